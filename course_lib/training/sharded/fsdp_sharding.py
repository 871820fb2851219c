"""Shard a model into FSDP2 units, and prove that it really is sharded.

``fully_shard`` (torch.distributed.fsdp) turns every parameter of a unit into a DTensor, of which each rank keeps some rows.
Before a unit computes, one all-gather collects its parameters; afterwards they are freed, and after its backward pass one
reduce-scatter leaves each rank the sum of the gradients of its rows. Ideas: ZeRO-3 (arXiv:1910.02054), FSDP
(arXiv:2304.11277).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from course_lib.choices import check_choice
from course_lib.training.finetune.building import cast_parameters
from course_lib.validation import pick

WRAPS = ("block", "whole")

# What a script for the older FullyShardedDataParallel ("FSDP1") says, and what says the same to fully_shard.
FROM_FSDP1 = {
    "FullyShardedDataParallel(model)": "fully_shard(block) for each block, then fully_shard(model): changed in place",
    "auto_wrap_policy=transformer_auto_wrap_policy": "the loop over the blocks that calls fully_shard",
    "sharding_strategy=FULL_SHARD": "reshard_after_forward=True",
    "sharding_strategy=SHARD_GRAD_OP": "reshard_after_forward=False",
    "sharding_strategy=HYBRID_SHARD": "mesh= a 2D mesh (replicate, shard), reshard_after_forward=True",
    "sharding_strategy=_HYBRID_SHARD_ZERO2": "mesh= a 2D mesh (replicate, shard), reshard_after_forward=False",
    "sharding_strategy=NO_SHARD": "DistributedDataParallel",
    "process_group=": "mesh=",
    "device_mesh=": "mesh=",
    "mixed_precision=MixedPrecision(param_dtype, reduce_dtype)": "mp_policy=MixedPrecisionPolicy(param_dtype, "
    "reduce_dtype)",
    "MixedPrecision(buffer_dtype)": "nothing: buffers keep their dtype; cast them yourself",
    "MixedPrecision(keep_low_precision_grads)": "nothing: a gradient comes back in its parameter's dtype",
    "cpu_offload=CPUOffload(offload_params=True)": "offload_policy=CPUOffloadPolicy()",
    "backward_prefetch=BACKWARD_PRE": "what happens anyway; further ahead: set_modules_to_backward_prefetch",
    "forward_prefetch=True": "set_modules_to_forward_prefetch",
    "use_orig_params=": "nothing: every parameter stays a tensor of its own, a DTensor",
    "ignored_modules=, ignored_states=": "ignored_params=",
    "param_init_fn=": "build on torch.device('meta'), fully_shard, to_empty, then fill each shard",
    "sync_module_states=True": "set_model_state_dict(..., options=StateDictOptions(broadcast_from_rank0=True))",
    "device_id=": "nothing: the device of the mesh",
    "limit_all_gathers=True": "nothing: no longer needed",
    "with model.no_sync():": "model.set_requires_gradient_sync(False)",
    "model.clip_grad_norm_(1.0)": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "with FSDP.summon_full_params(model):": "parameter.full_tensor(), or model.unshard() and model.reshard()",
    "with FSDP.state_dict_type(...):": "torch.distributed.checkpoint.state_dict.get_model_state_dict",
}


def shard(
    model: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int = True,
    precision: str = "fp32",
    offload: bool = False,
    wrap: str = "block",
    prefetch: int = 0,
) -> Any:
    """Make FSDP2 units of a transformers model's blocks, and of what is left (embedding, last norm, head) the root.

    Args:
        model: on the mesh's device or on "meta"; also one in PEFT's wrapper. It is changed and given back.
        mesh: 1D (shard) or 2D (replicate, shard); None takes all ranks as one row.
        reshard_after_forward: True lets a block's gathered weights go after its forward pass and gathers them again for the backward
            pass; False keeps them, which is ZeRO-2's memory and traffic; a number keeps that fraction: shards over so
            many neighbours. The root's are kept in any case: the backward pass begins with them.
        precision: "fp32"; "bf16-mixed", "fp16-mixed": shards, gradients and moments in fp32, gathered, computed with in
            16 bits, gradients summed in fp32; "bf16": everything in bf16, the sums too.
        offload: shards, gradients and moments live on the host, and come to the device when they are needed.
        wrap: "block", or "whole" for one unit of everything.
        prefetch: units whose all_gather starts ahead of need; 0 leaves it to FSDP2 (one ahead in the backward pass).
    """
    check_choice("precision", precision)
    pick("wrap", wrap, WRAPS)
    mesh = mesh if mesh is not None else make_mesh("", next(model.parameters()).device.type)
    shard_ranks = mesh.size(mesh.ndim - 1)
    check_reshard(reshard_after_forward, shard_ranks)
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch}: give how many units to gather ahead, 0 to leave it to FSDP2.")
    if prefetch and wrap == "whole":
        raise ValueError(
            f"prefetch={prefetch} has nothing to gather ahead: wrap='whole' is one unit; use wrap='block'."
        )
    if precision == "bf16":
        cast_parameters(model.parameters(), torch.bfloat16)
    how: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed_precision(precision),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy(),
    }
    if wrap == "whole":
        return fully_shard(model, reshard_after_forward=reshard_after_forward, **how)
    units = blocks(model)
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard_after_forward, **how)
    fully_shard(model, **how)
    if prefetch:
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + prefetch])
            unit.set_modules_to_backward_prefetch(units[max(0, i - prefetch) : i][::-1])
        # A GPU has streams, on which a gather runs beside the computing. gloo has none: a call that waits would not
        # overlap with anything. (No public switch for it yet.)
        if mesh.device_type == "cpu":
            model._set_unshard_async_op(True)
    return model


def blocks(model: Any) -> list[torch.nn.Module]:
    """The transformer blocks of a transformers model, also of one in PEFT's wrapper.

    Raises ValueError for a model that names no blocks.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = getattr(base.base_model, "layers", None)
    if not found:
        raise ValueError(f"{type(base).__name__} has no list of blocks named layers: use wrap='whole'.")
    return list(found)


