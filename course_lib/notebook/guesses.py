"""The reader guesses a number, the run answers.

    rank_peak = ask("Peak of a step on each of 2 ranks", unit="MiB")  # a number box; empty is allowed
    ...
    measured(rank_peak, run.memory[0]["peak"], formula=12 * P, parts={"gloo's copy": copied})

What somebody types is kept in the progress file by lesson and question, so it survives a restart of the kernel. The
measurement waits, folded, for a guess or for "skip". Where nobody can type (nbconvert, nbval) nothing waits, and nothing
is kept.
"""

from __future__ import annotations

import html
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from course_lib.notebook import progress
from course_lib.notebook.amounts import UNITS, amount, read_amount
from course_lib.notebook.page import Page
from course_lib.notebook.widgets.panel import with_fallback
from course_lib.units import nice_bytes
from course_lib.validation import pick


@dataclass(frozen=True)
class Measurement:
    """A guess beside its measurement, every number in `unit`. `parts` lead from the formula (or 0) to the measurement."""

    question: str
    unit: str
    measured: float
    guess: float | None = None
    formula: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    kind: str = "measured"

    @property
    def unexplained(self) -> float:
        """What formula and parts leave over; 0 without either, and for the rounding noise of floats."""
        if self.formula is None and not self.parts:
            return 0.0
        left = self.measured - (self.formula or 0.0) - sum(self.parts.values())
        return 0.0 if abs(left) <= 1e-9 * max(abs(self.measured), abs(self.formula or 0.0)) else left

    def __str__(self) -> str:
        """One line, such as '5.2 MiB measured · 4.8 by formula · padding +0.4 · your guess 6 (15 % high)'."""
        line = [f"{amount(self.measured, self.unit)} {self.kind}"]
        if self.formula is not None:
            exact = not self.parts and not self.unexplained
            line.append("exactly what the formula gives" if exact else f"{amount(self.formula)} by formula")
        line += [f"{name} {self._small(size)}" for name, size in self.parts.items()]
        if abs(self.unexplained) > 1e-6 * abs(self.measured):
            line.append(f"unexplained {self._small(self.unexplained)}")
        if self.guess is not None:
            line.append(f"your guess {amount(self.guess)} ({_distance(self.guess, self.measured)})")
        return " · ".join(line)

    def _small(self, size: float) -> str:
        """A part with its sign; one that hardly shows in the measurement's unit gets a smaller one: '+1.06 KiB'."""
        kind, scale = UNITS[self.unit]
        if kind == "bytes" and abs(size) < 0.01 * abs(self.measured):
            return f"{'+' if size > 0 else ''}{nice_bytes(size * scale)}"
        return amount(size, sign=True)

    def page(self, *, folded: bool, asked: bool, then: Any = None) -> Page:
        """The line with its picture, and `then` below; `folded` behind a line to click, where nothing can wait."""
        from course_lib.figures.guess import dot_plot

        line = f"{self} · no guess" if asked and self.guess is None else str(self)
        picture = dot_plot(self, alt=line)
        below = "" if then is None else then._repr_mimebundle_()["text/html"]
        shown = f"{picture.html if picture else ''}<div>{html.escape(line)}</div>{below}"
        if folded:
            shown = f"<details><summary>Guess first, then open this: what was {self.kind}</summary>{shown}</details>"
        text = "\n".join([self.question, line, *([] if then is None else [repr(then)])])
        return Page(f"<div><div><b>{html.escape(self.question)}</b></div>{shown}</div>", text)


def _distance(guess: float, actual: float) -> str:
    """How far a guess is from the measurement: 'right', '0.5 % low', '3.2 times too high'."""
    side = "low" if guess < actual else "high"
    if math.isclose(guess, actual, rel_tol=1e-9):
        return "right"
    if guess <= 0 or actual <= 0:
        return f"{amount(abs(guess - actual))} too {side}"
    times = max(guess / actual, actual / guess)
    return (
        f"{amount(float(f'{times:.2g}'))} times too {side}"
        if times >= 2
        else f"{100 * abs(guess / actual - 1):.2g} % {side}"
    )


