"""Data sets that are missing, empty or of another format; validation that takes all there is; packing that cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from course_tools.axolotl.check.batch import validation_rows
from course_tools.axolotl.check.datafiles import looks_like, missing, peek
from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding

ENDINGS = (".json", ".jsonl", ".parquet", ".arrow", ".csv", ".txt", ".gz")
LETTERS_A_TOKEN = 6  # English text has fewer: a sequence is not called too long by mistake
MOST_ROWS = 2000  # looked at for their length


def sources(facts: Facts) -> Iterator[Finding]:
    """Each data set, its file and its format."""
    raw = facts.settings.document.values
    if raw.get("datasets") is None and raw.get("pretraining_dataset") is None:
        yield facts.error("datasets", "There is no data: neither datasets nor pretraining_dataset.", "add datasets")
    for key in ("datasets", "test_datasets"):
        for index, dataset in facts.settings.datasets(key):
            yield from _source(facts, (key, index), dataset)


def _source(facts: Facts, path: tuple[str | int, ...], dataset: dict[str, Any]) -> Iterator[Finding]:
    kind, name = dataset.get("type"), dataset.get("path")
    if kind == "_synthetic":
        return
    if not name:
        yield facts.error(path, "The data set has no path.", "add path: a file, a folder or a name on the hub")
        return
    place = facts.settings.folder / name
    if not os.path.exists(place):
        if "://" not in name and (name.endswith(ENDINGS) or facts.settings.local(name)):
            yield facts.error((*path, "path"), f"{name} does not exist.", _elsewhere(facts, name))
        return
    found = peek(place)
    likely = looks_like(found.columns)
    if found.problem:
        yield facts.error((*path, "path"), found.problem, "give a file with one JSON object a line")
    elif kind is None and not facts.get("rl") and not facts.get("skip_prepare_dataset"):
        if "input_ids" not in found.columns:  # tokens, which Axolotl takes as they are
            sentence = "The data set has no type: Axolotl would not know how to read a row."
            yield facts.error(path, sentence, f"add type: {likely or 'alpaca'}")
    elif problem := missing(dataset, found):
        fix = f"write type: {likely}" if likely and likely != kind else "name its fields, or convert the file"
        yield facts.error((*path, "type"), problem, fix)


def _elsewhere(facts: Facts, name: str) -> str:
    document = facts.settings.document.path
    if document and os.path.exists(document.parent / name):
        return (
            f"it lies beside the YAML, and paths count from the working directory: start axolotl in {document.parent}"
        )
    return "paths count from the folder that axolotl is started in; write an absolute one to be sure"


def model(facts: Facts) -> Iterator[Finding]:
    """A model or tokenizer that is meant to lie here and does not."""
    for key in ("base_model", "tokenizer_config"):
        name = facts.given(key)
        if not name or not facts.settings.local(name):
            continue
        place = facts.settings.folder / name
        if not os.path.exists(place):
            yield facts.error(key, f"{name} does not exist.", _elsewhere(facts, name))
        elif key == "base_model" and place.is_dir() and not (place / "config.json").is_file():
            sentence = f"{name} holds no config.json: it is no model."
            yield facts.error(key, sentence, "name the folder of save_pretrained")


def validation(facts: Facts) -> Iterator[Finding]:
    """A split that leaves nothing to train on."""
    size, rows = facts.given("val_set_size"), facts.batch.rows
    if size is not None and size < 0:
        sentence = f"{size} is no share and no number of rows."
        yield facts.warning("val_set_size", sentence, "give a share such as 0.05")
    elif size and rows is not None:
        places = [facts.settings.folder / str(one.get("path")) for _, one in facts.settings.datasets()]
        total = sum(peek(place).rows or 0 for place in places if os.path.exists(place))
        if total and validation_rows(facts.settings, total) >= total:
            sentence = f"It takes {size:g} of {total} rows: nothing is left to train on."
            yield facts.error("val_set_size", sentence, "give a share such as 0.05")


def packing(facts: Facts) -> Iterator[Finding]:
    """Packed rows of changing length, and texts that are too long to be packed."""
    if not facts.get("sample_packing"):
        return
    if facts.given("pad_to_sequence_len") is False:
        yield facts.warning("pad_to_sequence_len", "Packed rows of changing length fragment the memory.", "write true")
    lengths, length = _letters(facts), facts.batch.sequence_len
    too_long = sum(one > length * LETTERS_A_TOKEN for one in lengths)
    if too_long:
        sentence = (
            f"{100 * too_long / len(lengths):.0f} % of the rows are longer than {length} tokens and are dropped or cut"
        )
        yield facts.warning(
            "sequence_len", f"{sentence}: nothing is left to pack them with.", "give a longer sequence_len"
        )


def _letters(facts: Facts) -> list[int]:
    found: list[int] = []
    for _, one in facts.settings.datasets():
        place = facts.settings.folder / str(one.get("path"))
        if one.get("type") in ("alpaca", "chat_template") and os.path.exists(place):
            found += [sum(len(str(value)) for value in row.values()) for row in peek(place).values[:MOST_ROWS]]
    return found


RULES = (sources, model, validation, packing)