def mixed_precision(precision: str) -> MixedPrecisionPolicy:
    """What a unit is gathered and computed in, and what its gradients are summed in."""
    if not precision.endswith("-mixed"):
        return MixedPrecisionPolicy()
    compute = torch.float16 if precision == "fp16-mixed" else torch.bfloat16
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)


def make_mesh(shape: str, device: str) -> DeviceMesh:
    """All ranks as a mesh: "" is one row of shards; "2x4" two copies of the model, each cut into four shards.

    Raises ValueError for a shape that cannot be read, does not fit the ranks, or shards nothing.
    """
    ranks = dist.get_world_size()
    if not shape:
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    sizes = shape.lower().split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ValueError(f"mesh={shape!r}: write copies x shards, such as '2x4', or '' for shards alone.")
    copies, shards = map(int, sizes)
    if copies * shards != ranks:
        raise ValueError(f"mesh={shape!r} takes {copies * shards} ranks and there are {ranks}.")
    if shards == 1:
        raise ValueError(f"mesh={shape!r} has one shard a copy, so nothing is sharded: that is DDP's work.")
    return init_device_mesh(device, (copies, shards), mesh_dim_names=("replicate", "shard"))


def read_reshard(text: str, shard_ranks: int) -> bool | int:
    """What the command line says: "yes", "no" or a number of ranks. Raises ValueError for anything else."""
    if text in ("yes", "no"):
        return text == "yes"
    if not text.isdecimal():
        raise ValueError(
            f"reshard_after_forward={text!r}: write yes, no, or the number of ranks to shard over after the forward pass."
        )
    check_reshard(int(text), shard_ranks)
    return int(text)


