"""Run steps on fake tensors, which have shapes and no memory, and count every storage.

So a training step of a model of 70 billion parameters takes seconds on a laptop, and what it would have allocated, and
when, is known all the same. What fake tensors cannot show: the workspace inside a kernel (cuBLAS, attention), which
is no tensor, and outputs whose layout a kernel chooses by itself.

One thing that any counter of this kind changes by looking, PyTorch's MemTracker included, on real tensors as well: where
two gradients of one tensor meet, autograd adds the second into the first if nobody else holds it, but never while
operations are being watched. A tied embedding under autocast then seems to need one more gradient of its size.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.memory.allocator import Event


class LiveStorages(TorchDispatchMode):
    """Within it, counts the storages that operations make, from their birth to the moment when nothing holds them.

    Works on real and on fake tensors alike; a storage counts once, however many tensors are views of it.

    Attributes:
        now, highest: bytes alive, and the most so far (`reset` starts again).
        log: every birth and death, in order, as `course_lib.memory.allocator.replay` takes them.
        born: the name of the operation that made a storage, by its id in the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.highest = 0
        self.log: list[Event] = []
        self.born: dict[int, str] = {}
        self._events_at_highest = 0
        self._alive: dict[int, int] = {}  # id in the log -> bytes
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there already: parameters, buffers, the optimizer's state, the batch."""
        for tensor in tensors:
            self._note(tensor, "held before")

    def reset(self) -> None:
        """Forget the highest point, not what is alive."""
        self.highest, self._events_at_highest = self.now, len(self.log)

    def by_operation(self) -> dict[str, int]:
        """Bytes alive at the highest point, by the operation that made them; the most first."""
        alive, found = {}, dict[str, int]()
        for event in self.log[: self._events_at_highest]:
            if event.allocate:
                alive[event.id] = event.bytes
            else:
                del alive[event.id]
        for name, size in alive.items():
            found[self.born[name]] = found.get(self.born[name], 0) + size
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, str(func))
        return out

    def _note(self, tensor: torch.Tensor, maker: str) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        name, size = len(self.born), storage.nbytes()
        self._known[storage] = name
        self.born[name] = maker
        self._alive[name] = size
        self.log.append(Event(True, name, size))
        self.now += size
        if self.now > self.highest:
            self.highest, self._events_at_highest = self.now, len(self.log)
        weakref.finalize(storage, self._bury, name).atexit = False

    def _bury(self, name: int) -> None:
        self.now -= self._alive.pop(name)
        self.log.append(Event(False, name))


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made within have shape, dtype and device, and no memory; so have models that are built within.

    transformers looks at the values of position ids to see whether several texts share a row, and a fake tensor has none;
    left alone it would play safe, write a mask out and, under the mask, repeat the keys and values of grouped-query
    attention for every head. Within, it is told what it would see on real tensors: one text a row.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import masking_utils

    asks = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        masking_utils.find_packed_sequence_indices = asks
