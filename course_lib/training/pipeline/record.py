"""Record when each forward and backward pass of each micro-batch ran on this rank, and slow them down on request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from course_lib.parallel.simulate import Event, Timeline, timeline


class Recorder:
    """Notes this rank's actions.

    Args:
        rank: in the pipeline.
        pace: seconds that each forward takes at least: it sleeps for what the computing did not take. A backward takes
            twice that, each half of a split one as long as a forward. 0 never sleeps.

    Attributes:
        events: since the last `clear`; times are the machine's clock, equal for all ranks on it.
        offset: added to the micro-batch that is told, for schedules that are called once for each.
    """

    def __init__(self, rank: int, *, pace: float = 0.0) -> None:
        self.rank, self.pace = rank, pace
        self.events: list[Event] = []
        self.offset = 0

    @contextmanager
    def __call__(self, kind: str, micro_batch: int, chunk: int = 0, *, whole: bool = True) -> Iterator[None]:
        """Around an action. ``whole``: False for a B that leaves the weights' gradients to W."""
        began = time.time()
        yield
        least = self.pace * (2 if kind == "B" and whole else 1)
        if least:
            time.sleep(max(0.0, began + least - time.time()))
        elif torch.cuda.is_initialized():  # kernels run behind Python's back
            torch.cuda.synchronize()
        self.events.append(Event(self.rank, kind, micro_batch + self.offset, chunk, began, time.time()))

    def clear(self) -> None:
        self.events.clear()

    def together(self, group: dist.ProcessGroup | None = None) -> Timeline:
        """The events of all ranks of `group`, from 0 on. Every rank of it must call."""
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, self.events, group=group)
        zero = min((event.start for events in found for event in events), default=0.0)
        moved = [e._replace(start=e.start - zero, end=e.end - zero) for events in found for e in events]
        return timeline(moved, len(found))


class RecordedStage(PipelineStage):
    """PyTorch's stage, which notes what a schedule has it do."""

    def __init__(self, *args: Any, record: Recorder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.record = record
        self.chunk = self.stage_index // self.group_size

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.record("F", fwd_chunk_id, self.chunk):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self.record("B", bwd_chunk_id, self.chunk, whole=full_backward):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.record("W", bwd_chunk_id, self.chunk):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
