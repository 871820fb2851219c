"""The cards that a YAML is to run on: 4x24GiB, 8xa100-80gb, 2x8xh100, 2xcpu."""

from __future__ import annotations

import re
from dataclasses import dataclass

from course_lib.memory import CARDS, Card, card

MOST = 1_000_000

# NVIDIA's table of compute capabilities. A card that is known by its memory alone has none.
CAPABILITY: dict[str, tuple[int, int]] = {
    "t4": (7, 5), "v100-16gb": (7, 0), "v100-32gb": (7, 0), "rtx3090": (8, 6), "rtx4090": (8, 9), "rtx5090": (12, 0),
    "l4": (8, 9), "a10g": (8, 6), "l40s": (8, 9), "a6000": (8, 6), "a100-40gb": (8, 0), "a100-80gb": (8, 0),
    "h100-80gb": (9, 0), "h200": (9, 0), "b200": (10, 0),
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Equal machines with equal cards.

    Attributes:
        nodes, per_node: machines, and cards in each.
        card: None for ranks on CPUs.
        capability: compute capability, (8, 0) for an A100; None where only the memory is known.
    """

    nodes: int
    per_node: int
    card: Card | None
    capability: tuple[int, int] | None

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    @property
    def cpu(self) -> bool:
        return self.card is None

    def __str__(self) -> str:
        nodes = f"{self.nodes} x " if self.nodes > 1 else ""
        return f"{nodes}{self.per_node} x {self.card.name if self.card else 'cpu'}"


def cluster(text: str | Cluster) -> Cluster:
    """The cluster behind 4x24GiB (4 cards), 4×24GiB, 2x8xh100 (2 machines of 8), a100-80gb (one), 2xcpu.

    Raises:
        ValueError: a count or a card that means nothing; the nearest cards are offered.
    """
    if isinstance(text, Cluster):
        return text
    if not isinstance(text, str):
        raise ValueError(f"gpus={text!r}: give cards such as '4x24GiB', '8xa100-80gb' or '2x8xh100' (2 machines).")
    *counts, name = re.split(r"\s*[xX×*]\s*", re.sub("(?i)rtx", "rt~", text.strip()))  # the x of rtx4090 parts nothing
    if len(counts) > 2 or not all(re.fullmatch(r"\d{1,7}", count) and 0 < int(count) <= MOST for count in counts):
        raise ValueError(
            f"{text!r} is no number of cards: write 4x24GiB, 8xa100-80gb, or 2x8xh100 for 2 machines of 8 cards."
        )
    nodes, per_node = ([1, 1] + [int(count) for count in counts])[-2:]
    name = name.replace("rt~", "rtx")
    if name.lower() == "cpu":
        return Cluster(nodes, per_node, None, None)
    found = card(_whole(name))
    return Cluster(nodes, per_node, found, CAPABILITY.get(found.name))


def _whole(name: str) -> str:
    """h100 for h100-80gb: a name that is the beginning of one card's only."""
    low = name.lower()
    if low in CARDS:
        return low
    full = [known for known in CARDS if name and known.startswith(low + "-")]
    if len(full) > 1:
        raise ValueError(f"{name!r} comes in several sizes: write {' or '.join(full)}.")
    return full[0] if full else name
