"""PyTorch's profiler reduced to its raw events: what the allocator did and which operation ran when."""

from __future__ import annotations

import os
from typing import Any


class RawEvents:
    """Records between ``__enter__`` and :meth:`stop`; ``events`` is then the profiler's own list.

    Args:
        memory: also each allocation and release, as events named ``[memory]``.
        cuda: also what runs on the GPU.
    """

    def __init__(self, *, memory: bool = False, cuda: bool = False) -> None:
        self._memory, self._cuda = memory, cuda
        self._profile: Any = None
        self.events: list[Any] = []

    def __enter__(self) -> RawEvents:
        from torch.autograd.profiler import profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else every start and stop prints a line
        self._profile = profile(
            use_kineto=True, profile_memory=self._memory, use_device="cuda" if self._cuda else None, acc_events=False
        )
        self._profile.__enter__()
        return self

    def stop(self) -> None:
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.events = list(self._profile.kineto_results.events())
            self._profile = None

    def __exit__(self, *_: object) -> None:
        self.stop()
