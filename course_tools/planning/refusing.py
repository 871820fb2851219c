"""Why something does not fit, and what would: sentences for a reader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from course_lib.choices import OFFLOADS, STRATEGIES
from course_lib.memory import CARDS
from course_lib.memory.cards import PER_MACHINE
from course_lib.units import GIB
from course_tools.planning.answer import NoPlan, Plan, Refusal
from course_tools.planning.files.facts import seconds
from course_tools.planning.question import Question
from course_tools.planning.search import Search

FIRST = 3
MOST_GPUS, MOST_HOST = 65_536, 8192 * GIB


def refusals(found: Search) -> list[Refusal]:
    """Of each method and strategy the fastest grid of which no variant fits; the first three of those."""
    table = found.table
    made: list[Refusal] = []
    seen: set[tuple] = set()
    kinds, first = np.unique(found.kinds[found.order], return_index=True)
    for kind in kinds[np.argsort(first)].tolist():
        family, row = table.ways[kind // len(table.grids)].family, found.least(kind)
        if family in seen or found.needs(row).fits(found.asked):
            continue
        seen.add(family)
        made.append(refusal(found, row))
        if len(made) == FIRST:
            break
    return made


def refusal(found: Search, row: int) -> Refusal:
    """The sentence of a setting that does not fit."""
    asked, need = found.asked, found.needs(row)
    chosen = found.table.settings(row, asked.precision)
    card, host = (need.memory.device, asked.room), (need.host, asked.machines.host_memory)
    on_host = host[0] / host[1] > card[0] / card[1]
    required, has = host if on_host else card
    parts = dict(need.memory.at_peak)
    parts["buckets, gathered weights and gradients not yet reduced"] = parts.pop("temporaries")
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:2]
    why = " and ".join(f"{name} alone {parts[name] / GIB:,.1f} GiB" for name in largest)
    free = f", with {asked.headroom:.0%} left free" if asked.headroom else ""
    assumed = " (assumed)" if asked.machines.host_assumed else ""
    short = {
        f"{card[0] / GIB:,.2f} GiB of a card's {card[1] / GIB:,.2f} GiB{free} ({why})": card,
        f"{host[0] / GIB:,.1f} GiB of a machine's own {host[1] / GIB:,.1f} GiB{assumed}": host,
    }
    needs = " and ".join(text for text, (much, room) in short.items() if much > room)
    sentence = f"{str(chosen)[0].upper()}{str(chosen)[1:]}: needs {needs}."
    return Refusal(chosen, required, has, sentence, "host" if on_host else "GPU")


def nothing_fits(found: Search) -> NoPlan:
    """By how much the way that comes nearest misses, and what would fit."""
    asked = found.asked
    one, would = refusal(found, found.nearest()), what_would(asked)
    sentence = (
        f"{asked.shape.name} cannot be trained on {asked.machines} with global_batch={asked.global_batch} and "
        f"seq_len={asked.seq_len}. What comes nearest misses by {one.missing / GIB:,.2f} GiB. {one.sentence} "
        + (f"What would fit: {'; '.join(would)}." if would else "Nothing near it would: take a smaller model.")
    )
    return NoPlan(sentence, one, would)


def what_would(asked: Question) -> tuple[str, ...]:
    """Each is searched: a loss that keeps no logits, QLoRA or offload where they were left out, more memory, more cards."""
    found = []
    if asked.loss == "eager" and _fits(replace(asked, loss="fused")):
        found.append("a loss that keeps no logits (loss: fused)")
    host = replace(asked, machines=replace(asked.machines, host_memory=MOST_HOST))
    if not asked.machines.cpu and (plans := _plans(host)):
        found.append(f"{plans[0].host / GIB:,.0f} GiB of a machine's own memory")
    if "qlora" not in asked.methods and _fits(replace(asked, methods=("qlora",))):
        found.append("QLoRA")
    elif asked.methods == ("full",) and _fits(replace(asked, methods=("lora",))):
        found.append("LoRA")
    if set(OFFLOADS) - set(asked.offload) and _fits(replace(asked, offload=OFFLOADS)):
        found.append("offload to the host")
    if not asked.machines.cpu:
        cards = _more_cards(asked)
        found += [f"{cards:,} such cards"] if cards else []
        for card in sorted(CARDS.values(), key=lambda one: one.memory):
            if card.memory > asked.machines.card.memory and (card.bf16 or not asked.precision.startswith("bf16")):
                host = asked.machines.host_memory * card.memory // asked.machines.card.memory
                if _fits(replace(asked, machines=replace(asked.machines, card=card, host_memory=host))):
                    found.append(f"a larger card ({card.name}, {card.memory / GIB:,.0f} GiB)")
                    break
    return tuple(found)


def helps(found: Search) -> list[str]:
    """What is not searched unasked and would spare the first plan of a method offload, 8-bit states, or all but its data axis."""
    asked, said = found.asked, []
    changes: dict[str, dict[str, Any]] = {}
    if asked.loss == "eager":
        changes["a loss that keeps no logits (loss: fused)"] = {"loss": "fused"}
    if asked.optimizers[0] == "adamw" and not asked.machines.cpu:
        changes["8-bit states (optimizer: adamw8bit)"] = {"optimizers": ("adamw8bit",)}
    for words, change in changes.items():
        for first in {one.method: one for one in reversed(found.plans)}.values():
            if "optimizers" in change and first.method != "full":
                continue
            spared = _spared(asked, first)
            plans = spared and _plans(replace(asked, **{"methods": (first.method,)} | spared | change))
            least = 1 if "optimizers" in change else 0  # 8-bit states are a last resort themselves
            if plans and found.simplicity(plans[0])[least:] < found.simplicity(first)[least:]:
                cost = f"{plans[0].memory_bytes / GIB:,.1f} GiB, {seconds(plans[0].step_seconds)} a step"
                said.append(f"With {words}: {plans[0]}; {cost}.")
                break
    return said


def _spared(asked: Question, plan: Plan) -> dict[str, tuple[str, ...]]:
    """What to ask for to do without the hardest thing that a plan needs."""
    if plan.offload != "none":
        return {"offload": ("none",)}
    if plan.optimizer != asked.optimizers[0]:
        return {"optimizers": asked.optimizers[:1]}
    return {"axes": ("dp",)} if max(plan.tp, plan.pp, plan.cp) > 1 else {}


def _more_cards(asked: Question) -> int:
    """The first doubling that fits: nodes of up to 8 cards, then more nodes."""
    on = asked.machines
    while on.gpus * 2 <= min(MOST_GPUS, 1024 * asked.machines.gpus):
        if on.nodes == 1 and on.per_node * 2 <= PER_MACHINE:
            on = replace(on, per_node=2 * on.per_node, host_memory=2 * on.host_memory)
        else:
            on = replace(on, nodes=2 * on.nodes)
        if _fits(replace(asked, machines=on)):
            return on.gpus
    return 0


def _fits(asked: Question) -> bool:
    """Whether anything fits; a plain strategy asked for on one GPU may need a sharded one on several."""
    if asked.machines.gpus > 1 and asked.strategies == ("single",):
        asked = replace(asked, strategies=tuple(STRATEGIES))
    return bool(_plans(asked))


def _plans(asked: Question) -> list[Plan]:
    try:
        return Search(asked, 1).plans
    except ValueError:  # nothing of that goes together
        return []
