"""The cards that a YAML is to run on: 4x24GiB, 8xa100-80gb, 2x8xh100, 2xcpu."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.memory.cards import Card, read_cards


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
    """The cluster behind 4x24GiB (4 cards), 4×24GiB, 2x8xh100 (2 machines of 8), a100-80gb (one), 2xcpu."""
    if isinstance(text, Cluster):
        return text
    found = read_cards(text)
    return Cluster(*found, found.card.capability if found.card else None)
