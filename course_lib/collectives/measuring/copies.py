"""Measure bytes per second between host and GPU, and between GPUs, from pinned and from pageable memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from course_lib.stamp import stamp
from course_lib.validation import positive

NO_CUDA = "There is no CUDA device here, so there is no copy to a GPU to time."


@dataclass(frozen=True)
class Copy:
    """One row.

    Attributes:
        way: "host to GPU 0", "GPU 0 to host", "GPU 0 to GPU 1", "inside GPU 0".
        memory: the host's side, "pinned" or "pageable"; "" between GPUs.
        bytes: of one copy.
        seconds: median over the repeats.
        bandwidth: bytes/s; inside a GPU each byte is read and written, and counted once.
        stamp: where and when.
    """

    way: str
    memory: str
    bytes: int
    seconds: float
    bandwidth: float
    stamp: dict[str, str | int]


def copy_bandwidth(sizes: Sequence[int] = (2**28,), *, repeats: int = 10) -> list[Copy]:
    """Time copies by CUDA events, in this process: host to GPU and back, inside a GPU, and between the first two GPUs.

    Without CUDA it prints one sentence that says so and gives back an empty list.

    Args:
        sizes: bytes of a copy, each above 0.
        repeats: copies that count, after one that does not.

    Raises:
        ValueError: no sizes, a size or repeats that are not above 0.
    """
    if not len(sizes):
        raise ValueError("sizes is empty: give the bytes of a copy.")
    for size in sizes:
        positive(size=size)
    positive(repeats=repeats)
    import torch

    if not torch.cuda.is_available():
        print(NO_CUDA)
        return []
    rows = []
    for size in map(int, sizes):
        there = torch.zeros(size, dtype=torch.uint8, device="cuda:0")
        for memory in ("pinned", "pageable"):
            here = torch.zeros(size, dtype=torch.uint8, pin_memory=memory == "pinned")
            rows.append(_row("host to GPU 0", memory, size, _seconds(_copy(there, here), repeats)))
            rows.append(_row("GPU 0 to host", memory, size, _seconds(_copy(here, there), repeats)))
        rows.append(_row("inside GPU 0", "", size, _seconds(_copy(torch.empty_like(there), there), repeats)))
        if torch.cuda.device_count() > 1:
            other = torch.empty_like(there, device="cuda:1")
            rows.append(_row("GPU 0 to GPU 1", "", size, _seconds(_copy(other, there), repeats)))
    return rows


def _copy(target: object, source: object) -> Callable[[], object]:
    # without non_blocking a copy from pinned memory waits for its own end; pageable memory waits whatever is asked
    return lambda: target.copy_(source, non_blocking=True)


def _seconds(copy: Callable[[], object], repeats: int) -> float:
    import torch

    times = []
    for turn in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        copy()
        end.record()
        end.synchronize()
        if turn:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _row(way: str, memory: str, size: int, seconds: float) -> Copy:
    return Copy(way, memory, size, seconds, size / seconds, stamp())
