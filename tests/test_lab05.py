"""Lab 5's checks: planted wrong answers get their words, a right answer written another way passes, a stub is no try."""

import pytest
import torch
from planted import lab05 as planted

from course_lib.checks.lab05 import lab, live, machines
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
    assert verdict.seconds < 30  # under 10 s on two idle cores; a busy machine may need more


@pytest.mark.parametrize(("name", "answer", "words"), planted.WRONG, ids=WRONG_IDS)
def test_wrong_answer_gets_its_word(name, answer, words):
    verdict = getattr(lab, name)(answer)
    assert verdict.status == "not yet", verdict
    assert words in verdict.message


@pytest.mark.parametrize("name", planted.RIGHT)
def test_stub_counts_as_not_attempted(name):
    assert getattr(lab, name)(planted.stub).status == "not attempted"


def test_every_exercise_has_planted_answers():
    assert set(lab.exercises) == set(planted.RIGHT) == {name for name, _, _ in planted.WRONG}


def test_what_is_alive_counts_wherever_it_hides():
    before = live.live_bytes()
    weight = torch.nn.Parameter(torch.zeros(500))
    weight.sum().backward()  # a gradient that no line of Python has seen
    hidden = [{"somewhere": (torch.zeros(1000)[:10],)}]
    assert live.live_bytes() - before == 2000 + 2000 + 4000
    assert live.bytes_behind_views([], 4000) == 4000
    del hidden, weight
    assert live.settled_bytes(before) == before


def test_a_setting_needs_what_the_paper_says_at_rest():
    """Stage 3 over stage 1 saves the weights' and gradients' shares; offloading lies in the host, not on the card."""
    machine = machines.MACHINES[0]
    by_setting = {setting: machines.gpu_bytes(machine, setting) for setting in machines.SETTINGS}
    assert by_setting[3, "none"] < by_setting[2, "none"] < by_setting[1, "none"]
    assert by_setting[2, "optimizer"] < by_setting[2, "none"]
    assert machines.host_bytes(machine, (2, "none")) == 0
    assert machines.host_bytes(machine, (3, "all")) > machines.host_bytes(machine, (3, "optimizer")) > 0
