"""A check states what must hold, clause by clause; why it may not hold is a table of hints.

    contract = Contract({"the graph keeps every chunk for backward": lambda facts: facts["after forward"] > budget})
    contract.values("the loss", loss, expected, rtol=2e-5)
    contract.facts["after forward"] = live.bytes()
    contract.memory("the worst moment", live.highest, at_most=budget)
    return contract.evidence()

The first clause that does not hold raises NotYet with its own sentence, and with the first hint that fits the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from course_checks.harness.comparing import NotYet, close
from course_lib.units import nice_bytes

Facts = dict[str, Any]
Hints = Mapping[str, Callable[[Facts], bool]]


class Contract:
    """Clauses of one exercise.

    Attributes:
        about: what every sentence begins with, the case that is looked at.
        hints: sentence -> whether it explains a failure, told from the facts. Those that need a fact which is not known yet
            do not fit.
        facts: what has been seen of the answer; a clause adds what it compared under its own name. "clause" is the one that
            does not hold.
    """

    def __init__(self, hints: Hints | None = None, facts: Facts | None = None, about: str = "") -> None:
        self.hints, self.facts, self.about = dict(hints or {}), {} if facts is None else facts, about
        self._said: list[str] = []

    def values(self, what: str, yours: Any, expected: Any, *, rtol: float, atol: float = 0.0) -> None:
        """Numbers, tensors, or dicts of them, equal within the tolerances (see `close`)."""
        self.facts[what] = yours
        try:
            close(yours, expected, rtol=rtol, atol=atol, what=what)
        except NotYet as error:
            raise self.broken(str(error), what) from None

    def memory(self, what: str, seen: int, *, at_most: float, at_least: float = 0.0) -> None:
        """Bytes within these bounds. The lower one catches an answer that does not do the work at all."""
        self.facts[what] = seen
        if not at_least <= seen <= at_most:
            allowed = f"at most {nice_bytes(at_most)}" if seen > at_most else f"at least {nice_bytes(at_least)}"
            raise self.broken(f"{what} takes {nice_bytes(seen)}, and should take {allowed}", what)
        self.say(f"{what}: {nice_bytes(seen)} of {nice_bytes(at_most)}")

    def holds(self, clause: bool, sentence: str, what: str = "") -> None:
        """Anything else; `sentence` says what does not hold, `what` is the clause's name for hints."""
        if not clause:
            raise self.broken(sentence, what)

    def say(self, sentence: str) -> None:
        """Add to the evidence of a pass."""
        self._said.append(sentence)

    def evidence(self) -> str:
        return ": ".join(part for part in (self.about, "; ".join(self._said)) if part)

    def broken(self, sentence: str, clause: str = "") -> NotYet:
        """The clause's sentence with the first hint that fits."""
        self.facts["clause"] = clause
        hint = next((hint for hint, fits in self.hints.items() if self._fits(fits)), "")
        return NotYet(": ".join(part for part in (self.about, sentence, hint) if part))

    def _fits(self, fits: Callable[[Facts], bool]) -> bool:
        try:
            return bool(fits(self.facts))
        except (
            LookupError,
            TypeError,
            ValueError,
            ArithmeticError,
            RuntimeError,
            AttributeError,
        ):  # a fact that is missing, or of no use
            return False


def slip_hints(
    formula: Callable[[Any, str], float],
    sentences: Mapping[str, str],
    cases: Sequence[Any],
    yours: Sequence[float],
    rtol: float = 1e-6,
) -> Hints:
    """A hint for each slip -> sentence: your answers are those of `formula(case, slip)`."""
    return {
        sentence: lambda _, slip=slip: gives(lambda case: formula(case, slip), cases, yours, rtol)
        for slip, sentence in sentences.items()
    }


def gives(wrong: Callable[..., float], cases: Sequence[Any], yours: Sequence[float], rtol: float = 1e-6) -> bool:
    """For a hint: whether your answers are those of the formula `wrong` in every case."""
    return all(abs(mine - wrong(case)) <= rtol * abs(wrong(case)) for mine, case in zip(yours, cases, strict=True))
