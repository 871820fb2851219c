"""Sequences and tokens in an optimizer step, and steps in an epoch, as Axolotl and transformers count them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from course_tools.axolotl.check.datafiles import peek
from course_tools.axolotl.check.settings import Settings

# Axolotl's ATTN_IMPLS_SUPPORTING_PACKING.
VARIABLE_LENGTH = (
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flash_attention_torch",
    "flex_attention",
    "xformers",
    "sage",
)


@dataclass(frozen=True)
class Batch:
    """An optimizer step.

    Attributes:
        micro: sequences (with packing: packed rows) in one forward pass of a rank. accumulate: forward passes a step.
        data_ranks: ranks that see other sequences. global_batch: their product.
        tokens: that product times sequence_len: exact with packing or padding to the length, else the most.
        rows, validation: of the local data sets, to train on and to evaluate on; None and 0 where one cannot be counted.
        steps_per_epoch, total_steps: None where unknown. capped: max_steps ends the run.
        unknown: why steps_per_epoch is None, in a sentence.
    """

    micro: int
    accumulate: int
    data_ranks: int
    global_batch: int
    sequence_len: int
    tokens: int
    packing: bool
    rows: int | None
    validation: int
    steps_per_epoch: int | None
    total_steps: int | None
    capped: bool
    unknown: str = ""


def batch(settings: Settings) -> Batch:
    """The batch of a run. Reads local data sets, nothing else."""
    micro, accumulate = settings.number("micro_batch_size"), settings.number("gradient_accumulation_steps")
    whole = micro * accumulate * settings.data_ranks
    length, packing = settings.number("sequence_len"), bool(settings.get("sample_packing"))
    found, unknown = _rows(settings)
    held_out = validation_rows(settings, found or 0)
    rows = None if found is None else found - held_out
    per_epoch: int | None = None
    if rows is not None and packing:
        unknown = f"{rows:,} rows, and how many packed ones they make is counted by axolotl preprocess."
    elif rows is not None:
        batches = math.ceil(math.ceil(rows / micro) / settings.data_ranks)
        if settings.get("dataloader_drop_last"):
            batches = max(1, rows // micro // settings.data_ranks)
        per_epoch = math.ceil(batches / accumulate)
    epochs, limit = settings.get("num_epochs"), settings.get("max_steps")
    total = math.ceil(float(epochs or 1) * per_epoch) if per_epoch is not None else None
    capped = isinstance(limit, int) and limit > 0
    return Batch(
        micro,
        accumulate,
        settings.data_ranks,
        whole,
        length,
        whole * length,
        packing,
        rows,
        held_out,
        per_epoch,
        limit if capped else total,
        capped,
        unknown,
    )


def _rows(settings: Settings) -> tuple[int | None, str]:
    """Of all local data sets together, or None and why not."""
    total = 0
    if not settings.datasets():
        return None, "No data set is listed."
    for _, one in settings.datasets():
        if one.get("type") == "_synthetic":
            total += int(_number(one.get("length"), 1000))
            continue
        name = str(one.get("path") or "")
        rows = peek(settings.folder / name).rows if os.path.exists(settings.folder / name) else None
        if rows is None or one.get("split") not in (None, "train") or one.get("shards"):
            return None, f"The rows of {name or 'a data set'} are not counted here."
        total += int(rows * _number(one.get("weight"), 1))
    return total, ""


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) and value else default


def validation_rows(settings: Settings, rows: int) -> int:
    """Rows that val_set_size takes: a share up to 1, above it a number, as Axolotl reads it."""
    size = settings.get("val_set_size") or 0
    return max(0, min(rows, int(size) if size > 1 else math.ceil(rows * size)))
