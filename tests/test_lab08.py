"""Lab 8: its checks against the planted answers, a hang, and its tasks against the planner."""

import functools

from planted import lab08 as planted
from planted.contract import Contract

from course_checks.harness import run_ranks
from course_checks.lab08 import lab, mlp, planning
from course_tools.planning import Settings, plan
from course_tools.planning.search import measured


class TestChecks(Contract):
    lab, planted = lab, planted


def test_a_rank_that_hangs_gets_a_verdict_that_says_where(monkeypatch):
    monkeypatch.setattr(mlp, "run_ranks", functools.partial(run_ranks, timeout=2.0))
    verdict = lab.parallel_mlp(planted.OneRankSkips)
    assert verdict.status == "not yet" and "all_reduce" in verdict.message


def test_each_task_has_several_good_plans_and_asks_for_another_kind():
    kinds = set()
    for task in planning.TASKS:
        best = planning.fastest(task)
        plans = plan(task.model, task.machines, **task.asked).plans
        good = {each.kind for each in plans if each.step_seconds <= 1.15 * best.step_seconds}
        assert len(good) >= 3, f"{task.name}: the check would want one plan and no other"
        kinds.add((best.method, best.pp > 1))
    assert len(kinds) == 3
    slow = planning.TASKS[-1]
    everywhere = Settings("fsdp", dp=64, micro_batch_size=4, num_microbatches=1, activation_checkpointing="full")
    over_the_network, need = measured(slow.question, everywhere)
    assert need.fits(slow.question)
    assert over_the_network.step_seconds > 2 * planning.fastest(slow).step_seconds
