"""Why something does not fit, and what would: sentences for a reader."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from course_lib.choices import OFFLOADS, STRATEGIES
from course_lib.memory import CARDS
from course_lib.units import GIB
from course_tools.planning.answer import NoPlan, Refusal, Settings
from course_tools.planning.fit import Needs
from course_tools.planning.question import Question
from course_tools.planning.search import Search

FIRST = 3
TRIED = 40  # the most frugal kinds that are estimated to say by how much nothing fits
MOST_GPUS = 65_536


def refusals(found: Search) -> list[Refusal]:
    """Of each method and strategy the fastest grid of which no variant fits; the first three of those."""
    table, room = found.table, found.asked.room
    kinds = table.way * len(table.grids) + table.grid
    may = np.zeros(len(table.ways) * len(table.grids), dtype=bool)
    may[kinds[found.least <= room]] = True
    for row, need in found.checked.items():  # some may by the bound, and do not by the estimate
        if need.fits(found.asked):
            may[kinds[row]] = True
    made: list[Refusal] = []
    seen: set[tuple] = set()
    for row in found.order.tolist():
        way = table.ways[table.way[row]]
        if way.family in seen or may[kinds[row]]:
            continue
        frugal = int(found.frugal[np.argmax(kinds[found.frugal] == kinds[row])])
        seen.add(way.family)
        made.append(refusal(found.asked, table.settings(frugal, found.asked.precision), found.needs(frugal)))
        if len(made) == FIRST:
            break
    return made


def refusal(asked: Question, chosen: Settings, need: Needs) -> Refusal:
    """The sentence of a setting that does not fit."""
    host = need.memory.device <= asked.room
    required, has = (need.host, asked.machines.host_memory) if host else (need.memory.device, asked.room)
    if host:
        why = "the model on its way to the cards, or what they offload"
        where = f"a node's memory of {has / GIB:,.0f} GiB{' (assumed)' if asked.machines.host_assumed else ''}"
    else:
        parts = dict(need.memory.at_peak)
        parts["buckets, gathered weights and gradients not yet reduced"] = parts.pop("temporaries")
        largest = sorted(parts, key=parts.__getitem__, reverse=True)[:2]
        why = " and ".join(f"{name} alone {parts[name] / GIB:,.1f} GiB" for name in largest)
        free = f", with {asked.headroom:.0%} left free" if asked.headroom else ""
        where = f"a card's {has / GIB:,.1f} GiB{free}"
    sentence = f"{str(chosen)[0].upper()}{str(chosen)[1:]}: needs {required / GIB:,.1f} GiB of {where}; {why}."
    return Refusal(chosen, required, has, sentence, "host" if host else "GPU")


def nothing_fits(found: Search) -> NoPlan:
    """By how much the most frugal way misses, and what would fit."""
    asked = found.asked
    nearest: tuple[int, Refusal] | None = None
    kinds = found.table.way * len(found.table.grids) + found.table.grid
    seen: set[int] = set()
    for row in found.frugal.tolist():
        if kinds[row] in seen:
            continue
        seen.add(int(kinds[row]))
        one = refusal(asked, found.table.settings(row, asked.precision), found.needs(row))
        miss = one.needs - one.has
        if nearest is None or miss < nearest[0]:
            nearest = (miss, one)
        if len(seen) == TRIED:
            break
    assert nearest is not None
    miss, one = nearest
    would = what_would(asked)
    place = "GPU" if one.where == "GPU" else "node"
    sentence = (
        f"{asked.shape.name} cannot be trained on {asked.machines} with global_batch={asked.global_batch} and "
        f"seq_len={asked.seq_len}: the most frugal way ({one.settings}) needs {one.needs / GIB:,.1f} GiB a {place} of "
        f"{one.has / GIB:,.1f}, {miss / GIB:,.1f} GiB too much. "
        + (f"What would fit: {'; '.join(would)}." if would else "Nothing near it would: take a smaller model.")
    )
    return NoPlan(sentence, miss, one, would)


def what_would(asked: Question) -> tuple[str, ...]:
    """A loss that keeps no logits, QLoRA or offload where they were left out, more cards, a larger card: each is searched."""
    found = []
    if asked.loss == "eager" and _fits(replace(asked, loss="fused")):
        found.append("a loss that keeps no logits (loss='fused')")
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


def _more_cards(asked: Question) -> int:
    """The first doubling that fits: nodes of up to 8 cards, then more nodes."""
    on = asked.machines
    while on.gpus * 2 <= min(MOST_GPUS, 1024 * asked.machines.gpus):
        if on.nodes == 1 and on.per_node * 2 <= 8:
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
    try:
        return bool(Search(asked, 1).plans)
    except ValueError:
        return False
