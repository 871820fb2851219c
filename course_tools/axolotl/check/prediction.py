"""Memory per GPU of the run that a YAML describes, by the course's memory model."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from course_lib.memory import Breakdown, Host, Shape, estimate, host_memory, largest_micro_batch, shape_of
from course_lib.memory.estimate import uncounted
from course_lib.memory.settings import RunSettings
from course_tools.axolotl.check.settings import Settings

OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_torch_8bit": "adamw8bit",
    "paged_adamw_8bit": "paged_adamw8bit",
    "sgd": "sgd",
}
MOST_PER_NODE = 8  # where no machines are told
LOSSES = {
    "liger_fused_linear_cross_entropy": "fused",
    "cut_cross_entropy": "fused",
    "chunked_cross_entropy": "chunked",
}
REDUCED = {"reduce_each_micro_batch": True}
LESS = ("tiled_mlp", "activation_offloading")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
EMBEDDINGS = ("embed_tokens", "lm_head", "wte")


class Prediction(NamedTuple):
    """Of one GPU, the fullest.

    Attributes:
        memory: what lies there; None with `reason`, in a sentence.
        shape: the model's; None where it is unknown.
        extra: bytes beside `memory` that Axolotl's own ways cost (see `fp32_outer`); the verdict counts them.
        host: of a machine's own memory.
        fits: whether the card holds it; None without a card, and where what is counted fits and not all is.
        largest: the largest micro_batch_size, or eval_batch_size where evaluation is the peak, that the card holds,
            everything else as it is; None where not asked.
        certain: the loss and the lengths are known, or what a single token needs is too much already.
        states_fit: what a single token needs fits; else shorter sequences or checkpointing help nobody.
        fits_in_shards: it would fit if FSDP reduced the gradients of each micro-batch.
        caveats: what the estimate does not see, in a sentence each.
    """

    memory: Breakdown | None
    reason: str = ""
    shape: Shape | None = None
    extra: int = 0
    host: Host | None = None
    fits: bool | None = None
    largest: int | None = None
    certain: bool = True
    states_fit: bool = True
    fits_in_shards: bool = False
    caveats: tuple[str, ...] = ()


def predict(settings: Settings) -> Prediction:
    """The estimate of `course_lib.memory` for a YAML's choices."""
    try:
        shape = model_shape(settings)
        chosen = choices(settings)
    except ValueError as error:
        return Prediction(None, str(error))
    micro, extra = settings.number("micro_batch_size"), fp32_outer(settings, shape, chosen)
    try:
        memory = estimate(shape, micro_batch_size=micro, **chosen)
        per_node = settings.cluster.per_node if settings.cluster else MOST_PER_NODE
        host, missing = host_memory(shape, RunSettings(**chosen), per_node), uncounted(shape, RunSettings(**chosen))
        fits = largest = None
        certain = states_fit = True
        in_shards = False
        if settings.cluster and settings.cluster.card:
            room = settings.cluster.card.memory - extra
            fits = memory.fits(room)
            if fits and missing:
                fits = None  # nobody knows
            elif not fits:
                alone = estimate(shape, micro_batch_size=micro, **chosen | {"eval_micro_batch_size": 0})
                memory = memory if alone.fits(room) else alone  # what training itself lacks comes first
                largest = _largest(shape, memory, micro, chosen, room)
                shortest = {"seq_len": settings.context_parallel, "eval_micro_batch_size": 0}
                least = estimate(shape, micro_batch_size=1, **chosen | shortest)
                states_fit = least.fits(room)
                if chosen["strategy"] == "fsdp" and not chosen["reduce_each_micro_batch"]:
                    in_shards = estimate(shape, micro_batch_size=micro, **chosen | REDUCED).fits(room)
                certain = _loss_and_lengths_known(settings) or not states_fit
    except ValueError as error:
        return Prediction(None, str(error), shape)
    caveats = (*missing, *_caveats(settings, extra))
    return Prediction(memory, "", shape, extra, host, fits, largest, certain, states_fit, in_shards, caveats)


