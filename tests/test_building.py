"""How a fine-tune is put together: dtypes as documented, checkpointing that changes no loss, 4-bit weights, 8-bit states."""

from __future__ import annotations

import warnings

import pytest
import torch
from refusals import assert_refused

from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import tensor_bytes
from course_lib.observe.memory import optimizer_tensors
from course_lib.on_cpu.bitsandbytes import prepare_bitsandbytes
from course_lib.training.finetune import building
from course_lib.training.finetune.building import (
    autocast,
    build_model,
    build_optimizer,
    grad_scaler,
    prepare,
    quantization_constants,
    trainable,
)

FP32, BF16, FP16, UINT8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
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


def three_steps(method, precision="fp32", *, optimizer="adamw", **how):
    """Losses of three steps of a two-block model, the model, and its optimizer."""
    model = prepare(tiny_llama(layers=2), method=method, precision=precision, device="cpu", **how)
    optim = build_optimizer(trainable(model), optimizer, 1e-3 if method == "full" else 1e-2)
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
    model, _ = build_model("tiny", method="qlora", device="cpu")
    packed = [p for n, p in model.named_parameters() if "base_layer.weight" in n]
    weights = sum(p.quant_state.shape.numel() for p in packed)
    assert tensor_bytes(packed) == weights / 2
    scales = [t for p in packed for t in (p.quant_state.absmax, p.quant_state.state2.absmax)]
    # arXiv:2305.14314, section 3: 8 bits for 64 weights and 32 bits for 64 * 256 weights; here a matrix's last group of
    # 256 scales is not full, which the small matrices of this model feel.
    paper = weights / 64 + weights / 64 / 256 * 4
    assert paper <= tensor_bytes(scales) <= paper + 4 * 28
    assert {id(t) for t in scales} <= {id(t) for t in quantization_constants(model)}


def test_optimizers_are_what_their_names_say():
    for name in ("adamw8bit", "paged_adamw8bit"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the paged one's fall-back on a CPU must not reach a page
            losses, _, optim = three_steps("full", optimizer=name)
        assert losses[-1] < losses[0] - 0.05
        kinds = {(p.numel() >= 4096, state["state1"].dtype, state["state2"].dtype) for p, state in optim.state.items()}
        assert kinds == {(True, UINT8, UINT8), (False, FP32, FP32)}, name  # small tensors stay whole
    adamw = build_optimizer(iter([torch.nn.Parameter(torch.ones(8))]), "adamw", 0.25)
    assert type(adamw) is torch.optim.AdamW and adamw.defaults["fused"] and adamw.defaults["lr"] == 0.25
    assert not optimizer_tensors(three_steps("full", optimizer="sgd")[2])


def test_only_fp16_mixed_scales_its_loss_and_only_mixed_precisions_autocast():
    for precision, dtype in {"bf16-mixed": BF16, "fp16-mixed": FP16, "bf16": FP32, "fp32": FP32}.items():
        assert grad_scaler(precision, "cpu").is_enabled() == (precision == "fp16-mixed")
        with autocast(precision, "cpu"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype, precision


def test_choices_that_do_not_exist_or_fit_are_refused(monkeypatch):
    choices = {
        "lora_rank=0": dict(method="qlora", lora_rank=0),
        "lora_rank=-1": dict(method="lora", lora_rank=-1),
        "'qlora'": dict(method="q-lora"),
        "'fp16-mixed'": dict(precision="fp16"),
        "'flash'": dict(attention="flashattention"),
        "selective": dict(activation_checkpointing="blocks of eight"),
    }
    rows = [
        (lambda how=how: build_model("tiny", device="cpu", **how), ValueError, word) for word, how in choices.items()
    ]
    assert_refused([*rows, (lambda: build_optimizer([], "adam8bit", 1e-3), ValueError, "'adamw8bit'")])
    # a card without bf16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert_refused([(lambda: build_model("tiny", precision="bf16-mixed", device="cuda"), ValueError, "fp16-mixed")])
    assert building.best_precision("cuda") == "fp16-mixed" and building.best_precision("cpu") == "fp32"
