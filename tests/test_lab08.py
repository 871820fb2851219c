"""Lab 8's checks: planted wrong answers get their words, a right answer written another way passes, a stub is no try."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from planted import lab08 as planted
from planted.contract import Contract

from course_checks.harness import run_ranks
from course_checks.lab08 import (
    bubble,
    grid,
    lab,
    merging,
    mlp,
    mlp_on_ranks,
    planning,
    schedule,
    vocabulary,
    vocabulary_on_ranks,
)
from course_lib.launch import launch
from course_lib.parallel.grid import Grid
from course_lib.parallel.schedules import ideal_bubble, orders
from course_lib.parallel.simulate import simulate
from course_tools.planning import Settings, plan
from course_tools.planning.search import measured


@pytest.fixture(scope="module", autouse=True)
def warm_ranks():
    """The first launch of a session imports PyTorch; a check's time is taken warm."""
    launch(float, ranks=1, quiet=True)


MARK = 7_777  # bytes of a broadcast that parts one answer's collectives from the next one's


def each_in_turn(function, answers):
    """On a rank: what `function` tells about each answer; None where it raises, on all ranks alike."""
    told = []
    for answer in answers:
        dist.broadcast(torch.zeros(MARK, dtype=torch.uint8), 0)
        try:
            told.append(function(answer))
        except Exception:
            told.append(None)
    return told


def shares(function, answers):
    """The Run of each answer that did not raise, by id, cut out of one launch for all of them."""
    run = launch(each_in_turn, function, answers, ranks=4, backend="gloo", threads=1, quiet=True)
    cut = [[] for _ in answers]
    at = dict.fromkeys(range(4), -1)
    for collective in run.collectives:
        if collective.kind == "broadcast" and collective.bytes == MARK:
            at[collective.rank] += 1
        else:
            cut[at[collective.rank]].append(collective)
    found = {}
    for number, answer in enumerate(answers):
        results = [told[number] for told in run.results]
        if None not in results:
            found[id(answer)] = replace(run, results=results, collectives=cut[number])
    assert len(found) > len(answers) // 2
    return found


@pytest.fixture(scope="module")
def shared_launch(warm_ranks):
    """`launch` for the checks on four ranks: planted wrong answers have run already, everything else runs now."""
    found = {}
    for name, function in (
        ("parallel_mlp", mlp_on_ranks.parallel_mlp),
        ("vocabulary_loss", vocabulary_on_ranks.vocabulary_loss),
    ):
        found |= shares(function, [answer[0] for exercise, answer, _ in planted.WRONG if exercise == name])

    def launched(function, answer, **settings):
        return found.get(id(answer.function)) or run_ranks(function, answer, **settings)

    return launched


class TestChecks(Contract):
    lab, planted = lab, planted
    fewest = 8

    @pytest.fixture(autouse=True)
    def one_launch_for_many(self, shared_launch, monkeypatch):
        monkeypatch.setattr(mlp, "run_ranks", shared_launch)
        monkeypatch.setattr(vocabulary, "run_ranks", shared_launch)


def test_a_rank_that_hangs_gets_a_verdict_that_says_where(monkeypatch):
    monkeypatch.setattr(mlp, "run_ranks", functools.partial(run_ranks, timeout=2.0))
    verdict = lab.parallel_mlp(planted.OneRankSkips)
    assert verdict.status == "not yet"
    assert "all_reduce" in verdict.message


