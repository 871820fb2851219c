"""Lab 4: its checks against the planted answers."""

from planted import lab04 as planted
from planted.contract import Contract

from course_checks.harness import run_ranks
from course_checks.lab04 import lab, own_ddp


class TestChecks(Contract):
    lab, planted = lab, planted


def test_a_rank_that_calls_one_more_collective_is_not_a_pass(monkeypatch):
    monkeypatch.setattr(own_ddp, "run_ranks", lambda *given, timeout, **how: run_ranks(*given, timeout=3.0, **how))
    verdict = lab.own_ddp(planted.only_on_rank_zero)
    assert verdict.status == "not yet", verdict


def test_zero_grad_may_come_first():
    assert lab.accumulated_step(planted.zeroes_first).status == "passed"
