"""A YAML for Axolotl, read once more by the course's own check before anybody sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_lib.choices import METHODS
from course_lib.memory.architectures import block_class
from course_tools.planning.answer import adapts_attention_alone
from course_tools.planning.files import deepspeed
from course_tools.planning.files.facts import (
    Refused,
    about,
    layout,
    model_source,
    refuse_axes,
    refuse_choice,
    yaml,
    zero_stage,
)

if TYPE_CHECKING:
    from course_tools.planning import Plan

FILE = "axolotl.yml"
LORA = {"lora_alpha": 32, "lora_dropout": 0.0}
# Models for which transformers has no sdpa; the kernels that their attention has instead
FLASH = {"gemma2": "flash_attention_2", "gpt_oss": "kernels-community/vllm-flash-attn3"}
MXFP4 = {"model_quantization_config": "Mxfp4Config", "model_quantization_config_kwargs": {"dequantize": True}}
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
# as course_lib.training.activation_checkpointing
KEPT = ["attention", "aten::mm", "aten::addmm", "bitsandbytes::gemm_4bit"]
OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw8bit": "adamw_bnb_8bit",
    "paged_adamw8bit": "paged_adamw_8bit",
    "sgd": "sgd",
}
LOSSES = {"eager": "", "chunked": "chunked_cross_entropy", "fused": "liger_fused_linear_cross_entropy"}
LIGER = "axolotl.integrations.liger.LigerPlugin"
YOURS = "Yours to replace: datasets, learning_rate, num_epochs, output_dir; the plan says nothing of them."
PADDED = (
    "The plan counts full rows. Examples shorter than sequence_len are padded; sample_packing: true fills the rows."
)


def files(plan: Plan, base_model: str | None) -> dict[str, str]:
    """``axolotl.yml``, in which `course_tools.axolotl.check` finds no error on the plan's cards.

    Raises:
        Refused: Axolotl cannot run the plan (pipeline or context parallelism, adapters under tensor parallelism, …),
            or the model has no name that it could load.
    """
    found = values(plan, base_model)
    report = _report(plan, found)
    if report.errors:
        alone = "has no sequence parallelism, and without it" if plan.sequence_parallel else "would not run this plan:"
        raise Refused(f"Axolotl {alone} {report.errors[0].sentence.rstrip('.')}")
    notes = [YOURS, PADDED]
    if found["attn_implementation"] in FLASH.values():
        notes.append(f"{plan.model.name} has no sdpa: install flash-attn, or kernels, for its attn_implementation.")
    if plan.method == "full" and plan.precision == "bf16-mixed" and plan.strategy in ("single", "ddp", "fsdp"):
        notes.append("Axolotl keeps the weights themselves in bf16 here: less memory than the plan counts.")
    return {FILE: yaml(found, [*about(plan), *notes, f"Start: {report.launch_command.replace('run.yml', FILE)}"])}


def values(plan: Plan, base_model: str | None = None) -> dict[str, Any]:
    """The YAML's keys. Raises Refused as `files`, the check left out."""
    refuse_axes(plan, "Axolotl", "pp")
    refuse_axes(plan, "Axolotl without ring-flash-attn, which needs GPUs,", "cp")
    if plan.tp > 1 and plan.method != "full":
        raise Refused(
            f"Axolotl trains no {METHODS[plan.method]} under tensor parallelism, and the plan has tp={plan.tp}"
        )
    if plan.tp > 1 and (zero_stage(plan) or (plan.dp > 1 and plan.strategy != "fsdp")):
        raise Refused(f"Beside tensor parallelism Axolotl shards the data ranks by FSDP2, not by {plan.strategy!r}")
    refuse_choice(plan, "Axolotl", "optimizer", *OPTIMIZERS)
    refuse_choice(plan, "Axolotl", "loss", *LOSSES)
    if plan.loss == "fused" and (plan.tp > 1 or plan.machines.cpu):
        raise Refused("Liger's fused loss, which Axolotl takes, needs GPUs and goes with no tensor parallelism")
    if plan.model.kind == "gpt_oss" and plan.method == "qlora":
        raise Refused("gpt-oss comes in MXFP4, which Axolotl loads or unpacks, and does not quantize to NF4")
    name = model_source(plan, base_model, "Axolotl loads a model by its name")
    fsdp = plan.strategy == "fsdp" and plan.dp > 1
    sharded = fsdp or plan.tp > 1
    found: dict[str, Any] = {
        "base_model": name,
        "datasets": [{"path": "tatsu-lab/alpaca", "type": "alpaca"}],
        "val_set_size": 0,
        "sequence_len": plan.seq_len,
        "pad_to_sequence_len": True,
        "sample_packing": False,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "num_epochs": 1,
        # torchao's steps the DTensors of sharded weights, bitsandbytes' does not
        "optimizer": "adamw_torch_8bit" if sharded and plan.optimizer == "adamw8bit" else OPTIMIZERS[plan.optimizer],
        "learning_rate": 0.00002 if plan.method == "full" else 0.0002,
        "lr_scheduler": "cosine",
        "bf16": plan.precision.startswith("bf16"),
        "fp16": plan.precision.startswith("fp16"),
        "tf32": False,
        "attn_implementation": "eager" if plan.attention == "eager" else FLASH.get(plan.model.kind, "sdpa"),
    }
    found |= MXFP4 if plan.model.kind == "gpt_oss" else {}
    if plan.activation_checkpointing != "none":
        found |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if plan.activation_checkpointing == "selective":
        found["selective_checkpointing"] = {"save": KEPT}
    if plan.method != "full":
        found |= {"adapter": plan.method, "load_in_4bit": plan.method == "qlora", "lora_r": plan.lora_rank, **LORA}
        if adapts_attention_alone(plan.model):  # as the plan counts them
            found |= {"lora_target_modules": [f"{name}_proj" for name in "qkvo"]}
            found |= {"quantize_moe_experts": True} if plan.method == "qlora" else {}
        else:
            found["lora_target_linear"] = True
        if plan.machines.cpu or plan.activation_checkpointing == "selective":  # Axolotl refuses the pair
            found |= {key: False for key in KERNELS}
    if plan.tp > 1:
        found["tensor_parallel_size"] = plan.tp
    if zero_stage(plan):
        found["deepspeed"] = _deepspeed(plan)
    elif fsdp and plan.tp == 1:  # beside tensor parallelism transformers shards itself
        found |= {"fsdp_version": 2, "fsdp_config": _fsdp(plan)}
        if plan.copies > 1:
            found |= {"dp_replicate_size": plan.copies, "dp_shard_size": plan.dp // plan.copies}
    if fsdp and plan.num_microbatches > 1:  # else gradients stay whole until the last micro-batch
        found["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    plugins = ["course_tools.axolotl.cpu_ranks.CPURanks"] * plan.machines.cpu  # without it no CPU rank shards anything
    if plan.loss != "eager":
        found[LOSSES[plan.loss]] = True
        plugins += [LIGER] * (plan.loss == "fused")
    if plugins:
        found["plugins"] = plugins
    return found | {"output_dir": f"runs/{plan.model.name}-{plan.method}-{plan.strategy}".replace(" ", "-")}


def _deepspeed(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's configuration inside the YAML; the numbers that the YAML has stand there once."""
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        "auto",
    )
    given = deepspeed.config(plan)
    return {key: auto.get(key, value) for key, value in given.items()}


def _fsdp(plan: Plan) -> dict[str, Any]:
    """The section fsdp_config, in Axolotl's own words."""
    block = block_class(plan.model.kind)
    wrap = {"transformer_layer_cls_to_wrap": block} if block else {}
    return {
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **wrap,
        "offload_params": plan.offload == "all",
        "cpu_ram_efficient_loading": True,  # else every rank loads the whole model, under QLoRA onto its card
        "state_dict_type": "FULL_STATE_DICT",
    }


def _report(plan: Plan, found: dict[str, Any]) -> Any:
    """The check of the values on the plan's cards."""
    from course_lib.memory.cards import Cards
    from course_tools.axolotl.check import check

    nodes, per_node = layout(plan)
    card = None if plan.machines.cpu else plan.machines.card
    return check(found, gpus=Cards(nodes, per_node, card), validate=False)
