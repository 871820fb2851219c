"""Lab 5: its checks against the planted answers."""

from pathlib import Path

import mutants
import pytest
import torch
from planted.lab05 import MUTANTS, RIGHT, SCRIPT_MUTANTS

from course_checks.harness import tensors
from course_checks.lab05 import choosing, lab
from course_lib.on_cpu.deepspeed import warm_deepspeed

SOLUTIONS = mutants.ROOT / "solutions"


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_deepspeed()


@pytest.mark.parametrize("exercise", list(lab.exercises))
def test_wrong_answers_hear_their_word_and_right_ones_pass(exercise: str, monkeypatch) -> None:
    monkeypatch.chdir(SOLUTIONS)
    shipped = mutants.judged(lab, exercise, mutants.solution(lab)[1][exercise])
    assert shipped.status == "passed" and shipped.message, shipped
    assert not mutants.rejected(lab, {exercise: RIGHT.get(exercise, [])})
    assert not (wrong := mutants.survivors(lab, exercise, MUTANTS)), "\n".join(wrong)


def test_scripts_that_train_something_else_hear_their_word(tmp_path: Path) -> None:
    script, wrong = (SOLUTIONS / lab.name / "sharded.py").read_text(), []
    for old, new, word in SCRIPT_MUTANTS:
        assert script.count(old) == 1, old
        (tmp_path / "planted.py").write_text(script.replace(old, new))
        verdict = lab.sharded(lambda: tmp_path / "planted.py")
        wrong += [] if verdict.status == "not yet" and word in verdict.message else [f"{new}: {verdict}"]
    assert not wrong, "\n".join(wrong)


def test_what_is_alive_counts_wherever_it_hides() -> None:
    before = tensors.live_bytes()
    weight = torch.nn.Parameter(torch.zeros(500))
    weight.sum().backward()  # a gradient that no line of Python has seen
    hidden = [{"somewhere": (torch.zeros(1000)[:10],)}]
    assert tensors.live_bytes() - before == 2000 + 2000 + 4000
    del hidden, weight
    assert tensors.settled_bytes(before) == before


def test_each_machine_has_another_answer_worth_choosing() -> None:
    best = [
        min(filter(lambda s: choosing.fits(m, s), choosing.SETTINGS), key=lambda s: choosing.bill(m, s))
        for m in choosing.MACHINES
    ]
    assert len(set(best)) >= 4
    assert choosing.fits(choosing.TIGHT[0], (3, "none")) and not choosing.fits(choosing.TIGHT[0], (2, "optimizer"))
    assert not any(choosing.fits(choosing.TIGHT[1], setting) for setting in choosing.SETTINGS)
