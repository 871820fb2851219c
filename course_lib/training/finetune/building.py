"""Build a fine-tuning run on one device: weights, precision, adapters, activation checkpointing, optimizer.

Which dtype every tensor has (16 is bf16 or fp16, whichever the precision names):

    method  precision   weights                  adapters  gradients    computes in  scaler
    full    fp32        fp32                     -         fp32         fp32         no
    full    16-mixed    fp32                     -         fp32         16           fp16 only
    full    bf16        bf16                     -         bf16         bf16         no
    lora    fp32        fp32, frozen             fp32      fp32         fp32         no
    lora    16-mixed    16, frozen               fp32      fp32         16           fp16 only
    lora    bf16        bf16, frozen             bf16      bf16         bf16         no
    qlora   any         as lora's; the blocks' linears in NF4, frozen, whatever the precision

NF4 takes one byte for two weights, one byte for the scale of each 64 weights, an fp32 for each 256 of these scales, and
one fp32 offset per matrix. The embedding, the norms and lm_head are not quantized. Buffers (rotary frequencies) stay fp32. Adam's
moments have their parameter's dtype; 8-bit ones are uint8, fp32 for tensors below 4,096 numbers. Nothing else is
upcast: PEFT's `prepare_model_for_kbit_training` and its `autocast_adapter_dtype`, which do that silently, are not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from course_lib.choices import check_choice
from course_lib.launch import rank_device
from course_lib.models import load, tiny_llama
from course_lib.on_cpu.bitsandbytes import prepare_bitsandbytes
from course_lib.training.finetune.activation_checkpointing import set_checkpointing

ATTENTIONS = {"flash": "sdpa", "eager": "eager"}  # sdpa picks a kernel that never writes the T x T scores


class Dtypes(NamedTuple):
    """Of the weights as loaded, of what is trained, and of what matrix products compute in."""

    weights: torch.dtype
    trained: torch.dtype
    compute: torch.dtype


def dtypes(method: str, precision: str) -> Dtypes:
    """The table above. Raises ValueError for an unknown method or precision."""
    check_choice("method", method)
    check_choice("precision", precision)
    if precision == "fp32":
        return Dtypes(torch.float32, torch.float32, torch.float32)
    if precision == "bf16":
        return Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    compute = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    return Dtypes(torch.float32 if method == "full" else compute, torch.float32, compute)


def build_model(
    name: str,
    *,
    method: str = "full",
    precision: str = "fp32",
    attention: str = "flash",
    activation_checkpointing: str = "none",
    lora_rank: int = 16,
    lora_alpha: float = 32,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> tuple[Any, Any]:
    """A model ready to be trained, in training mode and on its device, and its tokenizer.

    Args:
        name: as in `course_lib.models.load`: "tiny", "smollm2", a folder, a hub id.
        method: "full" trains every weight, "lora" adapters beside every linear layer of the blocks, "qlora" the same
            beside weights in NF4.
        precision: "fp32", "bf16-mixed", "fp16-mixed", "bf16"; see the table on top. Mixed ones compute under `autocast`.
        attention: "flash" (transformers' "sdpa") or "eager", which writes the T x T scores.
        activation_checkpointing: "none", "selective", "full"; see `course_lib.training.finetune.activation_checkpointing`.
        lora_rank, lora_alpha: an adapter adds lora_alpha / lora_rank * B(A(x)).
        seed: of the adapters, and of the tiny model's weights.
        device: None takes the GPU where there is one.

    Raises:
        ValueError: a choice that does not exist or does not fit this device or method.
        course_lib.models.ModelNotAvailable: the model is not to be had.
    """
    device = pick_device(device)
    check(
        method=method,
        precision=precision,
        attention=attention,
        activation_checkpointing=activation_checkpointing,
        lora_rank=lora_rank,
        device=device,
    )
    model, tokenizer = load(name, dtype=torch.float32 if name == "tiny" else dtypes(method, precision).weights)
    if name == "tiny":
        model = tiny_llama(seed=seed)
    return prepare(
        model,
        method=method,
        precision=precision,
        attention=attention,
        activation_checkpointing=activation_checkpointing,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        seed=seed,
        device=device,
    ), tokenizer


def prepare(
    model: Any,
    *,
    method: str = "full",
    precision: str = "fp32",
    attention: str = "flash",
    activation_checkpointing: str = "none",
    lora_rank: int = 16,
    lora_alpha: float = 32,
    seed: int = 0,
    device: str | torch.device | None = None,
) -> Any:
    """What `build_model` does to a model that is loaded already. The model given is changed, not copied."""
    device = pick_device(device)
    check(
        method=method,
        precision=precision,
        attention=attention,
        activation_checkpointing=activation_checkpointing,
        lora_rank=lora_rank,
        device=device,
    )
    kinds = dtypes(method, precision)
    model.config.use_cache = False  # keys and values of earlier tokens: for generating, not for training
    model.set_attn_implementation(ATTENTIONS[attention])
    cast_parameters(model.parameters(), kinds.weights)
    if method == "qlora":
        quantize_linears(model, kinds.compute, device)
    model.to(device)
    if method != "full":
        model = add_adapters(model, lora_rank, lora_alpha, kinds.trained, seed)
    set_checkpointing(model, activation_checkpointing)
    return model.train()


def cast_parameters(parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Cast in place. `model.to(dtype)` would cast the rotary frequencies too, which lose their long wavelengths in bf16."""
    for parameter in parameters:
        parameter.data = parameter.data.to(dtype)


def quantize_linears(model: torch.nn.Module, compute: torch.dtype, device: torch.device) -> None:
    """Put each linear layer of the model, `lm_head` left out, in NF4 with double quantization, on `device`.

    One matrix at a time: the whole model never lies on the device unquantized. `compute` is the dtype that weights are
    unpacked to for a product. They are packed as uint8, which FSDP2 gathers as it is. Paper: QLoRA (arXiv:2305.14314).
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    prepare_bitsandbytes()
    linears = [(name, module) for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    for name, linear in linears:
        if name.split(".")[-1] == "lm_head":  # often the embedding itself; and the last layer forgives rounding least
            continue
        packed = Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=compute,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        packed.weight = Params4bit(
            linear.weight.data,
            requires_grad=False,
            compress_statistics=True,
            quant_type="nf4",
            module=packed,
        )
        packed.bias = linear.bias
        # On a CPU with AVX512-BF16 an evaluation would reorder the weights in place, into bytes that nothing else reads.
        packed.support_avx512bf16_for_cpu = False
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, packed.to(device))  # it is the move that quantizes
    model.is_loaded_in_4bit = True  # PEFT asks this before it takes its layer for 4-bit weights


def quantization_constants(model: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors of NF4 that are neither parameters nor buffers: scales, scales of scales, offsets, code tables."""
    found = []
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            found += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return found


def add_adapters(model: Any, rank: int, alpha: float, dtype: torch.dtype, seed: int) -> Any:
    """Freeze the model and put an adapter beside every linear layer of the blocks; B starts at 0, so nothing changes yet."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]), peft_may_use_the_old_name():
        torch.manual_seed(seed)  # PEFT draws A on the CPU: the same numbers on every device
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    cast_parameters(trainable(model), dtype)
    return model


@contextmanager
def peft_may_use_the_old_name() -> Iterator[None]:
    """Around PEFT's wrapping: it asks transformers by a renamed attribute, whose warning nobody on the page can act on."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that get gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def build_optimizer(parameters: Iterable[torch.nn.Parameter], name: str, lr: float) -> torch.optim.Optimizer:
    """An optimizer over `parameters`. Adam's states: fp32 as the parameters are, or 8-bit (arXiv:2110.02861).

    "adamw" is fused, so a step needs no temporary tensors. The 8-bit ones keep fp32 states for tensors below 4,096
    numbers, bitsandbytes' own exception. "paged_adamw8bit" has its states in memory that CUDA moves to the host when the
    card is full; on a CPU it is "adamw8bit". "sgd" has no state. Raises ValueError for any other name, also for
    those that only the memory model knows.
    """
    check_choice("optimizer", name)
    parameters = list(parameters)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, fused=True)
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr)
    if "8bit" not in name:
        raise ValueError(f"optimizer={name!r}: the memory model knows it, but no program here builds it: take adamw.")
    import bitsandbytes

    if name == "paged_adamw8bit":
        # Known, said above, and nothing that a reader on a CPU could do about: there is no card to page out of.
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU", UserWarning)
        return bitsandbytes.optim.PagedAdamW8bit(parameters, lr=lr)
    return bitsandbytes.optim.AdamW8bit(parameters, lr=lr)


