"""Predict a number, measure it, and name what is left over.

    predict("peak of a ZeRO-2 step", 1.9, "GiB", lesson="05_deepspeed_zero")
    measured("peak of a ZeRO-2 step", run.memory[0].peak, "bytes", parts={"all-gather buffer": 96 * 2**20})

A reader who would rather not guess writes `predict(name, None, unit)`: the measurement is kept, without a residual.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.notebook import progress
from course_lib.stamp import stamp as stamp_here
from course_lib.units import GB, GIB, KB, KIB, MB, MIB, TB, TIB
from course_lib.validation import did_you_mean

_BYTES = {"bytes": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
UNITS: dict[str, tuple[str, float]] = {
    **{unit: ("bytes", size) for unit, size in _BYTES.items()},
    **{unit: ("time", size) for unit, size in _SECONDS.items()},
    **{f"{unit}/s": ("bytes per second", _BYTES[unit]) for unit in ("bytes", "MB", "GB", "MiB", "GiB")},
    **{f"{prefix}FLOP/s": ("FLOP per second", size) for prefix, size in {"": 1, "G": 1e9, "T": 1e12}.items()},
    "%": ("percent", 1),
    "tokens": ("tokens", 1),
    "tokens/s": ("tokens per second", 1),
    "steps": ("steps", 1),
    "": ("count", 1),
}
"""Unit -> (kind, size in that kind's base unit). Only units of one kind are converted into each other."""
_OTHER_WORDS = {"b": "bytes", "sec": "s", "second": "s", "seconds": "s", "percent": "%", "minutes": "min", "hours": "h"}


@dataclass
class Entry:
    """One pair of the ledger; every number is in `unit`. `parts` name contributions to measured - predicted."""

    name: str
    lesson: str
    unit: str
    predicted: float | None
    measured: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    stamp: dict[str, Any] = field(default_factory=dict)

    @property
    def residual(self) -> float | None:
        """measured - predicted in `unit`, None where one of them is missing; rounding noise of the floats is 0."""
        if self.predicted is None or self.measured is None:
            return None
        return self._clean(self.measured - self.predicted)

    @property
    def percent(self) -> float | None:
        """The residual in percent of the prediction, None where there is none or the prediction is 0."""
        return None if self.residual is None or not self.predicted else 100 * self.residual / abs(self.predicted)

    @property
    def unexplained(self) -> float | None:
        """The residual less the named parts, in `unit`."""
        return None if self.residual is None else self._clean(self.residual - sum(self.parts.values()))

    def _clean(self, value: float) -> float:
        scale = max(abs(self.predicted or 0), abs(self.measured or 0), *map(abs, self.parts.values()), 0)
        return 0.0 if abs(value) <= 1e-12 * scale else value

    def _ipython_display_(self) -> None:
        """Nothing: `measured` as a cell's last line has printed its line already. `print(entry)` shows it again."""

    def __str__(self) -> str:
        guess = "not predicted" if self.predicted is None else f"predicted {amount(self.predicted, self.unit)}"
        if self.measured is None:
            return f"{self.name}: {guess}"
        line = f"{self.name}: {guess}, measured {amount(self.measured, self.unit)}"
        if self.residual is None:
            return line
        share = "no percentage of a predicted 0" if self.percent is None else f"{self.percent:+.1f} %"
        line += f", residual {amount(self.residual, self.unit, sign=True)} ({share})"
        named = [f"{part} {amount(value, self.unit, sign=True)}" for part, value in self.parts.items()]
        if self.residual or named:
            line += ": " + ", ".join([*named, f"unexplained {amount(self.unexplained, self.unit, sign=True)}"])
        return line


_entries: dict[tuple[str, str], Entry] = {}  # this process's pairs, by lesson and name, the latest prediction last


def predict(name: str, value: float | None, unit: str, *, lesson: str | None = None) -> Entry:
    """Say what `name` will be, before it is measured: `value` in `unit`; None for no prediction.

    `lesson` None is the lesson of the prediction before this one, or the notebook's file name. Predicting a name again
    begins the pair anew. Raises ValueError for an unknown unit and for what is not a finite number.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError("give the prediction a name, such as 'peak of a training step'")
    _kind(unit)
    number = None if value is None else _finite(value, f"the prediction of {name!r}", "; None skips the prediction")
    entry = Entry(name, lesson or _lesson_now(), unit, number)
    progress.record_ledger(entry.lesson, _record(entry))
    _entries.pop((entry.lesson, name), None)
    _entries[entry.lesson, name] = entry
    return entry


def measured(
    name: str,
    value: float,
    unit: str | None = None,
    *,
    parts: Mapping[str, float] | None = None,
    stamp: Mapping[str, Any] | None = None,
) -> Entry:
    """Complete the pair `name` and print it in one line. `value` and `parts` are in `unit` (None: the prediction's).

    They are kept in the prediction's unit. `stamp` is what `course_lib.stamp.stamp(...)` or a run's own stamp gives; None takes
    `stamp()`. Raises ValueError without a prediction of that name in this process, for units of different kinds, an
    unknown unit, and what is not a finite number.
    """
    found = [entry for entry in _entries.values() if entry.name == name]
    if not found:
        near = did_you_mean(name, [entry.name for entry in _entries.values()])
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"nothing was predicted for {name!r}{hint}: run predict({name!r}, value, unit) first")
    entry = found[-1]
    scale = _scale(entry.unit if unit is None else unit, entry)
    number = _finite(value, f"the measurement of {name!r}") * scale
    named = {str(part): _finite(size, f"the part {part!r}") * scale for part, size in (parts or {}).items()}
    if "unexplained" in named:
        raise ValueError("'unexplained' is what the parts leave over: leave it out of parts")
    where = stamp_here() if stamp is None else dict(stamp)
    done = Entry(entry.name, entry.lesson, entry.unit, entry.predicted, number, named, where)
    progress.record_ledger(done.lesson, _record(done))
    vars(entry).update(vars(done))
    print(entry)
    return entry


def entries(lesson: str | None = None) -> list[Entry]:
    """This process's pairs in the order of their predictions, all of them or one lesson's."""
    return [entry for entry in _entries.values() if lesson in (None, entry.lesson)]


def amount(value: float, unit: str, *, sign: bool = False) -> str:
    """A number with its unit: '1.9 GiB', '13,912,064 bytes', '+7.9 %'. Whole numbers in full, others in 4 digits."""
    plus = "+" if sign and value else ""
    whole = float(value).is_integer() and abs(value) < 1e15
    digits = ",.0f" if whole or 1e4 <= abs(value) < 1e15 else ".4g"
    return f"{value:{plus}{digits}} {unit}".rstrip()


def _finite(value: Any, what: str, skip: str = "") -> float:
    try:
        number = float(value) if not isinstance(value, (str, bytes, bool)) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{what} is {str(value)[:60]!r}: give one finite number{skip}")
    return number


def _kind(unit: str) -> str:
    if isinstance(unit, str) and unit in UNITS:
        return UNITS[unit][0]
    if isinstance(unit, str) and unit.strip().upper() in ("K", "M", "G", "T"):
        letter = unit.strip().upper()
        power = "KMGT".index(letter) + 1
        sizes = f"{letter}B ({1000**power:,} bytes) or {letter}iB ({1024**power:,} bytes)"
        raise ValueError(f"{unit!r} is no unit: write {sizes}")
    near = did_you_mean(unit, [*UNITS, *_OTHER_WORDS], cutoff=0.4)
    hint = f" did you mean {_OTHER_WORDS.get(near[0], near[0])!r}?" if near else ""
    known = ", ".join(filter(None, UNITS))
    raise ValueError(f"{unit!r} is no unit that the ledger knows;{hint} it knows {known} and '' for a plain count")


def _scale(unit: str, entry: Entry) -> float:
    """What turns a number in `unit` into one in the prediction's unit."""
    if _kind(unit) != _kind(entry.unit):
        predicted, actual = (f"{name or 'a plain count'!r} ({_kind(name)})" for name in (entry.unit, unit))
        raise ValueError(f"{entry.name!r} was predicted in {predicted} and measured in {actual}: use units of one kind")
    return UNITS[unit][1] / UNITS[entry.unit][1]


def _lesson_now() -> str:
    if _entries:
        return next(reversed(_entries.values())).lesson
    return Path(os.environ.get("JPY_SESSION_NAME", "")).stem or "scratch"


def _record(entry: Entry) -> progress.LedgerRecord:
    return progress.LedgerRecord(entry.name, entry.unit, entry.predicted, entry.measured, entry.parts, entry.stamp)
