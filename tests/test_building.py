"""How a fine-tune is put together: dtypes as documented, checkpointing that changes no loss, 8-bit states, clear refusals."""

from __future__ import annotations

import re
import warnings

import pytest
import torch

from course_lib.choices import METHODS, PRECISIONS
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe, tensor_bytes
from course_lib.observe.memory import optimizer_tensors
from course_lib.training.finetune import building, nf4_on_cpu
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
    ("full", "fp16-mixed"): (FP32, FP32, FP32),
    ("full", "bf16"): (BF16, BF16, BF16),
    ("lora", "fp32"): (FP32, FP32, FP32),
    ("lora", "bf16-mixed"): (BF16, BF16, FP32),
    ("lora", "fp16-mixed"): (FP16, FP16, FP32),
    ("lora", "bf16"): (BF16, BF16, BF16),
    ("qlora", "fp32"): (UINT8, FP32, FP32),
    ("qlora", "bf16-mixed"): (UINT8, BF16, FP32),
    ("qlora", "fp16-mixed"): (UINT8, FP16, FP32),
    ("qlora", "bf16"): (UINT8, BF16, BF16),
}
assert set(DTYPES) == {(m, p) for m in METHODS for p in PRECISIONS}


pytestmark = pytest.mark.usefixtures("one_thread")


def three_steps(method, precision, *, optimizer="adamw", measure=False, **how):
    """Losses of three steps of a two-block model, the model, its optimizer and what was observed."""
    model = prepare(tiny_llama(layers=2), method=method, precision=precision, device="cpu", **how)
    optim = build_optimizer(trainable(model), optimizer, 1e-3 if method == "full" else 1e-2)
    scaler = grad_scaler(precision, "cpu")
    seen = observe(model if measure else None, optim if measure else None)
    losses = []
    batch = sample_batch(0, global_batch=2, seq_len=48)
    for _ in range(3):
        with seen.step():
            with autocast(precision, "cpu"):
                loss = model(input_ids=batch, labels=batch).loss
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            frozen_gradients = [n for n, p in model.named_parameters() if not p.requires_grad and p.grad is not None]
            gradients = {p.grad.dtype for p in trainable(model)}
            optim.zero_grad()
        losses.append(loss.item())
        assert not frozen_gradients
        assert gradients == {DTYPES[method, precision][2]}
    return losses, model, optim, seen


@pytest.mark.parametrize(("method", "precision"), DTYPES)
def test_every_tensor_has_the_dtype_of_the_table(method, precision):
    plain, model, optim, _ = three_steps(method, precision)
    assert plain[-1] < plain[0] - 0.05  # it learns, so a lost gradient would show
    linears, others, trained = DTYPES[method, precision]
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            wanted = trained
        else:
            wanted = linears if "_proj" in name else others  # the blocks' linear layers are called q_proj, up_proj, …
        assert parameter.dtype == wanted, name
        assert parameter.requires_grad == (method == "full" or "lora_" in name), name
    assert {buffer.dtype for buffer in model.buffers()} == {FP32}
    assert {t.dtype for t in optimizer_tensors(optim) if t.numel() > 1} == {trained}


@pytest.mark.parametrize(("method", "precision"), [("full", "fp32"), ("lora", "bf16-mixed"), ("qlora", "fp16-mixed")])
def test_checkpointing_changes_no_loss(method, precision):
    """The same operations run again on the same numbers, so on a CPU the losses are equal to the last bit. A block whose
    gradients went missing would change the second loss by 1e-2."""
    plain = three_steps(method, precision)[0]
    for kind in ("selective", "full"):
        assert three_steps(method, precision, activation_checkpointing=kind)[0] == plain


@pytest.mark.parametrize("method", METHODS)
def test_checkpointing_and_flash_attention_lower_the_peak(method):
    def peak(**how):
        return three_steps(method, "fp32", measure=True, **how)[3].memory["peak"]

    none, selective, full = (peak(activation_checkpointing=kind) for kind in ("none", "selective", "full"))
    assert none > selective > full
    assert peak(attention="eager") > none


def test_selective_keeps_the_products_and_the_attention_and_recomputes_the_rest(monkeypatch):
    from course_lib.training.finetune import activation_checkpointing as checkpointing

    kept = {}
    policy = checkpointing.keep_what_was_dear

    def spy(context, op, *args, **kwargs):
        answer = policy(context, op, *args, **kwargs)
        if not context.is_recompute:
            kept.setdefault((op.name().split(".")[0], answer.name), []).append(args)
        return answer

    monkeypatch.setattr(checkpointing, "keep_what_was_dear", spy)
    three_steps("qlora", "fp32", activation_checkpointing="selective")
    steps, blocks, linears = 3, 2, 7
    assert len(kept["bitsandbytes::gemm_4bit", "MUST_SAVE"]) == steps * blocks * linears
    assert len(kept["aten::mm", "MUST_SAVE"]) == steps * blocks * linears  # LoRA's A
    assert len(kept["aten::mm", "PREFER_RECOMPUTE"]) == steps * blocks * linears  # LoRA's B
    assert len(kept["aten::_scaled_dot_product_flash_attention_for_cpu", "MUST_SAVE"]) == steps * blocks
    assert ("aten::silu", "MUST_SAVE") not in kept and ("aten::silu", "PREFER_RECOMPUTE") in kept


