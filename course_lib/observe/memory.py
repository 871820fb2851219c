"""Count bytes by category on a rank: parameters, gradients, optimizer state, activations, and the peak.

On the CPU every figure is exact: tensors' storages are counted once each, and the peak comes from the allocator's own
events, recorded by the profiler during one step. On CUDA the peak is the caching allocator's, allocated and reserved
apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from course_lib.observe.saved_tensors import FreedStorages, SavedForBackward, storage_of

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


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor in the optimizer's state (Adam: two moments and a step counter per parameter)."""
    import torch

    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


def bucket_bytes(model: torch.nn.Module) -> int:
    """Bytes of DDP's own gradient buckets; 0 for other models and where gradients are views of the buckets."""
    return 0 if getattr(model, "gradient_as_bucket_view", False) else _buckets(model)[0]


def _buckets(model: torch.nn.Module) -> tuple[int, bool]:
    """(bytes of all of DDP's buckets, whether it has rebuilt them in the order of its first backward pass)."""
    from torch.nn.parallel import DistributedDataParallel

    if not isinstance(model, DistributedDataParallel):
        return 0, False
    logged = model._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]  # the same sum
    return sum(int(size) for size in str(sizes).split(",")), model._has_rebuilt_buckets


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

    def _gradient_tensors(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _gradient_bytes(self) -> int:
        return tensor_bytes(self._gradient_tensors())

    def _call_before_step(self, note: Callable[..., None], stack: ExitStack) -> None:
        """Have `note` called when the backward pass is over and the optimizer's step begins, as long as `stack` lives."""
        if self.optimizer is not None:
            stack.callback(self.optimizer.register_step_pre_hook(note).remove)

    @contextmanager
    def measure(self) -> Iterator[MemoryProbe]:
        """Around one whole step: forward, backward, optimizer step."""
        import torch

        from course_lib.observe.profiler import Allocations

        on_cuda = any(p.is_cuda for p in self.model.parameters())
        before = self.resident()
        buckets, rebuilt = _buckets(self.model)
        # those that no gradient is a view of just now are held by DDP all the same
        buckets -= before["gradients"] if getattr(self.model, "gradient_as_bucket_view", False) else 0
        freed = FreedStorages(self._gradient_tensors())
        saved = SavedForBackward(self.model, freed.check)
        gradients = 0

        def note_gradients(*_: Any) -> None:
            nonlocal gradients
            gradients = self._gradient_bytes()

        with ExitStack() as stack:
            self._call_before_step(note_gradients, stack)
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
                recording = stack.enter_context(Allocations())
                yield self
                recording.stop()
                freed.check()
                if buckets and _buckets(self.model)[1] > rebuilt:  # DDP rebuilt them as this step began
                    freed.log.append((0, -buckets))
                held = sum(before.values()) - before.get("ddp_buckets", 0) + buckets
                peak = {"peak": held + _highest(recording.log, freed.log)}
        after = self.resident()
        self.bytes = {
            **after,
            "parameters": before["parameters"],
            "gradients": gradients or after["gradients"],
            "activations": saved.highest,
            **peak,
        }
        _found.append(self.bytes)


def _highest(allocations: list[tuple[int, int, int]], freed: list[tuple[int, int]]) -> int:
    """Highest sum of bytes above the start, in the order of time."""
    ours: set[int] = set()
    changes = freed
    for at, address, size in allocations:
        if size > 0:
            ours.add(address)
        elif address not in ours:  # an older block: the size is unknown or, after an earlier recording, wrong
            continue
        else:
            ours.remove(address)
        changes.append((at, size))
    now = highest = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        now += size
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
