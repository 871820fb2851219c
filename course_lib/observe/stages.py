"""When each forward and backward of each micro-batch ran on this rank's pipeline stages, which a pace can slow down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.parallel.simulate import Event, Timeline, timeline


class StageRecorder:
    """Records what a schedule has this rank's stages do in its latest step.

    Args:
        stages: `torch.distributed.pipelining.PipelineStage`s of this rank, chunk 0 first.
        pace: seconds that each forward takes at least: it sleeps for what the computing did not take. A backward takes
            twice that, each half of a split one as long as a forward. 0 never sleeps.
    """

    def __init__(self, stages: Sequence[Any], pace: float = 0.0) -> None:
        self.pace, self.events = pace, []
        for chunk, stage in enumerate(stages):
            for kind, name in (("F", "forward"), ("B", "backward"), ("W", "backward_weight")):
                setattr(stage, f"{name}_one_chunk", self._timed(getattr(stage, f"{name}_one_chunk"), kind, chunk))

    def _timed(self, method: Callable[..., Any], kind: str, chunk: int) -> Callable[..., Any]:
        import torch
        import torch.distributed as dist

        def timed(number: int, *args: Any, **kwargs: Any) -> Any:
            if any(event[1:4] == (kind, number, chunk) for event in self.events):  # a new step
                self.events.clear()
            began = time.time()  # the machine's clock, which its ranks share
            result = method(number, *args, **kwargs)
            least = self.pace * (2 if kind == "B" and kwargs.get("full_backward", True) else 1)
            if least:
                time.sleep(max(0.0, began + least - time.time()))
            elif torch.cuda.is_initialized():  # kernels run behind Python's back
                torch.cuda.synchronize()
            self.events.append(Event(dist.get_rank(), kind, number, chunk, began, time.time()))
            return result

        return timed

    def timeline(self) -> Timeline:
        """The latest step of all ranks, in seconds from 0 on. Every rank must call it."""
        import torch.distributed as dist

        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.events)
        zero = min((event.start for events in found for event in events), default=0.0)
        moved = [e._replace(start=e.start - zero, end=e.end - zero) for events in found for e in events]
        return timeline(moved, len(found))
