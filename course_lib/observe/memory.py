"""Who holds how many bytes on a rank: parameters, gradients, optimizer state, activations, and the peak.

On the CPU every figure is exact: tensors' storages are counted once each, and the peak comes from the allocator's own
events, recorded by the profiler during one step. On CUDA the peak is the caching allocator's, allocated and reserved
apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# What the observers of this process have found; a rank hands the last one to the notebook as run.memory.
_found: list[dict[str, Any]] = []


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storages on this rank, each storage once (tied weights, views of one bucket).

    A DTensor counts with its local shard.
    """
    storages = [storage_of(tensor) for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The memory behind a tensor; behind a DTensor that of its local shard."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor in the optimizer's state (Adam: two moments and a step counter a parameter)."""
    import torch

    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def bucket_bytes(model: torch.nn.Module) -> int:
    """Bytes of DDP's own gradient buckets; 0 for other models and where gradients are views of the buckets."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel) or model.gradient_as_bucket_view:
        return 0
    told = model._get_ddp_logging_data()
    sizes = told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]
    return sum(int(size) for size in str(sizes).split(","))


class MemoryProbe:
    """Measures one training step of ``model`` and ``optimizer``; use as ``with probe.measure(): <one step>``."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model = model
        self.optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it, and steps the inner one
        self.bytes: dict[str, int] = {}

    def resident(self) -> dict[str, int]:
        """Bytes that stay between steps, by category."""
        params = list(self.model.parameters())
        return {
            "parameters": tensor_bytes([*params, *self.model.buffers()]),
            "gradients": self._gradient_bytes(),
            "optimizer_state": tensor_bytes(optimizer_tensors(self.optimizer)) if self.optimizer else 0,
            "ddp_buckets": bucket_bytes(self.model),
        }

    def _gradient_bytes(self) -> int:
        return tensor_bytes(p.grad for p in self.model.parameters() if p.grad is not None)

    @contextmanager
    def measure(self) -> Iterator[MemoryProbe]:
        """Around one whole step: forward, backward, optimizer step."""
        import torch

        from course_lib.observe.profiler import RawEvents

        on_cuda = any(p.is_cuda for p in self.model.parameters())
        before = self.resident()
        saved = _SavedForBackward(self.model)
        gradients = 0

        def note_gradients(*_: Any) -> None:
            nonlocal gradients
            gradients = self._gradient_bytes()

        with ExitStack() as stack:
            if self.optimizer is not None:
                stack.callback(self.optimizer.register_step_pre_hook(note_gradients).remove)
            for module in self.model.modules():
                if module._parameters:
                    stack.callback(module.register_forward_pre_hook(saved.note_own).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack))
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
                yield self
                peak = {
                    "peak": torch.cuda.max_memory_allocated(),
                    "peak_reserved": torch.cuda.max_memory_reserved(),
                }
            else:
                recording = stack.enter_context(RawEvents(memory=True))
                yield self
                recording.stop()
                peak = {"peak": sum(before.values()) + _highest(recording.events)}
        after = self.resident()
        self.bytes = {
            "parameters": before["parameters"],
            "gradients": gradients or after["gradients"],
            "optimizer_state": after["optimizer_state"],
            "ddp_buckets": after["ddp_buckets"],
            "activations": saved.highest,
            **peak,
        }
        _found.append(self.bytes)


def _highest(events: list[Any]) -> int:
    """Highest sum of bytes above the start, in the order of time."""
    now = highest = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


class _Kept:
    """What autograd holds in place of a tensor that the backward pass needs; gone when autograd lets go of it."""

    __slots__ = ("tensor", "_book", "_storage")

    def __init__(self, tensor: torch.Tensor, book: _SavedForBackward, storage: int) -> None:
        self.tensor, self._book, self._storage = tensor, book, storage

    def __del__(self) -> None:
        self._book.release(self._storage)


class _SavedForBackward:
    """Bytes that autograd keeps for the backward pass, the model's own parameters and buffers left out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._own = {storage_of(t)._cdata for t in [*model.parameters(), *model.buffers()]}
        self._users: dict[int, list[int]] = {}  # storage -> [how many saved tensors lie in it, its bytes]
        self.now = self.highest = 0

    def note_own(self, module: torch.nn.Module, _: Any) -> None:
        """Before a module's forward: FSDP has just put the gathered parameters in the place of the shards."""
        self._own |= {storage_of(p)._cdata for p in module._parameters.values() if p is not None}

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = storage_of(tensor)
        if storage._cdata in self._own:
            return tensor
        if storage._cdata not in self._users:
            self._users[storage._cdata] = [0, storage.nbytes()]
            self.now += storage.nbytes()
            self.highest = max(self.highest, self.now)
        self._users[storage._cdata][0] += 1
        return _Kept(tensor, self, storage._cdata)

    def unpack(self, packed: Any) -> torch.Tensor:
        return packed.tensor if isinstance(packed, _Kept) else packed

    def release(self, storage: int) -> None:
        users = self._users[storage]
        users[0] -= 1
        if not users[0]:
            self.now -= users[1]
            del self._users[storage]


def start_process_peak() -> None:
    """Start of a rank's function: forget earlier peaks."""
    import torch

    _found.clear()
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def process_report() -> dict[str, Any]:
    """What this rank's last probe found; on CUDA at least the allocator's peaks."""
    import torch

    report = dict(_found[-1]) if _found else {}
    if torch.cuda.is_initialized():
        report.setdefault("peak", torch.cuda.max_memory_allocated())
        report.setdefault("peak_reserved", torch.cuda.max_memory_reserved())
    return report
