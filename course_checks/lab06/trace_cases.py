"""Small made-up traces with one catch each, and what is true of them."""

from __future__ import annotations

from typing import NamedTuple

from course_lib.observe.trace import Span

UNIT = "layers."  # the labels of the units begin like this
MAIN, GLOO, GLOO_2, OTHER = 10, 20, 21, 11  # threads of the made-up traces


def _spans(*told: tuple[str, str, float, float, int]) -> list[Span]:
    return [Span(name, kind, start, end, thread) for name, kind, start, end, thread in told]


def _collective(start: float, end: float, thread: int = GLOO) -> tuple[str, str, float, float, int]:
    return ("gloo:all_gather", "collective", start, end, thread)


def _compute(kind: str, start: float, end: float, thread: int = MAIN) -> tuple[str, str, float, float, int]:
    return (kind, kind, start, end, thread)


class Exposure(NamedTuple):
    """A small trace, the seconds in it that no compute hides, and what it is there to show."""

    shows: str
    seconds: float
    spans: list[Span]


EXPOSURES = (
    Exposure("an empty trace", 0.0, []),
    Exposure(
        "a collective of 1 s with all compute after it (what is hidden is hidden at that very time; sums do not tell)",
        1.0,
        _spans(_collective(0, 1), _compute("forward", 1, 5)),
    ),
    Exposure(
        "a collective of 2 s, in its second half beside compute (a part of it can be hidden)",
        1.0,
        _spans(_collective(0, 2), _compute("forward", 1, 3)),
    ),
    Exposure(
        "collectives of 1 s each beside forward, beside backward and beside the optimizer's step (all three are compute)",
        0.0,
        _spans(
            _collective(0, 1),
            _compute("forward", 0, 1),
            _collective(2, 3),
            _compute("backward", 2, 3),
            _collective(4, 5),
            _compute("optimizer", 4, 5),
        ),
    ),
    Exposure(
        "a collective of 2 s, with a copy on its own thread (gloo's thread copies as a part of the collective)",
        2.0,
        _spans(_collective(0, 2), _compute("forward", 0.5, 1.5, GLOO)),
    ),
    Exposure(
        "a collective of 2 s inside a label of kind 'other' (a label is a name for a stretch of time, not work)",
        2.0,
        _spans((f"{UNIT}0", "other", 0, 4, MAIN), _collective(1, 3)),
    ),
    Exposure(
        "two collectives at once, from 0 to 2 s and from 1 to 3 s (a second in which two run is one second)",
        3.0,
        _spans(_collective(0, 2), _collective(1, 3, GLOO_2)),
    ),
    Exposure(
        "a collective of 3 s, with two threads computing in the same second (that hides one second, not two)",
        2.0,
        _spans(_collective(0, 3), _compute("backward", 1, 2), _compute("backward", 1, 2, OTHER)),
    ),
    Exposure(
        "spans that are not in order",
        1.5,
        _spans(_compute("forward", 3, 4.5), _collective(3, 5), _compute("forward", 1, 1.5), _collective(0, 1.5)),
    ),
)


class Waiting(NamedTuple):
    """Traces of all ranks, the unit in which somebody waits longest, for which rank, and what this one is there to show."""

    shows: str
    unit: str
    rank: int
    traces: list[list[Span]]


def _rank(*units: tuple[float, float, tuple[float, float] | None, tuple[float, float] | None]) -> list[Span]:
    """One rank's units: (begins, ends, when its collective ran, when it computed)."""
    told = []
    for number, (begins, ends, collective, compute) in enumerate(units):
        told.append((f"{UNIT}{number}", "other", begins, ends, MAIN))
        told += [_collective(*collective)] if collective else []
        told += [_compute("forward", *compute)] if compute else []
    return _spans(*told)


WAITING = (
    Waiting(
        "two ranks, one late at unit 1",
        f"{UNIT}1",
        1,
        [
            _rank((0, 2, (0, 0.5), (0.5, 2)), (2, 6, (2, 5), (5, 6)), (6, 8, (6, 6.5), (6.5, 8))),
            _rank((0, 2, (0, 0.5), (0.5, 2)), (4.8, 6, (4.8, 5), (5, 6)), (6, 8, (6, 6.5), (6.5, 8))),
        ],
    ),
    Waiting(
        "three ranks, where the longest unit and the longest collective are hidden under compute",
        f"{UNIT}2",
        0,
        [
            _rank((0, 9, (0, 7), (0, 9)), (9, 10, (9, 9.1), (9.1, 10)), (11.8, 13, (11.8, 12), (12, 13))),
            _rank((0, 9, (0, 7), (0, 9)), (9, 10, (9, 9.3), (9.3, 10)), (10, 13, (10, 12), (12, 13))),
            _rank((0, 9, (0, 7), (0, 9)), (9, 10, (9, 9.4), (9.4, 10)), (10.2, 13, (10.2, 12), (12, 13))),
        ],
    ),
    Waiting(
        "a gather that is issued in unit 0 and waited for in unit 1 (the wait is where nothing computes beside it)",
        f"{UNIT}1",
        2,
        [
            _rank((0, 2, (0.5, 4), (0, 2)), (2, 5, None, (4, 5))),
            _rank((0, 2, (0.6, 4), (0, 2)), (2, 5, None, (4, 5))),
            _rank((0, 3.6, (3.5, 4), (0, 3.6)), (3.6, 5, None, (4, 5))),
        ],
    ),
)
