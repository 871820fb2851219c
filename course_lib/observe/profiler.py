"""Read raw events from PyTorch's profiler: which operation ran when, or what the CPU's allocator did."""

from __future__ import annotations

import os
from typing import Any


class Operations:
    """Every operation between ``__enter__`` and :meth:`stop`; ``events`` is then the profiler's own list.

    Args:
        cuda: also what runs on the GPU.
    """

    def __init__(self, *, cuda: bool = False) -> None:
        self._cuda = cuda
        self._profile: Any = None
        self.events: list[Any] = []

    def __enter__(self) -> Operations:
        from torch.autograd.profiler import profile

        _quiet()
        self._profile = profile(use_kineto=True, use_device="cuda" if self._cuda else None, acc_events=False)
        self._profile.__enter__()
        return self

    def stop(self) -> None:
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.events = list(self._profile.kineto_results.events())
            self._profile = None

    def __exit__(self, *_: object) -> None:
        self.stop()


class Allocations:
    """What the CPU's allocator did between ``__enter__`` and :meth:`stop`.

    Operations are not recorded, or this would cost a small model's step as much as the step itself.

    oneDNN is switched off meanwhile: on CPUs with 16-bit instructions (AVX512-BF16, AVX512-FP16, AMX) it takes memory
    for reordered copies of its operands, which depend on the CPU and say nothing about the model. PyTorch's other
    kernels give the same events on every CPU.

    Attributes:
        log: (nanoseconds since the epoch, address, bytes), in the order of time; bytes below 0 are given back.
    """

    def __init__(self) -> None:
        self._running = False
        self._onednn_was_on = True
        self.log: list[tuple[int, int, int]] = []

    def __enter__(self) -> Allocations:
        import torch
        from torch._C._profiler import RecordScope
        from torch.autograd.profiler import profile

        _quiet()
        config = profile(use_kineto=True, profile_memory=True).config()
        activities = {torch.profiler.ProfilerActivity.CPU}
        self._onednn_was_on = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False
        torch.autograd._prepare_profiler(config, activities)
        torch.autograd._enable_profiler(config, activities, {RecordScope.USER_SCOPE})
        self._running = True
        return self

    def stop(self) -> None:
        import torch
        from torch._C._profiler import _EventType

        if not self._running:
            return
        self._running = False
        torch.backends.mkldnn.enabled = self._onednn_was_on
        waiting, log = list(torch.autograd._disable_profiler().experimental_event_tree()), []
        while waiting:
            event = waiting.pop()
            if event.tag == _EventType.Allocation:
                block = event.extra_fields
                log.append((event.start_time_ns, block.ptr, block.alloc_size))
            waiting += event.children
        self.log = sorted(log, key=lambda entry: entry[0])

    def __exit__(self, *_: object) -> None:
        self.stop()


def _quiet() -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints a line at every start and stop