def _largest(shape: Shape, memory: Breakdown, micro: int, chosen: dict[str, Any], room: int) -> int:
    """Of the batch that is too large, the training's or the evaluation's; 0 where not even one sequence fits."""
    if memory.peak_phase != "evaluation":
        return largest_micro_batch(shape, room, **chosen | {"eval_micro_batch_size": 0}) if room > 0 else 0
    most = chosen["eval_micro_batch_size"]

    def fits(sequences: int) -> bool:
        return estimate(shape, micro_batch_size=micro, **chosen | {"eval_micro_batch_size": sequences}).fits(room)

    return next((sequences for sequences in range(most - 1, 0, -1) if fits(sequences)), 0)


def _loss_and_lengths_known(settings: Settings) -> bool:
    foreign = [name for name in settings.plugins if not str(name).startswith("course_tools.")]
    less = foreign or any(settings.given(key) for key in LESS)
    return not less and bool(settings.get("sample_packing") or settings.get("pad_to_sequence_len"))


def fp32_outer(settings: Settings, shape: Shape, chosen: dict[str, Any]) -> int:
    """Bytes that embedding and head take above 16 bits, because Axolotl keeps them in fp32 there.

    It does in full training without FSDP, unless the attention asks for 16-bit input (`should_convert_embedding_dtypes`).
    """
    keeps = settings.attention in ("", "sdpa", "eager") and not settings.given("cut_cross_entropy")
    if (
        chosen["method"] != "full"
        or chosen["precision"] != "bf16"
        or chosen["strategy"] not in ("single", "ddp")
        or not keeps
    ):
        return 0
    states = {"adamw": 4, "sgd": 0}.get(chosen["optimizer"], 0)
    each = 2 + 2 + states + (2 if chosen["strategy"] == "ddp" else 0)  # weight, gradient, Adam's two, DDP's bucket
    return each * (shape.embedding_parameters + shape.head_parameters) // chosen["tensor_parallel"]


def model_shape(settings: Settings) -> Shape:
    """The widths of base_model: of a folder with config.json, or by its name on the hub."""
    name = settings.get("base_model")
    if not isinstance(name, str) or not name:
        raise ValueError("No base_model, no memory.")
    folder = settings.folder / name
    if settings.local(name) and not os.path.isdir(folder):
        raise ValueError(f"base_model {name} does not lie here, so its widths are unknown.")
    return shape_of(folder if os.path.isdir(folder) else name)