def autocast(precision: str, device: str | torch.device) -> torch.autocast:
    """Around forward pass and loss: matrix products in 16 bits under a mixed precision, nothing at all under others."""
    check_choice("precision", precision)
    mixed = precision.endswith("-mixed")
    compute = torch.float16 if precision == "fp16-mixed" else torch.bfloat16
    return torch.autocast(torch.device(device).type, dtype=compute, enabled=mixed)


def grad_scaler(precision: str, device: str | torch.device) -> torch.amp.GradScaler:
    """Keeps small gradients above fp16's smallest number; for other precisions it passes everything through."""
    check_choice("precision", precision)
    return torch.amp.GradScaler(torch.device(device).type, enabled=precision == "fp16-mixed")


def best_precision(device: str | torch.device | None = None) -> str:
    """fp32 on a CPU, where 16 bits are slower; on a GPU bf16-mixed, or fp16-mixed where the card has no bf16 (T4)."""
    if pick_device(device).type != "cuda":
        return "fp32"
    return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16-mixed"


def pick_device(device: str | torch.device | None) -> torch.device:
    """Without a device: a rank's own, else the GPU where there is one."""
    if device is None and torch.distributed.is_initialized():
        return rank_device()
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def check(
    *, method: str, precision: str, attention: str, activation_checkpointing: str, lora_rank: int, device: torch.device
) -> None:
    """Raise ValueError, one sentence, for choices that do not exist or do not go together on this device."""
    check_choice("method", method)
    check_choice("precision", precision)
    check_choice("attention", attention)
    check_choice("activation_checkpointing", activation_checkpointing)
    if method == "qlora" and lora_rank == 0:
        raise ValueError(
            "lora_rank=0 leaves qlora nothing to train, for 4-bit weights cannot be: give a rank such as 16."
        )
    if method != "full" and lora_rank < 1:
        raise ValueError(f"lora_rank={lora_rank}: give a whole number of at least 1, or method='full'.")
    wants_bf16 = precision in ("bf16", "bf16-mixed")
    if wants_bf16 and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"precision={precision!r}: this card has no bf16: use fp16-mixed.")
