"""Lab 4's checks: planted wrong answers get their words, a right answer written another way passes, a stub is no try."""

import functools

import pytest
from planted import lab04 as planted

from course_lib.checks.lab04 import lab
from course_lib.launch import launch


@pytest.fixture(scope="module", autouse=True)
def warm_ranks():
    """The first launch of a session imports PyTorch; a check's time is taken warm."""
    launch(float, ranks=1, quiet=True)


WRONG_IDS = [f"{name}-{words[:30]}" for name, _, words in planted.WRONG]


@pytest.mark.parametrize("name", planted.RIGHT)
def test_right_answer_written_another_way_passes(name):
    verdict = getattr(lab, name)(planted.RIGHT[name])
    assert verdict.status == "passed", verdict.message
    assert verdict.message, "a passed check shows its evidence"
    assert verdict.seconds < 10


@pytest.mark.parametrize(("name", "answer", "words"), planted.WRONG, ids=WRONG_IDS)
def test_wrong_answer_gets_its_word(name, answer, words):
    verdict = getattr(lab, name)(answer)
    assert verdict.status == "not yet", verdict
    assert words in verdict.message


@pytest.mark.parametrize("name", planted.RIGHT)
def test_stub_counts_as_not_attempted(name):
    assert getattr(lab, name)(planted.stub).status == "not attempted"


def test_a_rank_that_calls_one_more_collective_is_not_a_pass():
    verdict = lab.own_ddp(planted.only_on_rank_zero)
    assert verdict.status == "not yet", verdict


def test_a_partial_is_as_good_as_a_function():
    assert lab.batch_plan(functools.partial(planted.right_plan)).status == "passed"
