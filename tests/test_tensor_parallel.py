"""Every matrix cut over two ranks, by hand and by DTensor: losses, bytes and collectives as one rank's and as told."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import Runs, assert_same_training, one_rank
from refusals import assert_refused

from course_lib.launch import launch
from course_lib.memory import shape_of
from course_lib.models import tiny_llama
from course_lib.models.data import IGNORED
from course_lib.parallel.traffic import tensor_parallel as formula
from course_lib.training.tensor import megatron_linears, tensor_parallel
from course_lib.training.tensor.divisibility import check_split
from course_lib.training.tensor.loss import vocab_parallel_cross_entropy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=5, global_batch=4, seq_len=32)
SGD = dict(optimizer="sgd", lr=0.1)  # Adam does not see a factor in all gradients, nor much of one in a norm's
SETTINGS = {
    "hand": {},
    "hand, sequence": dict(sequence_parallel=True) | SGD,
    "dtensor": dict(implementation="dtensor") | SGD,
    "dtensor, sequence": dict(implementation="dtensor", sequence_parallel=True),
}


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs(tensor_parallel.train, {2: SETTINGS}, SIZES)


def test_ranks_train_as_one_does(runs):
    for _, name, how, outcomes in runs.every():
        update = dict(optimizer=how.get("optimizer", "adamw"), lr=how.get("lr", 1e-3))
        losses, _ = one_rank(tiny_llama(seed=0), **SIZES, **update)
        assert_same_training(outcomes, losses, name)
        hand = "implementation" not in how
        assert {o.wrapper for o in outcomes} == {"TensorParallelLlama" if hand else "LlamaForCausalLM"}, name


def test_a_rank_holds_half(runs):
    norms = 9 * 128  # whole on both; of all matrices half
    activations = {}
    for _, name, how, outcomes in runs.every():
        for outcome in outcomes:
            assert outcome.extra["total_elements"] == 803_968
            assert outcome.extra["local_elements"] == (803_968 - norms) // 2 + norms == 402_560, name
            assert outcome.memory["gradients"] == 4 * 402_560, name
            if "optimizer" not in how:
                assert outcome.memory["optimizer_state"] == pytest.approx(8 * 402_560, rel=1e-3), name
            activations[name] = outcome.memory["activations"]
    for name in ("hand", "dtensor"):
        assert activations[f"{name}, sequence"] < 0.9 * activations[name]


def told(sequence_parallel):
    """(kind, bytes that one of two ranks puts in) -> how many, of the formula."""
    shape = shape_of(tiny_llama(device="meta").config)
    sizes = dict(tp=2, micro_batch_size=4, seq_len=32, element=4)
    messages = formula(shape, **sizes, sequence_parallel=sequence_parallel)
    parts = {"all_gather": 2}
    return Counter({(m.collective, m.num_bytes // parts.get(m.collective, 1)): m.count for m in messages})


def trainings(run, rank):
    """(kind, bytes) -> how many, of what a rank issued up to each barrier, for one ends each training."""
    calls = [(c.kind, c.bytes) for c in run.collectives if c.rank == rank]
    barriers = [i for i, (kind, _) in enumerate(calls) if kind == "barrier"]
    return [Counter(calls[start + 1 : end]) for start, end in zip([-1, *barriers], barriers, strict=False)]


def test_collectives_are_those_of_the_formula(runs):
    for rank in range(2):
        for (name, how), calls in zip(SETTINGS.items(), trainings(runs[2], rank), strict=True):
            expected = told(how.get("sequence_parallel", False))
            scatters = Counter({key: count for key, count in calls.items() if key[0] == "scatter"})
            if "dtensor" in name:
                assert scatters.total() == 4 * 7 + 2  # it deals out rank 0's matrices, once
            if name == "dtensor, sequence":  # it sums the gradients of the 9 norms one by one, the formula joins them
                assert expected.pop(("all_reduce", 9 * 512)) == 1
                expected["all_reduce", 512] += 9  # as long as the 3 of the loss: 4 x 32 numbers
            assert calls - scatters == {key: 5 * count for key, count in expected.items()}, name
            by_kind = Counter()
            for (kind, size), count in expected.items():
                by_kind[kind] += count * size
            reported = runs.outcomes(2, name)[rank].extra["collectives_per_step"]
            assert {kind: size for kind, (_, size) in reported.items()} == by_kind, name


def logits_and_labels(scale):
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(12, (2, 6), generator=generator)
    labels[0, 3] = labels[1, 5] = IGNORED
    return scale * torch.randn(2, 6, 12, generator=generator), labels


def split_losses():
    group, results = dist.group.WORLD, {}
    for scale in (1.0, 1e4):
        logits, labels = logits_and_labels(scale)
        local = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(local, labels, group)
        loss.backward()
        results[scale] = loss.item(), local.grad
    return results


def test_the_loss_of_split_logits_is_that_of_whole_ones(private_tmp):
    run = launch(split_losses, ranks=3, threads=1, quiet=True)
    for scale in (1.0, 1e4):  # at 1e4 exponentials overflow unless the largest logit of all ranks was taken off
        logits, labels = logits_and_labels(scale)
        loss = F.cross_entropy(logits.requires_grad_().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        for rank, results in enumerate(run.results):
            result, gradient = results[scale]
            assert result == pytest.approx(loss.item(), rel=1e-6), scale
            assert torch.allclose(gradient, logits.grad.chunk(3, -1)[rank], rtol=1e-5, atol=1e-7), scale
    # no rank sends logits: three all-reduces of 12 numbers a loss, and nothing else
    assert [(c.kind, c.bytes) for c in run.collectives if c.rank == 0] == 6 * [("all_reduce", 12 * 4)]


def test_what_does_not_divide_is_refused():
    def check(ranks, how=None, **sizes):
        return check_split(tiny_llama(device="meta", **sizes).config, ranks, **how or {})

    cut = dict(seq_len=33, sequence_parallel=True)
    assert_refused(
        [
            (lambda: check(4, heads=4, kv_heads=2), ValueError, "2 kv heads"),
            (lambda: check(4, heads=6, kv_heads=2, hidden=96), ValueError, "6 attention heads"),
            (lambda: check(4, heads=4, kv_heads=4, intermediate=354), ValueError, "354"),
            (lambda: check(4, heads=4, kv_heads=4, vocab=257), ValueError, "257 tokens"),
            (lambda: check(2, cut), ValueError, "seq_len=33"),
            (lambda: check(0), ValueError, "tp=0"),
        ]
    )


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason=megatron_linears.INSTALL)
def test_megatron_s_layers_give_the_same(private_tmp):
    for comparison in launch(megatron_linears.compare, ranks=2, quiet=True, timeout=120).results:
        assert {"output", "loss", "gradient of x", "whole: output"} <= comparison.differences.keys()
        assert all(difference < 2e-6 for difference in comparison.differences.values()), comparison.differences
        assert comparison.ours == comparison.theirs
