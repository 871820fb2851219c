"""Full, LoRA, QLoRA: dtypes as documented, checkpointing that changes no loss, the bytes of NF4."""

from __future__ import annotations

import pytest
import torch

from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import tensor_bytes
from course_lib.observe.memory import optimizer_tensors
from course_lib.on_cpu.bitsandbytes import prepare_bitsandbytes
from course_lib.training.methods import autocast, prepare, quantization_constants, trainable

FP32, BF16, UINT8 = torch.float32, torch.bfloat16, torch.uint8
# (method, precision): linear weights of the blocks, the other weights, what is trained
DTYPES = {
    ("full", "fp32"): (FP32, FP32, FP32),
    ("full", "bf16-mixed"): (FP32, FP32, FP32),
    ("full", "bf16"): (BF16, BF16, BF16),
    ("lora", "fp32"): (FP32, FP32, FP32),
    ("lora", "bf16-mixed"): (BF16, BF16, FP32),
    ("lora", "bf16"): (BF16, BF16, BF16),
    ("qlora", "fp32"): (UINT8, FP32, FP32),
    ("qlora", "bf16-mixed"): (UINT8, BF16, FP32),
    ("qlora", "bf16"): (UINT8, BF16, BF16),
}
pytestmark = pytest.mark.usefixtures("one_thread")


def three_steps(method, precision="fp32", **how):
    """Losses of three steps of a two-block model, the model, and its optimizer."""
    model = prepare(tiny_llama(layers=2), method=method, precision=precision, **how)
    optim = torch.optim.AdamW(trainable(model), lr=1e-3 if method == "full" else 1e-2, fused=True)
    losses = []
    batch = sample_batch(0, global_batch=2, seq_len=48)
    for _ in range(3):
        with autocast(precision, "cpu"):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optim.step()
        gradients = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        optim.zero_grad()
        losses.append(loss.item())
        assert gradients == {DTYPES[method, precision][2]}, (method, precision)
    return losses, model, optim


def test_every_tensor_has_the_dtype_of_the_table():
    for (method, precision), (linears, others, trained) in DTYPES.items():
        losses, model, optim = three_steps(method, precision)
        assert losses[-1] < losses[0] - 0.05  # it learns, so a lost gradient would show
        for name, parameter in model.named_parameters():
            weights = linears if "_proj" in name else others  # the blocks' linear layers are called q_proj, up_proj, …
            expected = trained if "lora_" in name else weights
            assert parameter.dtype == expected, (method, precision, name)
            assert parameter.requires_grad == (method == "full" or "lora_" in name), (method, precision, name)
        assert {buffer.dtype for buffer in model.buffers()} == {FP32}
        assert {t.dtype for t in optimizer_tensors(optim) if t.numel() > 1} == {trained}, (method, precision)


def test_checkpointing_changes_no_loss():
    """The same operations run again on the same numbers, so the losses are equal to the last bit. A block whose gradients
    went missing would change the second loss by 1e-2."""
    for method, precision in (("full", "fp32"), ("lora", "bf16-mixed"), ("qlora", "fp32")):
        plain = three_steps(method, precision)[0]
        for kind in ("selective", "full"):
            assert three_steps(method, precision, activation_checkpointing=kind)[0] == plain, (method, kind)


def test_nf4_unpacks_to_the_nearest_of_its_16_levels():
    """bitsandbytes' AVX-512 kernel takes other blocks' scales where rows are not whole blocks."""
    import bitsandbytes.functional as F

    prepare_bitsandbytes()
    for columns in (16, 48, 64, 104, 576):
        weight = torch.randn(64, columns, generator=torch.Generator().manual_seed(0))
        packed, state = F.quantize_4bit(weight, blocksize=64, quant_type="nf4")
        blocks = weight.reshape(-1, 64)
        scales = blocks.abs().amax(1, keepdim=True)
        levels = state.code[(blocks / scales).unsqueeze(-1).sub(state.code).abs().argmin(-1)]
        expected = (levels * scales).reshape(weight.shape)
        assert torch.allclose(F.dequantize_4bit(packed, state), expected, rtol=1e-5, atol=1e-6), columns


def test_nf4_takes_the_bytes_that_the_paper_says():
    model = prepare(tiny_llama(), method="qlora")
    packed = [p for n, p in model.named_parameters() if "base_layer.weight" in n]
    weights = sum(p.quant_state.shape.numel() for p in packed)
    assert tensor_bytes(packed) == weights / 2
    scales = [t for p in packed for t in (p.quant_state.absmax, p.quant_state.state2.absmax)]
    # arXiv:2305.14314, section 3: 8 bits for 64 weights and 32 bits for 64 * 256 weights; here a matrix's last group of
    # 256 scales is not full, which the small matrices of this model feel.
    paper = weights / 64 + weights / 64 / 256 * 4
    assert paper <= tensor_bytes(scales) <= paper + 4 * 28
    assert {id(t) for t in scales} <= {id(t) for t in quantization_constants(model)}
