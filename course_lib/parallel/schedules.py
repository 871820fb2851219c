"""Pipeline schedules: which rank runs the forward and backward of which micro-batch, in which order.

Stage s of a model split over p ranks is on rank s. With v virtual stages per rank, each rank holds v smaller stages: chunk c
of rank r is stage c * p + r of the v * p stages.
"""

from __future__ import annotations

from typing import NamedTuple

from course_lib.choices import check_schedule

WORDS = {"F": "the forward", "B": "the backward", "W": "the backward for weights"}


class Action(NamedTuple):
    """One thing that a rank does.

    "F" is a forward and "B" a backward. In a schedule with "W", the gradients of the weights, B is only the part that the
    stage before waits for: the gradient of the input.
    """

    kind: str  # F, B or W
    micro_batch: int  # counted from 0
    chunk: int = 0  # which of the rank's stages, counted from 0

    def __str__(self) -> str:
        part = f" in chunk {self.chunk}" if self.chunk else ""
        return f"{WORDS.get(self.kind, repr(self.kind))} of micro-batch {self.micro_batch}{part}"


Orders = list[list[Action]]


def orders(schedule: str, stages: int, num_microbatches: int, virtual_stages: int = 1) -> Orders:
    """What each of `stages` ranks does, in its order: one list of actions per rank.

    - "naive": a micro-batch goes forward and all the way back before the next one begins.
    - "gpipe": all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).
    - "1f1b": each backward as soon as it can run, so that a rank holds few micro-batches (PipeDream-Flush, Narayanan et
      al. 2021, arXiv:2006.09503).
    - "interleaved": the same with `virtual_stages` stages on each rank (Narayanan et al. 2021, arXiv:2104.04473).
    - "zero_bubble": 1F1B whose weight gradients fill the gaps: ZB-H1 (Qi et al. 2023, arXiv:2401.10241).
    """
    check_schedule(schedule, stages, num_microbatches, virtual_stages)
    if schedule == "naive":
        return [[Action(kind, i) for i in range(num_microbatches) for kind in "FB"] for _ in range(stages)]
    if schedule == "gpipe":
        return [[Action(kind, i) for kind in "FB" for i in range(num_microbatches)] for _ in range(stages)]
    if schedule == "1f1b":
        return [_one_f_one_b(stages - 1 - rank, num_microbatches) for rank in range(stages)]
    if schedule == "interleaved":
        return [_interleaved(rank, stages, num_microbatches, virtual_stages) for rank in range(stages)]
    return [_zero_bubble(rank, stages, num_microbatches) for rank in range(stages)]


def _one_f_one_b(ahead: int, num_microbatches: int) -> list[Action]:
    """`ahead` forwards to begin with, then a forward and a backward in turns, then the backwards that are left."""
    ahead = min(ahead, num_microbatches)
    order = [Action("F", i) for i in range(ahead)]
    for i in range(num_microbatches):
        if i + ahead < num_microbatches:
            order.append(Action("F", i + ahead))
        order.append(Action("B", i))
    return order


def _interleaved(rank: int, stages: int, num_microbatches: int, virtual_stages: int) -> list[Action]:
    """1F1B over (micro-batch, chunk): groups of `stages` micro-batches go through chunk after chunk."""
    steps = range(num_microbatches * virtual_stages)
    group = stages * virtual_stages

    def at(kind: str, step: int) -> Action:
        chunk = step % group // stages
        micro_batch = step // group * stages + step % stages
        return Action(kind, micro_batch, chunk if kind == "F" else virtual_stages - 1 - chunk)

    ahead = min(2 * (stages - 1 - rank) + (virtual_stages - 1) * stages, len(steps))
    order = [at("F", step) for step in range(ahead)]
    for step in steps:
        if step + ahead < len(steps):
            order.append(at("F", step + ahead))
        order.append(at("B", step))
    return order


def _zero_bubble(rank: int, stages: int, num_microbatches: int) -> list[Action]:
    """1F1B in which rank r runs each W r backwards late, so that at the end it has r of them to fill its gap with."""
    order = []
    for action in _one_f_one_b(stages - 1 - rank, num_microbatches):
        order.append(action)
        if action.kind == "B" and action.micro_batch >= rank:
            order.append(Action("W", action.micro_batch - rank))
    return order + [Action("W", i) for i in range(max(num_microbatches - rank, 0), num_microbatches)]


def ideal_bubble(schedule: str, stages: int, num_microbatches: int, virtual_stages: int = 1) -> float:
    """The share of the ranks' time, from the first forward to the last backward, in which they have nothing to do.

    With p stages of equal work, m micro-batches, v virtual stages per rank, sends that take no time, and a backward twice as
    long as a forward (for "zero_bubble": B and W as long as a forward each):

    - naive: (p - 1) / p
    - gpipe, 1f1b: (p - 1) / (m + p - 1). Some papers give idle time over *busy* time: (p - 1) / m.
    - interleaved: (p - 1) / (v m + p - 1)
    - zero_bubble: (p - 1) / (3 m + p - 1); with m < p, p - m more in numerator and denominator
    """
    check_schedule(schedule, stages, num_microbatches, virtual_stages)
    work = {"naive": 1, "interleaved": virtual_stages * num_microbatches, "zero_bubble": 3 * num_microbatches}
    idle = stages - 1 + (max(stages - num_microbatches, 0) if schedule == "zero_bubble" else 0)
    return idle / (work.get(schedule, num_microbatches) + idle)
