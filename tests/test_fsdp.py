"""FSDP2 against one rank on the whole batch: the same losses and norms, a share of the elements, collectives as told."""

from __future__ import annotations

import math
import sys
from functools import cache

import cloudpickle
import pytest
from parity import TOLERANCE, Runs, assert_same_training, off_by, one_rank

from course_lib.models import tiny_llama
from course_lib.training import fsdp
from course_lib.training.methods import prepare

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest


def tied():
    return tiny_llama(tie_embeddings=True)  # its table is in one unit with its head: the root's


def quantized():
    return prepare(tiny_llama(), method="qlora", device="cpu").get_base_model()


SIZES = dict(steps=3, global_batch=12, seq_len=32)
LAUNCHES = {
    2: {
        "plain": {},
        "accumulate": dict(gradient_accumulation_steps=2, max_grad_norm=1.0),
        "bf16": dict(bf16=True),
        "tied": dict(build=tied),
        "qlora": dict(build=quantized),
    },
    3: {"plain": {}, "clipped": dict(max_grad_norm=1.0)},  # 128 rows do not divide by 3
}
BF16 = 3e-3  # it rounds to 4e-3
ROOT, BLOCK = 65_664 * 4, 184_576 * 4  # bytes of embedding, last norm and head; of one block
NORMS, ADAPTERS = 256 * 4, 37_376 * 4  # bytes of one block's


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs(fsdp.train, LAUNCHES, SIZES)


@cache
def expected(build=tiny_llama, max_grad_norm=math.inf):
    """Losses and norms of one process on the whole batch."""
    return one_rank(build(), **SIZES, max_grad_norm=max_grad_norm)


def test_ranks_train_as_one_does(runs):
    for ranks, name, how, outcomes in runs.every():
        losses, norms = expected(how.get("build", tiny_llama), how.get("max_grad_norm", math.inf))
        tolerance = BF16 if name == "bf16" else TOLERANCE
        assert_same_training(outcomes, losses, f"{ranks}: {name}", tolerance)
        for outcome in outcomes:
            assert outcome.wrapper == "FSDPLlamaForCausalLM"
            assert len(outcome.extra["gradient_norms"]) == SIZES["steps"]
            # a norm over one rank's shards alone would be off by 0.2
            assert name == "bf16" or off_by(outcome.extra["gradient_norms"], norms) < TOLERANCE, (ranks, name)
    clipped, norms = expected(max_grad_norm=1.0)
    assert max(norms) > 1.0 and off_by(clipped, expected()[0]) > TOLERANCE  # it did clip
    assert (
        off_by(expected(tied)[0], expected()[0]) > TOLERANCE
        and off_by(expected(quantized)[0], expected()[0]) > TOLERANCE
    )


def test_each_rank_holds_its_rows(runs):
    for ranks, name, how, outcomes in runs.every():
        for rank, outcome in enumerate(outcomes):
            if name != "qlora":  # NF4 packs a matrix into one column
                shares = [p.chunk(ranks)[rank].numel() for p in how.get("build", tiny_llama)().parameters()]
                assert outcome.extra["local_elements"] == sum(shares), (ranks, name, rank)
    assert len({outcome.extra["local_elements"] for outcome in runs.outcomes(3, "plain")}) == 2  # 43, 43 and 42 rows


def test_a_step_s_collectives(runs):
    again = [ROOT] + 8 * [BLOCK]  # a block forward and backward, the root once
    once = 4 * [BLOCK] + [ROOT]
    in_nf4 = (BLOCK - NORMS) // 8 + NORMS + ADAPTERS  # half a byte a weight instead of four
    rows = {
        "plain": (again, once, 39),
        "accumulate": (2 * again, once, 39),
        "bf16": ([size // 2 for size in again], once, 39),
        "qlora": ([ROOT] + 8 * [in_nf4], 4 * [ADAPTERS], 56),
    }
    for name, (gathers, scatters, trained) in rows.items():
        step = runs.last_step(2, name, 1)
        assert [2 * c.bytes for c in step if c.kind == "all_gather"] == gathers, name
        assert [c.bytes for c in step if c.kind == "reduce_scatter"] == scatters, name
        rest = [(c.kind, c.bytes) for c in step if c.kind not in ("all_gather", "reduce_scatter")]
        assert rest == [("all_reduce", 4 * trained)], name  # a norm for each of them


def test_bf16_keeps_shards_in_fp32(runs):
    bf16, plain = runs.outcomes(2, "bf16")[0], runs.outcomes(2, "plain")[0]
    for what in ("parameters", "gradients", "optimizer_state"):
        assert bf16.memory[what] == plain.memory[what], what
    assert off_by(bf16.losses, plain.losses) > 1e-7  # and yet computes in bf16