class Guess:
    """One question and its box. `value` is the guess in `unit`, None as long as nothing readable was typed."""

    def __init__(self, question: str, unit: str) -> None:
        self.question, self.unit, self.lesson = question, unit, lesson_here()
        self._record: progress.GuessRecord | None = None
        self._box: Any = None  # where somebody can type
        self._remark: Any = None
        self._reveal: list[Callable[[], None]] = []  # each shows a measurement that waits for this guess
        if somebody_looks_on():
            self._make_box()

    def _make_box(self) -> None:
        import ipywidgets as w

        kept = progress.load().guesses.get(self.lesson, {}).get(self.question)
        if kept is not None and kept.unit == self.unit:  # else the lesson asks in another unit now
            self._record = kept
        label = f"{self.question} ({self.unit})" if self.unit else self.question
        wide = {"style": {"description_width": "initial"}, "layout": w.Layout(width="auto", min_width="320px")}
        self._box = w.Text(
            value=self._typed, description=label, placeholder="your guess", continuous_update=False, **wide
        )
        self._box.observe(self._read, "value")
        self._remark = w.HTML()
        self._say("your guess from before" if self._typed else "")

    @property
    def value(self) -> float | None:
        """The guess in `unit`, or None."""
        return self._record.guess if self._record else None

    @property
    def _typed(self) -> str:
        return "" if self.value is None else amount(self.value)

    def __repr__(self) -> str:
        return f"{self.question}: ____ {self.unit}".rstrip()

    def _row(self, *more: Any) -> Any:
        """The box with what is said beside it; the same box may stand in several places."""
        import ipywidgets as w

        return w.HBox([self._box, *more, self._remark], layout=w.Layout(flex_flow="row wrap", align_items="center"))

    def _say(self, remark: str) -> None:
        self._remark.value = f"<span role='status'>{html.escape(remark)}</span>"

    def _read(self, change: Any) -> None:
        """Take what was typed into the box; nothing that anybody types is an error."""
        text = change["new"].strip()
        if self._record and self._record.measured is not None:
            late = "You have already seen the measurement, so this no longer counts."
            self._say("" if text == self._typed else late)
        elif not text:
            self._keep(None)
            self._say("")
        else:
            try:
                number = read_amount(text, self.unit)
            except ValueError as error:
                self._say(f"⚠ {error}. {f'Your guess is still {self._typed}.' if self._typed else 'No guess yet.'}")
                return
            self._keep(progress.GuessRecord(self.unit, number))
            self._say(f"your guess: {self._typed} {self.unit}".rstrip())
            self._unfold()

    def _skip(self, _: Any = None) -> None:
        self._keep(progress.GuessRecord(self.unit, None))  # unless the click has just finished a guess in the box
        self._unfold()

    def _keep(self, record: progress.GuessRecord | None) -> None:
        self._record = progress.record_guess(self.lesson, self.question, record)

    def _unfold(self) -> None:
        for reveal in self._reveal:
            reveal()
        self._reveal.clear()


_live: dict[tuple[str, str, str], Guess] = {}
"""A question asked again is the same guess: a cell that has run before it knows the new box."""


def ask(question: str, unit: str = "") -> Guess:
    """Show a number box for the reader's guess, and go on at once.

    Args:
        question: what is asked; with the notebook's name it names the guess in the progress file.
        unit: of the answer, one of UNITS; "" for a plain count. The box takes other units of its kind, too.
    """
    from IPython.display import display

    pick("unit", unit, UNITS)
    key = (lesson_here(), question, unit)
    guess = _live[key] = _live.get(key) or Guess(question, unit)
    page = Page(f"<p>{html.escape(question)}: ____ {html.escape(unit)}</p>", repr(guess))
    display(with_fallback([guess._row()], page._repr_html_()) if guess._box is not None else page)
    return guess


def measured(
    guess: Guess,
    value: float,
    *,
    formula: float | None = None,
    parts: Mapping[str, float] | None = None,
    kind: Literal["measured", "computed"] = "measured",
    then: Any = None,
) -> None:
    """Show the guess, the formula's value and the measurement side by side, once there is a guess or a "skip".

    Args:
        guess: what `ask` returned.
        value: the measurement: in bytes or seconds where the guess has a unit of them, otherwise in the guess's unit.
        formula: what the arithmetic gives, as `value`.
        parts: what leads from the formula (without one: from 0) to the measurement, name -> as `value`. What is then
            left is shown as unexplained.
        kind: how the value was found.
        then: a table or a figure that would give the answer away: it waits with the measurement.
    """
    from IPython.display import display

    size = UNITS[guess.unit][1]
    result = Measurement(
        guess.question,
        guess.unit,
        float(value) / size,
        formula=None if formula is None else float(formula) / size,
        parts={name: float(part) / size for name, part in (parts or {}).items()},
        kind=kind,
    )
    static = result.page(folded=True, asked=False, then=then)
    if guess._box is None:
        display(static)
        return
    import ipywidgets as w

    skip = w.Button(description="Show me without a guess", layout=w.Layout(width="auto"))
    skip.on_click(guess._skip)
    shown = with_fallback([guess._row(skip)], static._repr_html_())

    def reveal() -> None:
        if guess._record.measured is None:
            guess._keep(replace(guess._record, measured=result.measured))
        answer = replace(result, guess=guess.value).page(folded=False, asked=True, then=then)
        shown.children = [w.HTML(answer._repr_html_())]

    guess._reveal.append(reveal)
    if guess._record:
        guess._unfold()
    display(shown)


def somebody_looks_on() -> bool:
    """True in a notebook that is open in front of a person, False under nbconvert, nbval and in plain Python."""
    return bool(_notebook())


def lesson_here() -> str:
    """The name of this notebook, '01_gpu_memory'; "scratch" where there is none."""
    return Path(_notebook()).stem or "scratch"


def _notebook() -> str:
    """The file of the notebook that a person has open: Colab's first cell, VS Code and Jupyter's server each say it."""
    from course_lib.colab import NOTEBOOK

    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    in_vs_code = shell.user_ns.get("__vsc_ipynb_file__") if shell else None
    return in_vs_code or os.environ.get(NOTEBOOK) or os.environ.get("JPY_SESSION_NAME", "")