def check_reshard(reshard_after_forward: bool | int, shard_ranks: int) -> None:
    """Raise ValueError for a number of ranks that cannot be had."""
    if isinstance(reshard_after_forward, bool):
        return
    fitting = [n for n in range(2, shard_ranks) if shard_ranks % n == 0]
    if reshard_after_forward not in fitting:
        numbers = f", or one of {', '.join(map(str, fitting))}" if fitting else "; no number lies between"
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} is no proper divisor of the {shard_ranks} ranks that share a model: "
            f"choose yes ({shard_ranks}), no (1){numbers}."
        )


def on_meta(whole: Any) -> Any:
    """The model that rank 0 has (None elsewhere), without its adapters, as shapes without storage, on every rank."""
    from transformers import AutoModelForCausalLM

    told = [whole.config if whole is not None else None]
    dist.broadcast_object_list(told, src=0)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(told[0])


def materialize(model: Any, whole: Any, device: torch.device, *, offload: bool = False) -> None:
    """Give a model that was sharded on "meta" its weights: those of `whole`, which rank 0 alone has (None elsewhere).

    Each rank allocates its shards on `device`, with `offload` on the host; then rank 0 sends tensor by tensor, and each
    rank keeps its rows.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    shards_on = torch.device("cpu") if offload else device
    model.to_empty(device=shards_on)
    how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=shards_on.type == "cpu")
    set_model_state_dict(model, whole.state_dict() if whole is not None else {}, options=how)
    # Rotary frequencies are in no state dict, and to_empty leaves in them whatever was in that memory
    told = dict(whole.named_buffers()) if whole is not None else {}
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        filled = (told[name] if told else torch.empty_like(buffer)).to(device)
        dist.broadcast(filled, src=0)
        model.get_submodule(owner)._buffers[leaf] = filled


def proof(model: Any, ranks: int, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What this rank really holds, read off the parameters themselves.

    Args:
        model: as it came back from `shard` or from Accelerate's `prepare`.
        ranks: that were asked for.
        optimizer: also looked at, if given: whether it steps the shards.

    Returns:
        ranks, units, parameters (numbers of the whole model), local (numbers that this rank
        holds), placements (of the first parameter, as text).

    Raises:
        RuntimeError: what came back is something else: another number of ranks, another wrapper, whole parameters, or an
            optimizer of other tensors.
    """
    wrapper = type(model).__name__
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size != ranks:
        raise RuntimeError(f"asked for FSDP2 on {ranks} ranks and got {world_size}: nothing was trained.")
    if not isinstance(model, FSDPModule):
        raise RuntimeError(f"asked for FSDP2 and got {wrapper}, which shards no parameter: nothing was trained.")
    named = list(model.named_parameters())
    for name, parameter in named:
        if not isinstance(parameter, DTensor):
            raise RuntimeError(f"asked for FSDP2, but {name} is whole on every rank: nothing was trained.")
        mesh, placement = parameter.device_mesh, parameter.placements[-1]
        rows, shards = parameter.shape[0], mesh.size(mesh.ndim - 1)
        each = -(-rows // shards)  # the first ranks hold a full share, the last what is left, possibly nothing
        mine = max(0, min(each, rows - each * mesh.get_local_rank(mesh.ndim - 1)))
        if placement != Shard(0) or parameter.to_local().shape[0] != mine:
            raise RuntimeError(
                f"asked for FSDP2, but of {name} ({rows} rows on {shards} ranks) this rank holds "
                f"{parameter.to_local().shape[0]} rows: nothing was trained."
            )
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
    if stepped - {id(p) for _, p in named}:
        raise RuntimeError("the optimizer steps tensors that are not the model's shards: nothing was trained.")
    return {
        "ranks": world_size,
        "units": sum(isinstance(module, FSDPModule) for module in model.modules()),
        "parameters": sum(p.numel() for _, p in named),
        "local": sum(p.to_local().numel() for _, p in named),
        "placements": str(named[0][1].placements),
    }
