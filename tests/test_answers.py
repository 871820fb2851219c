"""Labs 1 to 6 and 8: their checks against the planted answers."""

import importlib
from types import ModuleType

import mutants
import pytest
from planted import lab01, lab02, lab03, lab04, lab05, lab06, lab08

from course_checks.harness import Lab
from course_lib.launch import warm_on_cpu
from course_lib.on_cpu.deepspeed import SLOW

LABS = {
    importlib.import_module(f"course_checks.{each.__name__[-5:]}").lab: each
    for each in (lab01, lab02, lab03, lab04, lab05, lab06, lab08)
}
EXERCISES = [pytest.param(lab, planted, name, id=name) for lab, planted in LABS.items() for name in lab.exercises]


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_on_cpu(*SLOW, "peft", "bitsandbytes")


@pytest.mark.parametrize(("lab", "planted", "exercise"), EXERCISES)
def test_wrong_answers_hear_their_word(lab: Lab, planted: ModuleType, exercise: str, monkeypatch) -> None:
    monkeypatch.chdir(mutants.ROOT / "solutions")
    assert not (wrong := mutants.misjudged(lab, planted, exercise)), "\n".join(wrong)