def choices(settings: Settings) -> dict[str, Any]:
    """The settings of `estimate` that a YAML amounts to, micro_batch_size left out."""
    adapter, strategy, context = settings.adapter, settings.strategy, settings.context_parallel
    if adapter not in ("", "lora", "qlora"):
        raise ValueError(f"The memory model does not know the adapter {adapter!r}.")
    if settings.get("load_in_8bit"):
        raise ValueError("The memory model knows weights in 4 bits (qlora), not in 8.")
    if settings.get("rl"):
        raise ValueError(
            f"The memory model knows supervised training; rl: {settings.get('rl')} holds more than one model."
        )
    if settings.expert_parallel > 1 and strategy == "fsdp":
        raise ValueError("The memory model does not know expert parallelism beside FSDP.")
    method = "qlora" if adapter and settings.get("load_in_4bit") else "lora" if adapter else "full"
    optimizer = OPTIMIZERS.get(str(settings.get("optimizer")))
    if optimizer is None:
        raise ValueError(f"The memory model does not know the optimizer {settings.get('optimizer')}.")
    ranks = settings.shard_ranks if strategy == "fsdp" else settings.data_ranks
    plan = {"zero0": "ddp", "tensor": "single"}.get(strategy, strategy)
    if ranks == 1 and plan == "ddp":
        plan = "single"
    chosen: dict[str, Any] = {
        "method": method,
        "precision": _precision(settings, method, plan),
        "optimizer": optimizer,
        "strategy": plan,
        "ranks": ranks,
        "tensor_parallel": settings.tensor_parallel,
        "seq_len": -(-settings.number("sequence_len") // context) * context,
        "context_parallel": context,
        "expert_parallel": settings.expert_parallel,
        "reduce_each_micro_batch": strategy == "fsdp" and settings.syncs_each_batch,
        "num_microbatches": settings.number("gradient_accumulation_steps"),
        "activation_checkpointing": _checkpointing(settings),
        "attention": "eager" if settings.attention == "eager" else "flash",
        "offload": _offload(settings),
        "loss": _loss(settings),
        "step": "foreach" if settings.get("optimizer") == "adamw_torch" else "fused",
    }
    if settings.get("val_set_size") or settings.given("test_datasets"):
        chosen["eval_micro_batch_size"] = settings.number(
            "eval_batch_size" if settings.given("eval_batch_size") else "micro_batch_size"
        )
    if method != "full":
        chosen["lora_rank"] = settings.number("lora_r")
        saved = settings.given("lora_modules_to_save") or []
        modules = settings.given("lora_target_modules")
        if isinstance(modules, list) and not settings.given("lora_target_linear"):
            chosen["lora_targets"] = (
                "attention"
                if all("mlp" not in m and m.split(".")[-1] in ATTENTION for m in map(str, modules))
                else "all"
            )
        chosen["quantize_experts"] = method == "qlora" and bool(settings.given("quantize_moe_experts"))
        chosen["train_embeddings"] = any(str(name) in EMBEDDINGS for name in saved)
    efficient = settings.fsdp.get("cpu_ram_efficient_loading") or settings.given("qlora_sharded_model_loading")
    if strategy == "fsdp" and not (efficient or settings.given("experimental_skip_move_to_device")):
        chosen["loading"] = "whole" if method == "qlora" else "card"
    if plan.startswith("zero"):
        bucket = settings.zero.get("reduce_bucket_size")
        if type(bucket) in (int, float) and bucket >= 1:
            chosen["bucket_elements"] = int(bucket)
        elif bucket == "auto":
            chosen["bucket_elements"] = model_shape(settings).hidden ** 2
        if plan == "zero3":
            chosen["reshard_after_forward"] = settings.zero.get("stage3_max_reuse_distance") == 0
    if settings.on_cpu:
        chosen |= {"device": "cpu", "step": "loop"}
    return chosen


def _loss(settings: Settings) -> str:
    """The plugin of cut cross entropy switches itself on."""
    if settings.given("cut_cross_entropy") is None and any("CutCrossEntropy" in str(p) for p in settings.plugins):
        return "fused"
    return next((kind for key, kind in LOSSES.items() if settings.given(key)), "eager")


def _precision(settings: Settings, method: str, strategy: str) -> str:
    """Axolotl loads weights in 16 bits, too: only DeepSpeed and adapters keep fp32 copies of what they train.

    Its own `fsdp2_prepare_model` (axolotl/monkeypatch/accelerate/fsdp2.py) leaves out Accelerate's upcast.
    """
    if settings.precision == "fp32":
        return "fp32"
    if method == "full" and not strategy.startswith("zero"):
        return "bf16" if settings.precision == "bf16" else "fp16-mixed"
    return f"{settings.precision}-mixed"


def _checkpointing(settings: Settings) -> str:
    if settings.get("selective_checkpointing"):
        return "selective"
    return "full" if settings.get("gradient_checkpointing") or settings.fsdp.get("activation_checkpointing") else "none"


def _offload(settings: Settings) -> str:
    if settings.fsdp.get("offload_params"):
        return "all"
    for name, what in (("offload_param", "all"), ("offload_optimizer", "optimizer")):
        if settings.section("zero_optimization", name).get("device") in ("cpu", "nvme"):
            return what
    return "none"


def _caveats(settings: Settings, extra: int) -> list[str]:
    found = [f"{key} needs less than is counted here." for key in LESS if settings.given(key)]
    for plugin in settings.plugins:
        if "liger" in str(plugin).lower() and not settings.given("liger_fused_linear_cross_entropy"):
            found.append(f"{plugin} may need less than is counted here.")
    if extra:
        found.append(
            f"Axolotl keeps embedding and head in fp32 under {settings.attention or 'sdpa'}: {extra / 2**30:,.2f} GiB more, "
            "which the verdict counts; flash_attention_2 would not."
        )
    if not settings.get("sample_packing") and not settings.get("pad_to_sequence_len"):
        found.append("Counted for sequences of sequence_len; batches are padded to their longest only.")
    others = [name for name in settings.given("lora_modules_to_save") or [] if str(name) not in EMBEDDINGS]
    if others:
        found.append(f"{', '.join(map(str, others))} of lora_modules_to_save is trained in full and not counted.")
    return found
