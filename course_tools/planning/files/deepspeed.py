"""ZeRO as the JSON that DeepSpeed reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from course_lib.memory.sharded import BUCKET_ELEMENTS
from course_tools.planning.files.facts import Refused, refuse_axes, refuse_choice, zero_stage

if TYPE_CHECKING:
    from course_tools.planning import Plan

FILE = "ds_config.json"


def files(plan: Plan, base_model: str | None) -> dict[str, str]:
    """``ds_config.json`` without an optimizer: the program brings its own AdamW, with its learning rate, and its loss."""
    refuse_choice(plan, "DeepSpeed's configuration", "optimizer", "adamw")
    refuse_choice(plan, "DeepSpeed's configuration", "loss", "eager")
    return {FILE: json.dumps(config(plan), indent=2) + "\n"}


def notes(plan: Plan) -> list[str]:
    """What the program has to bring, for JSON has no comments."""
    kept = plan.activation_checkpointing
    return [
        "The program brings the model, AdamW and its learning rate"
        + (f", and {kept} activation checkpointing" if kept != "none" else "")
        + ". gradient_clipping is off: with a Trainer take max_grad_norm=0, or change both.",
        f"Start it with deepspeed or torchrun on {plan.gpus} GPUs.",
    ]


def config(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's configuration of the plan, also for a program that has more to say. Raises Refused."""
    refuse_axes(plan, "DeepSpeed's ZeRO configuration", "tp", "pp", "cp")
    if not zero_stage(plan):
        raise Refused(
            f"DeepSpeed's configuration speaks of ZeRO's stages 1 to 3, and the plan's strategy is {plan.strategy!r}"
        )
    data: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "gradient_clipping": 0.0,  # left out, DeepSpeed clips at 1.0
        "zero_optimization": zero(plan),
    }
    if plan.machines.cpu and plan.offload != "none":
        data["zero_force_ds_cpu_optimizer"] = False  # its own Adam would be compiled first, for minutes
    for kind in ("bf16", "fp16"):
        if plan.precision.startswith(kind):
            data[kind] = {"enabled": True}
    return data


def zero(plan: Plan) -> dict[str, Any]:
    """The section zero_optimization, with the sizes that `course_lib.memory.estimate` counts with."""
    stage = zero_stage(plan)
    section: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET_ELEMENTS}
    if stage == 3:
        # every weight goes after its use; DeepSpeed's own 10^9 elements would keep a smaller model whole
        section |= {"stage3_max_reuse_distance": 0, "stage3_gather_16bit_weights_on_model_save": True}
    else:
        section["allgather_bucket_size"] = BUCKET_ELEMENTS
    pinned = {"device": "cpu", "pin_memory": not plan.machines.cpu}
    if plan.offload != "none":
        section["offload_optimizer"] = dict(pinned)
    if plan.offload == "all":
        section["offload_param"] = dict(pinned)
    return section
