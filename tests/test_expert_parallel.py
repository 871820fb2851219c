"""Experts on several ranks against all of them on one, and against a loop that sends nothing."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from parity import Runs, assert_same_training, one_rank
from refusals import assert_refused

from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.training.sequence import expert_parallel
from course_lib.training.sequence.expert_parallel_layer import MixtureOfExperts

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=4, global_batch=4, seq_len=24, layers=2, hidden=32, intermediate=48)
# Adam does not see a factor in the experts' gradients, plain SGD does
TRAINED = {1: dict(top_k=1, optimizer="sgd", lr=2.0), 2: dict(top_k=2)}


def dense(layer, x):
    """Every expert looks at every token, and what it was not chosen for is multiplied by zero."""
    tokens = x.flatten(0, 1)
    probabilities = torch.softmax(tokens @ layer.router.weight.T, -1)
    kept = probabilities >= probabilities.topk(layer.top_k).values[:, -1:]
    outs = torch.stack([expert(tokens) for expert in layer.experts], 1)
    return ((probabilities * kept)[..., None] * outs).sum(1).view_as(x)


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs(expert_parallel.train, {2: TRAINED}, SIZES)


def test_ranks_train_as_one_does(runs):
    for _, top_k, how, outcomes in runs.every():
        net = tiny_llama(seed=0, layers=2, hidden=32, intermediate=48)
        for mixture in expert_parallel.give_experts(net, experts=4, top_k=top_k, seed=0):
            mixture.forward = dense.__get__(mixture)
        update = dict(optimizer=how.get("optimizer", "adamw"), lr=how.get("lr", 1e-3))
        losses, _ = one_rank(net, steps=4, global_batch=4, seq_len=24, **update)
        # 1e-6 seen; experts whose gradients are not divided by the ranks are off by 1e-2 under SGD
        assert_same_training(outcomes, losses, f"top_k={top_k}")


def test_who_holds_which_expert(runs):
    for _, top_k, _, outcomes in runs.every():
        extras = [outcome.extra for outcome in outcomes]
        assert [extra["experts"] for extra in extras] == [[0, 1], [2, 3]]
        for extra in extras:
            assert extra["expert_elements"] == 2 * 4 * 3 * 32 * 48
            assert extra["local_elements"] == extra["total_elements"] - extra["expert_elements"] // 2
            assert [sum(counts) for counts in extra["tokens_per_expert"]] == [4 * 24 * top_k] * 2  # none is lost
        for block in range(2):
            chosen = extras[0]["tokens_per_expert"][block]
            received = [sum(extra["tokens_received"][block]) for extra in extras]
            assert received == [sum(chosen[:2]), sum(chosen[2:])]  # a token goes where its expert is


def test_what_the_routing_sends(runs):
    for _, top_k, _, outcomes in runs.every():
        for rank, outcome in enumerate(outcomes):
            sizes = [c.bytes for c in runs.last_step(2, top_k, rank) if c.kind == "all_to_all"]
            assert len(sizes) == 2 * 5  # a block: how many, there, back, and the gradients of the last two
            rows = [size for size in sizes if size != 4 * 8]  # without the counts: 4 experts, int64
            received, theirs = outcome.extra["tokens_received"], outcomes[1 - rank].extra["tokens_received"]
            left, came = sum(counts[rank] for counts in theirs), sum(counts[1 - rank] for counts in received)
            stayed = sum(counts[rank] for counts in received)
            assert outcome.extra["routed_bytes"][-1] == 2 * (left + came) * 32 * 4 > 0
            assert sum(rows) == outcome.extra["routed_bytes"][-1] + 4 * stayed * 32 * 4  # what stays is put in as well


def unbalanced():
    """One rank's experts get every token, the other's none; what the gradients are then. And what is refused."""
    wrong = {"3 experts": dict(experts=3), "top_k=5": dict(top_k=5), "top_k=0": dict(top_k=0)}
    wrong |= {"experts=0": dict(experts=0), "global_batch=3": dict(global_batch=3)}
    assert_refused(
        [(lambda how=how: expert_parallel.train(**SIZES | how), ValueError, word) for word, how in wrong.items()]
    )
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 12, experts=2, top_k=1).spread(torch.distributed.group.WORLD)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 8))  # positive tokens choose expert 0
    x = torch.rand(1, 5 + 2 * layer.rank, 8, requires_grad=True)
    layer(x).sum().backward()
    return layer.routing, [p.grad.abs().max().item() for p in layer.experts.parameters()], x.grad.abs().min().item()


def test_a_rank_that_no_token_goes_to_and_misfits(private_tmp):
    run = launch(unbalanced, ranks=2, quiet=True)
    (busy, some, back), (idle, nothing, also) = run.results
    assert busy.received == [5, 7] and idle.received == [0, 0] and idle.sent == [7, 0]
    assert min(some) > 0 and max(nothing) == 0  # zeros, and not None: the optimizer's step is the same everywhere
    assert min(back, also) > 0
    assert busy.bytes_to_others == idle.bytes_to_others == 2 * 7 * 8 * 4
