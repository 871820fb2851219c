"""Who holds how many bytes on a rank: parameters, gradients, optimizer state, activations, and the peak.

On the CPU every figure is exact: tensors' storages are counted once each, and the peak comes from the allocator's own
events, recorded by the profiler during one step. On CUDA the peak is the caching allocator's, allocated and reserved
apart.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


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
        self.model, self.optimizer = model, optimizer
        self.bytes: dict[str, int] = {}

    def resident(self) -> dict[str, int]:
        """Bytes that stay between steps, by category."""
        params = list(self.model.parameters())
        return {
            "parameters": tensor_bytes([*params, *self.model.buffers()]),
            "gradients": tensor_bytes(p.grad for p in params if p.grad is not None),
            "optimizer_state": tensor_bytes(optimizer_tensors(self.optimizer)) if self.optimizer else 0,
            "ddp_buckets": bucket_bytes(self.model),
        }

    @contextmanager
    def measure(self):
        """Around one whole step: forward, backward, optimizer step."""
        import torch

        on_cuda = any(p.is_cuda for p in self.model.parameters())
        held = tensor_bytes([*self.model.parameters(), *self.model.buffers()])
        before = self.resident()
        saved: dict[int, int] = {}
        gradients = [0]

        def note_gradients(*_: Any) -> None:
            gradients[0] = tensor_bytes(p.grad for p in self.model.parameters() if p.grad is not None)

        own = {t.untyped_storage().data_ptr() for t in [*self.model.parameters(), *self.model.buffers()]
               if not hasattr(t, "to_local")}  # fmt: skip

        def note_saved(tensor: torch.Tensor) -> torch.Tensor:
            if not hasattr(tensor, "to_local"):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in own:
                    saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with ExitStack() as stack:
            if self.optimizer is not None:
                hook = self.optimizer.register_step_pre_hook(note_gradients)
                stack.callback(hook.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(note_saved, lambda tensor: tensor))
            if on_cuda:
                torch.cuda.reset_peak_memory_stats()
                yield self
                peak = {
                    "peak": torch.cuda.max_memory_allocated(),
                    "peak_reserved": torch.cuda.max_memory_reserved(),
                }
            else:
                profiler = stack.enter_context(_allocator_events())
                yield self
                profiler.stop()
                peak = {"peak": sum(before.values()) + _highest(profiler)}
        after = self.resident()
        self.bytes = {
            "parameters": held,
            "gradients": gradients[0] or after["gradients"],
            "optimizer_state": after["optimizer_state"],
            "ddp_buckets": after["ddp_buckets"],
            "activations": sum(saved.values()),
            **peak,
        }
        _found.append(self.bytes)


class _allocator_events:
    """The CPU allocator's every allocation and release, by kineto, without operators' shapes or stacks."""

    def __enter__(self) -> _allocator_events:
        from torch.autograd.profiler import profile

        self._profile = profile(use_kineto=True, profile_memory=True)
        self._profile.__enter__()
        self._running = True
        return self

    def stop(self) -> None:
        if self._running:
            self._running = False
            self._profile.__exit__(None, None, None)

    def __exit__(self, *_: object) -> None:
        self.stop()


def _highest(events: _allocator_events) -> int:
    """Highest sum of bytes above the start, in the order of time."""
    told = [e for e in events._profile.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for event in sorted(told, key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


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
