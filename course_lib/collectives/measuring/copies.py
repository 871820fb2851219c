"""Measure bytes per second between host and GPU, and between GPUs, from pinned and from pageable memory."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from course_lib.stamp import stamp

SIZE, REPEATS = 2**28, 10
"""Bytes of a copy, and how many count, after one that does not."""


@dataclass(frozen=True)
class Copy:
    """One row: which way, the host's side ("pinned" or "pageable", "" between GPUs), and the median bandwidth in bytes/s.

    Inside a GPU each byte is read and written, and counted once.
    """

    way: str
    memory: str
    bandwidth: float
    stamp: dict[str, str | int]


def copy_bandwidth() -> list[Copy]:
    """Time copies by CUDA events, in this process: host to GPU and back, inside a GPU, and between the first two GPUs.

    Without CUDA it prints one sentence that says so and gives back an empty list.
    """
    import torch

    if not torch.cuda.is_available():
        print("There is no CUDA device here, so there is no copy to a GPU to time.")
        return []
    there = torch.zeros(SIZE, dtype=torch.uint8, device="cuda:0")
    rows = []
    for memory in ("pinned", "pageable"):
        here = torch.zeros(SIZE, dtype=torch.uint8, pin_memory=memory == "pinned")
        rows += [_timed("host to GPU 0", memory, there, here), _timed("GPU 0 to host", memory, here, there)]
    rows.append(_timed("inside GPU 0", "", torch.empty_like(there), there))
    if torch.cuda.device_count() > 1:
        rows.append(_timed("GPU 0 to GPU 1", "", torch.empty_like(there, device="cuda:1"), there))
    return rows


def _timed(way: str, memory: str, target: Any, source: Any) -> Copy:
    import torch

    seconds = []
    for _ in range(REPEATS + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        # without non_blocking a copy from pinned memory waits for its own end; pageable memory waits whatever is asked
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return Copy(way, memory, SIZE / statistics.median(seconds[1:]), stamp())
