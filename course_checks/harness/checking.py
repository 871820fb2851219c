"""The check contract: a learner's function goes in, `passed`, `not attempted` or `not yet: …` comes out.

    lab = Lab("04_ddp_accelerate", title="DDP with Accelerate")

    @lab.exercise("Your own DistributedDataParallel", importance=5, difficulty=4, minutes=30)
    def my_ddp(make_ddp):
        run = launch(steps, ranks=2, make_ddp=make_ddp)
        close(run.results[0], oracle(), rtol=1e-5, what="the loss")
        return "2 ranks; 5.6 MB a rank a step"

A check says that something is wrong by raising NotYet, here or in a rank. Whatever the learner's code raises becomes a
verdict that names the learner's line. A wrong signature, type or dtype becomes a sentence, and an endless loop is stopped
(harness/guard.py). An assertion or a NameError of the course's own is a bug of the course, and comes out as one.
"""

from __future__ import annotations

import functools
import html
import inspect
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from course_checks.harness.comparing import NotYet, close, returned
from course_checks.harness.guard import Guarded, time_limit
from course_checks.harness.stubs import always_stops, untouched
from course_lib.launch import RankFailed, RanksHung
from course_lib.launch.failures import is_learners, place
from course_lib.launch.threads import one_thread
from course_lib.notebook import progress
from course_lib.validation import did_you_mean

Status = Literal["passed", "not attempted", "not yet"]
COLOURS: dict[str, str] = {"passed": "#2e7d32", "not attempted": "#757575", "not yet": "#b26a00"}
__all__ = ["Exercise", "Lab", "NotYet", "Verdict", "close", "judge", "returned"]
LIMIT = 120.0  # seconds for one check: an endless loop ends here
# What using a wrong type, dtype or shape raises in a check's own lines, where no line of the learner's takes part.
USE_FAILS = (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RuntimeError)
_USE_FAILS_BY_NAME = {e.__name__ for e in USE_FAILS} | {"KeyError", "IndexError", "ZeroDivisionError", "OverflowError"}
NOT_ITS_RESULT = "pass the function itself, not its result"


@dataclass(frozen=True)
class Verdict:
    """What one check answered; `message` is the evidence or what is missing, `seconds` the time that it took."""

    exercise: str
    status: Status
    message: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.status}: {self.message}" if self.message else self.status

    def _ipython_display_(self) -> None:
        """Nothing: the check has shown its verdict already, and the call is usually the last line of its cell."""

    def to_html(self) -> str:
        """A small block for a notebook; the colour repeats what the word says, everything else is escaped."""
        word, rest = html.escape(self.status), html.escape(self.message)
        style = f"border-left:5px solid {COLOURS[self.status]};padding:.3em .8em;margin:.3em 0;white-space:pre-wrap"
        return f'<div role="status" style="{style}"><strong>{word}</strong>{": " + rest if rest else ""}</div>'

    def show(self) -> None:
        """Display the verdict in a notebook, print it anywhere else."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        if shell is not None and hasattr(shell, "kernel"):
            from IPython.display import display

            display({"text/html": self.to_html(), "text/plain": str(self)}, raw=True)
        else:
            print(self)


class Exercise:
    """One exercise of a lab: call it with the learner's function to get the verdict."""

    def __init__(
        self,
        lab: Lab,
        check: Callable[..., str | None],
        title: str,
        importance: int,
        difficulty: int,
        minutes: int,
        keeps_inputs: bool = True,
    ):
        functools.update_wrapper(self, check)
        self.lab, self.check, self.name, self.title = lab, check, check.__name__, title
        self.importance, self.difficulty, self.minutes = importance, difficulty, minutes
        self.keeps_inputs = keeps_inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Verdict:
        """Run the check, show and record its verdict. Raises only KeyboardInterrupt and the course's own bugs."""
        start = time.perf_counter()
        status, message = self._unready(args, kwargs) or self._run(args, kwargs)
        verdict = Verdict(self.name, status, message, time.perf_counter() - start)
        self.lab.verdicts[self.name] = verdict
        if status != "not attempted":
            passed = status == "passed"
            progress.record_exercise(self.lab.name, self.name, passed=passed, seconds=verdict.seconds, message=message)
        verdict.show()
        return verdict

    def _unready(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Status, str] | None:
        """What can be said before running: an untouched stub, a result in the place of a function."""
        signature = inspect.signature(self.check)
        call = f"check.{self.name}({', '.join(signature.parameters)})"
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return "not yet", f"{NOT_ITS_RESULT}: {call}"
        for name, value in given.items():
            wants = signature.parameters[name].annotation
            # A parameter takes a function unless the check annotates it as something else.
            function_wanted = wants is inspect.Parameter.empty or "Callable" in str(wants)
            if value is ... or (value is None and not function_wanted) or untouched(value):
                return "not attempted", ""
            if function_wanted and not callable(value):
                return "not yet", f"{NOT_ITS_RESULT}: {call}"
        if given and all(map(always_stops, given.values())):  # known without running it, which may start ranks
            return "not attempted", ""
        return None

    def _run(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Status, str]:
        try:
            with one_thread(), time_limit(LIMIT):
                evidence = self.check(*map(self._guarded, args), **{k: self._guarded(v) for k, v in kwargs.items()})
        except (Exception, SystemExit) as error:
            verdict = judge(error)
            if verdict is None:
                raise
            return verdict
        assert evidence is None or isinstance(evidence, str), f"{self.name} returned {evidence!r}, not its evidence"
        return "passed", evidence or ""

    def _guarded(self, value: Any) -> Any:
        return Guarded(value, keeps_inputs=self.keeps_inputs) if callable(value) else value


