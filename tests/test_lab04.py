"""Lab 4's checks: planted wrong answers get their words, a right answer written another way passes, a stub is no try."""

import functools

import pytest
from planted import lab04 as planted
from planted.contract import Contract

from course_checks.lab04 import lab
from course_lib.launch import launch


@pytest.fixture(scope="module", autouse=True)
def warm_ranks():
    """The first launch of a session imports PyTorch; a check's time is taken warm."""
    launch(float, ranks=1, quiet=True)


class TestChecks(Contract):
    lab, planted = lab, planted
    fewest = 3


def test_a_rank_that_calls_one_more_collective_is_not_a_pass():
    verdict = lab.own_ddp(planted.only_on_rank_zero)
    assert verdict.status == "not yet", verdict


def test_a_partial_is_as_good_as_a_function():
    assert lab.batch_plan(functools.partial(planted.right_plan)).status == "passed"


def test_zero_grad_may_come_first():
    assert lab.accumulated_step(planted.zeroes_first).status == "passed"
