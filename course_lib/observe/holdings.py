"""What a rank holds of a model under DeepSpeed: bytes by category.

What DeepSpeed 0.19 holds between two steps, in elements of a model of P trained weights on N ranks:

stages 1 and 2
    The weights lie in one flat tensor, P rounded up to a multiple of 2 N (its "nccl_start_alignment_factor" of 2, times the
    ranks), on every rank whole. A rank's share is that over N. The optimizer has a copy of the share ("master"), in fp32
    unless bf16 was asked for, also where the weights are in fp32 already; two moments of it; one step counter of 4 bytes.
stage 3
    Each weight is cut by itself: a rank holds ceil(elements / N) of it, the last rank's end being padding. The optimizer
    keeps a copy of its share even where the weights are fp32: DeepSpeed's test for this compares a torch.device with
    a string and never matches. The gradients' share stays allocated between steps, and so does one bucket of
    `reduce_bucket_size`.

Gradients are counted when backward is over and the step has not begun: in stages 1 and 2 those of every weight that lies at
least in part in the rank's share, whole, so a weight on the border of two shares is there twice. The bucket of stages 1 and
2 comes and goes with each backward pass: it is in the peak only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from course_lib.observe.memory import MemoryProbe, optimizer_tensors, storage_of

if TYPE_CHECKING:
    import torch

CATEGORIES = ("parameters", "gradients", "optimizer_state", "master", "buckets")


class ZeroProbe(MemoryProbe):
    """`MemoryProbe` for a DeepSpeed engine, of any stage, offload and precision.

    Two categories more: "master", the optimizer's fp32 copies of its share of the weights, and "buckets", the memory that
    gradients and weights travel through. What offloading moved is told by `on_host` instead; where the ranks run on the
    CPU both lie in the same memory, and "peak" then also sees what the host works with for a moment.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.module)
        self.engine = engine
        self.optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)

    def resident(self) -> dict[str, int]:
        """Bytes that stay between steps on the rank's device, by category, each storage once."""
        return self._count(host=False)

    def on_host(self) -> dict[str, int]:
        """Bytes by category that offloading keeps in the host's memory."""
        return self._count(host=True)

    def _count(self, *, host: bool) -> dict[str, int]:
        found, seen = dict.fromkeys(CATEGORIES, 0), set()
        for category, on_host, tensors in holdings(self.engine):
            for storage in map(storage_of, tensors):
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    found[category] += storage.nbytes() if on_host == host else 0
        return found

    def _gradients(self) -> list[torch.Tensor]:
        return [t for category, host, ts in holdings(self.engine) if category == "gradients" and not host for t in ts]

    def _call_before_step(self, note: Callable[..., None], stack: ExitStack) -> None:
        """DeepSpeed's optimizers copy and drop gradients before the inner one steps, so the note is taken before that."""
        outer = self.engine.optimizer
        if outer is self.optimizer:
            super()._call_before_step(note, stack)
            return
        step = outer.step

        def noted(*args: Any, **kwargs: Any) -> Any:
            note()
            return step(*args, **kwargs)

        outer.step = noted
        stack.callback(setattr, outer, "step", step)


def holdings(engine: Any) -> Iterator[tuple[str, bool, list[torch.Tensor]]]:
    """(category, offloaded to the host, tensors) for all that an engine keeps; a storage may come more than once, then
    its first category is the one that counts."""
    outer, model = engine.optimizer, engine.module
    inner = getattr(outer, "optimizer", outer)
    optimizer_on_host = bool(getattr(outer, "cpu_offload", False) or getattr(outer, "offload_optimizer", False))
    weights_on_host = bool(getattr(outer, "offload_param", False))

    def tensors(*names: str) -> list[torch.Tensor]:
        return [tensor for name in names for tensor in _tensors(getattr(outer, name, None))]

    # gathered weights lie on the device also where their shares do not
    yield "parameters", False, [*model.parameters(), *model.buffers()]
    yield "parameters", False, tensors("bit16_groups_flat", "bf16_groups_flat", "fp16_groups_flat")
    shares = [p.ds_tensor for p in model.parameters() if hasattr(p, "ds_tensor")]
    yield "parameters", weights_on_host, shares
    yield "parameters", weights_on_host, tensors("lp_param_buffer", "param_groups_fp16_flat_cpu_memory")

    yield "gradients", False, [p.grad for p in model.parameters() if p.grad is not None]
    yield "gradients", False, [p.grad_accum for p in model.parameters() if getattr(p, "grad_accum", None) is not None]
    yield "gradients", False, tensors("averaged_gradients", "all_grad_tensors", "grads_in_partition")
    yield "gradients", False, tensors("fp32_groups_gradients_flat")
    masters = tensors(
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "fp32_groups_flat",
    )
    masters += [p for group in inner.param_groups for p in group["params"]]
    yield "gradients", optimizer_on_host, [p.grad for p in masters if p.grad is not None]
    yield "gradients", optimizer_on_host, tensors("grad_partitions_flat_buffer", "accumulated_grads_in_cpu")

    yield "optimizer_state", optimizer_on_host, optimizer_tensors(inner)
    yield "master", optimizer_on_host, masters
    buckets = (getattr(outer, "ipg_buckets", None) or {}).values()
    yield "buckets", False, [tensor for bucket in buckets for tensor in _tensors(bucket.buffer)]
    yield "buckets", False, tensors("temp_grad_buffer_for_gpu_offload")
    yield "buckets", True, tensors("temp_grad_buffer_for_cpu_offload", "param_buffer_of_bit16_for_cpu_offload_groups")


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in lists and dictionaries, however deep."""
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def counted_peak(engine: Any, step: Callable[[], None]) -> int:
    """Peak bytes of a step by another instrument than `ZeroProbe`: the storages that operations make, one by one.

    Counts what the engine keeps and what the step makes; a batch that was there before is in neither.
    """
    from course_lib.observe.fake import LiveStorages

    with LiveStorages() as live:
        live.hold(tensor for _, _, tensors in holdings(engine) for tensor in tensors)
        step()
    return live.highest
