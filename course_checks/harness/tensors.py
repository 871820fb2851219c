"""How many bytes of tensors are alive in this process, whoever holds them: an attribute, a closure, a list somewhere.

An optimizer's own bookkeeping says what the optimizer wants to say. Two views of the same storages: `LiveTensors` sees
each operator's results from the beginning of a block on; `live_bytes` asks Python's collector about all that there is,
also what was made before. A storage counts once, and whole while one small view of it lives.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.observe import tensor_bytes

PATIENCE = 0.5  # seconds: a backend's own thread lets go of a collective's tensors a moment after wait() has returned


@dataclass
class NewTensor:
    """A storage that an operator made."""

    operator: str
    shape: tuple[int, ...]
    storage: StorageWeakRef

    @property
    def bytes(self) -> int:
        """Its bytes now: none once it is freed or resized to 0."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        return 0 if storage is None else storage.nbytes()


class LiveTensors(TorchDispatchMode):
    """Every storage that comes into being inside the `with` block, wherever it is kept afterwards.

    It stands below autograd, so it also sees what autograd saves and what a custom function keeps on `ctx`. (The
    allocator's log would miss what gloo's own threads free.)

    every: look after each operator; `highest` is then the most that was alive.
    """

    def __init__(self, *, every: bool = False) -> None:
        super().__init__()
        self.every, self.highest = every, 0
        self.made: list[NewTensor] = []
        self._alive: dict[int, NewTensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs or {}))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._alive and not tensor.is_meta:
                new = NewTensor(str(func), tuple(tensor.shape), StorageWeakRef(storage))
                self.made.append(new)
                self._alive[storage._cdata] = new
        if self.every:
            self.highest = max(self.highest, self._count())
        return result

    def __deepcopy__(self, _: Any) -> LiveTensors:
        return self

    def alive(self, *, besides: Iterable[torch.Tensor] = (), collect: bool = True) -> list[NewTensor]:
        """Those that are still held by somebody, without the storages of `besides`."""
        known = {tensor.untyped_storage()._cdata for tensor in besides}
        held = [new for new in self.made if new.storage.cdata not in known and not new.storage.expired()]
        if held and collect:  # perhaps only by a circle that nobody has collected yet
            gc.collect()
        return [new for new in held if not new.storage.expired()]

    def bytes(self, hoped: float = float("inf"), patience: float = PATIENCE) -> int:
        """Bytes alive; looks again for a moment while they are more than `hoped`."""
        return _settled(self._count, hoped, patience)

    def _count(self) -> int:
        for key in [key for key, new in self._alive.items() if new.storage.expired()]:
            del self._alive[key]
        return sum(new.bytes for new in self._alive.values())


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that Python can reach in this process, gradients that only C++ holds included."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def live_bytes() -> int:
    """Bytes of their storages, each storage once."""
    return tensor_bytes(live_tensors())


def settled_bytes(at_most: int) -> int:
    """The same, once it is `at_most`, or after half a second."""
    return _settled(live_bytes, at_most, PATIENCE)


def _settled(count: Callable[[], int], at_most: float, patience: float) -> int:
    if (found := count()) <= at_most:
        return found
    gc.collect()  # the record of a reduce-scatter stands in a ring of references, and holds its input
    give_up = time.perf_counter() + patience
    while (found := count()) > at_most and time.perf_counter() < give_up:
        time.sleep(0.001)
    return found


def bytes_behind_views(known: Iterable[torch.Tensor], at_least: int) -> int:
    """Bytes of storages of `at_least` bytes and more that some tensor sees less than half of.

    known: tensors whose storages do not count, such as the model's parameters.
    """
    # Whether somebody holds the whole tensor, too, cannot be told: a view keeps that object alive as well as its storage.
    passed_over = {tensor.untyped_storage()._cdata for tensor in known}
    behind: dict[int, int] = {}
    for tensor in live_tensors():
        storage = tensor.untyped_storage()
        if storage._cdata not in passed_over and at_least <= storage.nbytes() >= 2 * tensor.nbytes:
            behind[storage._cdata] = storage.nbytes()
    return sum(behind.values())
