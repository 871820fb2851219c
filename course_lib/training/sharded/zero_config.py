"""DeepSpeed's JSON configuration: write one for a stage, and check one for mistakes that DeepSpeed reports late or never.

Nothing here imports DeepSpeed, so a configuration can be checked on a machine without it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import psutil

from course_lib import choices
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.sharded.zero_keys import check_keys
from course_lib.validation import pick

Config = dict[str, Any]

STAGES = (0, 1, 2, 3)
OFFLOADS = (*choices.OFFLOADS, "nvme")
PRECISIONS = ("fp32", "bf16", "fp16")  # DeepSpeed's own names
BUCKET_ELEMENTS = 500_000_000  # DeepSpeed's own default: 2 GB of fp32, however small the model


def zero_config(
    stage: int,
    *,
    ranks: int,
    global_batch: int = 8,
    gradient_accumulation_steps: int = 1,
    lr: float = 1e-3,
    max_grad_norm: float = 0.0,
    precision: str = "fp32",
    offload: str = "none",
    nvme_path: str = "",
    bucket_elements: int = BUCKET_ELEMENTS,
    prefetch_elements: int = 0,
    compiled: bool = False,
) -> Config:
    """The configuration of one training, as plain JSON.

    Args:
        stage: 0 shards nothing, 1 the optimizer, 2 gradients too, 3 weights too.
        ranks: how many there will be; the batch is divided by them.
        global_batch: sequences in one optimizer step, over all ranks and micro-batches.
        gradient_accumulation_steps: micro-batches a rank.
        lr: AdamW's learning rate.
        max_grad_norm: longest gradient; 0 clips nothing. (DeepSpeed's own default is 1.0: it clips who does not say so.)
        precision: "fp32"; "bf16" or "fp16" keep weights in 2 bytes, with a copy in fp32 that the optimizer steps.
        offload: "optimizer" keeps its state in host memory (stages 1 to 3), "all" the weights as well (stage 3), "nvme"
            both on a disk (stage 3).
        nvme_path: folder for "nvme".
        bucket_elements: gradients that are reduced at once, and weights gathered at once; of stages 1 to 3.
        prefetch_elements: weights of stage 3 that are gathered ahead of their use. DeepSpeed's own default of 50 million is
            a layer of a large model; a model that is smaller is gathered whole, once a step, and never let go of between
            forward and backward.
        compiled: take DeepSpeed's own Adam, which it compiles on first use; else PyTorch's.
    """
    pick("offload", offload, OFFLOADS)
    pick("precision", precision, PRECISIONS)
    for name, number, least in (("bucket_elements", bucket_elements, 1), ("prefetch_elements", prefetch_elements, 0)):
        if type(number) is not int or number < least:
            raise ValueError(f"{name}={number}: give a whole number of at least {least}.")
    if max_grad_norm < 0:
        raise ValueError(f"max_grad_norm={max_grad_norm}: give the longest that a gradient may be, 0 to clip nothing.")
    micro_batch = micro_batch_size(
        steps=1, global_batch=global_batch, ranks=ranks, gradient_accumulation_steps=gradient_accumulation_steps
    )
    zero: Config = {"stage": stage}
    if stage in STAGES[1:]:
        zero |= {"reduce_bucket_size": bucket_elements, "allgather_bucket_size": bucket_elements}
    if stage == 3:
        del zero["allgather_bucket_size"]  # nothing is gathered after a step
        # a large model's ways at any size: no weight is too small to shard, or needed too soon to let go of
        zero |= {"stage3_prefetch_bucket_size": prefetch_elements, "stage3_max_reuse_distance": 0}
        zero |= {"stage3_param_persistence_threshold": 0}
    if offload != "none":
        place: Config = {"device": "nvme", "nvme_path": nvme_path} if offload == "nvme" else {"device": "cpu"}
        zero["offload_optimizer"] = dict(place)
        if offload != "optimizer":
            zero["offload_param"] = dict(place)
    config: Config = {
        "train_batch_size": global_batch,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": gradient_accumulation_steps,
        "gradient_clipping": max_grad_norm,
        "optimizer": adamw(lr),
        "zero_optimization": zero,
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    config = config if compiled else without_compiling(config)
    check_config(config, ranks=ranks)
    return config


def adamw(lr: float) -> Config:
    """The section "optimizer": AdamW as PyTorch has it (DeepSpeed's own decays no weights)."""
    return {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}}


def without_compiling(config: Config) -> Config:
    """The same training with PyTorch's Adam and ordinary memory, so that DeepSpeed compiles nothing: for ranks on CPUs.

    DeepSpeed's fused Adam takes minutes to compile on first use, and page-locked memory serves copies to a GPU only.
    """
    config = copy.deepcopy(config)
    optimizer, zero = config.get("optimizer"), config.get("zero_optimization")
    if isinstance(optimizer, dict):
        if str(optimizer.get("type")).lower() not in ("adam", "adamw"):
            raise ValueError(
                f"optimizer {optimizer.get('type')!r} needs parts that DeepSpeed compiles for a GPU: on CPU ranks take "
                '"Adam" or "AdamW".'
            )
        optimizer.setdefault("params", {})["torch_adam"] = True
    if isinstance(zero, dict):
        for name in ("offload_optimizer", "offload_param"):
            if isinstance(zero.get(name), dict):
                zero[name].setdefault("pin_memory", False)
                if name == "offload_optimizer" and zero[name].get("device") == "cpu":
                    config["zero_force_ds_cpu_optimizer"] = False
    return config


def read_config(path: str | Path) -> Config:
    """A configuration from a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"The DeepSpeed configuration {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ValueError(f"The DeepSpeed configuration {path} is no text file.") from None
    try:
        config = json.loads(text, object_pairs_hook=_no_key_twice)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds {_kind(config)}; a DeepSpeed configuration is an object: {{...}}.")
    return config


def _no_key_twice(pairs: list[tuple[str, Any]]) -> Config:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"The key {key!r} stands in the configuration twice; only one of its values would count.")
    return dict(pairs)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def batch_sizes(config: Config, *, ranks: int) -> tuple[int, int, int]:
    """(global batch, micro-batch, accumulation); what is missing follows from the others, as in DeepSpeed."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        value = config.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} is {value!r}: give a whole number of at least 1.")
    whole, micro, gradient_accumulation_steps = (config.get(name) for name in names)
    if whole is None and micro is None:
        raise ValueError(f"The configuration has neither {names[0]} nor {names[1]}: DeepSpeed needs one of them.")
    if gradient_accumulation_steps is None:
        gradient_accumulation_steps = 1 if whole is None or micro is None else whole // (ranks * micro)
    if whole is None:
        whole = micro * gradient_accumulation_steps * ranks
    if micro is None:
        micro = whole // (ranks * gradient_accumulation_steps)
    if whole != micro * gradient_accumulation_steps * ranks:
        raise ValueError(
            f"The batch sizes disagree: train_batch_size {whole} is not {micro} (train_micro_batch_size_per_gpu) x "
            f"{gradient_accumulation_steps} (gradient_accumulation_steps) x {ranks} ranks = {micro * gradient_accumulation_steps * ranks}."
        )
    return whole, micro, gradient_accumulation_steps


