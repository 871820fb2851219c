"""Bytes of a rank: by category, at the peak, and one allocation after the other.

What each instrument counts:

`tensor_bytes`        the storages behind tensors, each once.
`MemoryProbe`         a real step. On CPU the peak is computed from the allocator's events, which PyTorch's profiler
                      records: what a kernel takes for a moment is in it, gloo's copies are not. On CUDA it is the
                      caching allocator's, allocated and reserved apart.
`record_allocations`  the same events of the CPU's allocator, one by one.
`LiveStorages`        (course_lib.observe.fake) the storages that operations make, on real or on fake tensors: what a
                      kernel takes for itself is not in it.

gloo's copies. gloo copies what it sends: the whole output of an all-gather, the whole input of a reduce-scatter, which
it runs as an all-reduce on the copy. NCCL does not, nor does PyTorch's fake backend, so a peak that is meant for GPUs
must not contain them. "peak" and `LiveStorages` leave these copies out; "gloo_copies" says by how much they lift the
peak on this machine. The sum of the two is the allocator's own peak.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from course_lib.observe.collectives import around_calls, pause_after_waiting

if TYPE_CHECKING:
    import torch

IN_BACKEND = "in a backend's call"  # the profiler's label for it
_last: dict[str, int] = {}  # what the last probe of this process has found; a rank hands it over as run.memory


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory behind a tensor; behind a DTensor that of its local shard."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages on this rank, each storage once (tied weights, views of one bucket).

    A DTensor counts with its local shard.
    """
    storages = [storage_of(tensor) for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor in the optimizer's state (Adam: two moments and a step counter per parameter)."""
    import torch

    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def training_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[torch.Tensor]:
    """What lies in memory between two steps: parameters, buffers, gradients if not cleared, the optimizer's state.

    NF4 weights have constants that are no parameters (`course_lib.training.methods.quantization_constants`): add them.
    """
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [*parameters, *model.buffers(), *gradients, *(optimizer_tensors(optimizer) if optimizer else [])]


# ---------------------------------------------------------------------------------------------------- by category
class MemoryProbe:
    """Measures one training step of ``model`` and ``optimizer``; use as ``with probe.measure(): <one step>``.

    Attributes:
        bytes: of the last measured step: parameters (with buffers), gradients, optimizer_state, ddp_buckets,
            activations (the most that autograd kept for the backward pass), peak; on CPU also gloo_copies, on CUDA
            peak_reserved. Empty before.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it, and steps the inner one
        self.bytes: dict[str, int] = {}

    def resident(self) -> dict[str, int]:
        """Bytes that stay between steps, by category."""
        return {
            "parameters": tensor_bytes([*self.model.parameters(), *self.model.buffers()]),
            "gradients": tensor_bytes(self._gradients()),
            "optimizer_state": tensor_bytes(optimizer_tensors(self.optimizer)) if self.optimizer else 0,
            # gradients that are views of the buckets have been counted
            "ddp_buckets": 0 if getattr(self.model, "gradient_as_bucket_view", False) else _buckets(self.model)[0],
        }

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _call_before_step(self, note: Callable[..., None], stack: ExitStack) -> None:
        """Call `note` just before the optimizer steps, until `stack` closes."""
        if self.optimizer is not None:
            stack.callback(self.optimizer.register_step_pre_hook(note).remove)

    @contextmanager
    def measure(self) -> Iterator[MemoryProbe]:
        """Around one whole step: forward, backward, optimizer step.

        Raises:
            RuntimeError: on CPU, while another probe or another profiler is at work.
        """
        import torch

        before = self.resident()
        buckets, rebuilt = _buckets(self.model)
        gradients = 0

        def note_gradients(*_: Any) -> None:
            nonlocal gradients
            gradients = tensor_bytes(self._gradients())

        with ExitStack() as stack:
            self._call_before_step(note_gradients, stack)
            saved = stack.enter_context(SavedForBackward(self.model))
            # buffers, too: with its shards offloaded, a model computes on the GPU all the same
            if any(t.is_cuda for t in (*self.model.parameters(), *self.model.buffers())):
                torch.cuda.reset_peak_memory_stats()
                yield self
                peak = _cuda_peaks()
            else:
                with AllocatorLog(self._gradients()) as log:
                    yield self
                view = getattr(self.model, "gradient_as_bucket_view", False)
                buckets -= before["gradients"] if view else 0  # those that no gradient is a view of just now
                held = sum(before.values()) - before.get("ddp_buckets", 0)
                if _buckets(self.model)[1] == rebuilt:  # else DDP made new ones as this step began
                    held += buckets
                peak = log.peaks(held)
        after = self.resident()
        self.bytes = {
            **after,
            "parameters": before["parameters"],
            "gradients": gradients or after["gradients"],
            "activations": saved.highest,
            **peak,
        }
        global _last
        _last = self.bytes


def _buckets(model: torch.nn.Module) -> tuple[int, bool]:
    """(bytes of all of DDP's gradient buckets, whether it has rebuilt them in the order of its first backward pass)."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        return 0, False
    logged = model._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]  # the same sum
    return sum(int(size) for size in str(sizes).split(",")), model._has_rebuilt_buckets


def _cuda_peaks() -> dict[str, int]:
    import torch

    return {"peak": torch.cuda.max_memory_allocated(), "peak_reserved": torch.cuda.max_memory_reserved()}


def process_report() -> dict[str, Any]:
    """What this rank's last probe found; on CUDA at least the allocator's peaks."""
    import torch

    return (_cuda_peaks() if torch.cuda.is_initialized() else {}) | _last


# ------------------------------------------------------------------------------------ what the backward pass needs
class SavedForBackward:
    """Bytes that autograd keeps for the backward pass, the model's own parameters and buffers left out.

    Attributes:
        now, highest: bytes kept at this moment, and the most so far.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._own = weakref.WeakSet(storage_of(t) for t in [*model.parameters(), *model.buffers()])
        self._users: dict[int, list[int]] = {}  # storage -> [how many kept tensors lie in it, its bytes]
        self.now = self.highest = 0

    def __enter__(self) -> SavedForBackward:
        import torch

        with ExitStack() as stack:
            for module in self._model.modules():
                if module._parameters:
                    stack.callback(module.register_forward_pre_hook(self._note_own).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def _note_own(self, module: torch.nn.Module, _: Any) -> None:
        """Before a module's forward: FSDP has just put the gathered parameters in the place of the shards."""
        self._own |= {storage_of(p) for p in module._parameters.values() if p is not None}

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = storage_of(tensor)
        if storage in self._own:
            return tensor
        if storage._cdata not in self._users:
            self._users[storage._cdata] = [0, storage.nbytes()]
            self.now += storage.nbytes()
            self.highest = max(self.highest, self.now)
        self._users[storage._cdata][0] += 1
        # detached: an output that its own node keeps would be a cycle, which a split backward pass never breaks
        return _Kept(tensor.detach(), self, storage._cdata)

    def _unpack(self, packed: Any) -> torch.Tensor:
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


# ------------------------------------------------------------------------------------ allocation by allocation, on CPU
class Allocation(NamedTuple):
    """A block of memory that came or went. Without its first field it is an event of `course_lib.memory.allocator`.

    Attributes:
        at: nanoseconds since the recording began; 0 for what was there before, else at least 1.
        allocate: True where it came, False where it went.
        id: of the block, the same at both ends of its life.
        bytes: its size.
    """

    at: int
    allocate: bool
    id: int
    bytes: int


class AllocatorLog:
    """Records what the CPU's allocator does for this thread, and for gloo's threads on its behalf, while the block runs.

    oneDNN is switched off meanwhile: on CPUs with 16-bit instructions (AVX512-BF16, AVX512-FP16, AMX) it takes memory
    for reordered copies of its operands, which depend on the CPU and say nothing about the model. PyTorch's other
    kernels give the same events on every CPU. Of operations nothing is recorded, or this would cost a small model's step
    as much as the step itself.

    Args:
        older: tensors that are there already. They come first, each storage once, and are seen to go, too: of other older
            blocks the allocator does not tell.

    Attributes:
        events: in the order of time, once the block is over.
        copies: ids of the blocks that are gloo's own.

    Raises:
        ValueError: a tensor is not on the CPU.
        RuntimeError: another profiler or probe is at work in this thread.
    """

    def __init__(self, older: Iterable[torch.Tensor]) -> None:
        import torch

        if torch.autograd._profiler_enabled():
            raise RuntimeError("A profiler or a memory probe is at work already: measure one step after the other.")
        self.events: list[Allocation] = []
        self.copies: set[int] = set()
        self._alive: dict[int, Allocation] = {}  # address -> block
        self._lives: dict[int, list[Allocation]] = {}  # address -> the blocks that lay there, in order
        self._gone: list[tuple[int, int, int, int]] = []  # (when, address, 0, since when it was watched)
        self._watches = []
        for storage in map(storage_of, older):
            if storage.device.type != "cpu":
                raise ValueError(f"A tensor is on {storage.device}: only the CPU's allocations can be recorded.")
            if storage.nbytes() and storage.data_ptr() not in self._alive:
                self._add(Allocation(0, True, len(self.events), storage.nbytes()), storage.data_ptr())
                self._watch(storage, since=0)

    def _add(self, block: Allocation, address: int) -> None:
        self.events.append(block)
        self._alive[address] = block
        self._lives.setdefault(address, []).append(block)

    def block_at(self, time_ns: int, address: int) -> int | None:
        """The id of the block that lay at this address at this time, once the recording is over."""
        at = time_ns - self._began
        return max((block.id for block in self._lives.get(address, ()) if block.at <= at), default=None)

    def _watch(self, storage: torch.UntypedStorage, since: int) -> None:
        self._watches.append(weakref.finalize(storage, self._note_end, storage.data_ptr(), since))

    def _note_end(self, address: int, since: int) -> None:
        self._gone.append((time.time_ns(), address, 0, since))

    def _around_call(self, arguments: Any) -> AbstractContextManager[Any]:
        """Watch what gloo is given: its threads may be the last to let go of it, and there the profiler does not look."""
        import torch
        from torch.utils._pytree import tree_leaves

        for tensor in tree_leaves(arguments):
            if isinstance(tensor, torch.Tensor):
                self._watch(storage_of(tensor), time.time_ns())
        return torch.profiler.record_function(IN_BACKEND)

    def __enter__(self) -> AllocatorLog:
        import torch
        from torch._C._profiler import RecordScope
        from torch.autograd.profiler import profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints a line at every start and stop
        config = profile(use_kineto=True, profile_memory=True).config()
        activities = {torch.profiler.ProfilerActivity.CPU}
        with ExitStack() as stack:
            stack.callback(setattr, torch.backends.mkldnn, "enabled", torch.backends.mkldnn.enabled)
            torch.backends.mkldnn.enabled = False
            torch.autograd._prepare_profiler(config, activities)
            torch.autograd._enable_profiler(config, activities, {RecordScope.USER_SCOPE})
            stack.callback(self._read)
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                stack.enter_context(around_calls(self._around_call))
                stack.enter_context(pause_after_waiting())
            self._open, self._began = stack.pop_all(), time.time_ns()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def _read(self) -> None:
        """Stop the profiler, and put its events and the ends that were noted in the order of time."""
        import torch

        tree = torch.autograd._disable_profiler().experimental_event_tree()
        for watch in self._watches:
            watch.detach()
        blocks = len(self.events)
        for time_ns, address, size, more in sorted([*_allocations(tree, False), *self._gone]):
            at, block = max(time_ns - self._began, 1), self._alive.get(address)
            # A free of an older block that is not watched has no size, or, after an earlier recording, a wrong one. And
            # where a watched block has been seen to go already, there may be another one by now.
            if block is not None and (size or block.at <= max(more - self._began, 0)):
                self.events.append(self._alive.pop(address)._replace(at=at, allocate=False))
            if size > 0:
                self._add(Allocation(at, True, blocks, size), address)
                self.copies |= {blocks} if more else set()
                blocks += 1

    def peaks(self, held: int) -> dict[str, int]:
        """The "peak" without gloo's copies, in bytes, and by how much they lift it.

        Args:
            held: bytes that were there when the recording began.
        """
        now = highest = without = held
        copied = 0
        for event in self.events:
            if event.at:
                change = event.bytes if event.allocate else -event.bytes
                now += change
                copied += change if event.id in self.copies else 0
                highest, without = max(highest, now), max(without, now - copied)
        return {"peak": without, "gloo_copies": highest - without}


def _allocations(events: Iterable[Any], by_gloo: bool) -> Iterator[tuple[int, int, int, int]]:
    """(nanoseconds since the epoch, address, bytes, whether gloo took them) below these events; freed ones below 0."""
    from torch._C._profiler import _EventType

    for event in events:
        if event.tag == _EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, by_gloo
        yield from _allocations(event.children, by_gloo or event.name == IN_BACKEND or event.name.startswith("gloo:"))


def record_allocations(fn: Callable[[], Any], held: Iterable[torch.Tensor] = ()) -> list[Allocation]:
    """Call `fn` and list every allocation that the CPU's allocator makes for this thread, in the order of time.

    Args:
        fn: one training step, or several.
        held: tensors that were there before. They come first in the list, each storage once, and are seen to go, too:
            of other older blocks the allocator tells nothing. See `training_tensors`.

    Raises:
        ValueError, RuntimeError: as `AllocatorLog`.
    """
    log = AllocatorLog(held)
    del held
    with log:
        fn()
    return log.events


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
