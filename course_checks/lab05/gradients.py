"""Lab 5, exercise 4: ZeRO-2's gradients, each averaged slice on one rank only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import (
    ATOL,
    RTOL,
    NotYet,
    close,
    in_bytes,
    phases,
    ratio_hint,
    returned,
    run_ranks,
    same,
    sent_between,
)
from course_checks.lab05 import on_ranks
from course_checks.lab05.common import SLACK, lab, slots
from course_lib.launch import Run


@lab.exercise("Gradients, reduced and scattered", importance=5, difficulty=3, minutes=25)
def gradient_slice(reduce_scatter_gradients: Callable[..., Any]) -> str:
    """The averaged slice on each rank, nothing else kept, and one reduce_scatter of the flat gradient on the wire."""
    evidence = ""
    for ranks, skip_expert in ((2, False), (3, True), (4, False), (1, False)):
        told = run_ranks(on_ranks.gradient_slice, reduce_scatter_gradients, skip_expert, ranks=ranks)
        for rank, each in enumerate(told.results):
            _right_slice(each, rank, ranks)
        for rank, each in enumerate(told.results):
            _nothing_kept(each, rank, ranks)
        if ranks > 1:
            evidence = _right_traffic(told, ranks)
    return f"the averaged slices on 1, 2, 3 and 4 ranks, also where a rank has no gradient for a layer; {evidence}"


def _right_slice(told: dict[str, Any], rank: int, ranks: int) -> None:
    got = returned(told["got"], torch.Tensor, "what your function returns")
    where = f"rank {rank} of {ranks}"
    total, size = told["size"], slots(told["size"], ranks)
    if got.numel() != size or got.dim() != 1:
        raise NotYet(f"{where}: {_length(got, total, size, told['frozen'], ranks)}")
    whole = told["expected"]
    expected = whole[rank * size : (rank + 1) * size]
    if same(got, expected):
        return
    if ranks > 1 and same(got, told["local"]):
        raise NotYet(f"{where} returns its own gradients' slice: nothing was added up over the ranks")
    wrong_scale = {
        ranks: f"{where}: your slice is exactly {ranks} times too large: reduce_scatter sums, the gradient is the mean",
        1 / ranks: f"{where}: your slice is exactly {ranks} times too small: you divided twice",
        1 / ranks**2: f"{where}: your slice is {ranks**2} times too small: you divided three times",
    }
    if ranks > 1 and (hint := ratio_hint(got, expected, wrong_scale)):
        raise NotYet(hint)
    other = [i for i, piece in enumerate(whole.split(size)) if i != rank and same(got, piece)]
    if other:
        raise NotYet(f"{where} holds the slice of rank {other[0]}: rank r's begins at r times the slice's length")
    real = max(0, min(size, total - rank * size))
    if real < size and same(got[:real], expected[:real]):
        raise NotYet(
            f"{where}: the padding (slots from {real:,} on) holds {got[real]:.3g}: fill up with zeros (torch.zeros)"
        )
    close(got, expected, rtol=RTOL, atol=ATOL, what=f"{where}: the slice of the averaged gradient")


def _length(got: torch.Tensor, total: int, size: int, frozen: int, ranks: int) -> str:
    shape = f"your slice has the shape {tuple(got.shape)}"
    if got.numel() >= total:
        return f"{shape}: that is the whole gradient; keep this rank's slice, {size:,} elements of one flat vector"
    if got.numel() == slots(total + frozen, ranks):
        return (
            f"{shape}, and should have {size:,} elements: the frozen layer has no gradient, and no place in the vector"
        )
    if ranks > 1 and got.numel() in (
        total // ranks,
        total - (ranks - 1) * size,
        total - (ranks - 1) * (total // ranks),
    ):
        return (
            f"{shape}, and should have {size:,} elements on every rank, the last one too: {total:,} does not divide by "
            f"{ranks}, so fill the flat vector up with zeros first"
        )
    return f"{shape}, and should be flat, with {size:,} elements: {total:,} divided by {ranks}, rounded up"


def _nothing_kept(told: dict[str, Any], rank: int, ranks: int) -> None:
    where, size = f"rank {rank} of {ranks}", slots(told["size"], ranks)
    if told["kept"]:
        raise NotYet(
            f"{where} still has {told['kept'][0]}.grad, and {len(told['kept'])} in all: the slice is what is left of the "
            "gradients, so set every p.grad to None"
        )
    if told["held"] <= 4 * size + SLACK:
        return
    story = f"{where} keeps {in_bytes(told['held'])} when your function is over; its slice has {in_bytes(4 * size)}"
    if told["behind_views"]:
        raise NotYet(
            f"{story}: the slice is a view, and keeps the whole flat gradient alive: return a tensor of its own"
        )
    raise NotYet(f"{story}: let go of the rest")


def _right_traffic(told: Run, ranks: int) -> str:
    total = 4 * told.results[0]["size"]
    padded = 4 * ranks * slots(total // 4, ranks)
    for rank in range(ranks):
        sent = [c for c in phases(told, rank)[1]]
        kinds = {c.kind for c in sent}
        on_the_wire = sum(c.wire_bytes for c in sent)
        needed = padded * (ranks - 1) / ranks
        if "all_reduce" in kinds:
            raise NotYet(
                f"the slices are right, and cost too much: an all_reduce of which a rank keeps 1/{ranks} makes each rank send "
                f"{in_bytes(on_the_wire)} (ring), where a reduce_scatter sends {in_bytes(needed)}: it is an all_reduce's "
                "first half"
            )
        if "reduce" in kinds:
            raise NotYet(
                f"{len(sent)} reduces, one rank's slice after the other's: all send to one, whose link is full while the others "
                "wait. One reduce_scatter does all slices at once"
            )
        if "all_gather" in kinds:
            raise NotYet(
                "you gather every rank's gradients and add them up here: a rank needs the sum of its slice alone"
            )
        if kinds - {"reduce_scatter", "all_to_all"}:
            strange = ", ".join(sorted(kinds - {"reduce_scatter", "all_to_all"}))
            raise NotYet(f"averaging uses {strange}: one reduce_scatter of the flat gradient is all it takes")
        sent_between(
            told,
            rank,
            0.95 * total * (ranks - 1) / ranks,
            1.05 * padded,
            f"gradients on {ranks} ranks",
            phase=1,
            why="once is enough",
        )
    return (
        f"on {ranks} ranks {in_bytes(padded)} into reduce_scatter, {in_bytes(needed)} a rank on a ring, half of an all_reduce's; "
        f"{in_bytes(padded / ranks)} of gradients left"
    )
