"""Moments and choices that not every run has, each against storages that a real model makes, most of them without memory.

Fake tensors have shapes and no memory (`course_lib.observe.fake`); what torch.compile keeps, and what FSDP2's ranks hold, is
counted on real ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest import mock

import cloudpickle
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from course_lib.launch import launch
from course_lib.memory import Shape, estimate, host_memory
from course_lib.memory.blocks import SYMBOLS, block
from course_lib.memory.phases import numerics_of, sizes
from course_lib.memory.settings import RunSettings
from course_lib.models import llama
from course_lib.observe import tensor_bytes
from course_lib.observe.fake import LiveStorages, fake_tensors
from course_lib.training import fsdp

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SHAPE = Shape(layers=4, hidden=256, heads=8, vocab=8192, kv_heads=2, intermediate=704)
BATCH, LENGTH = 2, 256
SIZES = {"micro_batch_size": BATCH, "seq_len": LENGTH, "precision": "bf16"}


def highest(model: nn.Module, step: Callable[[torch.Tensor], Any], *more: torch.Tensor, batch: int = BATCH) -> int:
    """The most bytes at once while `step` runs on `batch` sequences."""
    with LiveStorages() as live:
        ids = torch.zeros(batch, LENGTH, dtype=torch.long)
        live.hold([*model.parameters(), *model.buffers(), *more])
        live.reset()
        step(ids)
        return live.highest


def peak_of(need, *names: str) -> int:
    return max(size for name, size in need.phases.items() if name in names or not names)


def test_evaluation_writes_all_logits_out() -> None:
    with fake_tensors():
        model = llama(SHAPE, dtype=torch.bfloat16).eval()
        with torch.no_grad():
            seen = highest(model, lambda ids: model(input_ids=ids, labels=ids).loss, batch=16)
    need = estimate(SHAPE, **SIZES, optimizer="sgd", eval_micro_batch_size=16)
    assert need.phases["evaluation"] == pytest.approx(seen, rel=0.02) and need.peak_phase == "evaluation"
    fused = estimate(SHAPE, **SIZES, optimizer="sgd", loss="fused", eval_micro_batch_size=16)
    assert fused.phases["evaluation"] == need.phases["evaluation"]
    sharded = estimate(SHAPE, **SIZES, strategy="fsdp", ranks=4, eval_micro_batch_size=16)
    assert sharded.phases["evaluation"] > need.phases["evaluation"] - need.weights  # what is gathered is there as well


def test_stepping_in_backward_leaves_one_gradient_at_a_time() -> None:
    shape = replace(SHAPE, vocab=512)  # so that the loss is not the peak
    with fake_tensors():
        model = llama(shape, dtype=torch.bfloat16)
        for parameter in model.parameters():

            def step(parameter: torch.Tensor) -> None:
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        seen = highest(model, lambda ids: model(input_ids=ids, labels=ids).loss.backward())
    need = estimate(shape, **SIZES, optimizer="sgd", optimizer_in_backward=True)
    assert need.gradients == 0 and need.peak == pytest.approx(seen, rel=0.02)
    with_all = estimate(shape, **SIZES, optimizer="sgd").phases["backward of the first block"]
    assert need.phases["backward of the first block"] < with_all - 2 * 3 * shape.block_parameters


def test_a_chunked_loss_has_one_chunk_of_fp32_logits_at_a_time() -> None:
    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        chunks = [model.lm_head(part) for part in model.model(ids).last_hidden_state.chunk(8, dim=1)]
        parts = zip(chunks, ids.chunk(8, dim=1), strict=True)
        return sum(cross_entropy(part.float().flatten(0, 1), labels.flatten()) for part, labels in parts)

    with fake_tensors():
        model = llama(SHAPE, dtype=torch.bfloat16)
        seen = highest(model, lambda ids: loss(model, ids).backward())
    need = estimate(SHAPE, **SIZES, optimizer="sgd", loss="chunked")
    assert need.peak == pytest.approx(seen, rel=0.03)
    assert need.peak < estimate(SHAPE, **SIZES, optimizer="sgd").peak


@pytest.mark.parametrize("held", [0, 2, 4])
def test_logits_that_the_loop_holds_are_there_in_backward(held) -> None:
    def step(ids: torch.Tensor) -> None:
        out = model(input_ids=ids, labels=ids)
        logits = {0: None, 2: out.logits, 4: out.logits.float() if held == 4 else None}[held]
        loss = out.loss
        del out
        loss.backward()
        del logits

    with fake_tensors():
        model = llama(SHAPE, dtype=torch.bfloat16)
        seen = highest(model, step)
    need = estimate(SHAPE, **SIZES, optimizer="sgd", keeps_logits=held)
    assert need.peak == pytest.approx(seen, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_that_are_trained_beside_adapters_count(tied) -> None:
    shape = Shape(layers=2, hidden=128, heads=4, vocab=8192, kv_heads=2, intermediate=352, tied=tied)
    saved = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    adapters = LoraConfig(r=16, target_modules="all-linear", modules_to_save=saved)
    model = get_peft_model(llama(shape, dtype=torch.bfloat16), adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = tensor_bytes([*model.parameters(), *model.buffers()])
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = tensor_bytes(value for state in optimizer.state.values() for value in state.values())
    need = estimate(shape, method="lora", train_embeddings=True, **SIZES | {"precision": "bf16-mixed"})
    assert need.num_trainable == sum(parameter.numel() for parameter in trained)
    assert need.weights == pytest.approx(weights, abs=1024)
    assert need.optimizer == states
    plain = estimate(shape, method="lora", **SIZES | {"precision": "bf16-mixed"})
    assert need.peak - plain.peak > 3 * 2 * shape.vocab * shape.hidden


def test_a_cache_is_kept_until_the_loss_is_there() -> None:
    peaks = []
    for cached in (False, True):
        config = LlamaConfig(
            vocab_size=64, hidden_size=256, intermediate_size=64, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=8, use_cache=cached, attn_implementation="sdpa",
        )  # fmt: skip
        with fake_tensors():
            model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
            kept: list[Any] = []
            peaks.append(highest(model, lambda ids, model=model, kept=kept: kept.append(model(input_ids=ids).logits)))
    shape = Shape(layers=8, hidden=256, heads=8, vocab=64, intermediate=64)
    more = [
        estimate(shape, activation_checkpointing="full", use_cache=cached, **SIZES).phases["forward of the last block"]
        for cached in (False, True)
    ]
    assert more[1] - more[0] == pytest.approx(peaks[1] - peaks[0], rel=0.15) and more[1] > more[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_block_keeps_what_was_estimated(dtype) -> None:
    """By the partitioner of torch.compile, which decides what is kept and what is computed again; no code is generated."""
    model = llama(SHAPE, dtype=dtype)
    body = model.model.layers[1]
    body.forward = torch.compile(body.forward, backend="aot_eager_decomp_partition")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    inside: list[bool] = []
    body.register_forward_pre_hook(lambda *_: inside.append(True))
    body.register_forward_hook(lambda *_: inside.clear())
    ids = torch.randint(0, SHAPE.vocab, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(input_ids=ids)
    torch._dynamo.reset()
    settings = RunSettings(**SIZES | {"precision": "fp32" if dtype is torch.float32 else "bf16", "compile": True})
    tape, _ = block(numerics_of(settings.run, SHAPE))
    elements = sizes(SHAPE, settings, 0).elements
    counted = sum(each * elements[SYMBOLS.index(symbol)] for symbol, each in tape.saved().items())
    seen = sum(storage.nbytes() for storage in kept.values())
    assert counted == pytest.approx(seen, rel=0.02)


def test_transformers_4_copies_the_logits_once_more() -> None:
    small, large = (estimate("llama-3.2-1b", transformers=version, **SIZES) for version in (5, 4))
    rows = BATCH * LENGTH * 128_256
    assert large.phases["the loss"] - small.phases["the loss"] == 4 * rows  # fp32, without the last row of each


def test_states_are_shared_by_those_that_work_on_one_sequence() -> None:
    how = {"strategy": "fsdp", "seq_len": 4096, "precision": "bf16-mixed"}
    two = estimate("llama-3.1-8b", ranks=2, context_parallel=4, **how)
    eight = estimate("llama-3.1-8b", ranks=8, **how)
    assert two.weights == eight.weights and two.optimizer == eight.optimizer
    assert two.activations < eight.activations / 3


DEEP, TIED = replace(SHAPE, layers=8, vocab=512), replace(SHAPE, tied=True)
REDUCED_EACH = [  # (shape, micro-batches, precision, reshard_after_forward): each has its peak at another moment
    (SHAPE, 2, "fp32", True),
    (SHAPE, 3, "bf16-mixed", True),
    (SHAPE, 3, "fp32", False),
    (DEEP, 2, "fp32", True),
]
REDUCED_AT_LAST = [
    (DEEP, 2, "bf16-mixed", True),
    (DEEP, 3, "bf16-mixed", False),
    (DEEP, 3, "bf16", True),
    (SHAPE, 2, "bf16-mixed", True),  # at the embedding's gradient, of the last micro-batch
    (SHAPE, 3, "bf16-mixed", True),  # and of one between
    (TIED, 1, "bf16-mixed", True),
    (TIED, 3, "bf16-mixed", True),
    (TIED, 3, "fp32", True),
]


def peaks(cases: list[tuple[Shape, int, str, bool]], each: bool, seq_len: int = 16) -> list[int]:
    """On a rank: the bytes at the peak of a step of FSDP2; `each`: no micro-batch is kept from its reduce-scatter."""
    found = []
    for shape, micro_batches, precision, reshard in cases:
        with ExitStack() as patches:
            sharded = partial(fully_shard, reshard_after_forward=reshard)
            patches.enter_context(mock.patch.object(fsdp, "fully_shard", sharded))
            if each:
                patches.enter_context(mock.patch.object(FSDPModule, "set_requires_gradient_sync"))
            run = fsdp.train(
                partial(llama, shape, dtype=torch.bfloat16 if precision == "bf16" else torch.float32),
                steps=2,
                global_batch=2 * micro_batches,
                seq_len=seq_len,
                gradient_accumulation_steps=micro_batches,
                bf16=precision == "bf16-mixed",
            )
        found.append(run.memory["peak"])
    return found


ON_TWO_RANKS: dict[str, Any] = {"strategy": "fsdp", "ranks": 2, "seq_len": 16, "device": "cpu"}


def test_sums_of_micro_batches_that_are_reduced_are_shards(private_tmp) -> None:
    run = launch(peaks, REDUCED_EACH, True, ranks=2, quiet=True, timeout=300)
    for (shape, micro_batches, precision, reshard), *seen in zip(REDUCED_EACH, *run.results, strict=True):
        how = ON_TWO_RANKS | {"precision": precision, "reshard_after_forward": reshard}
        need = estimate(shape, **how, num_microbatches=micro_batches, reduce_each_micro_batch=True)
        assert seen == pytest.approx([need.peak] * 2, rel=0.005), need.phases  # 5 % are allowed
        alone = estimate(shape, **how)
        assert need.phases["the loss"] - alone.phases["the loss"] == need.gradients
        assert asdict(estimate(shape, **how, reduce_each_micro_batch=True)) == asdict(alone)


def test_sums_of_micro_batches_that_wait_are_whole_and_fp32_under_mixed_precision(private_tmp) -> None:
    run = launch(peaks, REDUCED_AT_LAST, False, ranks=2, quiet=True, timeout=300)
    for (shape, micro_batches, precision, reshard), *seen in zip(REDUCED_AT_LAST, *run.results, strict=True):
        how = ON_TWO_RANKS | {"precision": precision, "reshard_after_forward": reshard}
        need = estimate(shape, **how, num_microbatches=micro_batches)
        peak = need.peak
        if precision == "bf16-mixed" and micro_batches > 1 and not shape.tied:
            # a CPU, not a GPU, casts a bf16 gradient before it adds it to fp32 sums
            cast = 4 * shape.vocab * shape.hidden
            peak = max(peak, need.phases["gradient of the embedding"] + cast)
        assert seen == pytest.approx([peak] * 2, rel=0.005), need.phases  # 5 % are allowed


@pytest.mark.parametrize(("precision", "width"), [("bf16-mixed", 4), ("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_whole_sums_are_there_at_the_loss(method, precision, width) -> None:
    one, two = (
        estimate(SHAPE, **ON_TWO_RANKS, method=method, precision=precision, num_microbatches=each) for each in (1, 2)
    )
    assert two.phases["the loss"] - one.phases["the loss"] == width * one.num_trainable


def test_the_host_holds_what_is_loaded_and_what_is_offloaded() -> None:
    shape = Shape(layers=4, hidden=256, heads=8, vocab=8192)
    n = shape.parameters

    def of(per_node: int, **settings) -> tuple[int, int]:
        return tuple(host_memory(shape, RunSettings(**settings), per_node))

    assert of(8) == (0, 0)  # tensors go to the card one by one
    assert of(8, loading="whole", strategy="ddp", ranks=16) == (8 * 2 * n, 0)
    assert of(8, strategy="zero3", ranks=4) == (2 * n, 0)
    assert of(8, strategy="zero3", ranks=16, offload="optimizer") == (2 * n, 16 * n // 2)
    assert of(8, strategy="zero3", ranks=16, offload="all") == (2 * n, 18 * n // 2)
    assert of(8, strategy="fsdp", ranks=8, offload="all") == (2 * n, 16 * n)  # fp32 weight, gradient, two moments
    assert of(8, strategy="fsdp", ranks=8, offload="all", precision="bf16") == (2 * n, 8 * n)
    paged = of(8, optimizer="paged_adamw8bit", precision="bf16")[1]
    assert 2 * n < paged < 2.1 * n  # two states of a byte, which may come here
    with pytest.raises(ValueError, match="loading"):
        estimate(shape, loading="lazy")
