"""Record what a step allocates and frees, in the order of time, for a figure of memory or a replay."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.observe.memory import optimizer_tensors
from course_lib.observe.profiler import Allocations
from course_lib.observe.saved_tensors import storage_of

if TYPE_CHECKING:
    import torch


class Allocation(NamedTuple):
    """A block of memory that came or went. Without its first field it is an event of `course_lib.memory.allocator`.

    Attributes:
        at: nanoseconds since `fn` was called; 0 for what was there before, else at least 1.
        allocate: True where it came, False where it went.
        id: of the block, the same at both ends of its life.
        bytes: its size.
    """

    at: int
    allocate: bool
    id: int
    bytes: int


def record_allocations(fn: Callable[[], Any], held: Iterable[torch.Tensor] = ()) -> list[Allocation]:
    """Call `fn` and list every allocation that the CPU's allocator makes for this thread, in the order of time.

    Args:
        fn: one training step, or several.
        held: tensors that were there before. They come first in the list, each storage once, and are seen to go, too:
            of other older blocks the allocator tells nothing. See `training_tensors`.

    Raises:
        ValueError: a tensor of `held` is not on the CPU.
    """
    events: list[Allocation] = []
    known: set[int] = set()
    gone: list[tuple[int, Allocation]] = []

    def note_end(block: Allocation) -> None:
        gone.append((time.time_ns(), block))

    watches = []
    for storage in map(storage_of, held):
        if storage.device.type != "cpu":
            raise ValueError(
                f"A tensor is on {storage.device}: only the CPU's allocations can be recorded, move the model there."
            )
        if storage.nbytes() and storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            events.append(Allocation(0, True, len(events), storage.nbytes()))
            watches.append(weakref.finalize(storage, note_end, events[-1]))
        del storage
    del held
    count = len(events)
    with Allocations() as recording:
        began = time.time_ns()
        fn()
    for watch in watches:
        watch.detach()
    addresses: dict[int, Allocation] = {}
    for at, address, size in recording.log:
        at = max(at - began, 1)
        if size > 0:
            addresses[address] = Allocation(at, True, count, size)
            events.append(addresses[address])
            count += 1
        elif address in addresses:
            events.append(addresses.pop(address)._replace(at=at, allocate=False))
    events += [block._replace(at=max(at - began, 1), allocate=False) for at, block in gone]
    return sorted(events, key=lambda event: event.at)


def training_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """What lies in memory between two steps: parameters, buffers, gradients if not cleared, the optimizer's state.

    NF4 weights have constants that are no parameters (`course_lib.training.finetune.building.quantization_constants`): add them.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*parameters, *model.buffers(), *gradients, *(optimizer_tensors(optimizer) if optimizer else [])]


def memory_over_time(events: Iterable[Allocation]) -> list[tuple[int, int]]:
    """(nanoseconds, bytes now) after each event; at 0 once, with all that was there before."""
    now, curve = 0, [(0, 0)]
    for event in events:
        now += event.bytes if event.allocate else -event.bytes
        if event.at == curve[-1][0]:
            curve[-1] = (event.at, now)
        else:
            curve.append((event.at, now))
    return curve
