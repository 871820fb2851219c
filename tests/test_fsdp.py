"""FSDP2 against one rank on the whole batch: the same losses and norms, bytes and collectives as told, no fall-backs."""

from __future__ import annotations

import math
import sys
from collections import Counter
from functools import cache

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from parity import TOLERANCE, Runs, assert_same_training, off_by, one_rank
from refusals import assert_refused
from torch.distributed.fsdp import fully_shard

from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.training.finetune.building import prepare
from course_lib.training.sharded import accelerate_fsdp, fsdp, fsdp_sharding

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=3, global_batch=12, seq_len=32)
LAUNCHES = {  # a norm over one rank's shards alone would be off by 0.3
    2: {
        "plain": {},
        "no": dict(reshard_after_forward="no", offload=True),
        "whole": dict(wrap="whole"),
        "accumulate": dict(gradient_accumulation_steps=2, max_grad_norm=1.0),
        "every micro-batch": dict(gradient_accumulation_steps=2, sync_every_micro_batch=True, max_grad_norm=1.0),
        "checkpointing": dict(activation_checkpointing="full", prefetch=2),
        "lora, meta": dict(method="lora", meta_init=True),
        "qlora": dict(method="qlora"),
        "bf16-mixed": dict(precision="bf16-mixed"),
        "bf16": dict(precision="bf16"),
    },
    3: {"plain": dict(max_grad_norm=1.0)},  # 128 rows do not divide by 3
    4: {"2x2": dict(mesh="2x2", max_grad_norm=1.0), "2": dict(reshard_after_forward="2")},
}
SIXTEEN_BITS = {"bf16-mixed": 3e-3, "bf16": 1e-2}  # bf16 rounds to 4e-3
ROOT, BLOCK, ADAPTERS = 65_664 * 4, 184_576 * 4, 37_376 * 4  # bytes of embedding, last norm and head; of one block


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs(fsdp.train, LAUNCHES, SIZES)


@cache
def expected(method="full", max_grad_norm=0.0):
    """Losses and norms of one process on the whole batch."""
    net = prepare(tiny_llama(seed=0), method=method, device="cpu")
    return one_rank(net, **SIZES, max_grad_norm=max_grad_norm)


def test_ranks_train_as_one_does(runs):
    for ranks, name, how, outcomes in runs.every():
        losses, norms = expected(how.get("method", "full"), how.get("max_grad_norm", 0.0))
        tolerance = SIXTEEN_BITS.get(name, TOLERANCE)
        assert_same_training(outcomes, losses, f"{ranks}: {name}", tolerance)
        assert {o.wrapper[:4] for o in outcomes} == {"FSDP"}, name
        if norms:
            assert all(off_by(o.extra["gradient_norms"], norms) < tolerance for o in outcomes), (ranks, name)
            assert max(norms) > 1.0 and off_by(losses, expected()[0]) > TOLERANCE  # it did clip
        if name in SIXTEEN_BITS:
            assert off_by(outcomes[0].losses, losses) > 1e-7, f"{name} is fp32"


