"""Step times and tokens a second of a training loop, with one step given to the memory probe."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from course_lib.observe.memory import MemoryProbe

if TYPE_CHECKING:
    import torch

WARM_UP = 1  # the first step allocates the optimizer's state and DDP's buckets: not typical


@dataclass
class Observation:
    """What :func:`observe` saw.

    Attributes:
        step_seconds: one figure a step; the step that the memory probe slowed down is left out.
        tokens: this rank's tokens in each of these steps.
        memory: bytes by category: parameters, gradients, optimizer_state, ddp_buckets, activations (what autograd
            keeps for the backward pass), peak; on CUDA also peak_reserved. Empty until the measured step is over.
    """

    probe: MemoryProbe | None = None
    measured_step: int = 1
    step_seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_steps: int = 0

    @property
    def memory(self) -> dict[str, int]:
        return self.probe.bytes if self.probe else {}

    @property
    def median_step(self) -> float:
        """Median seconds a step, the first step left out where there is another."""
        return statistics.median(self.step_seconds[WARM_UP:] or self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """This rank's tokens in the median step over its seconds."""
        return statistics.median(self.tokens[WARM_UP:] or self.tokens) / self.median_step

    @contextmanager
    def step(self, tokens: int = 0) -> Iterator[None]:
        """Around one optimizer step. ``tokens``: how many tokens this rank trains on in it."""
        number, self.num_steps = self.num_steps, self.num_steps + 1
        if self.probe is not None and number == self.measured_step:
            with self.probe.measure():
                yield
            return
        began = time.perf_counter()
        yield
        _finish_device_work()
        self.step_seconds.append(time.perf_counter() - began)
        self.tokens.append(tokens)


def _finish_device_work() -> None:
    import torch

    if torch.cuda.is_initialized():  # kernels run behind Python's back; without this a step takes no time
        torch.cuda.synchronize()


def observe(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    probe: MemoryProbe | None = None,
    measured_step: int = 1,
) -> Observation:
    """Watch a training loop of this rank.

    >>> seen = observe(model, optimizer)
    >>> for batch in batches:
    ...     with seen.step(tokens=batch.numel()):
    ...         train(batch)
    >>> seen.memory["peak"], seen.median_step, seen.tokens_per_second

    Args:
        model, optimizer: whose bytes to count; leave both out for times alone.
        probe: counts instead, for a model that needs a probe of its own (`course_lib.observe.deepspeed_memory`).
        measured_step: index of the one step during which memory is measured (slower; its time is not reported).

    Raises:
        ValueError: ``measured_step`` below 0.
    """
    if measured_step < 0:
        raise ValueError(f"measured_step={measured_step}: give the index of a step, 0 for the first.")
    if probe is None and model is not None:
        probe = MemoryProbe(model, optimizer)
    return Observation(probe, measured_step)
