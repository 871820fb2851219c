"""Track what autograd keeps for the backward pass, storage by storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory behind a tensor; behind a DTensor that of its local shard."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


class SavedForBackward:
    """Bytes that autograd keeps for the backward pass, the model's own parameters and buffers left out.

    ``pack`` and ``unpack`` go to ``torch.autograd.graph.saved_tensors_hooks``, ``note_own`` is a forward pre-hook.

    Args:
        model: whose parameters not to count.
        on_every_call: called whenever autograd keeps or takes back a tensor.

    Attributes:
        now, highest: bytes kept at this moment, and the most so far.
    """

    def __init__(self, model: torch.nn.Module, on_every_call: Callable[[], None]) -> None:
        self._own = {storage_of(t)._cdata for t in [*model.parameters(), *model.buffers()]}
        self._users: dict[int, list[int]] = {}  # storage -> [how many kept tensors lie in it, its bytes]
        self._on_every_call = on_every_call
        self.now = self.highest = 0

    def note_own(self, module: torch.nn.Module, _: Any) -> None:
        """Before a module's forward: FSDP has just put the gathered parameters in the place of the shards."""
        self._on_every_call()
        self._own |= {storage_of(p)._cdata for p in module._parameters.values() if p is not None}

    def pack(self, tensor: torch.Tensor) -> Any:
        self._on_every_call()
        storage = storage_of(tensor)
        if storage._cdata in self._own:
            return tensor
        if storage._cdata not in self._users:
            self._users[storage._cdata] = [0, storage.nbytes()]
            self.now += storage.nbytes()
            self.highest = max(self.highest, self.now)
        self._users[storage._cdata][0] += 1
        # detached: an output that its own node keeps would be a cycle, which a split backward pass never breaks
        return _Kept(tensor.detach(), self, storage._cdata)

    def unpack(self, packed: Any) -> torch.Tensor:
        self._on_every_call()
        return packed.tensor if isinstance(packed, _Kept) else packed

    def release(self, storage: int) -> None:
        users = self._users[storage]
        users[0] -= 1
        if not users[0]:
            self.now -= users[1]
            del self._users[storage]


class _Kept:
    """What autograd holds in place of a tensor that the backward pass needs; gone when autograd lets go of it."""

    __slots__ = ("tensor", "_book", "_storage")

    def __init__(self, tensor: torch.Tensor, book: SavedForBackward, storage: int) -> None:
        self.tensor, self._book, self._storage = tensor, book, storage

    def __del__(self) -> None:
        self._book.release(self._storage)


class FreedStorages:
    """Notices when storages that were there before the measurement are given back.

    The allocator's events do not tell the size of blocks that are older than the recording; of a model that is
    measured in the middle of its training, these are the last step's gradients.

    Attributes:
        log: (nanoseconds since the epoch, bytes below 0).
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        storages = {storage._cdata: storage for storage in map(storage_of, tensors)}
        self._there = [(StorageWeakRef(storage), storage.nbytes()) for storage in storages.values()]
        self.log: list[tuple[int, int]] = []

    def check(self) -> None:
        """Cheap while the first is there: ``zero_grad`` gives all back, in this order."""
        if self._there and self._there[0][0].expired():
            import time

            gone = [entry for entry in self._there if entry[0].expired()]
            self._there = [entry for entry in self._there if not entry[0].expired()]
            self.log.append((time.time_ns(), -sum(size for _, size in gone)))
