"""Batch, learning rate, names of optimizer and scheduler: numbers and words that mean nothing, or not what they seem to."""

from __future__ import annotations

import math
from collections.abc import Iterator

from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding, nearest
from course_tools.axolotl.check.keys import dotted_number
from course_tools.axolotl.check.schema import stored
from course_tools.axolotl.check.settings import MOST

HIGH = 0.1  # a learning rate above this is a slip of the exponent


def rules(facts: Facts) -> Iterator[Finding]:
    """Findings about single numbers and names."""
    yield from _counts(facts)
    yield from _batch_size(facts)
    yield from _learning_rate(facts)
    yield from _names(facts)
    yield from _warmup(facts)


def _counts(facts: Facts) -> Iterator[Finding]:
    for key in ("micro_batch_size", "gradient_accumulation_steps", "sequence_len", "tensor_parallel_size",
                "context_parallel_size", "dp_shard_size", "dp_replicate_size", "eval_batch_size", "lora_r"):  # fmt: skip
        value = facts.given(key)
        if value is not None and value < 1:
            yield facts.error(
                key, f"{value} is no number of anything, and Axolotl's schema lets it through.", "give at least 1"
            )
        elif value is not None and value > MOST:
            yield facts.error(key, f"{value:g} is beyond any machine.", "give a smaller number")
    if (epochs := facts.given("num_epochs")) is not None and not epochs > 0 and not facts.batch.capped:
        yield facts.error("num_epochs", f"{epochs} epochs train nothing.", "give a number above 0")
    if (steps := facts.given("max_steps")) is not None and steps < 1:
        yield facts.warning("max_steps", f"{steps} counts as no limit at all: num_epochs decides.", "leave it out")


def _batch_size(facts: Facts) -> Iterator[Finding]:
    if not facts.given("batch_size"):
        return
    if facts.given("gradient_accumulation_steps"):
        yield facts.error(
            "batch_size", "batch_size and gradient_accumulation_steps are both set, and Axolotl refuses that.",
            "leave batch_size out",
        )  # fmt: skip
        return
    wanted, batch = facts.given("batch_size"), facts.batch
    yield facts.error(
        "batch_size",
        f"It does not set the accumulation: the schema's default of 1 wins, so a step has {batch.global_batch} sequences.",
        f"write gradient_accumulation_steps: {max(1, wanted // (batch.micro * batch.data_ranks))} instead",
    )


def _learning_rate(facts: Facts) -> Iterator[Finding]:
    given = facts.given("learning_rate")
    if given is None:
        return
    try:
        rate = float(given)
    except ValueError:
        yield facts.error("learning_rate", f"{given!r} is no number.", "write it as 2.0e-5 or 0.00002")
        return
    if not 0 < rate < math.inf:
        yield facts.error("learning_rate", f"A learning rate of {given} trains nothing.", "give a number above 0")
    elif rate > HIGH:
        yield facts.warning(
            "learning_rate", f"{given} is far above what a language model survives.", "write 2.0e-5, say"
        )
    elif isinstance(given, str):
        yield facts.say(
            "note", "learning_rate",
            f"YAML 1.1 reads {given} as text; Axolotl turns this one key into a number, which other programs may not.",
            f"write {dotted_number(given)}" if "e" in given.lower() else f"write {given} without quotes",
        )  # fmt: skip


def _names(facts: Facts) -> Iterator[Finding]:
    for key, known in (("optimizer", "optimizers"), ("lr_scheduler", "schedulers")):
        value = facts.given(key)
        if value is not None and value not in stored()[known]:
            near = nearest(str(value), stored()[known], 0.5)
            yield facts.error(
                key, f"Neither Axolotl nor transformers has a {key.replace('_', ' ')} called {value!r}; the schema does not ask.",
                f"write {near}" if near else f"take one of {', '.join(stored()[known][:4])}, …",
            )  # fmt: skip


def _warmup(facts: Facts) -> Iterator[Finding]:
    steps, total = facts.given("warmup_steps"), facts.batch.total_steps
    if steps and facts.given("warmup_ratio"):
        yield facts.error(
            "warmup_ratio", "warmup_steps and warmup_ratio are both set, and Axolotl refuses that.", "keep one"
        )
    elif steps and total and steps >= total:
        yield facts.warning(
            "warmup_steps", f"{steps} steps of warm-up, and the run has {total}: the learning rate is never reached.",
            f"give fewer than {total}",
        )  # fmt: skip
