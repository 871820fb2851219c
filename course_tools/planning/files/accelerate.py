"""A configuration for ``accelerate launch --config_file``: DDP, DeepSpeed's ZeRO, or FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_lib.memory.architectures import block_class
from course_tools.planning.answer import adapts_attention_alone
from course_tools.planning.files.facts import about, layout, refuse_axes, yaml, zero_stage

if TYPE_CHECKING:
    from course_tools.planning import Plan

FILE = "accelerate.yaml"
# On CPU ranks too MULTI_GPU: MULTI_CPU starts one process and says nothing
KINDS = {"single": "NO", "ddp": "MULTI_GPU", "fsdp": "FSDP"}


def files(plan: Plan, base_model: str | None) -> dict[str, str]:
    """``accelerate.yaml``; what a launcher cannot know (micro-batch, checkpointing) stands in its comment."""
    refuse_axes(plan, "This launcher's configuration", "tp", "pp", "cp")
    nodes, _ = layout(plan)
    values: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": KINDS.get(plan.strategy, "DEEPSPEED"),
        "num_machines": nodes,
        "num_processes": plan.gpus,  # of all machines together
        "mixed_precision": plan.precision.removesuffix("-mixed") if plan.precision.endswith("-mixed") else "no",
    }
    start = f"Start: accelerate launch --config_file {FILE} script.py"
    if nodes > 1:
        first = {"machine_rank": 0, "main_process_ip": "FIRST_MACHINE", "main_process_port": 29500}
        values |= first | {"rdzv_backend": "c10d"}
        own = "--machine_rank N --main_process_ip FIRST_MACHINE"
        start = f"On machine 0 to {nodes - 1}: accelerate launch --config_file {FILE} {own} script.py"
    if zero_stage(plan):
        values["deepspeed_config"] = _deepspeed(plan, nodes)
    if plan.strategy == "fsdp":
        values["fsdp_config"] = _fsdp(plan)
    if plan.copies > 1:
        sizes = {"dp_replicate_size": plan.copies, "dp_shard_size": plan.dp // plan.copies}
        values["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    return {FILE: yaml(values, [*about(plan), *_script(plan), start])}


def _script(plan: Plan) -> list[str]:
    """What the training script itself has to say."""
    fsdp, checkpointing = plan.strategy == "fsdp", plan.activation_checkpointing
    accumulation = f"gradient_accumulation_steps={plan.num_microbatches}"
    if fsdp and plan.num_microbatches > 1:  # else the gradients stay whole until the last micro-batch
        plugin = f"GradientAccumulationPlugin(num_steps={plan.num_microbatches}, sync_each_batch=True)"
        accumulation = f"gradient_accumulation_plugin={plugin}"
    besides = []
    if checkpointing != "none" and not (fsdp and checkpointing == "full"):
        program = "course_lib.training.activation_checkpointing.set_checkpointing"
        besides.append(f"{program}(model, {checkpointing!r})")
    if plan.precision in ("bf16", "fp32"):
        besides.append(
            f"the model loaded with dtype={'torch.bfloat16' if plan.precision == 'bf16' else 'torch.float32'}"
        )
    if plan.attention != "flash":
        besides.append(f"attn_implementation={plan.attention!r}")
    if plan.method != "full":
        targets = ", target_modules: attention's" if adapts_attention_alone(plan.model) else ""
        besides.append(f"the model with its {plan.method} adapters (r={plan.lora_rank}{targets})")
    if plan.method == "qlora" and fsdp:
        besides.append("BitsAndBytesConfig(bnb_4bit_quant_storage=torch.bfloat16), or FSDP cannot shard the weights")
    if zero_stage(plan):
        besides.append("max_grad_norm=0 with a Trainer: gradient_clipping below is off, as in the plan's program")
    if plan.optimizer != "adamw":
        by_torchao = " by torchao" if fsdp and plan.optimizer == "adamw8bit" else ""
        besides.append(f"the optimizer {plan.optimizer}{by_torchao}")
    if plan.loss != "eager":
        besides.append(f"the {plan.loss} loss")
    first = f"In the script: batch_size={plan.micro_batch_size}, Accelerator({accumulation})"
    return [first, *(f"In the script, too: {each}" for each in besides)]


def _fsdp(plan: Plan) -> dict[str, Any]:
    """The section fsdp_config, in the launcher's own words."""
    block = block_class(plan.model.kind)
    wrap = {"fsdp_transformer_layer_cls_to_wrap": block} if block else {}
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
