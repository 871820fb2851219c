"""What every lab's check owes its learner, held against the lab's planted answers.

    class TestChecks(Contract):
        lab, planted = lab, planted

`planted` has RIGHT, {exercise: answer}, and WRONG, [(exercise, answer, words that the verdict must hold)]. An answer of
several functions is a tuple.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from course_checks.harness.checking import Lab
from course_lib.launch import launch

FEWEST = 3  # planted wrong answers an exercise


def stub(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


class Contract:
    """Tests for a subclass that names its lab."""

    lab: Lab
    planted: ModuleType
    on_ranks = True  # whether checks of this lab start ranks

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", list(self.lab.exercises))

    @pytest.fixture(scope="class", autouse=True)
    def warm_ranks(self) -> None:
        """The first launch of a session imports PyTorch, which is not to count against a check's patience."""
        if self.on_ranks:
            launch(float, ranks=1, quiet=True)

    def judged(self, name: str, answer: Any) -> Any:
        return getattr(self.lab, name)(*(answer if isinstance(answer, tuple) else (answer,)))

    def test_right_answer_written_another_way_passes(self, name: str) -> None:
        verdict = self.judged(name, self.planted.RIGHT[name])
        assert verdict.status == "passed", verdict
        assert verdict.message, "a passed check shows its evidence"

    def test_wrong_answers_get_their_words(self, name: str) -> None:
        wrong = []
        for number, (exercise, answer, words) in enumerate(self.planted.WRONG):
            if exercise != name:
                continue
            try:
                verdict = self.judged(name, answer)
            except Exception as error:
                wrong.append(f"WRONG[{number}] should hear {words!r}, and the check itself raised {error!r}")
            else:
                if verdict.status != "not yet" or words not in verdict.message:
                    wrong.append(f"WRONG[{number}] should hear {words!r}, and heard {str(verdict)!r}")
        assert not wrong, "\n".join(wrong)

    def test_every_exercise_has_a_right_answer_some_wrong_ones_and_knows_its_stub(self) -> None:
        assert set(self.planted.RIGHT) == set(self.lab.exercises)
        planted = [exercise for exercise, _, _ in self.planted.WRONG]
        for name, right in self.planted.RIGHT.items():
            assert planted.count(name) >= FEWEST, name
            verdict = self.judged(name, (stub,) * len(right) if isinstance(right, tuple) else stub)
            assert verdict.status == "not attempted", verdict
