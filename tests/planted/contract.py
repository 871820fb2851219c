"""What every lab's check owes its learner, held against the lab's planted answers.

    class TestChecks(Contract):
        lab, planted = lab, planted

`planted` has RIGHT, {exercise: answer}, WRONG, [(exercise, answer, words that the verdict must hold)], and `stub`. An
answer of several functions is a tuple.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from course_checks.harness.checking import Lab


class Contract:
    """Tests for a subclass that names its lab."""

    lab: Lab
    planted: ModuleType
    fewest = 5  # planted wrong answers an exercise

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "words" in metafunc.fixturenames:
            ids = [f"{name}-{words[:30]}-{number}" for number, (name, _, words) in enumerate(self.planted.WRONG)]
            metafunc.parametrize(("name", "answer", "words"), self.planted.WRONG, ids=ids)
        elif "name" in metafunc.fixturenames:
            metafunc.parametrize("name", list(self.lab.exercises))

    def judged(self, name: str, answer: Any) -> Any:
        return getattr(self.lab, name)(*(answer if isinstance(answer, tuple) else (answer,)))

    def nothing_but(self, name: str, function: Any) -> Any:
        """`function` in the place of each function that the exercise asks for."""
        right = self.planted.RIGHT[name]
        return (function,) * len(right) if isinstance(right, tuple) else function

    def test_right_answer_written_another_way_passes(self, name: str) -> None:
        verdict = self.judged(name, self.planted.RIGHT[name])
        assert verdict.status == "passed", verdict.message
        assert verdict.message, "a passed check shows its evidence"

    def test_wrong_answer_gets_its_word(self, name: str, answer: Any, words: str) -> None:
        verdict = self.judged(name, answer)
        assert verdict.status == "not yet", verdict
        assert words in verdict.message

    def test_stub_counts_as_not_attempted(self, name: str) -> None:
        assert self.judged(name, self.nothing_but(name, self.planted.stub)).status == "not attempted"

    def test_every_exercise_has_a_right_answer_and_enough_wrong_ones(self, name: str) -> None:
        assert set(self.planted.RIGHT) == set(self.lab.exercises)
        assert sum(exercise == name for exercise, _, _ in self.planted.WRONG) >= self.fewest
