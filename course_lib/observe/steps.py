"""Observe a training loop: seconds and bytes sent per step, tokens per second, and the memory of one step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from course_lib.observe.memory import MemoryProbe
from course_lib.observe.wire import WireMeter

if TYPE_CHECKING:
    import torch

WARM_UP = 1  # the first step allocates the optimizer's state and DDP's buckets: not typical


@dataclass
class Observation:
    """What :func:`observe` saw. A step that raises is not counted.

    Attributes:
        step_seconds: one entry per step; the step that the memory probe slowed down is left out.
        tokens: this rank's tokens in each of these steps.
        sent: bytes that this rank sent in each step, the measured one included; empty where the system does not count.
    """

    probe: MemoryProbe | None = None
    measured_step: int = 1
    step_seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    num_steps: int = 0

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by category (see `MemoryProbe.bytes`); empty until the measured step is over."""
        return self.probe.bytes if self.probe else {}

    @property
    def median_step(self) -> float:
        """Median seconds per step, without the first step where there is another."""
        return statistics.median(self.step_seconds[WARM_UP:] or self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        """This rank's tokens in the median step over its seconds."""
        return statistics.median(self.tokens[WARM_UP:] or self.tokens) / self.median_step

    @property
    def wire_bytes(self) -> float | None:
        """Mean bytes sent per step over the later half of the steps; None where the system does not count them."""
        late = self.sent[len(self.sent) // 2 :]
        return sum(late) / len(late) if late else None

    @contextmanager
    def step(self, tokens: int = 0) -> Iterator[None]:
        """Wrap one optimizer step. ``tokens``: how many tokens this rank trains on in it.

        Raises:
            RuntimeError: on CPU, where the memory of two steps, one inside the other, would be measured at once.
        """
        import torch

        measured = self.probe is not None and self.num_steps == self.measured_step
        with WireMeter() as wire, self.probe.measure() if measured else nullcontext():
            began = time.perf_counter()
            yield
            if torch.cuda.is_initialized():  # kernels run behind Python's back; without this a step takes no time
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        if not measured:
            self.step_seconds.append(seconds)
            self.tokens.append(tokens)
        self.sent += [] if wire.bytes is None else [wire.bytes]
        self.num_steps += 1


def observe(
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    probe: MemoryProbe | None = None,
    measured_step: int = 1,
) -> Observation:
    """Watch a training loop of this rank.

    >>> observation = observe(model, optimizer)
    >>> for batch in batches:
    ...     with observation.step(tokens=batch.numel()):
    ...         train(batch)
    >>> observation.memory["peak"], observation.median_step, observation.tokens_per_second, observation.wire_bytes

    Args:
        model, optimizer: whose bytes to count; leave both out for times alone.
        probe: counts instead, for a model that needs a probe of its own (`course_lib.observe.holdings`).
        measured_step: index of the one step during which memory is measured (slower; its time is not reported).
    """
    if measured_step < 0:
        raise ValueError(f"measured_step={measured_step}: give the index of a step, 0 for the first.")
    if probe is None and model is not None:
        probe = MemoryProbe(model, optimizer)
    return Observation(probe, measured_step)


def product_flops(size: int = 1024, repeats: int = 20) -> float:
    """FLOP/s of an fp32 product of two square matrices on this rank's device: what its training could reach at most."""
    import torch

    from course_lib.launch import rank_device

    matrix, observation = torch.randn(size, size, device=rank_device()), observe()
    for _ in range(repeats):
        with observation.step():
            matrix @ matrix
    return 2 * size**3 / observation.median_step
