"""Pipeline schedules: which rank runs the forward and backward of which micro-batch, in which order.

Stage s of a model cut over p ranks lies on rank s. With chunks, each rank holds several smaller stages: chunk c of rank r
is stage c * p + r of the c * p there are.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble")
WORDS = {"F": "the forward", "B": "the backward", "W": "the backward for weights"}


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        kind: "F" forward, "B" backward, "W" the weights' part of the backward. Where a schedule has no W, B is the whole
            backward; where it has, B is only the part that the stage before waits for, the gradient of the input.
        micro_batch: counted from 0.
        chunk: which of the rank's parts of the model, counted from 0.
    """

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        part = f" in chunk {self.chunk}" if self.chunk else ""
        return f"{WORDS.get(self.kind, repr(self.kind))} of micro-batch {self.micro_batch}{part}"


Orders = list[list[Action]]


def orders(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> Orders:
    """What each rank does, in its order: one list of actions a rank.

    Args:
        schedule:
            "naive": a micro-batch goes forward and all the way back before the next one begins.
            "gpipe": all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).
            "1f1b": each backward as soon as it can be, so that a rank holds few micro-batches (PipeDream-Flush,
            Narayanan et al. 2021, arXiv:2006.09503).
            "interleaved": the same with several chunks a rank (Narayanan et al. 2021, arXiv:2104.04473).
            "zero_bubble": 1F1B whose weight gradients fill the gaps: ZB-H1 (Qi et al. 2023, arXiv:2401.10241).
        stages: ranks in the pipeline.
        micro_batches: in one optimizer step.
        chunks: parts of the model on each rank: at least 2 for "interleaved", 1 for the others.

    Raises:
        ValueError: an unknown schedule, or numbers that it cannot work with.
    """
    check(schedule, stages, micro_batches, chunks)
    if schedule == "naive":
        return [[Action(kind, i) for i in range(micro_batches) for kind in "FB"] for _ in range(stages)]
    if schedule == "gpipe":
        return [[Action(kind, i) for kind in "FB" for i in range(micro_batches)] for _ in range(stages)]
    if schedule == "1f1b":
        return [_one_f_one_b(stages - 1 - rank, micro_batches) for rank in range(stages)]
    if schedule == "interleaved":
        return [_interleaved(rank, stages, micro_batches, chunks) for rank in range(stages)]
    return [_zero_bubble(rank, stages, micro_batches) for rank in range(stages)]


def _one_f_one_b(ahead: int, micro_batches: int) -> list[Action]:
    """`ahead` forwards to begin with, then a forward and a backward in turns, then the backwards that are left."""
    ahead = min(ahead, micro_batches)
    order = [Action("F", i) for i in range(ahead)]
    for i in range(micro_batches):
        if i + ahead < micro_batches:
            order.append(Action("F", i + ahead))
        order.append(Action("B", i))
    return order


def _interleaved(rank: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """1F1B over (micro-batch, chunk): groups of `stages` micro-batches go through chunk after chunk."""
    steps = range(micro_batches * chunks)
    group = stages * chunks

    def at(kind: str, step: int) -> Action:
        chunk = step % group // stages
        micro_batch = step // group * stages + step % stages
        return Action(kind, micro_batch, chunk if kind == "F" else chunks - 1 - chunk)

    ahead = min(2 * (stages - 1 - rank) + (chunks - 1) * stages, len(steps))
    order = [at("F", step) for step in range(ahead)]
    for step in steps:
        if step + ahead < len(steps):
            order.append(at("F", step + ahead))
        order.append(at("B", step))
    return order


def _zero_bubble(rank: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B in which rank r runs each W r backwards late, so that at the end it has r of them to fill its gap with."""
    order = []
    for action in _one_f_one_b(stages - 1 - rank, micro_batches):
        order.append(action)
        if action.kind == "B" and action.micro_batch >= rank:
            order.append(Action("W", action.micro_batch - rank))
    return order + [Action("W", i) for i in range(max(micro_batches - rank, 0), micro_batches)]


def ideal_bubble(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """The share of the ranks' time, from the first forward to the last backward, in which they have nothing to do.

    With p stages of equal work, m micro-batches, v chunks, sends that take no time, a backward twice as long as a
    forward (for "zero_bubble": its two parts as long as a forward each):

    ============= =====================
    naive         (p - 1) / p
    gpipe, 1f1b   (p - 1) / (m + p - 1)
    interleaved   (p - 1) / (v m + p - 1)
    zero_bubble   (p - 1) / (3 m + p - 1); with m < p, p - m more on both sides of the line
    ============= =====================

    Idle time over *busy* time, as some papers give it, is (p - 1) / m for the second line.

    Raises:
        ValueError: as `orders`.
    """
    check(schedule, stages, micro_batches, chunks)
    work = {"naive": 1, "interleaved": chunks * micro_batches, "zero_bubble": 3 * micro_batches}
    idle = stages - 1 + (max(stages - micro_batches, 0) if schedule == "zero_bubble" else 0)
    return idle / (work.get(schedule, micro_batches) + idle)


def check(schedule: str, stages: int, micro_batches: int, chunks: int = 1) -> None:
    """Raise ValueError, one sentence, for a schedule that does not exist or numbers that it cannot work with."""
    if schedule not in SCHEDULES:
        near = get_close_matches(str(schedule).lower().replace("-", "_"), SCHEDULES, 1, 0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"schedule={schedule!r}: {hint}Choose one of {', '.join(SCHEDULES)}.")
    for name, value in (("stages", stages), ("micro_batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{name}={value}: give a whole number of at least 1.")
    if schedule == "interleaved":
        if chunks == 1:
            raise ValueError("chunks=1: 'interleaved' with one chunk a rank is '1f1b'; give at least 2.")
        if micro_batches % stages:
            raise ValueError(
                f"micro_batches={micro_batches} is no multiple of {stages} stages: 'interleaved' sends them through the "
                f"chunks in groups of {stages}; take {-(-micro_batches // stages) * stages}."
            )
    elif chunks > 1:
        raise ValueError(f"chunks={chunks}: {schedule!r} has one chunk a rank; take schedule='interleaved' for more.")
