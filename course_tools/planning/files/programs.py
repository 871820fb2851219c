"""Which training program of the course runs a plan, and with which arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from course_lib.choices import STRATEGIES, why_not
from course_tools.planning.files import deepspeed
from course_tools.planning.files.facts import Refused, megatron, zero_stage

if TYPE_CHECKING:
    from course_tools.planning import Plan

ROOM = "course_lib.training"
# Of course_lib.models.tiny_llama: blocks where its stages ask for no more, heads, kv heads, longest sequence
LAYERS, TINY_HEADS, TINY_KV_HEADS, TINY_LENGTH = 4, 4, 2, 512

# What a plan says and a program may not take, and what that program does instead.
LEFT_OUT = {
    "precision": ("fp32", "computes in fp32"),
    "activation_checkpointing": ("none", "keeps all activations"),
    "offload": ("none", "offloads nothing"),
    "sequence_parallel": (False, "does not split norms along the sequence"),
}


def program_of(plan: Plan, *, model: str = "tiny", steps: int = 20) -> tuple[str, dict[str, Any]]:
    """The module whose ``train`` runs this plan, and the keyword arguments to call it with on the plan's ranks.

    Args:
        plan: any plan of the planner.
        model: "tiny", or what ``course_lib.models.load`` takes, for the program that trains other models too.
        steps: optimizer steps.
    """
    given: dict[str, Any] = {"steps": steps, "global_batch": plan.global_batch, "seq_len": plan.seq_len}
    if reason := why_not(strategy=plan.strategy, offload=plan.offload):
        raise Refused(reason.removesuffix("."))
    split = [axis for axis in ("tp", "pp", "cp") if getattr(plan, axis) > 1]
    if plan.method != "full":
        raise Refused(f"The course's own programs train every weight, and the plan is {plan.method}")
    if split == ["cp"]:
        return f"{ROOM}.sequence.context_parallel", given | {"dp": plan.dp, "seq_len": min(plan.seq_len, TINY_LENGTH)}
    if "cp" in split:
        raise Refused(
            f"course_lib.training.sequence.context_parallel splits sequences and nothing else, and the plan joins cp={plan.cp} with "
            f"{' and '.join(f'{axis}={getattr(plan, axis)}' for axis in split if axis != 'cp')} (Megatron-LM can: {megatron(plan)})"
        )
    if split:
        return _split(plan, split, model, given)
    given["gradient_accumulation_steps"] = plan.num_microbatches
    if plan.strategy == "single":
        return f"{ROOM}.single", given
    if plan.strategy == "fsdp":
        return f"{ROOM}.fsdp", given | {"bf16": plan.precision == "bf16-mixed"}
    if plan.strategy == "ddp":
        return f"{ROOM}.accelerate_ddp", given
    config = deepspeed.config(plan)
    if plan.offload != "none":
        config["zero_force_ds_cpu_optimizer"] = False  # the program brings PyTorch's AdamW
    return f"{ROOM}.zero", {"config": config, "steps": steps, "seq_len": plan.seq_len}


def _split(plan: Plan, split: list[str], model: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Ranks that hold parts of the layers: one axis alone has a program of its own, several meet in three_d."""
    stages = plan.pp * plan.virtual_stages
    layers = -(-LAYERS // stages) * stages  # of the tiny Llama
    if model == "tiny" and split == ["tp"] and plan.dp == 1 and plan.num_microbatches == 1 and plan.tp <= TINY_KV_HEADS:
        return f"{ROOM}.tensor.tensor_parallel", given | {"sequence_parallel": plan.sequence_parallel}
    if model == "tiny" and split == ["pp"] and plan.dp == 1:
        return f"{ROOM}.pipeline.pipeline_parallel", given | {
            "schedule": "interleaved" if plan.virtual_stages > 1 else "1f1b",
            "num_microbatches": plan.num_microbatches,
            "virtual_stages": plan.virtual_stages,
            "layers": layers,
        }
    many = {"heads": max(plan.tp, TINY_HEADS), "kv_heads": plan.tp} if plan.tp > TINY_KV_HEADS else {}
    size = {"layers": layers} | many if model == "tiny" else {"model": model}
    # ZeRO-1 beside TP and PP is Megatron's distributed optimizer; three_d shards with FSDP2 or not at all
    return f"{ROOM}.three_d", given | {
        "dp": plan.dp,
        "pp": plan.pp,
        "tp": plan.tp,
        "shard_data": bool(STRATEGIES[plan.strategy].shards),
        "num_microbatches": plan.num_microbatches,
        **size,
    }


def not_said(plan: Plan, module: str, arguments: dict[str, Any]) -> list[str]:
    """What the plan asks for and the program does not do, in words for "it ..."."""
    said = set(arguments) | ({"precision"} if arguments.get("bf16") else set())
    if "config" in arguments:  # DeepSpeed's
        said |= {"precision", "offload", "gradient_accumulation_steps"}
    words = [words for name, (usual, words) in LEFT_OUT.items() if getattr(plan, name) != usual and name not in said]
    if plan.num_microbatches > 1 and not {"num_microbatches", "gradient_accumulation_steps"} & said:
        words.append("takes a step's sequences at once")
    if module.endswith("context_parallel") and STRATEGIES[plan.strategy].shards:
        words.append("holds the whole model on every rank")
    if module.endswith("three_d") and plan.virtual_stages > 1:
        words.append(f"runs one stage per pipeline rank instead of {plan.virtual_stages}")
    if module.endswith("three_d") and zero_stage(plan):
        words.append(f"shards with FSDP2 instead of ZeRO-{zero_stage(plan)}")
    if arguments.get("seq_len") != plan.seq_len:
        words.append(f"takes sequences of {arguments['seq_len']} tokens, its longest")
    return words
