"""How many bytes of tensors are alive on this rank, whoever holds them: an attribute, a closure, a list somewhere.

Every tensor comes out of an operator. A dispatch mode sees the operators and keeps a weak reference to each storage, so
a storage counts with the bytes that it has *now*: nothing once it is freed or resized to 0, all of it while one small
view of it lives. (The allocator's log would miss what gloo's own threads free.)
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PATIENCE = 0.02  # seconds: gloo's thread lets go of a tensor a moment after wait() has returned


class Alive(TorchDispatchMode):
    """``with Alive() as alive:`` then ``alive.bytes()``: of what was made since, and is still there.

    Args:
        every: look after each operator; ``highest`` is then the most that was alive.
    """

    def __init__(self, *, every: bool = False) -> None:
        super().__init__()
        self.every, self.highest = every, 0
        self._storages: dict[int, StorageWeakRef] = {}
        self.moments: list[tuple[str, int, int]] = []  # (what, number, bytes)
        self.usual = 0  # bytes that need no second look
        gc.freeze()  # a collection then looks only at what is made from here on: 1 ms, not 100

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = StorageWeakRef(storage)
        if self.every:
            self.highest = max(self.highest, self._count())
        return out

    def __deepcopy__(self, _: Any) -> Alive:
        return self

    def bytes(self, hoped: float = float("inf")) -> int:
        """Bytes alive; looks again for a moment while they are more than ``hoped``."""
        if (now := self._count()) <= hoped:
            return now
        gc.collect()  # the record of a reduce-scatter stands in a ring of references, and holds its input
        give_up = time.perf_counter() + PATIENCE
        while (now := self._count()) > hoped and time.perf_counter() < give_up:
            time.sleep(0.001)
        return now

    def note(self, what: str, number: int, above: int = 0) -> None:
        """Remember a moment; ``above``: bytes that may be there beyond the usual ones."""
        self.moments.append((what, number, self.bytes(self.usual + above)))

    def _count(self) -> int:
        total = 0
        for key, ref in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total