def check_config(config: Config, *, ranks: int, parameters: int = 0, free: int | None = None) -> None:
    """Nothing, or a ValueError that says in one sentence what is wrong with a configuration for so many ranks.

    Beyond what DeepSpeed refuses: keys that it reads past in silence, and what it would only notice after its ranks are
    up and the model is built.

    Args:
        config: as `json.load` gives it.
        ranks: how many there will be, all on this machine.
        parameters: trained weights of the model, to see whether what is offloaded fits; 0 does not look.
        free: bytes of host memory that may be filled; None asks the system.
    """
    if not isinstance(config, dict):
        raise ValueError(f"A DeepSpeed configuration is an object, {{...}}; this is {_kind(config)}.")
    zero = config.get("zero_optimization") or {}
    if isinstance(config.get("zero_optimization"), bool):
        raise ValueError('"zero_optimization" is an object that names a stage, {"stage": 2}, no longer true or false.')
    check_keys(config)
    batch_sizes(config, ranks=ranks)
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in STAGES:
        raise ValueError(f"ZeRO has the stages 0, 1, 2 and 3, as whole numbers; {stage!r} is none of them.")
    if all((config.get(name) or {}).get("enabled") for name in ("fp16", "bf16")):
        raise ValueError("fp16 and bf16 are both enabled: weights are kept in one of the two.")
    for name, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        _check_offload(name, zero.get(name) or {}, stage, lowest)
    needed = host_bytes(config, parameters=parameters, ranks=ranks) * ranks
    if needed:
        if free is None:
            free = psutil.virtual_memory().available
        if needed > free:
            raise ValueError(
                f"What is offloaded takes {needed / 2**30:,.1f} GiB of host memory for {ranks} ranks and "
                f"{free / 2**30:,.1f} GiB are free: take fewer weights, or offload to nvme."
            )


def _check_offload(name: str, section: Config, stage: int, lowest: int) -> None:
    device = section.get("device", "none")
    if device not in ("none", "cpu", "nvme"):
        raise ValueError(f'{name}: there is no device {device!r} to offload to: take "cpu", "nvme" or "none".')
    if device == "none":
        return
    if stage < lowest:
        what = "the optimizer's state" if lowest == 1 else "the weights"
        raise ValueError(
            f"{name} needs stage {lowest} or above, and this is stage {stage}, which does not shard {what}."
        )
    if device == "nvme" and stage < 3:
        raise ValueError(f'{name} to "nvme" needs stage 3, and this is stage {stage}, which offloads to "cpu".')
    if device == "nvme" and not section.get("nvme_path"):
        raise ValueError(f'{name} to "nvme" needs an nvme_path: the folder on the disk.')


def host_bytes(config: Config, *, parameters: int, ranks: int) -> int:
    """Bytes that one rank keeps in host memory because of offloading; an estimate, padding left out.

    For the optimizer: its two moments, the copy of the weights that it steps and their gradients, in fp32; at stages 1 and
    2 besides a staging copy of the share, at stage 3 a second one of its gradients. For the weights: the share.
    """
    zero = config.get("zero_optimization") or {}
    low = 2 if any((config.get(name) or {}).get("enabled") for name in ("fp16", "bf16")) else 4
    each = 0
    if (zero.get("offload_optimizer") or {}).get("device") == "cpu":
        each += 4 + 8 + 4 + low
    if (zero.get("offload_param") or {}).get("device") == "cpu":
        each += low
    return -(-parameters // ranks) * each
