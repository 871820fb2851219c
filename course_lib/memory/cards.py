"""Accelerator cards: what their data sheets say, and how many of them a text such as 2x8xh100 means."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.units import MIB
from course_lib.validation import did_you_mean

MOST_CARDS = 1_000_000
PER_MACHINE = 8  # cards, at most, where a text does not say otherwise


@dataclass(frozen=True)
class Card:
    """A GPU.

    Attributes:
        memory: bytes that programs can have, CUDA's context included: what nvidia-smi shows as the total, which is less than
            the name says where ECC or the driver take their share.
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


# NVIDIA's data sheets; the memory is nvidia-smi's total, with ECC where the card has it. The tensor-core figures of the GeForce cards are those with fp32 accumulation (Ada and Ampere
# architecture papers, appendices), half of the fp16-accumulation figure that advertisements print.
CARDS: dict[str, Card] = {
    each.name: each
    for each in (
        Card("t4", 15_360 * MIB, False, 65e12, 320e9, (7, 5)),
        Card("v100-16gb", 16_384 * MIB, False, 125e12, 900e9, (7, 0)),
        Card("v100-32gb", 32_768 * MIB, False, 125e12, 900e9, (7, 0)),
        Card("rtx3090", 24_576 * MIB, True, 71e12, 936e9, (8, 6)),
        Card("rtx4090", 24_564 * MIB, True, 165.2e12, 1008e9, (8, 9)),
        Card("rtx5090", 32_607 * MIB, True, 209.5e12, 1792e9, (12, 0)),
        Card("l4", 23_034 * MIB, True, 121e12, 300e9, (8, 9)),
        Card("a10g", 23_028 * MIB, True, 70e12, 600e9, (8, 6)),
        Card("l40s", 46_068 * MIB, True, 362e12, 864e9, (8, 9)),
        Card("a6000", 49_140 * MIB, True, 154.8e12, 768e9, (8, 6)),
        Card("a100-40gb", 40_960 * MIB, True, 312e12, 1555e9, (8, 0)),
        Card("a100-80gb", 81_920 * MIB, True, 312e12, 2039e9, (8, 0)),
        Card("h100-80gb", 81_559 * MIB, True, 989e12, 3350e9, (9, 0)),
        Card("h200", 143_771 * MIB, True, 989e12, 4800e9, (9, 0)),
        Card("b200", 183_359 * MIB, True, 2250e12, 8000e9, (10, 0)),
    )
}


def read_memory(text: str) -> int:
    """Bytes behind 24GiB, 24GB or 1.5TiB. Raises ValueError for anything else."""
    if memory := _amount(text):
        return memory
    raise ValueError(f"{text!r} is no amount of memory: write 64GiB, 512GB or 2TiB.")


def _amount(text: str) -> int:
    """As `read_memory`; 0 where the text is no amount."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([gt])(i?)b", text.strip().lower().replace(" ", ""))
    if not found:
        return 0
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** {"g": 3, "t": 4}[found[2]])


def card(name: str | Card) -> Card:
    """A card by its name ("a100-80gb"), or any card by its memory ("24GiB", "24GB": bf16 assumed, speed unknown)."""
    if isinstance(name, Card):
        return name
    if not isinstance(name, str):
        raise ValueError(f"card={name!r}: give a card's name, such as 'a100-80gb', or an amount, such as '24GiB'.")
    key = name.strip().lower().replace(" ", "")
    if key in CARDS:
        return CARDS[key]
    sizes = [known for known in CARDS if key and known.startswith(f"{key}-")]  # h100 means h100-80gb
    if len(sizes) > 1:
        raise ValueError(f"{name!r} comes in several sizes: write {' or '.join(sizes)}.")
    if sizes:
        return CARDS[sizes[0]]
    if memory := _amount(key):
        return Card(name.strip(), memory, True, 0.0, 0.0)
    stems = [known.partition("-")[0] for known in CARDS if "-" in known]
    names = [*CARDS, *(stem for stem in stems if stems.count(stem) == 1)]
    within = [known for known in CARDS if key and (key in known or key.startswith(known.partition("-")[0]))]
    near = within[:3] or did_you_mean(key, names, most=3, cutoff=0.3) or ["t4", "a100-80gb", "h100-80gb"]
    raise ValueError(f"No card is called {name!r}: near it: {', '.join(near)}; an amount such as 24GiB will do too.")


class Cards(NamedTuple):
    """`nodes` machines with `per_node` cards each; `card` is None for ranks on CPUs."""

    nodes: int
    per_node: int
    card: Card | None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        nodes = f"{self.nodes} x " if self.nodes > 1 else ""
        return f"{nodes}{self.per_node} x {self.card.name if self.card else 'cpu'}"


def read_cards(text: str) -> Cards:
    """The cards behind 4x24GiB (4 cards), 4×24GiB, 2x8xh100 (2 machines of 8), a100-80gb (one), 2xcpu.

    More than 8 are machines of 8, as they are sold: 16xh100 is 2x8xh100. One machine of 16 (a DGX-2) is 1x16xv100-32gb.
    """
    if not isinstance(text, str):
        raise ValueError(f"gpus={text!r}: give cards such as '4x24GiB', '8xa100-80gb' or '2x8xh100' (2 machines).")
    if "+" in text or "," in text:
        raise ValueError(f"{text!r} mixes cards, and all ranks wait for the slowest: plan for so many of the smallest.")
    *found, name = re.fullmatch(
        r"(?:(-?\d+)\s*[x×*]\s*)?(?:(-?\d+)\s*[x×*]\s*)?(.*)", text.strip(), re.I | re.S
    ).groups()
    counts = [int(count) for count in found if count]
    if not all(0 < count <= MOST_CARDS for count in counts) or re.match(r"\d+\s*[x×*]", name, re.I):
        raise ValueError(
            f"How many cards is {text!r}? Write 4x24GiB, 8xa100-80gb, or 2x8xh100 for 2 machines of 8 cards."
        )
    nodes, per_node = ([1, 1, *counts])[-2:]
    if not name or (name.isdigit() and len(name) < 4):
        raise ValueError(f"{text!r} names no card: write a number and a card, such as 4x24GiB or 8xa100-80gb.")
    if len(counts) == 1 and per_node > PER_MACHINE and name.lower() != "cpu":
        nodes, rest = divmod(per_node, PER_MACHINE)
        if rest:
            fewer, more = (f"{n}x{PER_MACHINE}x{name} ({n * PER_MACHINE})" for n in (nodes, nodes + 1))
            raise ValueError(
                f"{per_node} cards do not fill machines of {PER_MACHINE}: write {fewer} or {more}, or how they stand, as in "
                f"MACHINESxCARDSx{name}."
            )
        per_node = PER_MACHINE
    if name.lower() == "cpu":
        return Cards(nodes, per_node, None)
    if name.lower() in CARDS:
        return Cards(nodes, per_node, CARDS[name.lower()])
    return Cards(nodes, per_node, card(name))
