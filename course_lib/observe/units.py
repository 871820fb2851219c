"""Watch one step of a model that `fully_shard` has cut: bytes on this rank, and which modules are gathered when."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed.tensor import DTensor

from course_lib.observe.fake import LiveStorages
from course_lib.observe.memory import optimizer_tensors


@dataclass(frozen=True)
class Moment:
    """One moment of a step.

    Attributes:
        event: how many storages had come or gone by then.
        what: what happens, such as "forward of block 3 begins".
        gathered: share of each module's elements that is whole on this rank, 0 to 1, by the modules' names.
    """

    event: int
    what: str
    gathered: dict[str, float]


@dataclass(frozen=True)
class UnitTimeline:
    """One step on one rank.

    Attributes:
        sizes: bytes on this rank after each storage that came or went; first what was there before.
        moments: where modules begin and end, in order.
        sharded: share of each module that the rank keeps between steps: one over the number of ranks.
    """

    sizes: list[int]
    moments: list[Moment]
    sharded: float

    @property
    def peak(self) -> int:
        """Bytes."""
        return max(self.sizes)

    @property
    def at_peak(self) -> int:
        """Index of the moment at which most bytes are there."""
        return max(range(len(self.moments)), key=lambda i: self.sizes[self.moments[i].event])


def watch_units(
    modules: Mapping[str, torch.nn.Module],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
) -> UnitTimeline:
    """Run one step under watch: `loss()`, its backward, the optimizer's step. Gloo's own copies are left out.

    Args:
        modules: name -> part of the model to look at, in the order of the forward pass.
        model: after `fully_shard` over a row of ranks; it has made a step before, so that the optimizer has its state.
        optimizer: of the model's parameters.
        loss: runs the forward pass.
    """
    moments: list[Moment] = []

    def note(what: str) -> None:
        gathered = {name: _gathered(module) for name, module in modules.items()}
        moments.append(Moment(len(live.log), what, gathered))

    with LiveStorages() as live, ExitStack() as hooks:
        for i, (name, module) in enumerate(modules.items()):
            watched = {
                f"forward of {name} begins": module.register_forward_pre_hook,
                f"forward of {name} ends": module.register_forward_hook,
            }
            if i:  # the first one's inputs need no gradient: its hook would come as its backward begins
                watched[f"backward of {name} ends"] = module.register_full_backward_hook
            for what, register in watched.items():
                hooks.callback(register(lambda *_, what=what: note(what)).remove)
        live.hold([*model.parameters(), *model.buffers(), *optimizer_tensors(optimizer)])
        note("between steps")
        before = len(live.log)
        loss().backward()
        note("backward is over")
        optimizer.step()
        optimizer.zero_grad()
        note("the optimizer has stepped")
        sizes = list(accumulate(event.bytes if event.allocate else -event.bytes for event in live.log))
    kept = next(p for p in model.parameters() if isinstance(p, DTensor))
    shifted = [Moment(m.event - before, m.what, m.gathered) for m in moments]
    return UnitTimeline(sizes[before - 1 :], shifted, 1 / kept.device_mesh.size())


def _gathered(module: torch.nn.Module) -> float:
    sizes = [(p.numel(), isinstance(p, DTensor)) for p in module.parameters()]
    return sum(size for size, is_shard in sizes if not is_shard) / sum(size for size, _ in sizes)
