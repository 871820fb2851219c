"""Lab 6: traces, cut into pieces."""

from collections import Counter

from course_checks.lab06.tracing import pieces
from course_lib.observe.trace import Span


def gather(start: float, end: float, thread: int) -> Span:
    return Span("gloo:all_gather", "collective", start, end, thread)


def forward(start: float, end: float, thread: int) -> Span:
    return Span("forward", "forward", start, end, thread)


def test_a_piece_says_what_runs_in_it() -> None:
    """Copies on a gather's thread and labels are no work, and a thread's number means nothing on another rank."""
    labels = [
        Span("layers.0", "other", 0, 5, 1),
        Span("FSDP::forward", "other", 0, 10, 1),
        Span("layers.1", "other", 5, 10, 1),
    ]
    one = [gather(0, 4, 2), *labels, forward(1, 3, 2), forward(3, 6, 1), forward(4, 5, 3), gather(7, 9, 2)]
    other = [forward(0, 2, 2), gather(2, 4, 1), gather(8, 9, 1)]
    found = []
    for rank in pieces([one, other]):
        seconds = Counter()
        for piece in rank:
            seconds[tuple(piece.gathers), tuple(piece.begun), piece.computes, piece.unit] += piece.seconds
        found.append(seconds)
    expected = {((0,), (), False, "layers.0"): 2, ((0,), (0,), False, "layers.0"): 1, ((0,), (0,), True, "layers.0"): 1}
    expected |= {((), (), True, "layers.0"): 1, ((), (), True, "layers.1"): 1, ((), (), False, "layers.1"): 2}
    expected |= {((1,), (), False, "layers.1"): 1, ((1,), (1,), False, "layers.1"): 1}
    assert found[0] == expected
    assert found[1] == {
        ((), (), True, ""): 2,
        ((0,), (0,), False, ""): 2,
        ((), (), False, ""): 4,
        ((1,), (1,), False, ""): 1,
    }
