"""What a check has to say: one sentence, where it is, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing about a YAML.

    Attributes:
        level: "error": Axolotl refuses the YAML, or it names what is not there, or it does not fit the cards.
            "warning": Axolotl takes it, and it may fail later or not be what was meant. "note": worth knowing.
        key: where, as datasets[0].path; "" for the whole file.
        line: of that key, from 1; None where no file was read or the key is missing.
        sentence: what is wrong. fix: what to write instead; "" where there is nothing to do.
    """

    level: str
    key: str
    line: int | None
    sentence: str
    fix: str = ""

    def __str__(self) -> str:
        place = f"line {self.line}, " if self.line else ""
        fix = f" Fix: {self.fix}" if self.fix else ""
        return f"{self.level}: {place}{self.key or 'the file'}: {self.sentence}{fix}"


def dotted(path: Iterable[str | int]) -> str:
    """("datasets", 0, "path") as datasets[0].path."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text
