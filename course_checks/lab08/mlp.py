"""Lab 8, exercise 1: a column- and a row-parallel layer, and what each sends in forward and in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from course_checks.harness import ATOL, RTOL, NotYet, close, phases, run_ranks, same
from course_checks.lab08 import mlp_on_ranks
from course_checks.lab08.common import RANKS, SIZES, lab, members
from course_checks.lab08.mlp_on_ranks import HIDDEN, ROWS
from course_lib.observe import Collective

CUTS = {
    "up.weight": "column-parallel: each rank computes some of the inner columns, so up.weight is cut along its rows "
    "(dimension 0, the outputs) and up.bias with it",
    "down.weight": "row-parallel: each rank reads the inner columns that it has, so down.weight is cut along dimension 1 "
    "(the inputs)",
}


@lab.exercise("A column- and row-parallel MLP", importance=5, difficulty=3, minutes=35)
def parallel_mlp(make_mlp: Callable[..., Any]) -> str:
    """Output and all gradients of the whole MLP, 1/n of it on each rank, one all-reduce in each direction."""
    run = run_ranks(mlp_on_ranks.parallel_mlp, make_mlp, ranks=RANKS)
    for number, size in enumerate(SIZES):
        told = [result[size] for result in run.results]
        for rank, each in enumerate(told):
            _split(each, f"rank {rank} in a group of {size}", size)
            _start(told, rank, size)
        logs = [phases(run, rank)[1 + 3 * number : 3 + 3 * number] for rank in range(RANKS)]
        for rank, (forward, backward) in enumerate(logs):
            _groups([*forward, *backward], rank, size)
            if size > 1:
                _strange(forward, "forward")
                _strange(backward, "backward")
        for rank in range(RANKS):
            _outputs(told, logs[rank][0], rank, size)
        for rank in range(RANKS):
            _gradients(told, logs[rank][1], rank, size)
        if size > 1:
            for rank, (forward, backward) in enumerate(logs):
                _one(forward, "forward", rank, size)
                _one(backward, "backward", rank, size)
    elements = sum(p.numel() for layer in mlp_on_ranks.whole_layers().values() for p in layer.parameters())
    held = sum(p.numel() for p in run.results[0][4]["gradients"].values())
    return (
        f"output, input gradient and all weight gradients are the whole MLP's in groups of 1, 2 and 4; on 4 ranks {held:,} of "
        f"{elements:,} elements a rank, one all-reduce of {4 * ROWS * HIDDEN:,} bytes forward and one backward"
    )


def _split(told: dict[str, Any], where: str, size: int) -> None:
    dtensors = [n for n, kind in told["kinds"].items() if kind == "DTensor"]
    if dtensors:
        raise NotYet(f"{dtensors[0]} is a DTensor: PyTorch has done the work. Cut the weights, send and add yourself")
    shapes, expected = told["shapes"], told["expected shapes"]
    if set(shapes) != set(expected):
        raise NotYet(
            f"the parameters of ParallelMLP are {', '.join(shapes) or 'none'}, and should be {', '.join(expected)}: keep "
            "this rank's part in two nn.Linear, self.up and self.down"
        )
    for name, shape in shapes.items():
        if shape == expected[name]:
            continue
        layer = name.split(".")[0] + ".weight"
        if name == "down.bias":
            raise NotYet(f"{where}: down.bias has {shape[0]} elements: the output is whole, so its bias is, too")
        whole = tuple(mlp_on_ranks.whole_layers()[layer.split(".")[0]].weight.shape)
        if shape == whole:
            raise NotYet(f"{where}: {name} has all its {whole[0]} x {whole[1]} elements, and 1/{size} of them is meant")
        raise NotYet(f"{where}: {name} has the shape {shape}, and should have {expected[name]}. It is {CUTS[layer]}")
    if told["views"]:
        raise NotYet(
            f"{where}: {told['views'][0]} is a view, and a view keeps the whole weight in memory: clone() the slice, or copy "
            "it into a small layer"
        )
    if told["alive"]:
        raise NotYet(f"{where}: the whole layers are still in memory after __init__: keep this rank's part and no more")


def _start(told: list[dict[str, Any]], rank: int, size: int) -> None:
    for name, (mine, expected) in told[rank]["start"].items():
        if torch.equal(mine, expected):
            continue
        where = f"rank {rank} in a group of {size}: {name}"
        others = [p for p in range(size) if torch.equal(mine, told[members(rank, size)[p]]["start"][name][1])]
        if others:
            raise NotYet(
                f"{where} is the part of the group's rank {others[0]}: this is rank {rank % size} of its group, dist.get_rank(group)"
            )
        raise NotYet(
            f"{where} is not this rank's part of the given layer: rank r of n keeps the r-th of n equal pieces, one after the "
            "other, and the inner columns that it computes must be those that its rows of down read"
        )


def _groups(log: Iterable[Collective], rank: int, size: int) -> None:
    for collective in log:
        if collective.group != members(rank, size):
            raise NotYet(
                f"rank {rank} calls {collective.kind} over the ranks {collective.group}; its tensor-parallel group is "
                f"{members(rank, size)}: pass group=… to every collective"
            )


def _strange(log: list[Collective], where: str) -> None:
    kinds = {c.kind for c in log} - {"all_reduce"}
    if kinds:
        raise NotYet(
            f"{where} uses {', '.join(sorted(kinds))}: no rank needs another's part of the inner columns, nor of the weights. "
            "What must be exchanged is one sum"
        )


def _outputs(told: list[dict[str, Any]], log: list[Collective], rank: int, size: int) -> None:
    each, where = told[rank], f"rank {rank} in a group of {size}: the output"
    output, expected, bias = each["output"], each["expected"], each["bias"]
    if output.shape != expected.shape:
        raise NotYet(f"{where} has the shape {tuple(output.shape)}, and should have {tuple(expected.shape)}")
    if same(output, expected):
        return
    if size > 1:
        known = {
            "is this rank's part of the sum: add the ranks' parts": (each["part"], each["part"] + bias),
            f"has the bias of down {size} times: each rank adds it before the sum. Add it once, after": (
                expected + (size - 1) * bias,
            ),
            "has no bias of down": (expected - bias,),
            "is the mean of the ranks' parts where their sum is meant": (
                (expected - bias) / size + bias,
                expected / size,
                (expected - bias) / size,
            ),
        }
        for words, tensors in known.items():
            if any(same(output, tensor) for tensor in tensors):
                raise NotYet(f"{where} {words}")
        if len(log) > 1:
            raise NotYet(
                f"forward calls {len(log)} all-reduces, and its output is off: every rank has the whole input already. One sum, "
                "behind the row-parallel layer, is all"
            )
    close(output, expected, rtol=RTOL, atol=ATOL, what=where)


def _gradients(told: list[dict[str, Any]], log: list[Collective], rank: int, size: int) -> None:
    each, where = told[rank], f"rank {rank} in a group of {size}"
    got, expected = each["gradients"], each["expected gradients"]
    mine, wanted = each["input gradient"], each["expected input gradient"]
    missing = [name for name, gradient in got.items() if gradient is None]
    if missing or mine is None:
        raise NotYet(f"{where}: after backward() {missing[0] if missing else 'the input'} has no gradient")
    if size > 1:
        if all(same(g, size * expected[n]) for n, g in got.items() if n != "down.bias"):
            raise NotYet(
                f"{where}: the gradients of the weights are exactly {size} times too large: the gradient of a sum goes to each "
                "addend as it is, and every rank has it already. All-reduced in backward it is added up once more"
            )
        parts = [told[r]["input gradient"] for r in members(rank, size)]
        if not same(mine, wanted) and same(sum(parts), wanted):
            raise NotYet(
                f"{where}: the input gradient is only this rank's part: its inner columns tell nothing about the others'. The "
                "all-reduce in backward is missing, where the input went to all ranks"
            )
        if same(mine, size * wanted):
            raise NotYet(f"{where}: the input gradient is {size} times too large: it is added up twice")
        if same(mine, wanted / size):
            raise NotYet(f"{where}: the input gradient is {size} times too small: the ranks' parts add up, no mean")
        if same(got["down.bias"], expected["down.bias"] / size):
            raise NotYet(
                f"{where}: the gradient of down.bias is {size} times too small. A {size}-th of the bias on every rank adds up to "
                f"the right output, and trains {size} times too slowly: add it once, after the sum"
            )
    close(mine, wanted, rtol=RTOL, atol=ATOL, what=f"{where}: the input gradient")
    close(got, expected, rtol=RTOL, atol=10 * ATOL, what=f"{where}: the gradient")


def _one(log: list[Collective], where: str, rank: int, size: int) -> None:
    whole = 4 * ROWS * HIDDEN
    sizes = [c.bytes for c in log]
    if len(log) == 1 and sizes == [whole]:
        return
    if not log:
        raise NotYet(
            f"{where} on rank {rank} of {size} sends nothing, and its numbers are right: did each rank compute all?"
        )
    if len(log) > 1:
        raise NotYet(
            f"{where} calls {len(log)} all-reduces ({', '.join(f'{s:,}' for s in sizes)} bytes) where one is enough: the gradient "
            "of a weight belongs to the rank that keeps it"
        )
    raise NotYet(
        f"the all-reduce of {where} moves {sizes[0]:,} bytes; {ROWS} rows of {HIDDEN} fp32 numbers are {whole:,}"
    )
