"""Inputs for the course's YAMLs: a tiny Llama as a folder, and real text as the JSON lines that Axolotl reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PARAGRAPH = 40  # characters: anything shorter is a heading


def make_inputs(folder: str | os.PathLike[str], *, layers: int = 2, hidden: int = 128, seed: int = 0) -> Path:
    """Write `tiny/` (model and byte tokenizer), `instructions.jsonl` (alpaca), `chat.jsonl` (two of these pairs in each
    chat) and `texts.jsonl` (completion).

    Nothing is downloaded: the questions are the course's own, the texts the Python documentation. Existing files
    in `folder` are overwritten. Returns the folder.
    """
    from course_lib.models import byte_tokenizer, no_progress_bars, tiny_llama  # imports PyTorch, and a check must not
    from course_lib.models.data import english, instructions

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    model, tokenizer = tiny_llama(layers=layers, hidden=hidden, max_length=2048, seed=seed), byte_tokenizer()
    for name in ("pad", "bos", "eos"):
        setattr(model.config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
    with no_progress_bars():
        model.save_pretrained(target / "tiny")
    tokenizer.save_pretrained(target / "tiny")
    pairs = instructions()
    _write(
        target / "instructions.jsonl",
        ({"instruction": pair["question"], "input": "", "output": pair["answer"]} for pair in pairs),
    )
    turns = [[("user", pair["question"]), ("assistant", pair["answer"])] for pair in pairs]
    chats = (first + second for first, second in zip(turns[::2], turns[1::2], strict=False))
    _write(
        target / "chat.jsonl",
        ({"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats),
    )
    paragraphs = (" ".join(text.split()) for text in english().split("\n\n"))
    _write(target / "texts.jsonl", ({"text": text} for text in paragraphs if len(text) > PARAGRAPH))
    return target


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
