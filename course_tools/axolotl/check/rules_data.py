"""Data sets that are missing, empty or of another format; validation that takes more than there is; packing that cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from course_tools.axolotl.check.batch import validation_rows
from course_tools.axolotl.check.datafiles import looks_like, missing, peek
from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding

CAN_PACK = (
    "flash_attention_2", "flash_attention_3", "flash_attention_4", "flash_attention_torch", "flex_attention", "xformers",
    "sage", "sdpa", "eager",
)  # fmt: skip
LETTERS_A_TOKEN = 6  # English text has fewer: a sequence is not called too long by mistake
MOST_ROWS = 2000  # looked at for their length


def rules(facts: Facts) -> Iterator[Finding]:
    """Findings about data, validation and packing."""
    yield from _sources(facts)
    yield from _model(facts)
    yield from _validation(facts)
    yield from _packing(facts)
    rows, whole = facts.batch.rows, facts.batch.global_batch
    if rows is not None and 0 < rows < whole and not facts.batch.packing:
        yield facts.warning(
            "datasets",
            f"{rows} rows, and a step takes {whole}: an epoch is less than one full step.",
            "make the batch smaller",
        )


def _sources(facts: Facts) -> Iterator[Finding]:
    raw = facts.settings.document.values
    if raw.get("datasets") is None and raw.get("pretraining_dataset") is None:
        yield facts.error("datasets", "There is no data: neither datasets nor pretraining_dataset.", "add datasets")
    for key in ("datasets", "test_datasets"):
        found = facts.given(key)
        for index, dataset in enumerate(found if isinstance(found, list) else []):
            if isinstance(dataset, dict):
                yield from _source(facts, (key, index), dataset)


def _source(facts: Facts, at: tuple[str | int, ...], dataset: dict[str, Any]) -> Iterator[Finding]:
    if dataset.get("type") == "_synthetic":
        return
    name = dataset.get("path")
    if not name:
        yield facts.error(at, "The data set has no path.", "add path: a file, a folder or a name on the hub")
        return
    if str(dataset.get("type", "")).startswith("sharegpt"):
        yield facts.error((*at, "type"), "Axolotl has removed sharegpt.", "write type: chat_template")
        return
    place = facts.settings.folder / name
    if not os.path.exists(place):
        if _meant_here(facts, dataset, str(name)):
            yield facts.error((*at, "path"), f"{name} does not exist.", _elsewhere(facts, str(name)))
        return
    found = peek(place)
    if found.problem:
        yield facts.error((*at, "path"), found.problem, "give a file with one JSON object a line")
        return
    kind = dataset.get("type")
    if kind is None and not facts.get("rl") and not facts.get("skip_prepare_dataset"):
        likely = looks_like(found.columns)
        yield facts.error(
            at, "The data set has no type: Axolotl would not know how to read a row.", f"add type: {likely or 'alpaca'}"
        )
    elif problem := missing(dataset, found):
        likely = looks_like(found.columns)
        fix = f"write type: {likely}" if likely and likely != kind else "name its fields, or convert the file"
        yield facts.error((*at, "type"), problem, fix)


def _meant_here(facts: Facts, dataset: dict[str, Any], name: str) -> bool:
    ending = name.endswith((".json", ".jsonl", ".parquet", ".arrow", ".csv", ".txt", ".gz"))
    cloud = "://" in name
    return not cloud and (ending or facts.settings.local(name))


def _elsewhere(facts: Facts, name: str) -> str:
    document = facts.settings.document.path
    if document and os.path.exists(document.parent / name):
        return (
            f"it lies beside the YAML, and paths count from the working directory: start axolotl in {document.parent}"
        )
    return "paths count from the folder that axolotl is started in; write an absolute one to be sure"


def _model(facts: Facts) -> Iterator[Finding]:
    for key in ("base_model", "tokenizer_config"):
        name = facts.given(key)
        if isinstance(name, str) and facts.settings.local(name):
            place: Path = facts.settings.folder / name
            if not os.path.exists(place):
                yield facts.error(key, f"{name} does not exist.", _elsewhere(facts, name))
            elif place.is_dir() and key == "base_model" and not (place / "config.json").is_file():
                yield facts.error(
                    key, f"{name} holds no config.json: it is no model.", "name the folder of save_pretrained"
                )


def _validation(facts: Facts) -> Iterator[Finding]:
    size, rows = facts.given("val_set_size"), facts.batch.rows
    if size is not None and size < 0:
        yield facts.error("val_set_size", f"{size} is no share and no number of rows.", "give a share such as 0.05")
        return
    if size and facts.given("test_datasets"):
        yield facts.error(
            "val_set_size", "test_datasets is set, too, and Axolotl refuses both.", "write val_set_size: 0"
        )
    if size and rows is not None:
        all_rows = _all_rows(facts)
        if all_rows and validation_rows(facts.settings, all_rows) >= all_rows:
            yield facts.error(
                "val_set_size",
                f"It takes {size:g} of {all_rows} rows: nothing is left to train on.",
                "give a share such as 0.05",
            )
    strategy, steps = facts.given("eval_strategy"), facts.given("eval_steps")
    if (
        facts.given("val_set_size") == 0
        and not facts.given("test_datasets")
        and (steps or strategy not in (None, "no"))
    ):
        yield facts.error(
            "eval_steps" if steps else "eval_strategy", "There is nothing to evaluate on: val_set_size is 0, and Axolotl refuses.",
            "give val_set_size: 0.05, or leave it out",
        )  # fmt: skip
    if facts.given("evals_per_epoch") and steps:
        yield facts.error("eval_steps", "eval_steps and evals_per_epoch are both set, and Axolotl refuses.", "keep one")


def _all_rows(facts: Facts) -> int:
    total = 0
    for one in facts.settings.local_datasets:
        place = facts.settings.folder / str(one.get("path"))
        total += (peek(place).rows or 0) if os.path.exists(place) else 0
    return total


def _packing(facts: Facts) -> Iterator[Finding]:
    if not facts.get("sample_packing"):
        return
    attention = facts.settings.attention
    if facts.get("rl"):
        yield facts.error(
            "sample_packing", "Packing does not go with rl, and Axolotl refuses.", "write sample_packing: false"
        )
    if not attention:
        yield facts.warning(
            "sample_packing", "No attention is chosen, and only a chosen one keeps packed texts from seeing each other.",
            "add attn_implementation: flash_attention_2 or sdpa",
        )  # fmt: skip
    elif attention not in CAN_PACK and "/" not in attention:
        yield facts.warning(
            "sample_packing",
            f"{attention} lets packed texts see each other.",
            "take flash_attention_2, flex_attention or sdpa",
        )
    if facts.get("pad_to_sequence_len") is False and "pad_to_sequence_len" in facts.settings.values:
        yield facts.warning("pad_to_sequence_len", "Packed rows of changing length fragment the memory.", "write true")
    lengths = _letters(facts)
    limit = facts.batch.sequence_len * LETTERS_A_TOKEN
    if lengths and (long := sum(length > limit for length in lengths)):
        share = 100 * long / len(lengths)
        yield facts.warning(
            "sequence_len",
            f"{share:.0f} % of the rows are longer than {facts.batch.sequence_len} tokens and are dropped or cut: nothing is "
            "left to pack them with.",
            "give a longer sequence_len",
        )


def _letters(facts: Facts) -> list[int]:
    found: list[int] = []
    for one in facts.settings.local_datasets:
        place = facts.settings.folder / str(one.get("path"))
        if one.get("type") in ("alpaca", "chat_template") and os.path.exists(place):
            found += [sum(len(str(value)) for value in row.values()) for row in peek(place).values[:MOST_ROWS]]
    return found
