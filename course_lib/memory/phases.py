"""The phases of a training step at whose end memory can be highest, and the worst of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from course_lib.memory.blocks import SYMBOLS, Numerics
from course_lib.memory.breakdown import CATEGORIES, Breakdown
from course_lib.memory.communication import Communication, communication, widening
from course_lib.memory.linear_forms import Forms, forms
from course_lib.memory.parameters import (
    count,
    held,
    kinds_of,
    local_experts,
    local_factors,
    local_matrices,
    up_to_first_mixture,
)
from course_lib.memory.resident import Resident, resident
from course_lib.memory.settings import Run, RunSettings
from course_lib.memory.shapes import Shape


class Sizes(NamedTuple):
    """Elements of every symbol of `blocks`, tokens of a micro-batch on this GPU, tokens a sequence, and the elements of
    one residual stream that sequence parallelism gathers for a product (0 without it)."""

    elements: np.ndarray
    tokens: int
    seq_len: int
    gathered: int


class Stage(NamedTuple):
    """One pipeline stage of one model under one run: what does not change with batch and length.

    `forms` are those of its blocks, where there are two kinds those of the mixtures; `plain` those of the plain blocks beside
    them, and how many there are; `up_to_mixture` as of `up_to_first_mixture`.
    """

    run: Run
    shape: Shape
    layers: int
    first: bool
    last: bool
    tensor_parallel: int
    accumulate: bool
    resident: Resident
    forms: Forms
    plain: tuple[Forms, int] | None
    up_to_mixture: float
    num_parameters: int
    during: Communication


class PhaseEnd(NamedTuple):
    """Bytes at the end of a phase: saved for backward, gradients and communication, autocast's copies of weights, the rest;
    and the rows of the tapes at work, of which the highest counts."""

    saved: float
    gradients: float
    casts: float = 0
    rows: Sequence[slice] = ()
    rest: float = 0

    @property
    def places(self) -> list[int]:
        return [place for rows in self.rows for place in range(rows.start, rows.stop)]

    def bytes(self, values: list[float]) -> float:
        fixed = self.saved + self.gradients + self.casts + self.rest
        return fixed + max((values[place] for place in self.places), default=0)


@lru_cache(maxsize=8192)
def stage(
    run: Run,
    shape: Shape,
    ranks: int,
    t: int,
    layers: int,
    first: bool,
    last: bool,
    earlier: int,
    experts: int = 1,
) -> Stage:
    """`earlier`: micro-batches of the step whose gradients are there already; `experts`: expert-parallel ranks."""
    numerics = replace(numerics_of(run, shape, experts), split_vocab=t > 1)
    grad_in = run.full or run.train_embeddings or not first
    # FSDP2's sums may be shards, or wider than gradients: then an unsharded gradient is new in each micro-batch
    apart = run.strategy == "fsdp" and (run.reduce_each_micro_batch or widening(run) > 1)
    # else a new gradient is gone as soon as it is there: added to the old one, or used up
    accumulate = (earlier > 0 and not apart) or run.optimizer_in_backward
    # zero2 and zero3 move each gradient into a bucket, or to the host, as soon as it is there
    at_once = run.zero_stage > 1
    adapters = count(held(shape, 1, shape.layers, True, True, run.rank, targets=run.lora_targets).factors)
    r = resident(run, shape, ranks, t, layers, first, last, experts)
    plain = None
    if shape.experts:
        numbers = [number for block, number in kinds_of(shape, layers, first) if not block.experts]
        if numbers:
            plain = forms(replace(numerics, mlp="gated", shared=False), grad_in, accumulate or at_once), numbers[0]
    return Stage(
        run=run,
        shape=shape,
        layers=layers,
        first=first,
        last=last,
        tensor_parallel=t,
        accumulate=accumulate,
        resident=r,
        forms=forms(numerics, grad_in, accumulate or at_once),
        plain=plain,
        up_to_mixture=up_to_first_mixture(shape, layers, first),
        num_parameters=shape.parameters + adapters,
        during=communication(run, r, layers, earlier, accumulate, shape.tied and first and last),
    )


def numerics_of(run: Run, shape: Shape, experts: int = 1) -> Numerics:
    """What decides the tapes: the run's dtypes and the kind of the model's blocks."""
    e, latent = shape.experts, shape.latent
    mlp = "gated" if shape.gated else "plain"
    if e:
        mlp = "every" if e.rows > e.active else "clamped" if e.bias else "grouped"
    return replace(
        run.numerics,
        qk_norm=shape.qk_norm,
        wide_qk_norm=shape.wide_qk_norm,
        mlp=mlp,
        shared=bool(e and e.shared),
        wide_router=bool(e and e.wide_router),
        wide_shares=bool(e and e.wide_shares),
        dispatch=experts > 1,
        latent=("qkv" if latent.q_rank else "kv") if latent else "",
        layer_norm=shape.norm_bias,
        norms=shape.norms,
        wide_norms=shape.wide_norms,
        rotary=not shape.positions,
        fused="qkv" in shape.fused,
        gelu_in_parts=shape.gelu_in_parts,
        sinks=shape.sinks,
        softcap=shape.softcap,
    )


def sizes(shape: Shape, settings: RunSettings, rank: int) -> Sizes:
    """`rank`: of LoRA's factors, 0 for none."""
    t, c, seq_len = settings.tensor_parallel, settings.context_parallel, settings.seq_len
    split = settings.sequence_parallel
    per_token, fixed = _widths(shape, t, split, rank, settings.expert_parallel, settings.lora_targets)
    tokens = settings.micro_batch_size * seq_len // c
    elements = per_token * tokens
    elements[_SCORES] *= seq_len  # every token looks at the whole sequence
    elements += fixed
    return Sizes(elements, tokens, seq_len // c, tokens * shape.hidden if split and t > 1 else 0)


_SCORES, _LOGITS, _KEYS = (SYMBOLS.index(symbol) for symbol in ("NS", "NV", "Nk"))


@lru_cache(maxsize=1024)
def _widths(shape: Shape, t: int, split: bool, rank: int, experts: int, targets: str) -> tuple[np.ndarray, np.ndarray]:
    """Elements of SYMBOLS a token, and those of the symbols that do not depend on tokens."""
    s, kv = t if split else 1, shape.kv_heads // t
    a_token = {
        "N": 1 / s,
        "Nh": shape.hidden / s,
        "Na": shape.attention_width / t,
        "Nav": shape.value_width / t,
        "Nk": kv * shape.head_dim,
        "Nqkv": shape.attention_width / t + 2 * kv * shape.head_dim,
        "Nm": shape.intermediate / t,
        "NH": shape.heads / t,
        "NK": kv,
        "NV": shape.vocab / t,
        "Nr": rank,
        "NS": shape.heads / t,
    }
    if e := shape.experts:  # the router is taken to be fair: each expert gets as many copies as the others
        copies = e.rows or e.active
        a_token |= {"NE": e.number, "Ns": copies, "Nsh": copies * shape.hidden, "Nsm": copies * e.intermediate / t}
        a_token["Nz"] = e.shared / t
    if latent := shape.latent:
        up = shape.heads * (shape.head_dim - latent.rope + latent.value) / t
        a_token |= {"Nqr": latent.q_rank, "Nkn": latent.kv_rank, "Nkr": latent.kv_rank + latent.rope, "Nkb": up}
    once: dict[str, int] = {}
    for block, _ in shape.kinds[::-1]:
        once |= {f"W{which}": rows * columns for which, (rows, columns) in local_matrices(block, t).items()}
        once |= {f"L{which}": sum(pair) for which, pair in local_factors(block, rank, t, targets).items()}
        once |= {f"W{which}": elements for which, elements in local_experts(block, t * experts).items()}
    once |= {"Wh": shape.vocab * shape.hidden / t, "h": shape.hidden, "d": shape.head_dim, "one": 1}
    return np.array([a_token.get(s, 0.0) for s in SYMBOLS]), np.array([once.get(s, 0.0) for s in SYMBOLS])


def step_breakdown(at: Stage, size: Sizes, in_flight: float, evaluated: Sizes | None = None) -> Breakdown:
    """One stage's step. `in_flight`: micro-batches whose activations it holds at a time (1 without a pipeline);
    `evaluated`: sizes of a batch of evaluation, between two steps."""
    run, shape, layers, first, last, t, accumulate, r, f, plain, up_to_mixture, num_parameters, during = at
    tokens, full, again = size.tokens, run.full, run.activation_checkpointing != "none"
    values = (f.matrix @ size.elements).tolist()
    kept_block, kept_first, saved_head, log_shares = values[:4]
    if again:
        kept_block = kept_first = values[4 if run.activation_checkpointing == "full" else 5]
    arriving = 0.0
    if run.offload_activations:  # one on its way to the host or back
        arriving, kept_block, kept_first = kept_block, 0.0, 0.0
    blocks = kept_first + (layers - 1) * kept_block
    if plain:  # the others of a mixture's blocks keep another amount
        row = (4 if run.activation_checkpointing == "full" else 5) if again else 0
        blocks += plain[1] * (float(plain[0].matrix[row] @ size.elements) - kept_block)

    # Beside the blocks: cosines and sines; the token ids that a trained embedding keeps; the shifted labels and their
    # count, which the loss keeps. (A single row of labels is not copied when it is shifted, and keeps its padding.)
    turns = 0 if shape.positions else 2 * size.seq_len * shape.head_dim * run.stored
    ids = 8 * tokens
    small = turns + (ids if (full or run.train_embeddings) and first else 0)
    if last:
        small += ids + 4 + (8 if tokens == size.seq_len else 0) + (4 if run.scaled else 0)
    activations = blocks + small + (saved_head if last else 0)
    below = blocks - kept_block + small + arriving  # while the last block is at work
    earlier = (in_flight - 1) * blocks

    casts = layers * r.block_casts + r.outer_casts
    casts_kept = r.outer_casts if again else casts - r.unused_casts
    casts_there = r.block_casts if again else casts_kept - r.outer_casts
    split = size.gathered * run.numerics.compute
    # a tied matrix gets two gradients; autograd adds them up, into a third tensor, when it has both
    waiting = r.embedding_gradient if shape.tied and first and last else 0
    twice = (
        waiting if run.numerics.autocast else 2 * waiting
    )  # autocast's cast leaves the first one to autograd: in place
    twice += r.embedding_gradient if accumulate else 0
    forward = f.first_pass if again else f.forward
    backward = [f.backward, f.forward] if again else [f.backward]
    filled = during.head + layers * during.block * (1 - up_to_mixture)

    moments: dict[str, PhaseEnd] = {"forward of the last block": PhaseEnd(below, during.forward, casts, [forward])}
    if during.gathering:
        moments["gather of the first block"] = PhaseEnd(small, during.first_gather)
    if during.gathering and layers > 1:
        moments["gather of the last block"] = PhaseEnd(below, during.gathering)
    if last:
        there = blocks + small
        gathered = during.at_loss - during.at_work
        moments["the loss"] = PhaseEnd(there, during.forward, casts, [f.head_forward], gathered)
        moments["backward of the loss"] = PhaseEnd(there, during.backward, casts_kept, [f.head_backward], gathered)
    moments["backward of the last block"] = PhaseEnd(below, during.backward + last * during.head, casts_there, backward)
    if during.last_block:
        moments["reduce-scatter of the last block"] = PhaseEnd(below, during.last_block)
    if during.on_the_way and layers > 2:  # the last and the first block that follow one and are followed by one
        for name, done in (("second last", 1), ("second", layers - 2)):
            saved = kept_first + (layers - 2 - done) * kept_block + small
            sent = during.on_the_way + during.head + done * during.block
            moments[f"backward of the {name} block"] = PhaseEnd(saved, during.backward + sent, rows=backward)
    sent = during.on_the_way - during.at_work if layers > 1 else 0  # nothing is gathered ahead any more
    moments["backward of the first block"] = PhaseEnd(small, during.backward + filled + sent, r.block_casts, backward)
    if (full or run.train_embeddings) and first:
        stream = tokens * shape.hidden * run.stored
        moments["gradient of the embedding"] = PhaseEnd(0, during.end + twice, rest=stream)
    if during.reduced:
        moments["gradients reduced"] = PhaseEnd(during.left * (blocks - kept_block) + small, during.reduced)
    moments = {name: m._replace(saved=m.saved + earlier, rest=m.rest + split) for name, m in moments.items()}
    moments["optimizer step"] = PhaseEnd(0, during.step - r.step, rest=r.step)
    if run.keeps_logits and last:  # the loop's, until backward is over
        logits = run.keeps_logits * float(size.elements[_LOGITS])
        for name in moments:
            if "backward" in name or "gradient" in name or "reduce" in name:
                moments[name] = moments[name]._replace(rest=moments[name].rest + logits)
    if run.use_cache and again:  # without checkpointing attention keeps those keys and values itself
        cache = layers * 2 * run.numerics.compute * float(size.elements[_KEYS])
        until = ("forward of the last block", "the loss")
        for name in moments if run.keeps_logits else until:  # the model's output has it, too
            if name in moments and name != "optimizer step":
                moments[name] = moments[name]._replace(rest=moments[name].rest + cache)
    resting = r.weights + r.optimizer
    phases = {name: resting + moment.bytes(values) for name, moment in moments.items()}
    if evaluated:
        between = communication(run, r, layers, 0, False, shape.tied and first and last).forward
        moments["evaluation"] = PhaseEnd(0, between, rows=[f.first_pass, *([f.evaluation] if last else [])])
        values_then = (f.matrix @ evaluated.elements).tolist()
        phases["evaluation"] = resting + moments["evaluation"].bytes(values_then)
    peak_phase = max(phases, key=phases.__getitem__)
    worst = (evaluated.elements, values_then) if evaluated and peak_phase == "evaluation" else (size.elements, values)
    return Breakdown(
        weights=r.weights,
        gradients=r.gradients,
        optimizer=r.optimizer,
        activations=int(activations + earlier),
        logits=int(f.logits * size.elements[_LOGITS]) if last else 0,
        buffers=int(r.buckets + r.outer_copy + 2 * r.block_copy + split + during.whole + casts),
        # a checkpoint holds cosines and sines as its arguments, not autograd
        kept=int(activations + casts_kept + (log_shares if last else 0) - (turns if again else 0)),
        peak=int(phases[peak_phase]),
        peak_phase=peak_phase,
        phases={name: int(value) for name, value in phases.items()},
        at_peak=_at_peak(at, *worst, moments[peak_phase]),
        num_parameters=num_parameters,
        num_trainable=r.trainable,
    )


def _at_peak(at: Stage, elements: np.ndarray, values: list[float], moment: PhaseEnd) -> dict[str, int]:
    """What the moment is made of, by CATEGORIES. Of ranks that share gradients, these are among the temporaries, like all
    else that is on its way between the ranks."""
    f, r, run = at.forms, at.resident, at.run
    saved, logits, gradients = moment.saved, 0.0, 0 if run.shards else moment.gradients - r.buckets
    if places := moment.places:
        row = max(places, key=values.__getitem__)
        logits = f.matrix[row, _LOGITS] * elements[_LOGITS]
        saved += f.saved[row] @ elements - f.saved[row, _LOGITS] * elements[_LOGITS]
        gradients += f.weight_grads[row] @ elements
    parts = {"weights": r.weights, "optimizer state": r.optimizer, "gradients": int(gradients)}
    parts |= {"activations": int(saved), "logits and loss": int(logits), "autocast's copies": int(moment.casts)}
    rest = int(r.weights + r.optimizer + moment.bytes(values)) - sum(parts.values())
    return {name: parts.get(name, rest) for name in CATEGORIES}
