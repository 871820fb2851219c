"""How many rows are left when short sequences share one: tokens counted with the model's own tokenizer, then packed."""

from __future__ import annotations

import os
import random
from typing import Any

from course_tools.axolotl.check.datafiles import Peek
from course_tools.axolotl.check.settings import Settings

MOST_LETTERS = 2**20  # above that counting takes longer than a check may
INTRO = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)
WITH_INPUT = INTRO.format(", paired with an input that provides further context")
WITHOUT = INTRO.format("")


def token_lengths(settings: Settings, peeks: list[Peek]) -> tuple[list[int] | None, str]:
    """Tokens of each sequence, in order, or None and why not.

    Counted where the tokenizer is a local folder with a tokenizer.json and the data sets are alpaca or completion.
    """
    folder = settings.folder / str(settings.get("tokenizer_config") or settings.get("base_model") or "")
    if not os.path.isfile(folder / "tokenizer.json"):
        return None, "Packed rows are counted where the tokenizer lies here as a folder with tokenizer.json."
    datasets = [one for _, one in settings.datasets()]
    kinds = [one.get("type") for one in datasets]
    if any(kind not in ("alpaca", "completion") for kind in kinds):
        return None, "Packed rows are counted for `type: alpaca` and `type: completion` only."
    texts = [
        (kind, _texts(kind, one, row))
        for kind, one, found in zip(kinds, datasets, peeks, strict=True)
        for row in found.values
    ]
    if sum(len(part) for _, parts in texts for part in parts) > MOST_LETTERS:
        return None, "The data is too large to be tokenized for a check: axolotl preprocess counts it."
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    length = settings.number("sequence_len")
    counted: list[int] = []
    for kind, parts in texts:
        tokens = sum(len(tokenizer.encode(part).ids) for part in parts) + 1  # the end of the sequence
        if kind == "completion":  # a long text becomes several sequences
            counted += [min(length, tokens - start) for start in range(0, tokens, length)]
        else:
            counted.append(tokens)
    return counted, ""


def _texts(kind: Any, dataset: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    if kind == "completion":
        return (str(row.get(dataset.get("field") or "text", "")),)
    instruction, given = str(row.get("instruction", "")), str(row.get("input") or "")
    if given:
        prompt = f"{WITH_INPUT}### Instruction:\n{instruction}\n\n### Input:\n{given}\n\n### Response:\n"
    else:
        prompt = f"{WITHOUT}### Instruction:\n{instruction}\n\n### Response:\n"
    return prompt, str(row.get("output", ""))


def packed_rows(lengths: list[int], capacity: int, most: int = 200) -> int:
    """Rows of `capacity` tokens that first-fit packing fills, with at most `most` sequences in each.

    Axolotl shuffles first and packs in that order; the order here is another, so the number may differ by a few.
    """
    order = list(lengths)
    random.Random(0).shuffle(order)
    room: list[int] = []
    inside: list[int] = []
    first_open, shortest = 0, min(order, default=1)
    for length in order:
        for row in range(first_open, len(room)):
            if room[row] >= length and inside[row] < most:
                room[row] -= length
                inside[row] += 1
                break
        else:
            room.append(capacity - length)
            inside.append(1)
        while first_open < len(room) and (room[first_open] < shortest or inside[first_open] >= most):
            first_open += 1
    return len(room)
