"""FSDP2 as a small Python module: ``shard(model)`` in plain PyTorch, with the plan's choices in the open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from course_tools.planning.files.facts import Refused, about, comment, refuse_axes

if TYPE_CHECKING:
    from course_tools.planning import Plan

FILE = "fsdp_plan.py"

TEMPLATE = '''\
{comment}
# Before the optimizer is built: from fsdp_plan import shard; model = shard(model). The process group must be up.

{torch}from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
{imports}
RANKS = {ranks}
MICRO_BATCH_SIZE = {micro_batch_size}
GRADIENT_ACCUMULATION_STEPS = {gradient_accumulation_steps}  # micro-batches a step; model.set_requires_gradient_sync(last) in front of each
SEQ_LEN = {seq_len}


def shard(model):
    """Cut a transformers model over the ranks, in place: each block is a unit that is gathered and let go of."""
    device = next(model.parameters()).device.type
    policy = {{
        "mesh": init_device_mesh(device, (RANKS,), mesh_dim_names=("dp",)),
        "reshard_after_forward": True,
        "mp_policy": {mixed},
        "offload_policy": {offload},
    }}
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
{activation_checkpointing}    for block in base.base_model.layers:
        fully_shard(block, **policy)
    return fully_shard(model, **policy)
'''


def files(plan: Plan, base_model: str | None) -> dict[str, str]:
    """``fsdp_plan.py`` with one function, ``shard(model)``, which runs without the course but for selective checkpointing."""
    if plan.strategy != "fsdp":
        raise Refused(f"This file is FSDP2, and the plan's strategy is {plan.strategy!r}")
    refuse_axes(plan, "This file", "tp", "pp", "cp")
    compute = {"bf16-mixed": "bfloat16", "fp16-mixed": "float16"}.get(plan.precision)
    imports = checkpointing = ""
    if plan.activation_checkpointing == "full":
        checkpointing = '    base.gradient_checkpointing_enable({"use_reentrant": False})\n'
    elif plan.activation_checkpointing == "selective":
        imports = "from course_lib.training.activation_checkpointing import set_checkpointing\n"
        checkpointing = '    set_checkpointing(base, "selective")\n'
    notes = ["Load the model in fp32: its shards are the copy that the optimizer steps."] if compute else []
    text = TEMPLATE.format(
        comment=comment([*about(plan), *notes]).rstrip(),
        imports=imports,
        torch="import torch\n" if compute else "",
        ranks=plan.gpus,
        micro_batch_size=plan.micro_batch_size,
        gradient_accumulation_steps=plan.num_microbatches,
        seq_len=plan.seq_len,
        activation_checkpointing=checkpointing,
        mixed=f"MixedPrecisionPolicy(param_dtype=torch.{compute}, reduce_dtype=torch.float32)"
        if compute
        else "MixedPrecisionPolicy()",
        offload='CPUOffloadPolicy(pin_memory=device == "cuda")' if plan.offload == "all" else "OffloadPolicy()",
    )
    return {FILE: text}
