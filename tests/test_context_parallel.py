"""Ring attention against plain attention, gradients too, and the Llama trained on split sequences against one rank."""

from __future__ import annotations

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
from course_lib.parallel.traffic import context_parallel as traffic
from course_lib.training.sequence import context_parallel
from course_lib.training.sequence.ring_attention import positions, ring_attention, runs, scores_computed

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

LAYOUTS = ("zigzag", "contiguous")
SIZES = dict(steps=4, global_batch=2, seq_len=48, layers=2, hidden=32, lr=3e-2)
SGD = dict(optimizer="sgd", lr=2.0)  # Adam does not see a factor in all gradients; such large steps show every mistake
TRAINED = {
    "zigzag": {},
    "contiguous": dict(layout="contiguous") | SGD,
    "dp": dict(dp=2) | SGD,
    "no ring": dict(dp=4, global_batch=4),
}
GROUPS = ([0, 1, 2, 3], [0, 1, 2], [2, 3], [1])  # a group's ranks are not their numbers in the group


def qkv():
    """Queries, keys, values and the gradient that comes back: in fp64, so that nothing but a mistake is visible."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(2, heads, 24, 6, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    return [t.requires_grad_() for t in made], torch.randn(2, 4, 24, 6, generator=generator).double()


def meet(layout, ranks):
    """Greatest differences of the output and of three gradients on this rank, from plain attention on the whole."""
    group = dist.new_group(ranks)
    if dist.get_rank() not in ranks:
        return []
    (q, k, v), grad = qkv()
    out = F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
    out.backward(grad)
    local = positions(dist.get_rank(group), len(ranks), 24, layout)
    parts = [t.detach()[:, :, local].requires_grad_() for t in (q, k, v)]
    ours = ring_attention(*parts, group=group, layout=layout)
    ours.backward(grad[:, :, local])
    pairs = [(ours, out), *((part.grad, whole.grad) for part, whole in zip(parts, (q, k, v), strict=True))]
    return [(a - b[:, :, local]).abs().max().item() for a, b in pairs]


def meet_all():
    torch.set_num_threads(1)
    differences = {(layout, len(ranks)): meet(layout, ranks) for layout in LAYOUTS for ranks in GROUPS}
    wrong = {
        "seq_len=50": dict(seq_len=50),
        "4 runs": dict(seq_len=50, layout="contiguous"),
        "layout='stripes'": dict(layout="stripes"),
        "dp=3": dict(dp=3),
        "global_batch=3": dict(dp=2, global_batch=3),
        "seq_len=1024": dict(seq_len=1024),
    }
    rows = [(lambda how=how: context_parallel.train(**SIZES | how), ValueError, word) for word, how in wrong.items()]
    (q, _, _), _ = qkv()
    assert_refused([*rows, (lambda: ring_attention(q, q[:, :3], q[:, :3]), ValueError, "3 kv heads")])
    return differences


def test_the_ring_computes_attention_and_its_gradients_and_refuses_misfits(private_tmp):
    run = launch(meet_all, ranks=4, quiet=True, timeout=120)
    for layout in LAYOUTS:
        for ranks in GROUPS:
            for rank in ranks:
                differences = run.results[rank][layout, len(ranks)]
                assert len(differences) == 4 and max(differences) < 1e-12, (layout, ranks, rank)


@pytest.fixture(scope="module")
def trained(private_tmp):
    return Runs(context_parallel.train, {4: TRAINED}, SIZES)


def test_ranks_train_as_one_does(trained):
    for _, name, how, outcomes in trained.every():
        batch = {key: how[key] for key in ("steps", "global_batch", "seq_len", "lr")}
        net = tiny_llama(seed=0, layers=2, hidden=32)
        losses, _ = one_rank(net, **batch, optimizer=how.get("optimizer", "adamw"))
        # fp32, other orders of adding up: 1e-6 seen. Positions that begin at 0 on every rank are off by 1e-3
        assert_same_training(outcomes, losses, name)


def test_who_holds_which_tokens(trained):
    for _, name, how, outcomes in trained.every():
        cp = 4 // how.get("dp", 1)
        for rank, outcome in enumerate(outcomes):
            assert outcome.extra["coordinates"] == {"dp": rank // cp, "cp": rank % cp}, name
            tokens = [p for first, last in outcome.extra["positions"] for p in range(first, last)]
            assert tokens == positions(rank % cp, cp, 48, how.get("layout", "zigzag")).tolist(), name
            assert outcome.extra["tokens"] == how["global_batch"] * 48 // 4, name
    # the share of the activations; without a ring a rank has one sequence, where the four share two
    whole = trained.outcomes(4, "no ring")[0].memory["activations"]
    for outcome in trained.outcomes(4, "zigzag"):
        assert outcome.memory["activations"] == pytest.approx(2 * whole / 4, rel=0.02)


def test_what_goes_round_is_what_the_formula_says(trained):
    net = tiny_llama(layers=2, hidden=32, device="meta")
    (message,) = traffic(shape_of(net), cp=4, micro_batch_size=2, seq_len=48, element=4)
    for rank in range(4):
        calls = trained.last_step(4, "zigzag", rank)
        assert Counter(c.bytes for c in calls if c.kind == "send") == {message.num_bytes: message.count}
        parameters = sum(p.numel() for p in net.parameters())
        assert [c.bytes for c in calls if c.kind == "all_reduce"] == [4 * parameters]


def test_zigzag_shares_the_work_out_and_contiguous_does_not():
    assert [runs(r, 2, 16) for r in range(2)] == [[range(0, 4), range(12, 16)], [range(4, 8), range(8, 12)]]
    assert runs(1, 2, 16, "contiguous") == [range(8, 16)]
    for ranks in (1, 2, 3, 5):
        even = {sum(scores_computed(r, ranks, 60, "zigzag")) for r in range(ranks)}
        uneven = [sum(scores_computed(r, ranks, 60, "contiguous")) for r in range(ranks)]
        assert len(even) == 1 and uneven == [(60 // ranks) ** 2 * (r + 1) for r in range(ranks)]
