"""Lab 5, exercise 2: which part of which tensor a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from course_checks.harness import NotYet, returned
from course_checks.lab05.common import lab, slots

Part = tuple[int, int, int]  # tensor, first element of it, the one after the last
Parts = list[list[Part]]


class Case(NamedTuple):
    """Shapes of the tensors, and ranks."""

    shapes: list[tuple[int, ...]]
    ranks: int

    def __str__(self) -> str:
        return (
            f"shapes {self.shapes if len(self.shapes) < 8 else f'of {len(self.shapes)} tensors'} on {self.ranks} ranks"
        )


LLAMA = [
    (256, 128),
    *[(128, 128), (64, 128), (64, 128), (128, 128), (352, 128), (352, 128), (128, 352), (128,), (128,)] * 4,
    (128,),
    (256, 128),
]
CASES = [
    Case([(3, 4), (5,), (), (7,)], 4),  # 25 elements: slots of 7, the last rank has 4
    Case([(4, 4), (2, 4)], 2),
    Case([(2, 3), (0, 3), (9,)], 3),  # a tensor without elements
    Case([(3, 4), (5,), (), (7,)], 1),
    Case([(3,), (2,)], 8),  # more ranks than elements
    Case([(5, 7), (3,), (2, 2)], 5),
    Case(LLAMA, 7),
]


def cut(case: Case, kind: str = "right") -> Parts:
    """The parts of each rank; ``kind`` names a known mistake."""
    counts = [math.prod(shape) for shape in case.shapes]
    total, ranks = sum(counts), case.ranks
    if kind == "whole tensors":
        return [
            [(i, 0, count) for i, count in enumerate(counts) if i % ranks == rank and count] for rank in range(ranks)
        ]
    if kind == "each tensor":
        pieces = [
            [(i, r * slots(n, ranks), min(n, (r + 1) * slots(n, ranks))) for i, n in enumerate(counts)]
            for r in range(ranks)
        ]
        return [[part for part in mine if part[1] < part[2]] for mine in pieces]
    bounds = [min(total, rank * slots(total, ranks)) for rank in range(ranks + 1)]
    if kind in ("dropped", "last takes rest"):
        bounds = [rank * (total // ranks) for rank in range(ranks + 1)]
        bounds[-1] = total if kind == "last takes rest" else bounds[-1]
    if kind == "within one":
        bounds = [rank * (total // ranks) + min(rank, total % ranks) for rank in range(ranks + 1)]
    answer: Parts = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        mine, at = [], 0
        for i, count in enumerate(counts):
            first, last = max(low, at), min(high, at + count)
            if first < last or (kind == "empty" and not first > last):
                shift = 0 if kind == "flat" else at
                mine.append((i, first - shift, last - shift - (kind == "inclusive")))
            at += count
        answer.append(mine)
    if kind == "padding" and total % ranks:
        rank = max(r for r, mine in enumerate(answer) if mine)
        i, first, last = answer[rank][-1]
        answer[rank][-1] = (i, first, last + slots(total, ranks) - sum(b - a for _, a, b in answer[rank]))
    return answer[::-1] if kind == "backwards" else answer


SENTENCES = {
    "flat": "start and stop count from the beginning of the flat vector; give them within the tensor",
    "inclusive": "stop is the last element; let it be the one after, as in tensor[start:stop]",
    "empty": "a part without elements is no part: leave it out",
    "padding": "the last part reaches beyond its tensor's end: padding belongs to no tensor",
    "dropped": "the rest of the division is dropped, and those elements are nobody's: round the slice's length up",
    "last takes rest": "the last rank takes the rest, so its slice is longer than the others': round the length up, and let the "
    "last slices be shorter",
    "within one": "your slices differ by one (that is array_split): the collectives want slots of equal length, the number of "
    "elements over the ranks rounded up, all full but the last",
    "whole tensors": "whole tensors are dealt out: a rank with the embedding then holds far more than one with a norm. Cut the "
    "flat vector, wherever the cut falls",
    "each tensor": "every tensor is cut by itself, and padded by itself (FSDP2 does so, along the first axis); here they are "
    "laid end to end, and the one vector is cut",
    "backwards": "the slices go to the ranks in the wrong order: rank 0 has the beginning",
}


@lab.exercise("Who holds what", importance=4, difficulty=2, minutes=20)
def partition(partition: Callable[..., Any]) -> str:
    """Every element on exactly one rank, slots of equal length, in order; the tensors can be put together again."""
    for case in CASES:
        answer = _as_parts(partition(list(case.shapes), case.ranks), case)
        wanted = cut(case)
        if answer != wanted:
            kinds = [kind for kind in SENTENCES if cut(case, kind) == answer]
            raise NotYet(f"{case}: {SENTENCES[kinds[0]] if kinds else _first_difference(answer, wanted, case)}")
    return _put_together(partition)


def _as_parts(answer: Any, case: Case) -> Parts:
    answer = returned(answer, (list, tuple), "the answer")
    if len(answer) != case.ranks:
        raise NotYet(f"{case}: you give {len(answer)} lists: one a rank, also an empty one for a rank that has nothing")
    parts = []
    for rank, mine in enumerate(answer):
        mine = list(returned(mine, (list, tuple), f"what you give rank {rank}"))
        for part in mine:
            fits = isinstance(part, (list, tuple)) and len(part) == 3
            if not fits or any(isinstance(n, bool) or not isinstance(n, int) for n in part):
                raise NotYet(f"{case}: {part!r} on rank {rank}: a part is three whole numbers (tensor, start, stop)")
        parts.append([tuple(part) for part in mine])
    return parts


def _first_difference(answer: Parts, wanted: Parts, case: Case) -> str:
    counts = [math.prod(shape) for shape in case.shapes]
    owners: list[dict[int, int]] = [{} for _ in counts]
    for rank, mine in enumerate(answer):
        for i, first, last in mine:
            if not (0 <= i < len(counts) and 0 <= first <= last <= counts[i]):
                return f"rank {rank} has ({i}, {first}, {last}), and that is no part of a tensor that is there"
            if last - first + sum(map(len, owners)) > 2 * sum(counts):
                return "elements are held by more than one rank"
            for element in range(first, last):
                if element in owners[i]:
                    return f"element {element} of tensor {i} is on rank {owners[i][element]} and on rank {rank}"
                owners[i][element] = rank
    for i, count in enumerate(counts):
        if len(owners[i]) < count:
            return f"element {next(e for e in range(count) if e not in owners[i])} of tensor {i} is on no rank"
    rank = next(rank for rank in range(case.ranks) if answer[rank] != wanted[rank])
    return f"rank {rank} should hold {_brief(wanted[rank])}, and you give it {_brief(answer[rank])}"


def _brief(parts: Sequence[Part]) -> str:
    return f"[{', '.join(map(str, parts[:3]))}{', …' if len(parts) > 3 else ''}]"


def _put_together(partition: Callable[..., Any]) -> str:
    """Tensors cut by the learner's parts, and glued from them again: equal to the byte."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in LLAMA]
    ranks, again = 7, [torch.zeros(shape) for shape in LLAMA]
    held = [
        [(i, a, b, tensors[i].flatten()[a:b].clone()) for i, a, b in mine] for mine in partition(list(LLAMA), ranks)
    ]
    for mine in held:
        for i, first, last, piece in mine:
            again[i].view(-1)[first:last] = piece
    assert all(torch.equal(one, other) for one, other in zip(again, tensors, strict=True))
    sizes = [sum(len(piece) for *_, piece in mine) for mine in held]
    crossing = sum(any(a > 0 or b < tensors[i].numel() for i, a, b, _ in mine) for mine in held)
    return (
        f"{len(tensors)} tensors of a small Llama on {ranks} ranks, {sizes[0]:,} elements each and {sizes[-1]:,} on the last; "
        f"{crossing} ranks hold a piece of a tensor that goes on elsewhere; glued together again they are equal"
    )
