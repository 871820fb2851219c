"""Count every storage of a step, on real tensors or on fake ones, which have shapes and no memory.

So a training step of a model of 70 billion parameters, or one rank of 32, takes seconds on a laptop, and what it would have
allocated, and when, is known all the same. What this cannot show: what a kernel takes for itself (cuBLAS, attention), which
is no tensor, and outputs whose layout a kernel chooses by itself. What gloo copies is left out (course_lib.observe.memory).

One thing that any counter of this kind changes by looking, PyTorch's MemTracker included: where two gradients of one tensor
meet, autograd adds the second into the first if nobody else holds it, but never while operations are being watched. A tied
embedding under autocast then seems to need one more gradient of its size.
"""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_lib.observe.collectives import pause_after_waiting
from course_lib.observe.memory import Allocation, optimizer_tensors, storage_of, tensor_bytes

MOMENTS = ("first block's forward", "rest of the forward pass", "backward pass", "optimizer step")
COPIED_BY_GLOO = ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_")


class LiveStorages(TorchDispatchMode):
    """Within it, counts the storages that operations make, from their birth to the moment when nothing holds them.

    A storage counts once, however many tensors are views of it, and a DTensor with its local shard. FSDP2 gives a gathered
    unit back by resizing its storages to nothing, which is no operation: that is seen as well. What only waits for Python's
    garbage collector does not count: it is called before a new peak is believed.

    Attributes:
        now, highest: bytes alive, and the most so far (`reset` starts again).
        gloo_copies: the most bytes at once that gloo took for copies of a reduce-scatter's input: not in the two above.
        log: every birth and death, in order; its clock starts at the last `hold`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.highest = self.gloo_copies = 0
        self.log: list[Allocation] = []
        self._zero = self._copied = 0
        self._copies_due: list[int] = []  # bytes of the copies that gloo has made and that no operation has shown yet
        self._keys, self._ids = itertools.count(), itertools.count()
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()  # -> key
        self._alive: dict[int, Allocation] = {}  # key -> its birth, at its present size

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that are there already: parameters, buffers, the optimizer's state, the batch."""
        for tensor in tensors:
            self._note(tensor, held=True)
        self._zero = time.time_ns()

    def reset(self) -> None:
        """Forget the highest point, not what is alive."""
        gc.collect()
        self.highest = self.now

    def __enter__(self) -> LiveStorages:
        gc.collect()
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            if (key := self._known.get(storage)) in self._alive:
                self._die(key)
                self._come_alive(key, size)
            return done

        with ExitStack() as stack:
            gc.freeze()  # what is there now is not looked through again, so that collecting takes no time
            stack.callback(gc.unfreeze)
            stack.callback(setattr, torch.UntypedStorage, "resize_", resize)
            torch.UntypedStorage.resize_ = resize_
            stack.enter_context(pause_after_waiting())
            self._zero = time.time_ns()
            super().__enter__()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor first: its operations on local tensors come here again
        out = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in COPIED_BY_GLOO and "gloo" in dist.get_backend():
            self._copies_due += [t.nbytes for t in tree_leaves(args[1]) if t.device.type == "cpu"]
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, is_view=func.is_view)
        return out

    def _note(self, tensor: torch.Tensor, *, held: bool = False, is_view: bool = False) -> None:
        storage = storage_of(tensor)
        if storage in self._known:
            return
        size, key = storage.nbytes(), next(self._keys)
        self._known[storage] = key
        if is_view and size in self._copies_due:  # waiting for the collective, gloo takes a piece of its copy
            self._copies_due.remove(size)
            self._copied += size
            self.gloo_copies = max(self.gloo_copies, self._copied)
            weakref.finalize(storage, self._drop_copy, size).atexit = False
            return
        self._come_alive(key, size, held=held)
        weakref.finalize(storage, self._die, key).atexit = False

    def _come_alive(self, key: int, size: int, *, held: bool = False) -> None:
        if self.now + size > self.highest:
            gc.collect()
        self._alive[key] = Allocation(0 if held else self._at(), True, next(self._ids), size)
        self.log.append(self._alive[key])
        self.now += size
        self.highest = max(self.highest, self.now)

    def _die(self, key: int) -> None:
        block = self._alive.pop(key)
        self.now -= block.bytes
        self.log.append(block._replace(at=self._at(), allocate=False))

    def _drop_copy(self, size: int) -> None:
        self._copied -= size

    def _at(self) -> int:
        return max(time.time_ns() - self._zero, 1)


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


def become_fake(model: torch.nn.Module) -> None:
    """Replace the tensors of a model on "meta" by CPU tensors, fake ones under `fake_tensors`; ties stay.

    PEFT moves its adapters about while it adds them: "meta" tensors move, fake ones do not.
    """
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    made[tensor] = torch.empty_like(tensor, device="cpu")
                    if isinstance(tensor, torch.nn.Parameter):
                        made[tensor] = torch.nn.Parameter(made[tensor], requires_grad=tensor.requires_grad)
                tensors[name] = made.get(tensor)


@contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Within it this process is rank 0 of `ranks`, whose collectives return at once and move nothing.

    Raises:
        ValueError: fewer than 1 rank.
        RuntimeError: a real process group is up.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: give a whole number of at least 1.")
    if dist.is_initialized():
        raise RuntimeError("A process group is up already: count on fake ranks outside of launch().")
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class CountedStep:
    """Bytes of one rank in the steady state of a run, the batch's own left out.

    Attributes:
        parameters, gradients, optimizer: at rest; the model's buffers are with the parameters.
        moments: the most during each part of a step (`MOMENTS`). With 3 blocks or more each of them grows by the same
            with every further block, the part that is the peak may change.
    """

    parameters: int
    gradients: int
    optimizer: int
    moments: dict[str, int]

    @property
    def peak(self) -> int:
        """Of the whole step."""
        return max(self.moments.values())

    @property
    def resident(self) -> int:
        """What stays between steps."""
        return self.parameters + self.optimizer


def count_step(
    model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor, first_block: torch.nn.Module
) -> CountedStep:
    """A training step of a transformers model; if the optimizer has no states yet, the one after a step that makes them.

    Args:
        model: real or fake, whole or cut by ``fully_shard``.
        batch: token ids of this rank, (sequences, tokens).
        first_block: of the model; it says where the first moment ends.
    """

    def step(at_end_of: Callable[[str], None]) -> None:
        hook = first_block.register_forward_hook(lambda *_: at_end_of(MOMENTS[0]))
        loss = model(input_ids=batch, labels=batch).loss
        hook.remove()  # a checkpointed block runs once more in the backward pass
        at_end_of(MOMENTS[1])
        loss.backward()
        del loss
        at_end_of(MOMENTS[2])
        optimizer.step()
        optimizer.zero_grad()
        at_end_of(MOMENTS[3])

    if not optimizer.state:
        step(lambda _: None)
    moments: dict[str, int] = {}
    gradients = 0
    with LiveStorages() as live:
        live.hold([*model.parameters(), *model.buffers(), *optimizer_tensors(optimizer), batch])

        def note(moment: str) -> None:
            nonlocal gradients
            moments[moment] = live.highest - batch.nbytes
            if moment == MOMENTS[2]:
                gradients = tensor_bytes(p.grad for p in model.parameters() if p.grad is not None)
            live.reset()

        step(note)
        return CountedStep(
            parameters=tensor_bytes([*model.parameters(), *model.buffers()]),
            gradients=gradients,
            optimizer=tensor_bytes(optimizer_tensors(optimizer)),
            moments=moments,
        )
