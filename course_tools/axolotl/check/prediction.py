"""Memory per GPU of the run that a YAML describes, by the course's memory model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from course_lib.memory import Breakdown, Shape, estimate, largest_micro_batch, shape_of
from course_tools.axolotl.check.settings import Settings

# What a config.json may leave out, as transformers fills it in.
LEFT_OUT = {
    "tie_word_embeddings": False,
    "num_key_value_heads": None,
    "head_dim": None,
    "attention_bias": False,
    "mlp_bias": False,
    "intermediate_size": None,
    "max_position_embeddings": 1024,
}
GPT2 = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_8bit": "adamw8bit",
    "adamw_bnb_8bit": "adamw8bit",
    "adamw_torch_8bit": "adamw8bit",
    "paged_adamw_8bit": "paged_adamw8bit",
    "sgd": "sgd",
}
LESS = (
    "liger_fused_linear_cross_entropy",
    "cut_cross_entropy",
    "chunked_cross_entropy",
    "tiled_mlp",
    "activation_offloading",
)


class Prediction(NamedTuple):
    """Of one GPU, the fullest.

    Attributes:
        memory: what lies there; None with `reason`, in a sentence.
        shape: the model's; None where it is unknown.
        extra: bytes beside `memory` that Axolotl's own ways cost (see `fp32_outer`); the verdict counts them.
        fits: whether the card holds it; None without a card.
        largest: the largest micro_batch_size that the card holds, everything else as it is; None where not asked.
        certain: the loss and the lengths are known, or what a single token needs is too much already.
        caveats: what the estimate does not see, in a sentence each.
    """

    memory: Breakdown | None
    reason: str = ""
    shape: Shape | None = None
    extra: int = 0
    fits: bool | None = None
    largest: int | None = None
    certain: bool = True
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
        fits = largest = None
        certain = True
        if settings.cluster and settings.cluster.card:
            room = settings.cluster.card.memory - extra
            fits = memory.fits(room)
            if not fits:
                largest = largest_micro_batch(shape, room, **chosen) if room > 0 else 0
                least = estimate(shape, micro_batch_size=1, **(chosen | {"seq_len": settings.context_parallel}))
                certain = _loss_and_lengths_known(settings) or not least.fits(room)
    except ValueError as error:
        return Prediction(None, str(error), shape)
    return Prediction(memory, "", shape, extra, fits, largest, certain, tuple(_caveats(settings, extra)))


def _loss_and_lengths_known(settings: Settings) -> bool:
    foreign = [name for name in settings.given("plugins") or [] if not str(name).startswith("course_tools.")]
    fused = foreign or any(settings.given(key) for key in LESS)
    return not fused and bool(settings.get("sample_packing") or settings.get("pad_to_sequence_len"))


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
    """The widths of base_model: a folder with config.json, or a well-known model by its name on the hub."""
    name = settings.get("base_model")
    if not isinstance(name, str) or not name:
        raise ValueError("No base_model, no memory.")
    folder = settings.folder / name
    if os.path.isdir(folder):
        return _from_folder(folder, name)
    if settings.local(name):
        raise ValueError(f"base_model {name} does not lie here, so its widths are unknown.")
    try:
        shape = shape_of(name)
    except ValueError:
        shape = None
    if shape is None or (shape.name == "tiny" and name != "tiny"):
        raise ValueError(
            f"The widths of {name} are not among the course's presets: point base_model at a local folder with its "
            "config.json to have the memory predicted."
        )
    return shape


def _from_folder(folder: Path, name: str) -> Shape:
    try:
        read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{name} is a folder without config.json, so it is no model that transformers can load."
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}/config.json cannot be read: {error}.") from None
    if not isinstance(read, dict):
        raise ValueError(f"{name}/config.json holds no object.")
    read = read.get("text_config") or read
    defaults: dict[str, Any] = dict(LEFT_OUT)
    if read.get("model_type") == "gpt2":
        read = {GPT2.get(key, key): value for key, value in read.items()}
        defaults["tie_word_embeddings"] = True
    try:
        shape = shape_of(
            SimpleNamespace(**(defaults | {key: value for key, value in read.items() if value is not None}))
        )
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{name}/config.json gives no widths: {error}.") from None
    return shape


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
        "num_microbatches": settings.number("gradient_accumulation_steps"),
        "activation_checkpointing": _checkpointing(settings),
        "attention": "eager" if settings.attention == "eager" else "flash",
        "offload": _offload(settings),
        "step": "foreach" if settings.get("optimizer") == "adamw_torch" else "fused",
    }
    if method != "full":
        chosen["lora_rank"] = settings.number("lora_r")
    if plan.startswith("zero"):
        bucket = settings.zero.get("reduce_bucket_size")
        if type(bucket) in (int, float) and bucket >= 1:
            chosen["bucket_elements"] = int(bucket)
        elif bucket == "auto":
            chosen["bucket_elements"] = model_shape(settings).hidden ** 2
        if plan == "zero3":
            chosen["reshard_after_forward"] = settings.zero.get("stage3_max_reuse_distance") == 0
    if settings.cluster and settings.cluster.cpu:
        chosen |= {"device": "cpu", "step": "loop"}
    return chosen


def _precision(settings: Settings, method: str, strategy: str) -> str:
    """Axolotl loads weights in 16 bits, too: only FSDP2, DeepSpeed and adapters keep fp32 copies of what they train."""
    if settings.precision == "fp32":
        return "fp32"
    if method == "full" and not strategy.startswith(("zero", "fsdp")):
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
    for plugin in settings.given("plugins") or []:
        if "liger" in str(plugin).lower() or "cut_cross_entropy" in str(plugin):
            found.append(f"{plugin} may need less than is counted here.")
    if extra:
        found.append(
            f"Axolotl keeps embedding and head in fp32 under {settings.attention or 'sdpa'}: {extra / 2**30:,.2f} GiB more, "
            "which the verdict counts; flash_attention_2 would not."
        )
    if not settings.get("sample_packing") and not settings.get("pad_to_sequence_len"):
        found.append("Counted for sequences of sequence_len; batches are padded to their longest only.")
    if settings.given("lora_modules_to_save"):
        found.append("lora_modules_to_save is trained in full and not counted.")
    return found
