"""What a check has to say: one sentence, where it is, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing about a YAML.

    Attributes:
        level: "error": the run fails, or is not the one that was written down. "warning": it runs, and may not be what was
            meant. "note": worth knowing.
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


def nearest(word: str, known: Iterable[str], cutoff: float = 0.7) -> str:
    """The known word that `word` was probably meant to be; "" if none is near."""
    words = sorted(known)
    found = difflib.get_close_matches(word, words, 1, cutoff)
    if not found:
        plain = {one.replace("_", "").replace("-", ""): one for one in words}
        found = [plain[one] for one in difflib.get_close_matches(word.replace("_", "").lower(), plain, 1, cutoff)]
    return found[0] if found else ""
