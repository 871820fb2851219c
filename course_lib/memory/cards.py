"""Accelerator cards: what their data sheets say."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        memory: bytes on the card (the driver keeps a few hundred MiB of it).
        bf16: computes in bf16 (compute capability 8.0 and later).
        peak_flops: dense FLOP a second of bf16 (fp16 on cards without bf16) with fp32 accumulation, without sparsity.
        bandwidth: bytes a second of its memory.
    """

    name: str
    memory: int
    bf16: bool
    peak_flops: float
    bandwidth: float


# NVIDIA's data sheets. The tensor-core figures of the GeForce cards are those with fp32 accumulation (Ada and Ampere
# architecture papers, appendices), half of the fp16-accumulation figure that advertisements print.
CARDS: dict[str, Card] = {
    each.name: each
    for each in (
        Card("t4", 15 * GIB, False, 65e12, 320e9),  # sold as 16 GB; ECC takes its share, nvidia-smi shows 15,360 MiB
        Card("v100-16gb", 16 * GIB, False, 125e12, 900e9),
        Card("v100-32gb", 32 * GIB, False, 125e12, 900e9),
        Card("rtx3090", 24 * GIB, True, 71e12, 936e9),
        Card("rtx4090", 24 * GIB, True, 165.2e12, 1008e9),
        Card("rtx5090", 32 * GIB, True, 209.5e12, 1792e9),
        Card("l4", 24 * GIB, True, 121e12, 300e9),
        Card("a10g", 24 * GIB, True, 70e12, 600e9),
        Card("l40s", 48 * GIB, True, 362e12, 864e9),
        Card("a6000", 48 * GIB, True, 154.8e12, 768e9),
        Card("a100-40gb", 40 * GIB, True, 312e12, 1555e9),
        Card("a100-80gb", 80 * GIB, True, 312e12, 2039e9),
        Card("h100-80gb", 80 * GIB, True, 989e12, 3350e9),
        Card("h200", 141 * 10**9, True, 989e12, 4800e9),
        Card("b200", 180 * 10**9, True, 2250e12, 8000e9),
    )
}


def card(name: str | Card) -> Card:
    """A card by its name ("a100-80gb"), or any card by its memory ("24GiB", "24GB": bf16 assumed, speed unknown).

    Raises:
        ValueError: neither a known card nor an amount; the nearest names are offered.
    """
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
    near = difflib.get_close_matches(key, CARDS, 3, 0.3) or ["t4", "a100-80gb", "h100-80gb"]
    raise ValueError(
        f"No card is called {name!r}: the nearest are {', '.join(near)}; an amount such as 24GiB will do too."
    )