def judge(error: BaseException) -> tuple[Status, str] | None:
    """The verdict on what a check raised; None when the course is to blame, and the exception must go on."""
    if isinstance(error, NotYet):
        return "not yet", str(error)
    if isinstance(error, RanksHung):
        return "not yet", str(error)
    if isinstance(error, RankFailed):
        return _judge_rank(error)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    learners = [frame for frame in frames if is_learners(frame[0])]
    kind, message = type(error).__name__, _text(error)
    if _lacks_forward(message):
        return "not yet", message
    if not learners:
        if isinstance(error, TypeError) and "cannot travel" in message:  # launch's own sentence
            return "not yet", message
        return ("not yet", _unusable(kind, message)) if isinstance(error, USE_FAILS) else None
    if isinstance(error, AssertionError) and _module(error).startswith(
        ("course_lib.", "course_checks.", "course_tools.")
    ):
        return None
    if isinstance(error, NotImplementedError) and is_learners(frames[-1][0]):
        return "not attempted", ""
    return "not yet", f"your code raised {_brief(kind, message)} at {place(*learners[-1])}"


def _judge_rank(error: RankFailed) -> tuple[Status, str] | None:
    kind, message, where = error.cause_type, error.cause_message, error.where
    if kind == "NotYet" or _lacks_forward(message):
        return "not yet", message
    if kind == "NotImplementedError" and (not message or "`" not in where or "NotImplementedError" in where):
        return "not attempted", ""
    if not where:  # a rank that died has no line to name, and no check of ours ends its rank
        if kind == "SystemExit" or kind.startswith("SIG"):
            return "not yet", message
        return ("not yet", _unusable(kind, message)) if kind in _USE_FAILS_BY_NAME else None
    return "not yet", f"your code raised {_brief(kind, message)} on rank {error.rank} at {where}"


def _unusable(kind: str, message: str) -> str:
    return (
        f"the check cannot use what your function gave ({_brief(kind, message)}): its type, dtype, shape or one of its methods "
        "is another than the stub's docstring asks for"
    )


def _module(error: BaseException) -> str:
    """Name of the module in which the exception was raised."""
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    return str(last.f_globals.get("__name__", ""))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # a learner's own exception class may fail to print; that is not the news
        return f"(its message cannot be shown: {type(broken).__name__})"


def _brief(kind: str, message: str) -> str:
    line = " ".join(message.split())
    return f"{kind}: {line[:300]}{'…' if len(line) > 300 else ''}" if line else kind


def _lacks_forward(message: str) -> bool:
    return 'is missing the required "forward" function' in message  # torch's words; no line of the learner's took part


class Lab:
    """The exercises of one lab in the order of their definition, and what this kernel has seen of them."""

    def __init__(self, name: str, *, title: str):
        numbered = re.fullmatch(r"(\d\d)_\w+", name)
        if not numbered:
            raise ValueError(f"a lab is named like its notebook, '04_ddp_accelerate', not {name!r}")
        self.name, self.title, self.number = name, title, int(numbered[1])
        self.exercises: dict[str, Exercise] = {}
        self.verdicts: dict[str, Verdict] = {}

    def exercise(
        self,
        title: str,
        *,
        importance: int,
        difficulty: int,
        minutes: int,
        keeps_inputs: bool = True,
    ) -> Callable[[Callable[..., str | None]], Exercise]:
        """Make a function the check of the next exercise. `importance` and `difficulty` go from 1 to 5.

        keeps_inputs: the learner's function must not change the lists, dicts and tensors that it is given.

        The function takes what the learner hands in, raises NotYet for a known mistake, and returns None or the
        evidence in a few words. A parameter takes a function unless it is annotated as something else.
        """
        if not (1 <= importance <= 5 and 1 <= difficulty <= 5 and minutes > 0):
            raise ValueError(f"{title!r}: importance and difficulty go from 1 to 5, minutes are more than 0")

        def define(check: Callable[..., str | None]) -> Exercise:
            name = check.__name__
            if name in self.exercises or hasattr(type(self), name) or name in vars(self):
                raise ValueError(f"lab {self.number} has something called {name!r} already: rename the exercise")
            self.exercises[name] = Exercise(self, check, title, importance, difficulty, minutes, keeps_inputs)
            return self.exercises[name]

        return define

    def __getattr__(self, name: str) -> Exercise:
        exercises = vars(self).get("exercises", {})
        if name in exercises:
            return exercises[name]
        near = did_you_mean(name, exercises, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"this lab has no exercise {name!r}{hint}")

    def score_text(self, statuses: Mapping[str, str]) -> str:
        """The score of `statuses` (exercise name -> status; missing: not attempted). Runs nothing, holds no times."""
        unknown = set(statuses) - set(self.exercises)
        if unknown:
            raise ValueError(f"lab {self.number} has no exercise {sorted(unknown)[0]!r}")
        lines, passed = [], 0
        for number, (name, exercise) in enumerate(self.exercises.items(), 1):
            status = statuses.get(name, "not attempted")
            passed += status == "passed"
            lines.append(f"[{'x' if status == 'passed' else ' '}] {number} {exercise.title} - {status}")
        return "\n".join([*lines, f"Lab {self.number}: {passed} of {len(lines)} passed"])

    def score(self) -> None:
        """Print the score of this kernel's verdicts."""
        print(self.score_text({name: verdict.status for name, verdict in self.verdicts.items()}))
