"""A whole check: YAML and cards in, a report out."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_lib.memory.cards import Cards, read_cards
from course_tools.axolotl.check.batch import batch
from course_tools.axolotl.check.document import Document, read_yaml
from course_tools.axolotl.check.findings import LEVELS, Facts, Finding
from course_tools.axolotl.check.holders import holders, strategy_name
from course_tools.axolotl.check.mistakes import mistakes
from course_tools.axolotl.check.prediction import Prediction, choices, predict
from course_tools.axolotl.check.report import Report, launch_command
from course_tools.axolotl.check.rules import RULES, axes
from course_tools.axolotl.check.settings import Settings
from course_tools.axolotl.check.validator import findings as axolotls_own


def check(
    path_or_values: str | os.PathLike[str] | Mapping[str, Any],
    *,
    gpus: str | Cards | None = "4x24GiB",
    validate: bool = True,
    folder: str | os.PathLike[str] = ".",
) -> Report:
    """Read an Axolotl YAML as Axolotl would, without starting it.

    Errors about settings are Axolotl's own: its validator is asked, in a process that loads it once (about ten
    seconds) and answers in a fraction of a second from then on. What it takes, the course's rules call a warning at
    most; their errors are about what it does not look at: files, rows of data, how ranks divide,
    what the cards can hold.

    Args:
        path_or_values: the file, or its mapping (then findings have no lines).
        gpus: the cards: 4x24GiB, 8xa100-80gb, 2x8xh100 (2 machines of 8), 2xcpu; None says nothing about cards.
        validate: ask Axolotl's validator; without it misspelt keys and wrong types are not found.
        folder: the working directory of the run, from which Axolotl reads relative paths.
    """
    given = isinstance(path_or_values, Mapping)
    document = Document(dict(path_or_values)) if given else read_yaml(path_or_values)
    cards = read_cards(gpus) if isinstance(gpus, str) else gpus
    settings = Settings(document, cards, Path(folder))
    facts = Facts(settings, batch(settings), predict(settings))
    if split := next(axes(facts), None):
        facts = replace(facts, prediction=Prediction(None, split.sentence, facts.prediction.shape))
    findings = [*mistakes(facts), *(finding for rule in RULES for finding in rule(facts))]
    if document.twice[0]:
        key, line = document.twice
        sentence = "The key stands there a second time: the last one counts, without a word."
        findings.append(Finding("error", key, line, sentence, "keep one of the two"))
    started = time.perf_counter()
    if validate:
        findings += axolotls_own(document, cards, Path(folder))
    prediction = facts.prediction
    offload = choices(settings)["offload"] if prediction.memory else "none"
    return Report(
        document=document,
        cluster=cards,
        launch_command=launch_command(document.path, cards),
        strategy="nothing, with these axes" if split else strategy_name(settings),
        batch=facts.batch,
        holders=() if split else tuple(holders(settings, prediction.memory, offload)),
        memory=prediction.memory,
        memory_unknown=prediction.reason,
        host=prediction.host,
        fits=prediction.fits,
        largest=prediction.largest,
        caveats=prediction.caveats,
        findings=tuple(sorted(findings, key=lambda finding: (LEVELS.index(finding.level), finding.line or 0))),
        validator_seconds=time.perf_counter() - started,
        validated=validate,
        extra=prediction.extra,
    )
