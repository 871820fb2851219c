"""The phases of a training step at whose end memory can be highest, and the worst of them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from course_lib.memory.blocks import SYMBOLS, Numerics
from course_lib.memory.breakdown import CATEGORIES, Breakdown
from course_lib.memory.communication import Communication, communication
from course_lib.memory.linear_forms import Forms, forms
from course_lib.memory.parameters import count, held, local_factors, local_matrices
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
    """One pipeline stage of one model under one run: what does not change with batch and length."""

    run: Run
    shape: Shape
    layers: int
    first: bool
    last: bool
    tensor_parallel: int
    accumulate: bool
    resident: Resident
    forms: Forms
    num_parameters: int
    during: Communication


@lru_cache(maxsize=8192)
def stage(run: Run, shape: Shape, ranks: int, t: int, layers: int, first: bool, last: bool, accumulate: bool) -> Stage:
    """`accumulate`: gradients of earlier micro-batches are there already."""
    numerics = numerics_of(run, shape)
    # zero2 and zero3 move each gradient into a bucket, or to the host, as soon as it is there
    at_once = run.zero_stage > 1 or (run.zero_stage == 1 and run.offload != "none")
    adapters = count(held(shape, 1, shape.layers, True, True, run.rank).factors)
    r = resident(run, shape, ranks, t, layers, first, last)
    return Stage(
        run=run,
        shape=shape,
        layers=layers,
        first=first,
        last=last,
        tensor_parallel=t,
        accumulate=accumulate,
        resident=r,
        forms=forms(numerics, run.full or not first, accumulate or at_once),
        num_parameters=shape.parameters + adapters,
        during=communication(run, r, layers, accumulate, shape.tied and first and last),
    )


def numerics_of(run: Run, shape: Shape) -> Numerics:
    """What decides the tapes: the run's dtypes and the kind of the model's blocks."""
    return replace(run.numerics, qk_norm=shape.qk_norm, gated=shape.gated, layer_norm=shape.norm_bias)


def sizes(shape: Shape, settings: RunSettings, rank: int) -> Sizes:
    """`rank`: of LoRA's factors, 0 for none."""
    t, c, seq_len = settings.tensor_parallel, settings.context_parallel, settings.seq_len
    split = settings.sequence_parallel
    per_token, fixed = _widths(shape, t, split, rank)
    tokens = settings.micro_batch_size * seq_len // c
    elements = per_token * tokens
    elements[_SCORES] *= seq_len  # every token looks at the whole sequence
    elements += fixed
    return Sizes(elements, tokens, seq_len // c, tokens * shape.hidden if split and t > 1 else 0)


_SCORES, _LOGITS = (SYMBOLS.index(symbol) for symbol in ("NS", "NV"))


@lru_cache(maxsize=1024)
def _widths(shape: Shape, t: int, split: bool, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Elements of SYMBOLS a token, and those of the symbols that do not depend on tokens."""
    s, kv = t if split else 1, max(shape.kv_heads // t, 1)
    matrices, factors = local_matrices(shape, t), local_factors(shape, rank, t)
    a_token = {
        "N": 1 / s,
        "Nh": shape.hidden / s,
        "Na": shape.attention_width / t,
        "Nk": kv * shape.head_dim,
        "Nm": shape.intermediate / t,
        "NH": shape.heads / t,
        "NK": kv,
        "NV": shape.vocab / t,
        "Nr": rank,
        "NS": shape.heads / t,
    }
    once = {f"W{which}": rows * columns for which, (rows, columns) in matrices.items()}
    once |= {f"L{which}": sum(pair) for which, pair in factors.items()}
    once |= {"Wh": shape.vocab * shape.hidden / t, "h": shape.hidden, "d": shape.head_dim, "one": 1}
    return np.array([a_token.get(s, 0.0) for s in SYMBOLS]), np.array([once.get(s, 0.0) for s in SYMBOLS])


def step_breakdown(at: Stage, size: Sizes, in_flight: float) -> Breakdown:
    """One stage's step. `in_flight`: micro-batches whose activations it holds at a time (1 without a pipeline)."""
    run, shape, layers, first, last, t, accumulate, r, f, num_parameters, during = at
    tokens, full, again = size.tokens, run.full, run.activation_checkpointing != "none"
    values = (f.matrix @ size.elements).tolist()
    kept_block, kept_first, saved_head, log_shares = values[:4]
    if again:
        kept_block = kept_first = values[4 if run.activation_checkpointing == "full" else 5]

    # Beside the blocks: cosines and sines; the token ids that a trained embedding keeps; the shifted labels and their
    # count, which the loss keeps. (A single row of labels is not copied when it is shifted, and keeps its padding.)
    turns = 0 if shape.positions else 2 * size.seq_len * shape.head_dim * run.stored
    ids = 8 * tokens
    small = turns + (ids if full and first else 0)
    if last:
        small += ids + 4 + (8 if tokens == size.seq_len else 0) + (4 if run.scaled else 0)
    blocks = kept_first + (layers - 1) * kept_block
    activations = blocks + small + (saved_head if last else 0)
    below = blocks - kept_block + small  # while the last block is at work
    earlier = (in_flight - 1) * blocks

    casts = layers * r.block_casts + r.outer_casts
    casts_kept = r.outer_casts if again else casts - r.unused_casts
    split = size.gathered * run.numerics.compute
    # a tied matrix gets two gradients; autograd adds them up, into a third tensor, when it has both
    waiting = r.embedding_gradient if shape.tied and first and last else 0
    base = r.weights + r.optimizer + earlier + split

    forward, backward = max(values[f.first_pass if again else f.forward]), max(values[f.backward])
    if again:
        backward = max(backward, max(values[f.forward]))
    block_casts = r.block_casts
    phases = {"forward of the last block": base + during.forward + below + forward + casts}
    if last:
        there = base - during.at_work + blocks + small
        phases["the loss"] = there + during.forward + max(values[f.head_forward]) + casts
        phases["backward of the loss"] = there + during.backward + max(values[f.head_backward]) + casts_kept
    casts_there = block_casts if again else casts_kept - r.outer_casts
    phases["backward of the last block"] = base + during.backward + below + backward + casts_there
    phases["backward of the last block"] += during.head if last else 0
    if during.last_block:
        phases["reduce-scatter of the last block"] = base + during.last_block + below
    phases["backward of the first block"] = (
        base + during.backward + small + backward + block_casts + during.head + (layers - 1) * during.block
    )
    if full and first:
        sums = (
            1 if run.numerics.autocast else 2
        )  # autocast's cast leaves the first gradient to autograd alone: in place
        twice = sums * waiting + (r.embedding_gradient if accumulate else 0)
        stream = tokens * shape.hidden * run.stored
        phases["gradient of the embedding"] = base + during.end + twice + stream
    if during.reduced:
        phases["gradients reduced"] = base + during.reduced + during.left * (blocks - kept_block) + small
    phases["optimizer step"] = r.weights + r.optimizer + during.step
    peak_phase = max(phases, key=phases.__getitem__)
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
        at_peak=_at_peak(at, size, peak_phase, int(phases[peak_phase]), values, blocks, small, earlier),
        num_parameters=num_parameters,
        num_trainable=r.trainable,
    )


def _at_peak(
    at: Stage, size: Sizes, phase: str, peak: int, values: list[float], blocks: float, small: float, earlier: float
) -> dict[str, int]:
    """What the peak is made of, by CATEGORIES.

    `blocks`: what all blocks save. `small`: what lies beside them. `earlier`: what earlier micro-batches have saved.
    """
    f, r, during = at.forms, at.resident, at.during
    checkpointing = at.run.activation_checkpointing
    kept_block = values[{"none": 0, "full": 4, "selective": 5}[checkpointing]]
    below = blocks - kept_block + small
    before = r.gradients if at.accumulate else 0  # gradients of earlier micro-batches
    first_pass, body = f.forward, [f.backward]
    if checkpointing != "none":
        first_pass, body = f.first_pass, [f.backward, f.forward]
    rows, saved, gradients = {
        "forward of the last block": ([first_pass], below, before),
        "the loss": ([f.head_forward], blocks + small, before),
        "backward of the loss": ([f.head_backward], blocks + small, before),
        "backward of the last block": (body, below, before + during.head),
        "reduce-scatter of the last block": ([], below, before),
        "backward of the first block": (body, small, before + during.head + (at.layers - 1) * during.block),
        "gradient of the embedding": ([], 0, r.gradients),
        "gradients reduced": ([], during.left * blocks + small, r.gradients),
        "optimizer step": ([], -earlier, r.gradients),
    }[phase]
    saved, logits = saved + earlier, 0.0
    places = [i for piece in rows for i in range(*piece.indices(len(values)))]
    if places:
        row = max(places, key=values.__getitem__)
        logits = f.matrix[row, _LOGITS] * size.elements[_LOGITS]
        saved += f.saved[row] @ size.elements - f.saved[row, _LOGITS] * size.elements[_LOGITS]
        gradients += f.weight_grads[row] @ size.elements
    if phase == "gradient of the embedding" and at.shape.tied and at.last:
        gradients += (1 if at.run.numerics.autocast else 2) * r.embedding_gradient
    parts = {"weights": r.weights, "optimizer state": r.optimizer}
    left = peak - sum(parts.values())
    for name, value in {"activations": saved, "logits and loss": logits, "gradients": gradients}.items():
        parts[name] = min(max(int(value), 0), left)
        left -= parts[name]
    return {name: parts.get(name, left) for name in CATEGORIES}
