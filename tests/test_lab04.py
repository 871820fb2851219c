"""Lab 4: its checks against the planted answers."""

from pathlib import Path

import mutants
import pytest
from planted.lab04 import MUTANTS, RIGHT, SCRIPT_MUTANTS

from course_checks.lab04 import lab

SOLUTIONS = mutants.ROOT / "solutions"


@pytest.mark.parametrize("exercise", list(lab.exercises))
def test_wrong_answers_hear_their_word_and_right_ones_pass(exercise: str, monkeypatch) -> None:
    monkeypatch.chdir(SOLUTIONS)
    shipped = mutants.judged(lab, exercise, mutants.solution(lab)[1][exercise])
    assert shipped.status == "passed" and shipped.message, shipped
    assert not mutants.rejected(lab, {exercise: RIGHT.get(exercise, [])})
    assert not mutants.survivors(lab, exercise, MUTANTS)


def test_scripts_that_train_something_else_hear_their_word(tmp_path: Path) -> None:
    script, wrong = (SOLUTIONS / lab.name / "many_gpus.py").read_text(), []
    for old, new, word in SCRIPT_MUTANTS:
        assert script.count(old) == 1, old
        (tmp_path / "planted.py").write_text(script.replace(old, new))
        verdict = lab.many_gpus(lambda: tmp_path / "planted.py")
        wrong += [] if verdict.status == "not yet" and word in verdict.message else [f"{new}: {verdict}"]
    assert not wrong, "\n".join(wrong)
