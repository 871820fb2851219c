"""Find out which elements of the model a rank really holds, from the tensors that are there."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Slices = list[tuple[int, int]]


def held_slices(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """The parts of the model on this rank; call it after the backward pass and before the step, from the second one on.

    Args:
        model: a plain one, under DDP, cut by fully_shard, or a DeepSpeed engine of any stage.
        optimizer: whose state counts; an engine brings its own.

    Returns:
        "elements" of the whole model, and of "parameters", "gradients", "optimizer" (Adam's first moment) the parts that
        are there, each (first, last + 1) in elements, parameters one after another in the order of ``parameters()``.
        Neighbours are joined, padding is left out.
    """
    zero = getattr(model, "optimizer", None) if hasattr(model, "zero_optimization_stage") else None
    module = model.module if zero is not None else model
    parameters = list(module.parameters())
    sizes = [getattr(p, "ds_numel", p.numel()) for p in parameters]
    starts = [0, *itertools.accumulate(sizes)]
    stage = model.zero_optimization_stage() if zero is not None else 0
    if stage == 3:
        found = _stage3(parameters, starts, zero)
    elif stage:
        found = _stage12(starts[-1], zero)
    else:
        state = getattr(zero if zero is not None else optimizer, "state", {})
        found = {"parameters": [], "gradients": [], "optimizer": []}
        for p, start in zip(parameters, starts, strict=False):
            moments = next((v for v in state.get(p, {}).values() if getattr(v, "numel", lambda: 0)() > 1), None)
            for kind, tensor in (("parameters", p), ("gradients", p.grad), ("optimizer", moments)):
                found[kind] += _rows(tensor, start)
    return {"elements": starts[-1], **{kind: _joined(slices) for kind, slices in found.items()}}


def _rows(tensor: torch.Tensor | None, start: int) -> Slices:
    """Of a tensor whose first element is number `start` of the model: all of it, or of a DTensor the rank's rows."""
    if tensor is None:
        return []
    if not hasattr(tensor, "device_mesh"):
        return [(start, start + tensor.numel())]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    assert local.shape == shape
    each = tensor[0].numel() if tensor.dim() > 1 else 1
    return [(start + offset[0] * each, start + offset[0] * each + local.numel())] if local.numel() else []


def _stage12(elements: int, zero: Any) -> dict[str, Slices]:
    """Weights in one flat tensor, of which the rank has a slice: where it starts is read off the addresses."""
    flat = zero.bit16_groups_flat[0]
    rank = _rank(zero)
    partition = zero.parallel_partitioned_bit16_groups[0][rank]
    first = (partition.data_ptr() - flat.data_ptr()) // flat.element_size()

    def cut(count: int) -> Slices:
        return [(first, min(first + count, elements))] if count else []

    gradients = zero.averaged_gradients.get(0) or []
    moments = _first_moment(zero, zero.single_partition_of_fp32_groups[0])
    return {
        "parameters": [(0, min(flat.numel(), elements))],
        "gradients": cut(sum(g.numel() for g in gradients)),
        "optimizer": cut(moments.numel() if moments is not None else 0),
    }


def _stage3(parameters: list[Any], starts: list[int], zero: Any) -> dict[str, Slices]:
    """Every tensor cut by itself: the rank has one slice of each."""
    rank = _rank(zero)

    def cut(p: Any, start: int, count: int) -> Slices:
        first, end = min(rank * count, p.ds_numel), min((rank + 1) * count, p.ds_numel)
        return [(start + first, start + end)] if end > first else []

    gradients = [g.numel() for group in zero.averaged_gradients.values() for g in group or []]
    moments = sum(
        t.numel() for flat in zero.fp32_partitioned_groups_flat if (t := _first_moment(zero, flat)) is not None
    )
    trained = [(p, start) for p, start in zip(parameters, starts, strict=False) if p.requires_grad]
    found: dict[str, Slices] = {"parameters": [], "gradients": [], "optimizer": []}
    for p, start in zip(parameters, starts, strict=False):
        found["parameters"] += cut(p, start, p.ds_tensor.numel())
    for (p, start), count in zip(trained, gradients, strict=False):
        found["gradients"] += cut(p, start, count)
    if moments == sum(p.ds_tensor.ds_numel for p, _ in trained):  # the flat moments are these slices, one after another
        found["optimizer"] = [part for p, start in trained for part in cut(p, start, p.ds_tensor.ds_numel)]
    return found


def _rank(zero: Any) -> int:
    import torch.distributed as dist

    group = zero.dp_process_group
    return dist.get_rank(group=group)


def _first_moment(zero: Any, flat: Any) -> torch.Tensor | None:
    state = zero.optimizer.state.get(flat, {})
    return state.get("exp_avg")


def _joined(slices: Slices) -> Slices:
    joined: Slices = []
    for first, end in sorted(slices):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((first, end))
    return joined
