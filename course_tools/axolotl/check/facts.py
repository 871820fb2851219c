"""What a rule may ask: the run, its batch, its memory; and how it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from course_tools.axolotl.check.batch import Batch
from course_tools.axolotl.check.findings import Finding, dotted
from course_tools.axolotl.check.prediction import Prediction
from course_tools.axolotl.check.settings import Settings

Key = str | tuple[str | int, ...]


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

    def say(self, level: str, key: Key, sentence: str, fix: str = "") -> Finding:
        """A finding at a key, with its line."""
        path = (key,) if isinstance(key, str) else key
        return Finding(level, dotted(path), self.settings.document.line(*path), sentence, fix)

    def error(self, key: Key, sentence: str, fix: str = "") -> Finding:
        return self.say("error", key, sentence, fix)

    def warning(self, key: Key, sentence: str, fix: str = "") -> Finding:
        return self.say("warning", key, sentence, fix)
