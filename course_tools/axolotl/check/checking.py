"""A whole check: YAML and cards in, a report out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from course_tools.axolotl.check import (
    rules_adapters,
    rules_data,
    rules_hardware,
    rules_numbers,
    rules_saving,
    rules_sharding,
)
from course_tools.axolotl.check.batch import batch
from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import LEVELS, Finding
from course_tools.axolotl.check.gpus import Cluster, cluster
from course_tools.axolotl.check.holders import holders, strategy_name
from course_tools.axolotl.check.keys import cleaned
from course_tools.axolotl.check.launching import launch_command
from course_tools.axolotl.check.prediction import choices, predict
from course_tools.axolotl.check.report import Report
from course_tools.axolotl.check.schema import installed_version, stored
from course_tools.axolotl.check.settings import Settings
from course_tools.axolotl.check.yaml_lines import EXPONENT, Document, KeyPath, read_yaml

RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    rules_numbers.rules, rules_data.rules, rules_adapters.rules, rules_sharding.rules, rules_hardware.rules,
    rules_saving.rules,
)  # fmt: skip


def check(
    path_or_values: str | os.PathLike[str] | Mapping[str, Any],
    *,
    gpus: str | Cluster | None = "4x24GiB",
    deep: bool = False,
    folder: str | os.PathLike[str] = ".",
) -> Report:
    """Read an Axolotl YAML as Axolotl would, without starting it.

    Args:
        path_or_values: the file, or its mapping (then findings have no lines).
        gpus: the cards: 4x24GiB, 8xa100-80gb, 2x8xh100 (2 machines of 8), 2xcpu; None says nothing about cards.
        deep: let Axolotl's own validators judge, too: they see some crossed settings that no rule here knows, and take ten
            seconds to import.
        folder: the working directory of the run, from which Axolotl reads relative paths.

    Raises:
        ValueError: a file that cannot be read or is no YAML (line and column), cards that do not exist.
    """
    document = document_of(path_or_values) if isinstance(path_or_values, Mapping) else read_yaml(path_or_values)
    cards = None if gpus is None else cluster(gpus)
    values, findings = cleaned(document)
    settings = Settings(document, values, cards, Path(folder))
    found = batch(settings)
    facts = Facts(settings, found, predict(settings))
    for rule in RULES:
        findings += rule(facts)
    findings += _version()
    if deep:
        from course_tools.axolotl.check.deep import ask

        findings += ask(settings, findings)
    prediction = facts.prediction
    offload = choices(settings)["offload"] if prediction.memory else "none"
    return Report(
        str(document.path or "the YAML"), cards, launch_command(settings), strategy_name(settings), found,
        tuple(holders(settings, prediction.memory, offload)), prediction.memory, prediction.reason, prediction.fits,
        prediction.largest, prediction.caveats, tuple(sorted(findings, key=_order)),
    )  # fmt: skip


def document_of(values: Mapping[str, Any]) -> Document:
    """A document of values that came without a file."""
    return Document(dict(values), plain_strings=frozenset(_exponents(values, ())))


def _exponents(value: Any, path: KeyPath) -> Iterator[KeyPath]:
    if isinstance(value, str) and EXPONENT.fullmatch(value):
        yield path
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _exponents(item, (*path, key))


def _version() -> list[Finding]:
    here, known = installed_version(), stored()["axolotl"]
    if here in (None, known):
        return []
    return [
        Finding(
            "note",
            "",
            None,
            f"Axolotl {here} is installed, and the keys known here are those of {known}.",
            "run python -m course_tools.axolotl.check.schema",
        )  # fmt: skip
    ]


def _order(finding: Finding) -> tuple[int, int]:
    return LEVELS.index(finding.level), finding.line or 0
