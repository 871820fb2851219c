"""A configuration for ``accelerate launch --config_file``: DDP, DeepSpeed's ZeRO, or FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_tools.planning.files.facts import (
    about,
    block_class,
    layout,
    refuse_axes,
    yaml,
    zero_stage,
)

if TYPE_CHECKING:
    from course_tools.planning import Plan

FILE = "accelerate.yaml"
PORT = 29500


def files(plan: Plan, base_model: str | None) -> dict[str, str]:
    """``accelerate.yaml``; what a launcher cannot know (micro-batch, checkpointing) stands in its comment."""
    refuse_axes(plan, "This launcher's configuration", "tp", "pp", "cp")
    nodes, _ = layout(plan)
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind(plan),
        "num_machines": nodes,
        "num_processes": plan.gpus,  # of all machines together
        "mixed_precision": plan.precision.removesuffix("-mixed") if plan.precision.endswith("-mixed") else "no",
    }
    if nodes > 1:
        values |= {
            "machine_rank": 0,
            "main_process_ip": "FIRST_MACHINE",
            "main_process_port": PORT,
            "rdzv_backend": "c10d",
        }
    if zero_stage(plan):
        values["deepspeed_config"] = _deepspeed(plan, nodes)
    if plan.strategy == "fsdp":
        values["fsdp_config"] = fsdp_config(plan)
    start = f"Start: accelerate launch --config_file {FILE} script.py"
    if nodes > 1:
        start = f"On machine 0 to {nodes - 1}: accelerate launch --config_file {FILE} --machine_rank N --main_process_ip FIRST_MACHINE script.py"
    return {FILE: yaml(values, [*about(plan), *script(plan), start])}


def kind(plan: Plan) -> str:
    """Accelerate's distributed_type. On CPU ranks too MULTI_GPU: MULTI_CPU starts one process and says nothing."""
    if zero_stage(plan):
        return "DEEPSPEED"
    return {"fsdp": "FSDP", "ddp": "MULTI_GPU", "single": "NO"}[plan.strategy]


def script(plan: Plan) -> list[str]:
    """What the training script itself has to say."""
    lines = [
        f"In the script: batch_size={plan.micro_batch_size}, Accelerator(gradient_accumulation_steps={plan.num_microbatches})"
    ]
    if plan.activation_checkpointing != "none" and not (
        plan.strategy == "fsdp" and plan.activation_checkpointing == "full"
    ):
        lines.append(
            f"In the script, too: course_lib.training.activation_checkpointing.set_checkpointing(model, {plan.activation_checkpointing!r})"
        )
    if plan.method != "full":
        lines.append(f"In the script, too: the model with its {plan.method} adapters")
    return lines


def fsdp_config(plan: Plan) -> dict[str, Any]:
    """The section fsdp_config, in the launcher's own words."""
    wrap = {"fsdp_transformer_layer_cls_to_wrap": block_class(plan)} if block_class(plan) else {}
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **wrap,
        "fsdp_reshard_after_forward": True,
        "fsdp_offload_params": plan.offload == "all",
        "fsdp_activation_checkpointing": plan.activation_checkpointing == "full",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _deepspeed(plan: Plan, nodes: int) -> dict[str, Any]:
    """The section deepspeed_config, in the launcher's own words."""
    return {
        "zero_stage": zero_stage(plan),
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": 0.0,
        "offload_optimizer_device": "none" if plan.offload == "none" else "cpu",
        "offload_param_device": "cpu" if plan.offload == "all" else "none",
        "zero3_init_flag": plan.strategy == "zero3",
        "zero3_save_16bit_model": plan.strategy == "zero3",
        **({"deepspeed_multinode_launcher": "standard"} if nodes > 1 else {}),
    }
