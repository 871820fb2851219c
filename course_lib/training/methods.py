"""Full, LoRA, QLoRA: a loaded model made ready for training, with every tensor in a dtype that is known.

16 is bf16 or fp16, whichever the precision names; fp16-mixed also needs a `GradScaler`:

    method  precision   weights                  adapters  gradients    computes in
    full    fp32        fp32                     -         fp32         fp32
    full    16-mixed    fp32                     -         fp32         16
    full    bf16        bf16                     -         bf16         bf16
    lora    fp32        fp32, frozen             fp32      fp32         fp32
    lora    16-mixed    16, frozen               fp32      fp32         16
    lora    bf16        bf16, frozen             bf16      bf16         bf16
    qlora   any         as lora's; the blocks' linears in NF4, frozen, whatever the precision

NF4 takes one byte for two weights, one byte for the scale of each 64 weights, an fp32 for each 256 of these scales, and
one fp32 offset per matrix. The embedding, the norms and lm_head are not quantized. Buffers (rotary frequencies) stay
fp32. Nothing is upcast in silence, as PEFT's `prepare_model_for_kbit_training` and its `autocast_adapter_dtype` would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from course_lib.launch import rank_device
from course_lib.on_cpu.bitsandbytes import prepare_bitsandbytes
from course_lib.training.activation_checkpointing import set_checkpointing

ATTENTIONS = {"flash": "sdpa", "eager": "eager"}  # sdpa picks a kernel that never writes the T x T scores


class Dtypes(NamedTuple):
    """Of the weights as loaded, of what is trained, and of what matrix products compute in."""

    weights: torch.dtype
    trained: torch.dtype
    compute: torch.dtype


def dtypes(method: str, precision: str) -> Dtypes:
    """The table above."""
    if precision == "fp32":
        return Dtypes(torch.float32, torch.float32, torch.float32)
    if precision == "bf16":
        return Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    compute = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    return Dtypes(torch.float32 if method == "full" else compute, torch.float32, compute)


def prepare(
    model: Any,
    *,
    method: str = "full",
    precision: str = "fp32",
    attention: str = "flash",
    activation_checkpointing: str = "none",
    lora_rank: int = 16,
    device: str | torch.device | None = None,
) -> Any:
    """The model, changed and not copied, in training mode and on its device; with adapters in PEFT's wrapper.

    Args:
        model: a decoder of transformers, in fp32 or in the dtype of its weights.
        method: "full" trains every weight, "lora" adapters beside every linear layer of the blocks, "qlora" the same
            beside weights in NF4.
        precision: "fp32", "bf16-mixed", "fp16-mixed", "bf16"; see the table on top. Mixed ones compute under `autocast`.
        attention: "flash" (transformers' "sdpa") or "eager", which writes the T x T scores.
        activation_checkpointing: "none", "selective", "full"; see `course_lib.training.activation_checkpointing`.
        lora_rank: an adapter adds 32 / lora_rank * B(A(x)).
        device: None takes a rank's own, and the CPU where there are no ranks.
    """
    device = torch.device(device or (rank_device() if dist.is_initialized() else "cpu"))
    kinds = dtypes(method, precision)
    model.config.use_cache = False  # keys and values of earlier tokens: for generating, not for training
    model.set_attn_implementation(ATTENTIONS[attention])
    cast_parameters(model.parameters(), kinds.weights)
    if method == "qlora":
        quantize_linears(model, kinds.compute, device)
    model.to(device)
    if method != "full":
        model = add_adapters(model, lora_rank, kinds.trained)
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


def add_adapters(model: Any, rank: int, dtype: torch.dtype) -> Any:
    """Freeze the model and put an adapter beside every linear layer of the blocks; B starts at 0, so nothing changes yet."""
    from peft import LoraConfig, get_peft_model

    prepare_bitsandbytes()
    config = LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # PEFT draws A on the CPU: the same numbers on every device
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    cast_parameters(trainable(model), dtype)
    return model


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that get gradients."""
    return [p for p in model.parameters() if p.requires_grad]


def autocast(precision: str, device: str | torch.device) -> torch.autocast:
    """Around forward pass and loss: matrix products in 16 bits under a mixed precision, nothing at all under others."""
    compute = torch.float16 if precision == "fp16-mixed" else torch.bfloat16
    return torch.autocast(torch.device(device).type, dtype=compute, enabled=precision.endswith("-mixed"))
