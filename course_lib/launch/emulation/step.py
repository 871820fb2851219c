"""Time a data-parallel training step of emulated GPUs over an emulated link: both sleep, and nothing competes for cores.

Gradients, all-reduces and their overlap with backward are real. The model is small, so its own work hardly counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from course_lib.launch.emulation.delay import slow_link
from course_lib.observe.trace import Span
from course_lib.validation import positive

if TYPE_CHECKING:
    import torch

    from course_lib.collectives.links import Link

    Wrap = Callable[[torch.nn.Module], tuple[torch.nn.Module, Callable[[], None]]]

LAYERS, WIDTH = 16, 256


class Clock:
    """When an emulated GPU will have done its work. As on a GPU, work that starts late does not delay what follows."""

    busy_until = 0.0

    def work(self, seconds: float) -> None:
        """Sleep until the GPU has done this, too."""
        self.busy_until = (self.busy_until or time.perf_counter()) + seconds
        time.sleep(max(0.0, self.busy_until - time.perf_counter()))


def emulated_model(compute: float) -> torch.nn.Module:
    """16 linear layers (4.2 MB of gradients) that sleep `compute` seconds per step: a third forward, the rest backward."""
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    model.clock = Clock()

    def begin(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        model.clock.busy_until = 0.0  # it has waited for the gradients: its next work starts when it comes
        inputs[0].requires_grad_()  # or the first layer's hook warns that it has nothing to wait for

    model.register_forward_pre_hook(begin)
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: model.clock.work(compute / 3 / LAYERS))
        layer.register_full_backward_pre_hook(lambda *_: model.clock.work(compute * 2 / 3 / LAYERS))
    return model


def emulated_step(wrap: Wrap, *, ranks: int, compute: float, link: Link, steps: int = 5) -> tuple[float, list[Span]]:
    """Train `emulated_model` on several ranks. Seconds of a step, and what it consists of, as `bucketed_step` has it.

    It is rank 0's shortest step after the first, in which DDP has one bucket.

    Args:
        wrap: takes the model; returns the model to train, and what to call after ``backward()``.
        compute: seconds that one rank computes in a step.
        link: carries one all-reduce at a time, each for as long as a ring of `ranks` takes.
        steps: at least 2.
    """
    from course_lib.launch import launch

    positive(compute=compute, steps_after_the_first=steps - 1)
    run = launch(_steps, wrap, compute, link, steps, ranks=ranks, backend="gloo", threads=1, quiet=True)
    return min(run.results[0][1:], key=lambda step: step[0])


def _steps(wrap: Wrap, compute: float, link: Link, steps: int) -> list[tuple[float, list[Span]]]:
    import torch
    import torch.distributed as dist

    result = []
    with slow_link(link) as wire:
        emulated = emulated_model(compute)
        model, after_backward = wrap(emulated)
        for _ in range(steps):
            dist.barrier()
            wire.messages.clear()
            began = time.perf_counter()
            loss = model(torch.ones(4, WIDTH)).sum()
            turn = emulated.clock.busy_until
            loss.backward()
            after_backward()
            seconds = time.perf_counter() - began
            model.zero_grad()
            stretches = [("forward", began, turn), ("backward", turn, emulated.clock.busy_until)]
            stretches += [("collective", *message) for message in wire.messages]
            result.append(
                (seconds, [Span(kind, kind, start - began, end - began, 0) for kind, start, end in stretches])
            )
    return result
