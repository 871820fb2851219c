"""Lab 1, stretch: how many answers an RL step can generate at one time, with trainer and engine on one card."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from course_checks.harness import Contract, fresh_seed, number, slip_hints
from course_checks.lab01.common import lab
from course_lib.memory import card, estimate, shape_of

FREE = 0.1  # of the card


@dataclass(frozen=True)
class RLStep:
    """A GRPO step of one policy on one card: generate answers, score them, train on them, hand the weights to the engine.

    Attributes:
        model, method, card: as `estimate` and `card` take them; "full" or "lora".
        precision: of the trainer, as `estimate` takes it.
        prompt, answer: tokens. group: answers to each prompt, which share its keys and values.
        sleeps: the engine drops its weights and its cache while the policy trains.
    """

    model: str
    method: str
    precision: str
    card: str
    prompt: int
    answer: int
    group: int
    sleeps: bool

    def __str__(self) -> str:
        engine = "an engine that sleeps" if self.sleeps else "an engine that stays awake"
        return f"{self.model}, {self.method}, {self.precision}, on {self.card}, groups of {self.group} of {self.prompt} + {self.answer} tokens, {engine}"


STEPS = (
    RLStep("llama-3.2-3b", "full", "bf16-mixed", "h100-80gb", 512, 1536, 8, True),
    RLStep("llama-3.2-3b", "lora", "bf16-mixed", "a6000", 512, 1536, 8, False),
    RLStep("llama-3.2-1b", "full", "bf16", "a6000", 2048, 2048, 16, False),
)


def drawn(seed: int) -> list[RLStep]:
    draw = random.Random(seed)
    mixed = "bf16-mixed"
    found = [RLStep("llama-3.1-8b", "full", mixed, "h100-80gb", 512, 512, 8, True)]  # not even the trainer fits
    found += [RLStep("llama-3.2-3b", "full", mixed, "h100-80gb", 2048, 4096, 4, sleeps) for sleeps in (True, False)]
    found += [RLStep("llama-3.2-3b", "full", "bf16", on, 256, 256, 4, True) for on in ("40.5GiB", "44GiB")]  # the sync
    for model, on in (("qwen3-0.6b", "rtx4090"), ("llama-3.2-1b", "a100-80gb"), ("qwen2.5-7b", "h100-80gb")):
        method = "lora" if model == "qwen2.5-7b" else draw.choice(("full", "lora"))
        sizes = draw.randrange(128, 4096), draw.randrange(256, 4096), draw.choice((4, 8, 16))
        found += [RLStep(model, method, draw.choice((mixed, "bf16")), on, *sizes, sleeps) for sleeps in (True, False)]
    return found


def most(step: RLStep, slip: str = "") -> int:
    """Answers that fit at the worst of three moments, with this slip made."""
    shape, on = shape_of(step.model), card(step.card)
    need = estimate(shape, method=step.method, precision=step.precision, micro_batch_size=1, seq_len=step.prompt + step.answer, num_microbatches=2, activation_checkpointing="full")  # fmt: skip
    room = (1 if slip == "no margin" else 1 - FREE) * on.memory - need.cuda_context
    bf16 = 2 * shape.parameters
    reference = bf16 if step.method == "full" or slip == "reference" else 0
    tokens = step.prompt * (step.group if slip == "prompt" else 1) + step.group * step.answer
    cache = 4 * shape.layers * shape.kv_width * tokens  # of a group: keys and values, 2 bytes each
    awake = not step.sleeps
    moments = {  # bytes without the cache, and whether the cache is there
        "rollout": (need.resident + reference + bf16, True),
        "training": (need.peak + reference + awake * bf16, awake),
        "weight sync": (need.resident + reference + bf16 + (bf16 if step.method == "full" else 0), awake),
    }
    if slip == "rollout only":
        moments = {"rollout": moments["rollout"]}
    if max(fixed for fixed, _ in moments.values()) > room:
        return 0
    return int((room - max(fixed for fixed, cached in moments.values() if cached)) // cache) * step.group


SENTENCES = {
    "prompt": "the answers of a group share the keys and values of their prompt: count it once a group",
    "reference": "under LoRA the frozen weights are the reference: switch the adapters off, and no second copy is needed",
    "rollout only": "that is the rollout's answer; training and weight sync must fit, too, with what the engine still holds",
    "no margin": "10 % of the card's memory stay free",
}


@lab.exercise("Stretch: the answers of an RL step", importance=3, difficulty=4, minutes=30)
def most_answers(most_answers: Callable[..., Any]) -> str:
    """Three announced steps and eleven others, six of them drawn."""
    steps = [*STEPS, *drawn(fresh_seed())]
    yours = [number(most_answers(step), "the number of answers") for step in steps]
    contract = Contract(slip_hints(most, SENTENCES, steps, yours))
    for step, mine in zip(steps, yours, strict=True):
        contract.holds(mine == most(step), f"{step}: {most(step):,} answers fit, and you say {mine:,.0f}")
    return "; ".join(f"{step}: {most(step):,} answers" for step in STEPS)
