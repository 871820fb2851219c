"""One script for ``torchrun``: the plan in plain PyTorch, on a random model of its shape."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from course_lib.memory import Shape
from course_lib.units import GIB
from course_tools.planning.files.axolotl import FLASH
from course_tools.planning.files.facts import Refused, about, layout, model_source, refuse_axes, refuse_choice

if TYPE_CHECKING:
    from course_tools.planning import Plan

FILE = "train.py"
WHAT = "This script"
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW(trained, lr=1e-3, fused=True)",
    "sgd": "torch.optim.SGD(trained, lr=1e-3, fused=True)",
    "adamw8bit": "AdamW8bit(trained, lr=1e-3)",
    "paged_adamw8bit": "PagedAdamW8bit(trained, lr=1e-3)",
}
ABLE = {
    "strategy": ("single", "ddp", "fsdp"),
    "precision": ("bf16-mixed", "bf16", "fp32"),  # fp16 needs a scaled loss
    "optimizer": tuple(OPTIMIZERS),
    "loss": ("eager",),
    "sequence_parallel": (False,),
}
# As course_lib.training.methods.prepare has them; a script gives what differs
DEFAULTS = {"method": "full", "precision": "fp32", "attention": "flash"}
DEFAULTS |= {"activation_checkpointing": "none", "lora_rank": 16}
WIDTHS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "tied")  # all of a Llama's
SPLIT = (
    "",
    "llama",
    "mistral",
    "qwen2",
    "granite",
    "smollm3",
    "gemma",
)  # tried; Qwen3 and OLMo 2 norm queries and keys
# Module: names, of which a script imports those that it uses
IMPORTS = {
    "bitsandbytes.optim": ("AdamW8bit", "PagedAdamW8bit"),
    "torch.distributed.device_mesh": ("init_device_mesh",),
    "torch.distributed.fsdp": ("CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"),
    "torch.nn.parallel": ("DistributedDataParallel",),
    "torchao.optim": ("AdamW8bit",),
    "transformers": ("AutoConfig", "AutoModelForCausalLM"),
    "course_lib.launch.group": ("end_process", "process_group"),
    "course_lib.memory": ("Shape",),
    "course_lib.models": ("llama",),
    "course_lib.models.data": ("sample_batch",),
    "course_lib.training.methods": ("autocast", "prepare"),
    "course_lib.training.tensor_parallel": ("split",),
}
HEAD = """\
# {about}
import json
import time

import torch
import torch.distributed as dist
{imports}"""
BODY = """\
STEPS, MICRO_BATCH_SIZE, MICRO_BATCHES, SEQ_LEN = 5, {plan.micro_batch_size}, {plan.num_microbatches}, {plan.seq_len}
DATA_RANKS, TENSOR_PARALLEL = {plan.dp}, {plan.tp}
CHOICES = {choices}


def wrap(model, device):
    {wrap}


