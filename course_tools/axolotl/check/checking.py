"""A whole check: YAML and cards in, a report out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_tools.axolotl.check import (
    rules_adapters,
    rules_batch,
    rules_data,
    rules_hardware,
    rules_saving,
    rules_sharding,
    validator,
)
from course_tools.axolotl.check.batch import batch
from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import LEVELS, Finding, dotted
from course_tools.axolotl.check.gpus import Cluster, cluster
from course_tools.axolotl.check.holders import holders, strategy_name
from course_tools.axolotl.check.prediction import Prediction, choices, predict
from course_tools.axolotl.check.report import Report, launch_command
from course_tools.axolotl.check.settings import Settings
from course_tools.axolotl.check.yaml_lines import Document, read_yaml

RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *rules_batch.RULES,
    *rules_data.RULES,
    *rules_adapters.RULES,
    *rules_sharding.RULES,
    *rules_hardware.RULES,
    *rules_saving.RULES,
)


def check(
    path_or_values: str | os.PathLike[str] | Mapping[str, Any],
    *,
    gpus: str | Cluster | None = "4x24GiB",
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
    document = Document.of(path_or_values) if isinstance(path_or_values, Mapping) else read_yaml(path_or_values)
    cards = None if gpus is None else cluster(gpus)
    settings = Settings(document, cards, Path(folder))
    facts = Facts(settings, batch(settings), predict(settings))
    if split := next(rules_sharding.axes(facts), None):
        facts = replace(facts, prediction=Prediction(None, split.sentence, facts.prediction.shape))
    findings = list(_duplicates(document))
    findings += [finding for rule in RULES for finding in rule(facts)]
    if validate:
        findings += validator.findings(document, cards, Path(folder))
    prediction = facts.prediction
    offload = choices(settings)["offload"] if prediction.memory else "none"
    return Report(
        name=str(document.path or "the YAML"),
        cluster=cards,
        launch_command=launch_command(document.path, cards),
        strategy="the ranks cannot split the model so" if split else strategy_name(settings),
        batch=facts.batch,
        holders=() if split else tuple(holders(settings, prediction.memory, offload)),
        memory=prediction.memory,
        memory_unknown=prediction.reason,
        host=prediction.host,
        fits=prediction.fits,
        largest=prediction.largest,
        caveats=prediction.caveats,
        findings=tuple(sorted(findings, key=lambda finding: (LEVELS.index(finding.level), finding.line or 0))),
    )


def _duplicates(document: Document) -> Iterator[Finding]:
    for path, earlier in document.duplicates:
        sentence = f"The key stands there twice (line {earlier} too): the last one counts, without a word."
        yield Finding("error", dotted(path), document.line(*path), sentence, "keep one of the two")
