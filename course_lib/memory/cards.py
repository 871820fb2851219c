"""Accelerator cards: what their data sheets say, and how many of them a text such as 2x8xh100 means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.units import GIB
from course_lib.validation import did_you_mean

MOST_CARDS = 1_000_000


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        memory: bytes on the card (the driver keeps a few hundred MiB of it).
        bf16: computes in bf16 (compute capability 8.0 and later).
        peak_flops: dense FLOP a second of bf16 (fp16 on cards without bf16) with fp32 accumulation, without sparsity.
        bandwidth: bytes a second of its memory.
        capability: compute capability by NVIDIA's table, (8, 0) for an A100; None for a card known by its memory alone.
    """

    name: str
    memory: int
    bf16: bool
    peak_flops: float
    bandwidth: float
    capability: tuple[int, int] | None = None


# NVIDIA's data sheets. The tensor-core figures of the GeForce cards are those with fp32 accumulation (Ada and Ampere
# architecture papers, appendices), half of the fp16-accumulation figure that advertisements print.
CARDS: dict[str, Card] = {
    each.name: each
    for each in (
        # sold as 16 GB; ECC takes its share, nvidia-smi shows 15,360 MiB
        Card("t4", 15 * GIB, False, 65e12, 320e9, (7, 5)),
        Card("v100-16gb", 16 * GIB, False, 125e12, 900e9, (7, 0)),
        Card("v100-32gb", 32 * GIB, False, 125e12, 900e9, (7, 0)),
        Card("rtx3090", 24 * GIB, True, 71e12, 936e9, (8, 6)),
        Card("rtx4090", 24 * GIB, True, 165.2e12, 1008e9, (8, 9)),
        Card("rtx5090", 32 * GIB, True, 209.5e12, 1792e9, (12, 0)),
        Card("l4", 24 * GIB, True, 121e12, 300e9, (8, 9)),
        Card("a10g", 24 * GIB, True, 70e12, 600e9, (8, 6)),
        Card("l40s", 48 * GIB, True, 362e12, 864e9, (8, 9)),
        Card("a6000", 48 * GIB, True, 154.8e12, 768e9, (8, 6)),
        Card("a100-40gb", 40 * GIB, True, 312e12, 1555e9, (8, 0)),
        Card("a100-80gb", 80 * GIB, True, 312e12, 2039e9, (8, 0)),
        Card("h100-80gb", 80 * GIB, True, 989e12, 3350e9, (9, 0)),
        Card("h200", 141 * 10**9, True, 989e12, 4800e9, (9, 0)),
        Card("b200", 180 * 10**9, True, 2250e12, 8000e9, (10, 0)),
    )
}


def card(name: str | Card) -> Card:
    """A card by its name ("a100-80gb"), or any card by its memory ("24GiB", "24GB": bf16 assumed, speed unknown)."""
    if isinstance(name, Card):
        return name
    if not isinstance(name, str):
        raise ValueError(f"card={name!r}: give a card's name, such as 'a100-80gb', or an amount, such as '24GiB'.")
    key = name.strip().lower().replace(" ", "")
    if key in CARDS:
        return CARDS[key]
    amount = re.fullmatch(r"(\d+(?:\.\d+)?)(gib|gb)", key)
    if amount and float(amount[1]) > 0:
        return Card(name.strip(), int(float(amount[1]) * (GIB if amount[2] == "gib" else 10**9)), True, 0.0, 0.0)
    near = did_you_mean(key, CARDS, most=3, cutoff=0.3) or ["t4", "a100-80gb", "h100-80gb"]
    raise ValueError(
        f"No card is called {name!r}: the nearest are {', '.join(near)}; an amount such as 24GiB will do too."
    )


class Cards(NamedTuple):
    """`nodes` machines with `per_node` cards each; `card` is None for ranks on CPUs."""

    nodes: int
    per_node: int
    card: Card | None


def read_cards(text: str) -> Cards:
    """The cards behind 4x24GiB (4 cards), 4×24GiB, 2x8xh100 (2 machines of 8), a100-80gb (one), 2xcpu."""
    if not isinstance(text, str):
        raise ValueError(f"gpus={text!r}: give cards such as '4x24GiB', '8xa100-80gb' or '2x8xh100' (2 machines).")
    *counts, name = re.split(r"\s*[xX×*]\s*", re.sub("(?i)rtx", "rt~", text.strip()))  # the x of rtx4090 parts nothing
    if len(counts) > 2 or not all(re.fullmatch(r"\d{1,7}", count) and 0 < int(count) <= MOST_CARDS for count in counts):
        raise ValueError(
            f"{text!r} is no number of cards: write 4x24GiB, 8xa100-80gb, or 2x8xh100 for 2 machines of 8 cards."
        )
    nodes, per_node = ([1, 1] + [int(count) for count in counts])[-2:]
    name = name.replace("rt~", "rtx")
    if name.lower() == "cpu":
        return Cards(nodes, per_node, None)
    if name.lower() in CARDS:
        return Cards(nodes, per_node, CARDS[name.lower()])
    sizes = [known for known in CARDS if name and known.startswith(name.lower() + "-")]  # h100 means h100-80gb
    if len(sizes) > 1:
        raise ValueError(f"{name!r} comes in several sizes: write {' or '.join(sizes)}.")
    return Cards(nodes, per_node, card(sizes[0] if sizes else name))
