"""Batch, learning rate, warm-up: numbers that Axolotl takes and that mean nothing, or not what they seem to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding
from course_tools.axolotl.check.settings import MOST
from course_tools.axolotl.check.yaml_lines import KeyPath, written_number

HIGH = 0.1  # a learning rate above this is a slip of the exponent
COUNTS = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    "sequence_len",
    "tensor_parallel_size",
    "context_parallel_size",
    "dp_shard_size",
    "dp_replicate_size",
    "eval_batch_size",
    "lora_r",
)


def counts(facts: Facts) -> Iterator[Finding]:
    """Counts below 1 or beyond any machine."""
    for key in COUNTS:
        value = facts.given(key)
        if value is not None and value < 1:
            yield facts.warning(key, f"{value} is no number of anything, though Axolotl takes it.", "give at least 1")
        elif value is not None and value > MOST:
            yield facts.warning(key, f"{value:g} is beyond any machine.", "give a smaller number")


def length_of_run(facts: Facts) -> Iterator[Finding]:
    """Epochs and steps that train nothing or limit nothing."""
    epochs, steps = facts.given("num_epochs"), facts.given("max_steps")
    if epochs is not None and epochs <= 0 and not facts.batch.capped:
        yield facts.warning("num_epochs", f"{epochs} epochs train nothing.", "give a number above 0")
    if steps is not None and steps < 1:
        yield facts.warning("max_steps", f"{steps} counts as no limit at all: num_epochs decides.", "leave it out")


def batch_size(facts: Facts) -> Iterator[Finding]:
    """`batch_size` alone, which looks as if it set the accumulation."""
    wanted, batch = facts.given("batch_size"), facts.batch
    if wanted and not facts.given("gradient_accumulation_steps"):
        yield facts.warning(
            "batch_size",
            f"It does not set the accumulation: Axolotl's default of 1 wins, so a step has {batch.global_batch} sequences.",
            f"write gradient_accumulation_steps: {max(1, wanted // (batch.micro * batch.data_ranks))} instead",
        )


def less_than_a_step(facts: Facts) -> Iterator[Finding]:
    """Fewer rows than a step takes."""
    rows, whole = facts.batch.rows, facts.batch.global_batch
    if rows is not None and 0 < rows < whole and not facts.batch.packing:
        sentence = f"{rows} rows, and a step takes {whole}: an epoch is less than one full step."
        yield facts.warning("datasets", sentence, "make the batch smaller")


def learning_rate(facts: Facts) -> Iterator[Finding]:
    """A learning rate that trains nothing, is far too high, or is text to YAML."""
    given = facts.given("learning_rate")
    try:
        rate = float(given)
    except (TypeError, ValueError):
        return  # missing, or Axolotl's validator says so
    if not 0 < rate < math.inf:
        yield facts.warning("learning_rate", f"A learning rate of {given} trains nothing.", "give a number above 0")
    elif rate > HIGH:
        sentence = f"{given} is far above what a language model survives."
        yield facts.warning("learning_rate", sentence, "write 2.0e-5, say")
    elif isinstance(given, str):
        yield facts.say(
            "note",
            "learning_rate",
            f"YAML 1.1 reads {given} as text; Axolotl turns this one key into a number, which other programs may not.",
            f"write {written_number(given)}" if "e" in given.lower() else f"write {given} without quotes",
        )


def numbers_that_stay_text(facts: Facts) -> Iterator[Finding]:
    """1e-5 without a dot inside mappings whose types nothing checks or converts."""
    document = facts.settings.document
    for path in sorted(document.plain_strings, key=str):
        if path[0] in ("lr_scheduler_kwargs", "optim_args", "deepspeed") and len(path) > 1:
            yield _text(facts, path, document.value(*path))


def _text(facts: Facts, path: KeyPath, raw: Any) -> Finding:
    sentence = f"YAML 1.1 reads {raw!r} as text, not as a number, and nothing converts it here."
    return facts.warning(path, sentence, f"write {written_number(raw)}")


def warmup(facts: Facts) -> Iterator[Finding]:
    """A warm-up that is longer than the run."""
    steps, total = facts.given("warmup_steps"), facts.batch.total_steps
    if steps and total and steps >= total:
        sentence = f"{steps} steps of warm-up, and the run has {total}: the learning rate is never reached."
        yield facts.warning("warmup_steps", sentence, f"give fewer than {total}")


RULES = (counts, length_of_run, batch_size, less_than_a_step, learning_rate, numbers_that_stay_text, warmup)
