"""What a check has to say: one sentence, where it is, and what to do about it; and what a rule may ask to know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from course_tools.axolotl.check.batch import Batch
from course_tools.axolotl.check.document import Document, KeyPath
from course_tools.axolotl.check.prediction import Prediction
from course_tools.axolotl.check.settings import Settings

Mend = Mapping[Any, Any]  # a key, as `finding` takes it -> what to write there
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
        mend: the same for `--fix`, where nobody could mean anything else: for `Document.mended`.
    """

    level: str
    key: str
    line: int | None
    sentence: str
    fix: str = ""
    mend: dict[KeyPath, Any] = field(default_factory=dict)

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


def finding(
    document: Document, level: str, key: str | KeyPath, sentence: str, fix: str = "", mend: Mend | None = None
) -> Finding:
    """A finding at a key of a document, with its line; keys as a path, or as fsdp_config.offload_params."""
    path = _path(key)
    mends = {_path(each): value for each, value in (mend or {}).items()}
    return Finding(level, dotted(path), document.line(*path), sentence, fix, mends)


def _path(key: str | KeyPath) -> KeyPath:
    return tuple(key.split(".")) if isinstance(key, str) else key


@dataclass(frozen=True)
class Facts:
    """A run as far as it can be known before it runs."""

    settings: Settings
    batch: Batch
    prediction: Prediction

    def get(self, key: str) -> Any:
        """A value of the YAML, or Axolotl's default."""
        return self.settings.get(key)

    def given(self, key: str) -> Any:
        """A value that stands in the YAML; None if it does not."""
        return self.settings.given(key)

    def say(self, level: str, key: str | KeyPath, sentence: str, fix: str = "", mend: Mend | None = None) -> Finding:
        """A finding at a key, with its line."""
        return finding(self.settings.document, level, key, sentence, fix, mend)

    def error(self, key: str | KeyPath, sentence: str, fix: str = "", mend: Mend | None = None) -> Finding:
        return self.say("error", key, sentence, fix, mend)

    def warning(self, key: str | KeyPath, sentence: str, fix: str = "", mend: Mend | None = None) -> Finding:
        return self.say("warning", key, sentence, fix, mend)