@pytest.mark.parametrize("case", vocabulary_on_ranks.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("rank", range(4))
def test_models_of_the_vocabulary_s_mistakes_are_right_without_one_and_wrong_with_one(case, rank):
    logits, targets = vocabulary_on_ranks.question(case, 0)
    loss, gradient = vocabulary_on_ranks.answer(logits, targets)
    mine = gradient.chunk(4, 1)[rank]
    assert vocabulary_on_ranks.mistaken_loss(logits, targets, 4, rank, "").item() == pytest.approx(
        loss.item(), rel=1e-5
    )
    assert torch.allclose(vocabulary_on_ranks.mistaken_gradient(logits, targets, 4, rank, "").float(), mine, atol=1e-6)
    if case.ignored and case.scale == 1.0:  # the case that shows every one
        for name in vocabulary_on_ranks.LOSSES:
            wrong = vocabulary_on_ranks.mistaken_loss(logits, targets, 4, rank, name).item()
            assert wrong != pytest.approx(loss.item(), rel=1e-3), name
        for name in vocabulary_on_ranks.GRADIENTS:
            wrong = vocabulary_on_ranks.mistaken_gradient(logits, targets, 4, rank, name).float()
            assert not torch.allclose(wrong, mine, rtol=1e-2, atol=1e-4), name


def test_models_of_the_bubble_s_mistakes_are_right_without_one_and_no_two_look_alike():
    for cases, mistaken, true, words in (
        (bubble.PIPELINES, bubble.mistaken_bubble, bubble.true_bubble, bubble.BUBBLES),
        (bubble.BOUNDS, bubble.mistaken_fewest, bubble.true_fewest, bubble.FEWEST),
    ):
        right = tuple(float(true(case)) for case in cases)
        assert tuple(mistaken(case, ()) for case in cases) == pytest.approx(right)
        outcomes = {name: tuple(mistaken(case, (name,)) for case in cases) for name in words}
        assert len({right, *outcomes.values()}) == len(words) + 1, outcomes


def test_the_bubbles_are_those_of_the_schedules_and_of_the_simulator():
    for case in bubble.PIPELINES:
        schedule_name = "interleaved" if case.chunks > 1 else "1f1b"
        assert float(bubble.true_bubble(case)) == pytest.approx(ideal_bubble(schedule_name, *case))
        assert bubble.simulated(case) == pytest.approx(float(bubble.true_bubble(case)))


def test_1f1b_meets_every_target_and_gpipe_or_the_naive_order_do_not():
    for target in (*schedule.TARGETS, schedule.ON_RANKS):
        line = simulate(orders("1f1b", *target), forward=1.0, backward=2.0)
        assert line.seconds == target.seconds
        assert line.in_flight == [target.held(rank) for rank in range(target.stages)]
    first = schedule.TARGETS[0]
    assert simulate(orders("gpipe", *first), forward=1.0, backward=2.0).in_flight[0] > first.held(0)
    assert simulate(orders("naive", *first), forward=1.0, backward=2.0).seconds > first.seconds


def test_places_are_those_of_the_course_s_grid():
    for shape in grid.SHAPES[:6]:
        same = Grid(pp=shape.pp, dp=shape.dp, tp=shape.tp)
        for rank in range(shape.size):
            at = same.coordinates(rank)
            assert grid.place_of(rank, shape) == (at["pp"], at["dp"], at["tp"])


def test_the_shards_that_are_to_be_merged_are_padded_and_gqa():
    from course_lib.models import tiny_llama

    model = tiny_llama(seed=3, **merging.WIDTHS._asdict())
    shards = merging.cut({n: p.detach() for n, p in model.named_parameters()}, model.config, 2)
    assert sum(len(shard["output_layer.weight"]) for shard in shards) > merging.WIDTHS.vocab
    qkv = shards[0]["decoder.layers.0.self_attention.linear_qkv.weight"]
    width = merging.WIDTHS.hidden // merging.WIDTHS.heads
    assert (
        len(qkv) == (merging.WIDTHS.heads + 2 * merging.WIDTHS.kv_heads) * width // 2 < 3 * merging.WIDTHS.hidden // 2
    )


def test_each_task_has_several_good_plans_and_asks_for_another_kind():
    kinds = set()
    for task in planning.TASKS:
        best = planning.fastest(task)
        good = [
            p for p in plan(task.model, task.machines, **task.asked).plans if p.step_seconds <= 1.15 * best.step_seconds
        ]
        assert len({p.kind for p in good}) >= 3, f"{task.name}: the check would want one plan and no other"
        kinds.add((best.method, best.pp > 1))
    assert len(kinds) == 3
    slow = planning.TASKS[-1]
    everywhere = Settings("fsdp", dp=64, micro_batch_size=4, num_microbatches=1, activation_checkpointing="full")
    needs_the_network, need = measured(slow.question, everywhere)
    assert need.fits(slow.question)
    assert needs_the_network.step_seconds > 2 * planning.fastest(slow).step_seconds