def train(device):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert ranks == DATA_RANKS * TENSOR_PARALLEL, f"this plan is for {{DATA_RANKS * TENSOR_PARALLEL}} ranks"
    torch.manual_seed(0)  # the same weights on every rank
    shape = {shape}
    model = wrap(prepare({model}, **CHOICES, device={where}), device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = {optimizer}
    share = {{"rank": rank // TENSOR_PARALLEL, "world_size": DATA_RANKS, "seq_len": SEQ_LEN}}
    for step in range(STEPS):
        start = time.perf_counter()
        batch = sample_batch(step, global_batch=DATA_RANKS * MICRO_BATCHES * MICRO_BATCH_SIZE, **share).to(device)
        total, parts = torch.zeros((), device=device), batch.split(MICRO_BATCH_SIZE)
        for part in parts:
            {forward}
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)  # only to report the loss of the whole batch
        line = {{"step": step, "loss": total.item() / ranks, "seconds": time.perf_counter() - start}}
        if device.type == "cuda":
            line["peak_bytes"] = torch.cuda.max_memory_allocated()
        if rank == 0:
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with process_group() as device:  # NCCL where each rank has a GPU, else gloo
        train(torch.device(device))
    end_process(0)
"""
DDP = "return DistributedDataParallel(model)"
FSDP = """\
mesh = init_device_mesh(device.type, {sizes}, mesh_dim_names={axes})
    blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    {split}policy = {{
        "mesh": mesh[{data_axes}],
        "mp_policy": MixedPrecisionPolicy({mixed}),
        "offload_policy": {offload},
    }}
    for block in blocks:  # a unit each: gathered for its use, and let go of
        fully_shard(block, **policy)
    return fully_shard(model, **policy)  # what is left: embedding, last norm, head"""
# In front of each micro-batch
ONE_REDUCTION = "model.require_backward_grad_sync = part is parts[-1]  # what no_sync() sets\n            "
COPIES_MEET_ONCE = "model.set_requires_all_reduce(part is parts[-1])  # the copies meet once a step\n            "
FORWARD = "loss = model(input_ids=part, labels=part).loss / MICRO_BATCHES"
AUTOCAST = 'with autocast("bf16-mixed", device):\n                '


def files(plan: Plan, base_model: str | None) -> dict[str, str]:
    """``train.py``: it trains on real English, byte by byte, and prints a JSON line a step."""
    refuse_axes(plan, WHAT, "pp", "cp")
    for name, able in ABLE.items():
        refuse_choice(plan, WHAT, name, *able)
    sharded = plan.strategy == "fsdp"
    if plan.tp > 1 and not (sharded and plan.method == "full" and plan.model.kind in SPLIT):
        raise Refused(f"{WHAT} has tensor parallelism for Llama and its like, in full training by FSDP")
    if plan.model.experts and plan.method != "full":
        raise Refused(f"{WHAT} has adapters for dense models alone, and {plan.model.name} is a mixture of experts")
    if plan.attention == "flash" and plan.model.kind in FLASH:
        raise Refused(f"{WHAT} takes sdpa for attention, which transformers does not have for {plan.model.name}")
    shape, model = _model(plan, base_model)
    body = BODY.format(
        plan=plan,
        choices=json.dumps({name: value for name in DEFAULTS if (value := getattr(plan, name)) != DEFAULTS[name]}),
        shape=shape,
        model=model,
        where='"cpu"' if sharded and plan.method != "qlora" else "device",  # FSDP takes it from there, block by block
        wrap=_fsdp(plan) if sharded else DDP if plan.strategy == "ddp" else "return model",
        optimizer=OPTIMIZERS[plan.optimizer],
        forward=_each(plan) + FORWARD,
    )
    head = HEAD.format(about="\n# ".join([*about(plan), *_notes(plan)]), imports=_imports(body, plan))
    return {FILE: f"{head}\n{body}"}


def _imports(body: str, plan: Plan) -> str:
    """An import line for each module of which `body` calls something, the course's apart."""
    called = set(re.findall(r"(?<![.\w])\w+(?=[(.])", body))
    unused = "bitsandbytes.optim" if plan.strategy == "fsdp" else "torchao.optim"  # bitsandbytes steps no DTensors
    used = {module: [name for name in names if name in called] for module, names in IMPORTS.items() if module != unused}
    lines = [f"from {module} import {', '.join(names)}\n" for module, names in used.items() if names]
    libraries = [line for line in lines if "course_lib" not in line]
    return "".join([*libraries, "\n", *lines[len(libraries) :]])


def _model(plan: Plan, base_model: str | None) -> tuple[str, str]:
    """Two expressions: of the model's widths, and of the model with this `shape`."""
    dtype = f"dtype=torch.{'float32' if _element(plan) == 4 else 'bfloat16'}"
    widths = {name: getattr(plan.model, name) for name in WIDTHS}
    if base_model is None and replace(plan.model, kind="", name="") == Shape(**widths, name=""):
        given = ", ".join(f"{name}={value}" for name, value in widths.items() if value)
        return f"Shape({given})", f"llama(shape, {dtype})"
    name = model_source(plan, base_model, f"{WHAT} builds a model by its configuration")
    return f"AutoConfig.from_pretrained({json.dumps(name)})", f"AutoModelForCausalLM.from_config(shape, {dtype})"


def _element(plan: Plan) -> int:
    """Bytes of a weight as it is built: `course_lib.training.methods.dtypes`, without PyTorch."""
    return 4 if plan.precision == "fp32" or (plan.method == "full" and plan.precision != "bf16") else 2


def _fsdp(plan: Plan) -> str:
    """The body of wrap(model, device): FSDP2 over one or two axes, and over what tensor parallelism leaves."""
    axes = {"replicate": plan.copies, "shard": plan.dp // plan.copies, "tp": plan.tp}
    axes = {axis: size for axis, size in axes.items() if size > 1 or axis == "shard"}
    return FSDP.format(
        sizes=tuple(axes.values()),
        axes=str(tuple(axes)).replace("'", '"'),
        data_axes=", ".join(f'"{axis}"' for axis in axes if axis != "tp"),
        split='split(blocks, mesh["tp"])\n    ' if plan.tp > 1 else "",
        mixed="torch.bfloat16, torch.float32" if plan.precision == "bf16-mixed" else "",
        offload='CPUOffloadPolicy(pin_memory=device.type == "cuda")' if plan.offload == "all" else "OffloadPolicy()",
    )


def _each(plan: Plan) -> str:
    """What stands in front of a micro-batch's loss."""
    if plan.strategy == "fsdp":  # which reduces the gradients of each
        return COPIES_MEET_ONCE if plan.copies > 1 else ""
    return (ONE_REDUCTION if plan.strategy == "ddp" else "") + (AUTOCAST if plan.precision == "bf16-mixed" else "")


def _notes(plan: Plan) -> list[str]:
    """How to start the script, and what it needs besides."""
    nodes, per_node = layout(plan)
    size, room = _element(plan) * plan.model.parameters * per_node, plan.machines.host_memory
    if size > room:
        need = f"{size / GIB:,.0f} GiB on a machine that has {room / GIB:,.0f} GiB"
        raise Refused(f"{WHAT} builds the whole model on each rank, {need}")
    meet = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 " if nodes > 1 else ""
    notes = [
        "It measures the plan: random weights, five steps of English. Your model, data and schedule go where it has those.",
        f"Start{' on each machine' if meet else ''}: torchrun {meet}--nproc-per-node {per_node} {FILE}",
        f"Each rank builds the whole model first: {size / GIB:,.1f} GiB of a machine's own memory.",
    ]
    if plan.tp > 1:
        notes.append("Embedding and head are whole on each tensor-parallel rank: more memory than the plan counts.")
    return notes