def parameters_of(how):
    """(shape, bytes a number, is it trained) of each parameter, from the model as one process has it."""
    method, precision = how.get("method", "full"), how.get("precision", "fp32")
    frozen = 2 if precision == "bf16" or "mixed" in precision and method != "full" else 4
    net = prepare(tiny_llama(seed=0), method="lora" if method == "qlora" else method, device="cpu")
    for name, p in net.named_parameters():
        size = 4 if p.requires_grad and precision != "bf16" else frozen
        packed = method == "qlora" and "base_layer" in name  # two weights a byte, which FSDP2 sees as any numbers
        yield ((p.numel() // 2 // size, 1) if packed else tuple(p.shape)), size, p.requires_grad


def at_rest(how, shards, rank):
    """(parameters, gradients, optimizer state) in bytes: every share padded to the largest, but for Adam's moments."""
    parameters = gradients = moments = 0
    for shape, size, trained in parameters_of(how):
        row, share = math.prod(shape[1:]) * size, math.ceil(shape[0] / shards)
        parameters += share * row
        if trained:
            gradients += share * row
            moments += 2 * max(0, min(share, shape[0] - share * rank)) * row + 4  # and a counter of steps
    return parameters + 2 * 16 * 4, gradients, moments  # two buffers of 16 rotary frequencies are whole on every rank


def test_what_lies_on_each_rank_to_the_byte(runs):
    for ranks, name, how, outcomes in runs.every():
        shards = 2 if "mesh" in how else ranks
        for rank, outcome in enumerate(outcomes):
            held = tuple(outcome.memory[what] for what in ("parameters", "gradients", "optimizer_state"))
            assert held == at_rest(how, shards, rank % shards), (ranks, name, rank)
    assert len({outcome.extra["local"] for outcome in runs.outcomes(3, "plain")}) == 2
    (constants,) = {outcome.extra["quantization_constants"] for outcome in runs.outcomes(2, "qlora")}
    assert constants > 40_000  # whole on every rank


def test_a_step_s_collectives_on_two_ranks(runs):
    again = [ROOT] + 8 * [BLOCK]  # a block forward and backward, the root once
    once = 4 * [BLOCK] + [ROOT]
    expected = {
        "plain": (again, once),
        "no": ([ROOT] + 4 * [BLOCK], once),
        "whole": (2 * [ROOT + 4 * BLOCK], [ROOT + 4 * BLOCK]),
        "accumulate": (2 * again, once),
        "every micro-batch": (2 * again, 2 * once),
        "checkpointing": (again, once),
        "lora, meta": ([ROOT] + 8 * [BLOCK + ADAPTERS], 4 * [ADAPTERS]),
        "bf16-mixed": ([size // 2 for size in again], once),
        "bf16": ([size // 2 for size in again], [size // 2 for size in once]),
    }
    for name, (gathers, scatters) in expected.items():
        step = runs.last_step(2, name, 1)
        assert [2 * c.bytes for c in step if c.kind == "all_gather"] == gathers, name
        assert [c.bytes for c in step if c.kind == "reduce_scatter"] == scatters, name
        rest = [(c.kind, c.bytes) for c in step if c.kind not in ("all_gather", "reduce_scatter")]
        assert rest == ([("all_reduce", 39 * 4)] if "max_grad_norm" in LAUNCHES[2][name] else [])  # a norm a parameter


def test_a_step_s_collectives_on_four_ranks(runs):
    among_neighbours = {
        ("all_gather", ROOT // 4, 4): 1,
        ("all_gather", BLOCK // 4, 4): 4,
        ("all_gather", BLOCK // 2, 2): 4,  # for the backward pass
        ("reduce_scatter", BLOCK, 4): 4,
        ("reduce_scatter", ROOT, 4): 1,
    }
    two_copies = {
        ("all_gather", ROOT // 2, 2): 1,
        ("all_gather", BLOCK // 2, 2): 8,
        ("reduce_scatter", BLOCK, 2): 4,
        ("reduce_scatter", ROOT, 2): 1,
        ("all_reduce", BLOCK // 2, 2): 4,
        ("all_reduce", ROOT // 2, 2): 1,
        ("all_reduce", 39 * 4, 2): 1,
    }
    for name, calls in {"2": among_neighbours, "2x2": two_copies}.items():
        assert Counter((c.kind, c.bytes, len(c.group)) for c in runs.last_step(4, name, 0)) == calls, name


def test_what_the_highest_moment_holds(runs):
    def highest(name, what="peak"):
        return runs.outcomes(2, name)[0].memory[what]

    assert highest("whole") > highest("plain") + BLOCK
    assert highest("checkpointing") < highest("plain")
    assert 5 * highest("checkpointing", "activations") < highest("plain", "activations")
    # between micro-batches every rank has whole gradients; activations, here half as many, are left out
    waiting = highest("accumulate") - highest("accumulate", "activations")
    assert waiting > highest("plain") - highest("plain", "activations") + 2 * BLOCK


# ------------------------------------------------------------------ asked once, on two ranks, in one launch
def tied_on_meta():
    """(are they one tensor, its local rows, loss) of a model whose head is its embedding, built on no rank but 0."""
    whole = tiny_llama(seed=0, tie_embeddings=True) if dist.get_rank() == 0 else None
    net = fsdp_sharding.on_meta(tiny_llama(seed=0, tie_embeddings=True) if whole is None else whole)
    net = fsdp_sharding.shard(net, mesh=fsdp_sharding.make_mesh("", "cpu"))
    fsdp_sharding.materialize(net, whole, torch.device("cpu"))
    tied = net.lm_head.weight is net.model.embed_tokens.weight
    batch = sample_batch(0, global_batch=2, seq_len=8)
    return tied, net.lm_head.weight.to_local().shape[0], net(input_ids=batch, labels=batch).loss.item()


def saved_and_resumed(folder):
    small = dict(global_batch=4, seq_len=8, layers=1)
    saving = dict(small, checkpoint_dir=folder)
    first = fsdp.train(**saving, steps=4, save_every=2, save_in_background=True).losses
    dist.barrier()
    resumed = fsdp.train(**saving, steps=6, resume=True)
    assert_refused([(lambda: fsdp.train(**{**saving, "seq_len": 16}, steps=6, resume=True), ValueError, "seq_len=16")])
    assert resumed.extra["first_step"] == 4
    # the same sums in the same order, in one process: bit for bit
    assert first + resumed.losses == fsdp.train(**small, steps=6).losses
    return tied_on_meta()


def test_a_run_goes_on_where_its_checkpoint_was_and_a_tied_head_stays_tied(private_tmp, tmp_path):
    batch = sample_batch(0, global_batch=2, seq_len=8)
    loss = tiny_llama(seed=0, tie_embeddings=True)(input_ids=batch, labels=batch).loss.item()
    for tied in launch(saved_and_resumed, str(tmp_path), ranks=2, quiet=True, threads=1, timeout=240).results:
        assert tied == (True, 128, pytest.approx(loss, rel=TOLERANCE))


def refuse():
    blocks_only, whole_head, early = (tiny_llama(layers=1) for _ in range(3))
    fully_shard(blocks_only.model.layers[0])
    fully_shard(whole_head, ignored_params={whole_head.lm_head.weight})
    optimizer = torch.optim.AdamW(early.parameters())  # before sharding: it steps tensors that are no one's
    fsdp_sharding.shard(early)
    proof, train = fsdp_sharding.proof, fsdp.train
    assert_refused(
        [
            (lambda: proof(blocks_only, 2), RuntimeError, "LlamaForCausalLM"),
            (lambda: proof(whole_head, 2), RuntimeError, "lm_head.weight"),
            (lambda: proof(early, 2, optimizer), RuntimeError, "optimizer"),
            (lambda: proof(early, 3), RuntimeError, "3 ranks"),
            (lambda: proof(tiny_llama(layers=1), 2), RuntimeError, "got LlamaForCausalLM"),
            (lambda: accelerate_fsdp.train(**SIZES, expect_ranks=3), RuntimeError, "3 ranks"),
            (lambda: train(method="qlra"), ValueError, "method='qlra'"),
            (lambda: train(reshard_after_forward="maybe"), ValueError, "'maybe'"),
            (lambda: train(reshard_after_forward="2"), ValueError, "reshard_after_forward=2"),
            (lambda: train(mesh="2x2"), ValueError, "mesh='2x2'"),
            (lambda: train(prefetch=1, wrap="whole"), ValueError, "prefetch=1"),
            (lambda: train(max_grad_norm=-1), ValueError, "max_grad_norm=-1"),
            (lambda: train(resume=True), ValueError, "resume"),
            (lambda: train(meta_init=True, method="qlora"), ValueError, "meta_init"),
            (lambda: train(global_batch=7), ValueError, "global_batch=7"),
        ]
    )


def test_wrong_choices_and_models_that_are_not_sharded_are_refused(private_tmp):
    launch(refuse, ranks=2, quiet=True, timeout=120)
