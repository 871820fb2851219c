"""Experts on several ranks against all of them on one, and against a loop that sends nothing."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from parity import TOLERANCE, one_rank, refusals, train_each

from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.training.command_line import parse
from course_lib.training.sequence import expert_parallel
from course_lib.training.sequence.expert_parallel_layer import MixtureOfExperts

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

STEPS = 4
SIZES = dict(steps=STEPS, global_batch=4, seq_len=24, layers=2, hidden=32, intermediate=48)
SGD = dict(optimizer="sgd", lr=2.0)  # Adam does not see a factor in the experts' gradients
TRAINED = {1: SGD, 2: dict(top_k=2)}
MISFITS = {
    "experts": (dict(experts=3), "3 experts do not divide over 2 ranks: give a multiple of 2."),
    "top_k": (dict(top_k=5), "top_k=5: a token can choose 1 to 4 of the 4 experts."),
    "none": (dict(top_k=0), "top_k=0"),
    "no experts": (dict(experts=0), "experts=0"),
    "batch": (dict(global_batch=3), "global_batch=3 does not divide into 2 ranks"),
}


def several():
    wrong = {name: lambda how=how: expert_parallel.train(**{**SIZES, **how}) for name, (how, _) in MISFITS.items()}
    return refusals(wrong), train_each(expert_parallel.train, {k: {**SIZES, **how} for k, how in TRAINED.items()})


def unbalanced():
    """One rank's experts get every token, the other's none; what the gradients are then."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 12, experts=2, top_k=1).spread(torch.distributed.group.WORLD)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, 8))  # positive tokens choose expert 0
    x = torch.rand(1, 5 + 2 * layer.rank, 8, requires_grad=True)
    layer(x).sum().backward()
    return layer.routing, [p.grad.abs().max().item() for p in layer.experts.parameters()], x.grad.abs().min().item()


@pytest.fixture(scope="module")
def run(private_tmp):
    return launch(several, ranks=2, quiet=True, timeout=200)


def dense(layer, x):
    """Every expert looks at every token, and what it was not chosen for is multiplied by zero."""
    tokens = x.flatten(0, 1)
    probabilities = torch.softmax(tokens @ layer.router.weight.T, -1)
    kept = probabilities >= probabilities.topk(layer.top_k).values[:, -1:]
    outs = torch.stack([expert(tokens) for expert in layer.experts], 1)
    return ((probabilities * kept)[..., None] * outs).sum(1).view_as(x)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_one_process_does_what_a_dense_loop_does(top_k):
    torch.manual_seed(0)
    layer = MixtureOfExperts(8, 12, experts=4, top_k=top_k).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    weights = [x, *layer.parameters()]
    out, expected = layer(x), dense(layer, x)
    torch.testing.assert_close(out, expected)
    probe = torch.randn(2, 7, 8, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((out * probe).sum(), weights),
        torch.autograd.grad((expected * probe).sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def expected_losses(top_k, **how):
    """Losses of one process by the dense loop."""
    net = tiny_llama(seed=0, layers=2, hidden=32, intermediate=48)
    for mixture in expert_parallel.give_experts(net, experts=4, top_k=top_k, seed=0):
        mixture.forward = dense.__get__(mixture)
    return one_rank(net, steps=STEPS, global_batch=4, seq_len=24, **how)[0]


@pytest.mark.parametrize("top_k", TRAINED)
def test_it_trains_as_one_rank_does(top_k, run):
    expected = expected_losses(**{"top_k": top_k} | TRAINED[top_k])
    for rank, (_, outcomes) in enumerate(run.results):
        outcome = outcomes[top_k]
        assert (outcome.rank, outcome.world_size, outcome.wrapper) == (rank, 2, "MixtureOfExperts")
        # 1e-6 seen; experts whose gradients are not divided by the ranks are off by 1e-2 under SGD
        assert outcome.losses == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("top_k", TRAINED)
def test_who_holds_which_expert(top_k, run):
    extras = [outcomes[top_k].extra for _, outcomes in run.results]
    assert [extra["experts"] for extra in extras] == [[0, 1], [2, 3]]
    for extra in extras:
        assert extra["expert_elements"] == 2 * 4 * 3 * 32 * 48
        assert extra["local_elements"] == extra["total_elements"] - extra["expert_elements"] // 2
        assert [sum(counts) for counts in extra["tokens_per_expert"]] == [4 * 24 * top_k] * 2  # none is lost
    for block in range(2):
        chosen = extras[0]["tokens_per_expert"][block]
        received = [sum(extra["tokens_received"][block]) for extra in extras]
        assert received == [sum(chosen[:2]), sum(chosen[2:])]  # a token goes where its expert is


@pytest.mark.parametrize("top_k", TRAINED)
def test_what_the_routing_sends(top_k, run):
    for rank, (_, outcomes) in enumerate(run.results):
        extra = outcomes[top_k].extra
        log = [c for c in run.collectives if c.rank == rank]
        ends = [i for i, c in enumerate(log) if (c.kind, c.bytes) == ("all_reduce", 4)]
        last = ends[STEPS * top_k - 1]  # the last step of the first training, or of the second
        told = [c.bytes for c in log[ends[STEPS * top_k - 2] + 1 : last] if c.kind == "all_to_all"]
        assert len(told) == 2 * 5  # a block: how many, there, back, and the gradients of the last two
        rows = [c for c in told if c != 4 * 8]  # without the counts: 4 experts, int64
        theirs = run.results[1 - rank][1][top_k].extra
        left = sum(received[rank] for received in theirs["tokens_received"])
        came = sum(received[1 - rank] for received in extra["tokens_received"])
        stayed = sum(received[rank] for received in extra["tokens_received"])
        assert extra["routed_bytes"][-1] == 2 * (left + came) * 32 * 4 > 0
        assert sum(rows) == extra["routed_bytes"][-1] + 4 * stayed * 32 * 4  # what stays is put in as well


def test_a_rank_that_no_token_goes_to(private_tmp):
    run = launch(unbalanced, ranks=2, quiet=True)
    (busy, found, back), (idle, nothing, also) = run.results
    assert busy.received == [5, 7] and idle.received == [0, 0] and idle.sent == [7, 0]
    assert min(found) > 0 and max(nothing) == 0  # zeros, and not None: the optimizer's step is the same everywhere
    assert min(back, also) > 0
    assert busy.bytes_to_others == 2 * 7 * 8 * 4 and idle.bytes_to_others == 2 * 7 * 8 * 4


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_get_a_sentence(name, run):
    for refused, _ in run.results:
        assert MISFITS[name][1] in refused[name]


def test_it_can_be_started_from_the_shell():
    assert parse(expert_parallel.train, ["--top-k=2"])["top_k"] == 2
