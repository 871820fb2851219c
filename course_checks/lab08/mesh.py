"""Lab 8, exercise 3: FSDP2 and tensor parallelism on one device mesh, for a model that the lesson does not split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import PhiConfig, PhiForCausalLM

from course_checks.harness import Contract, NotYet, fresh_seed, in_bytes, named_seed, returned, run_ranks
from course_checks.lab08.common import lab
from course_lib.observe.collectives import Collective, record_collectives

LEARNING_RATE, MAX_NORM, STEPS, SEQUENCES, LENGTH = 0.2, 0.5, 3, 4, 16
VOCABULARY, HIDDEN, LAYERS = 512, 32, 2
GRIDS = ((2, 2), (1, 4), (4, 1))  # dp, tp
LOSSES, WEIGHTS, HELD, UNITS = "the loss", "a weight", "elements held", "the largest all-gather"
ACTIVATIONS, LOGITS, COUNT = "the largest message along tp", "logits", "messages along tp"
HINTS = {
    "every rank trains on all rows: along tp ranks share them, and each replica has its own": lambda f: (
        f["clause"] == ACTIVATIONS and f[ACTIVATIONS] == f["whole batch"]
    ),
    "this is before any step: which rows, which targets, which mean?": lambda f: f["clause"] == LOSSES and f["first"],
    "clip by the norm of the whole model's averaged gradients: `full_tensor()` of each parameter's norm": lambda f: (
        f["clause"] == WEIGHTS or f["clause"] == LOSSES and not f["first"]
    ),
    "embedding and head are cut along tp, too, and everything is sharded along dp": lambda f: f["clause"] == HELD,
    "shard each layer by itself, then the rest": lambda f: f["clause"] == UNITS,
    "leave the logits cut by columns (use_local_output=False), and take the loss and its backward under loss_parallel()": (
        lambda f: f["clause"] == LOGITS
    ),
    "each column-parallel matrix brought its own f: PrepareModuleInput": lambda f: f["clause"] == COUNT,
}


def model(seed: int = 0, device: str = "cpu") -> PhiForCausalLM:
    """A small Phi with weights of this seed: attention and MLP side by side behind one norm, and biases everywhere."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_hidden_layers": LAYERS,
    }
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = PhiForCausalLM(PhiConfig(**sizes, **drop, num_attention_heads=4, max_position_embeddings=64))
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):  # they start as zeros, with which a lost one would not be noticed
                nn.init.normal_(parameter, std=0.1)
    return made


def batches(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=generator) for _ in range(STEPS)]


def one_rank(seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights after plain SGD with clipped gradients."""
    whole, losses = model(seed), []
    optimizer = torch.optim.SGD(whole.parameters(), lr=LEARNING_RATE)
    for batch in batches(seed):
        logits = whole(input_ids=batch).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in whole.named_parameters()}


def on_a_rank(train: Callable[..., Any], seed: int) -> list[str]:
    said = []
    for dp, tp in GRIDS:
        with record_collectives() as calls:
            result = returned(
                train(model(seed), batches(seed), dp, tp, LEARNING_RATE, MAX_NORM), tuple, "(model, losses)"
            )
        dist.barrier()
        said.append(_right(result, calls, dp, tp, seed))
    return said


def _right(result: tuple[Any, ...], calls: list[Collective], dp: int, tp: int, seed: int) -> str:
    if len(result) != 2 or not isinstance(result[0], nn.Module):
        raise NotYet("return (model, losses): the model that was trained, and a list with a loss for each step")
    contract = Contract(HINTS, about=f"dp {dp} x tp {tp}, rank {dist.get_rank()}")
    trained, (losses, weights) = result[0], one_rank(seed)
    contract.facts["first"] = abs(result[1][0] - losses[0]) > 1e-4  # before the first step
    contract.values(LOSSES, result[1], losses, rtol=1e-4)
    parameters = dict(trained.named_parameters())
    whole = sum(weight.numel() for weight in weights.values())
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in parameters.values())
    small = sum(
        weight.numel() for weight in weights.values() if weight.dim() == 1
    )  # norms and some biases: whole along tp
    least, most = whole // dp // tp, whole // dp // tp + small // dp + len(weights)
    told = f"this rank holds {held:,} of {whole:,} elements, and should hold {least:,} to {most:,}"
    contract.holds(least <= held <= most, told, HELD)
    found = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}
    contract.values(WEIGHTS, found, weights, rtol=1e-3, atol=1e-4)

    first = dist.get_rank() // tp * tp
    calls = [c for c in calls if len(c.group) > 1 and c.kind not in ("scatter", "broadcast")]  # those hand weights out
    along_tp = [c for c in calls if c.group == tuple(range(first, first + tp))]
    along_dp = [c for c in calls if c not in along_tp]
    if dp > 1:
        contract.holds(
            isinstance(trained, FSDPModule), "the model that you return is no FSDPModule: fully_shard it", UNITS
        )
        ends = sum(weight.numel() for name, weight in weights.items() if ".layers." not in name)
        units = sum(c.kind == "reduce_scatter" for c in along_dp) / STEPS
        neighbours = f"tp ranks are neighbours, {first} to {first + tp - 1} here"
        contract.holds(units > 0, f"no gradients travel along dp: {neighbours}, and replicas share what is left", "")
        contract.holds(units > LAYERS, f"{units:g} units reduce gradients, and should be {LAYERS + 1}", UNITS)
        largest = max((c.bytes * dp for c in along_dp if c.kind == "all_gather"), default=0)
        room = 4 * (ends // tp + small)
        contract.memory(UNITS, largest, at_most=room, at_least=room / 3)
    sent = sum(c.wire_bytes for c in along_tp)
    if tp > 1:
        activation = 4 * (SEQUENCES // dp) * LENGTH * HIDDEN
        logits = activation // HIDDEN * VOCABULARY // tp
        travels = [
            c for c in along_tp if c.bytes >= logits // 2 and VOCABULARY in (c.shapes[0][-1], c.shapes[0][-1] * tp)
        ]
        contract.holds(
            not travels, f"a {travels and travels[0].kind} of {in_bytes(logits)} along tp: the logits travel", LOGITS
        )
        largest, contract.facts["whole batch"] = max((c.bytes for c in along_tp), default=0), dp * activation
        contract.memory(ACTIVATIONS, largest, at_most=activation, at_least=activation / tp)
        count = sum(c.bytes >= activation / tp for c in along_tp) / STEPS
        due = 4 * LAYERS + 2
        told = f"{count:g} messages of activations along tp in a step; {due} are enough: four for each layer, one for the embedding, and one for the head"
        contract.holds(2 * LAYERS + 1 <= count <= due, told, COUNT)
    return f"dp {dp} x tp {tp}: {held / whole:.1%} of the weights, {in_bytes(sent / STEPS)} along tp and {in_bytes(sum(c.wire_bytes for c in along_dp) / STEPS)} along dp per step"


@lab.exercise("FSDP2 and tensor parallelism on one mesh", importance=5, difficulty=3, minutes=25)
def on_a_mesh(train: Callable[..., Any]) -> str:
    """One rank's losses and weights on 2 x 2, 1 x 4 and 4 x 1 ranks; what each holds, and what it sends along each axis."""
    seed = fresh_seed()
    with named_seed(seed):
        said = run_ranks(on_a_rank, train, seed, ranks=4, timeout=45.0).results[0]
    return f"one rank's losses and weights; {'; '.join(said)}"