def test_an_adapter_changes_nothing_before_its_first_step_and_nothing_asks_the_embedding_for_a_gradient():
    batch = sample_batch(0, global_batch=2, seq_len=48)
    plain = tiny_llama(layers=2)(input_ids=batch).logits
    model = prepare(tiny_llama(layers=2), method="lora", activation_checkpointing="full", device="cpu")
    assert torch.equal(model(input_ids=batch).logits, plain)
    asked = []
    model.get_input_embeddings().register_forward_hook(lambda _, __, output: asked.append(output.requires_grad))
    model(input_ids=batch)
    assert asked == [False]


def test_the_same_seed_gives_the_same_adapters_and_leaves_the_callers_random_numbers_alone():
    torch.manual_seed(5)
    first, _ = build_model("tiny", method="lora", seed=3, device="cpu")
    after = torch.rand(1)
    second, _ = build_model("tiny", method="lora", seed=3, device="cpu")
    other, _ = build_model("tiny", method="lora", seed=4, device="cpu")
    torch.manual_seed(5)
    assert torch.rand(1) == after
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(trainable(first)[0], trainable(other)[0])


@pytest.mark.parametrize("columns", [16, 48, 64, 80, 104, 352, 576])
def test_nf4_unpacks_to_the_nearest_of_its_16_levels_on_every_cpu(columns):
    """bitsandbytes' AVX-512 kernel takes other blocks' scales where rows are not whole blocks."""
    import bitsandbytes.functional as F

    nf4_on_cpu.repair()
    weight = torch.randn(64, columns, generator=torch.Generator().manual_seed(0))
    packed, state = F.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    levels = state.code[(blocks / scales).unsqueeze(-1).sub(state.code).abs().argmin(-1)]
    torch.testing.assert_close(F.dequantize_4bit(packed, state), (levels * scales).reshape(weight.shape))


def test_nf4_takes_the_bytes_that_the_paper_says():
    model, _ = build_model("tiny", method="qlora", device="cpu")
    packed = [p for n, p in model.named_parameters() if "base_layer.weight" in n]
    weights = sum(p.quant_state.shape.numel() for p in packed)
    assert tensor_bytes(packed) == weights / 2
    state = packed[0].quant_state
    scales = [t for p in packed for t in (p.quant_state.absmax, p.quant_state.state2.absmax)]
    # arXiv:2305.14314, section 3: 8 bits for 64 weights and 32 bits for 64 * 256 weights; here a matrix's last group of
    # 256 scales is not full, which the small matrices of this model feel.
    assert state.absmax.dtype == UINT8 and state.absmax.numel() == state.shape.numel() / 64
    assert (
        weights / 64 + weights / 64 / 256 * 4 <= tensor_bytes(scales) <= weights / 64 + weights / 64 / 256 * 4 + 4 * 28
    )
    assert {id(t) for t in scales} <= {id(t) for t in quantization_constants(model)}


@pytest.mark.parametrize("name", ["adamw8bit", "paged_adamw8bit"])
def test_8_bit_states_are_8_bit_but_for_small_tensors(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the paged one's fall-back on a CPU must not reach a page
        losses, _, optim, _ = three_steps("full", "fp32", optimizer=name)
    assert losses[-1] < losses[0] - 0.05
    kinds = {(p.numel() >= 4096, state["state1"].dtype, state["state2"].dtype) for p, state in optim.state.items()}
    assert kinds == {(True, UINT8, UINT8), (False, FP32, FP32)}


def test_the_optimizers_are_what_their_names_say():
    weights = [torch.nn.Parameter(torch.ones(8))]
    adamw = build_optimizer(iter(weights), "adamw", 0.25)
    assert type(adamw) is torch.optim.AdamW and adamw.defaults["fused"] and adamw.defaults["lr"] == 0.25
    losses, _, sgd, _ = three_steps("full", "fp32", optimizer="sgd")
    assert not optimizer_tensors(sgd)


def test_only_fp16_mixed_scales_its_loss_and_only_mixed_precisions_autocast():
    for precision in PRECISIONS:
        assert grad_scaler(precision, "cpu").is_enabled() == (precision == "fp16-mixed")
        with autocast(precision, "cpu"):
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == {"bf16-mixed": BF16, "fp16-mixed": FP16}.get(precision, FP32)


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        (dict(method="qlora", lora_rank=0), "lora_rank=0 leaves qlora nothing to train"),
        (dict(method="lora", lora_rank=-1), "lora_rank=-1: give a whole number of at least 1"),
        (dict(method="q-lora"), "did you mean 'qlora'?"),
        (dict(precision="fp16"), "did you mean 'fp16-mixed'?"),
        (dict(attention="flashattention"), "did you mean 'flash'?"),
        (dict(activation_checkpointing="blocks of eight"), "choose one of none, selective, full"),
    ],
)
def test_choices_that_do_not_exist_or_fit_are_refused_in_a_sentence(choice, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        build_model("tiny", device="cpu", **choice)
    with pytest.raises(ValueError, match="did you mean 'adamw8bit'"):
        build_optimizer([], "adam8bit", 1e-3)


def test_a_card_without_bf16_is_told_what_to_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    for precision in ("bf16", "bf16-mixed"):
        with pytest.raises(ValueError, match="this card has no bf16: use fp16-mixed"):
            build_model("tiny", precision=precision, device="cuda")
    assert building.best_precision("cuda") == "fp16-mixed"
    assert building.best_precision("cpu") == "fp32"
