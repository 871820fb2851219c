"""The machines that a plan is made for: cards, nodes, and the links inside and between them."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from course_lib.collectives.links import Cluster, Link, link
from course_lib.memory import CARDS, Card
from course_lib.memory.cards import read_cards
from course_lib.units import GIB
from course_lib.validation import check_counts

# What such cards are usually sold in. Inside a node; between nodes; network cards of a node (0: one for each GPU).
WIRING: dict[str, tuple[str, str, int]] = {
    "v100-16gb": ("nvlink2", "roce-100", 1),  # an Azure NDv2: one InfiniBand EDR card, 100 Gbit/s
    "v100-32gb": ("nvlink2", "roce-100", 1),
    "a100-40gb": ("nvswitch-a100", "infiniband-hdr", 0),
    "a100-80gb": ("nvswitch-a100", "infiniband-hdr", 0),
    "h100-80gb": ("nvswitch-h100", "infiniband-ndr", 0),
    "h200": ("nvswitch-h100", "infiniband-ndr", 0),
    "b200": ("nvlink5", "infiniband-ndr", 0),
    "t4": ("pcie3", "ethernet-25", 1),
    "rtx5090": ("pcie5", "ethernet-10", 1),
}
OTHERS = ("pcie4", "ethernet-25", 1)
# Memory of a machine beside that of its cards. DGX A100 and H100: 2 TB beside 640 GB, AWS p4d 1.1 TB beside 320 GB; AWS g5
# and g4dn with four cards 192 GB beside 96 and 64 GB; of a desktop with one or two GeForce cards 64 GiB in all.
HOST_SHARE, SMALL_HOST_SHARE, DESKTOP = 3, 2, 64 * GIB
SMALL_CARDS = ("t4", "l4", "a10g", "l40s", "a6000")
GLOO = Link("gloo on one machine", 100e-6, 0.9e9, "benchmarks/collectives.py on two CPU cores")
CPU_FLOPS, CPU_BANDWIDTH = 50e9, 10e9  # of one core: the order of a laptop's


@dataclass(frozen=True)
class Machines:
    """Equal machines with equal cards.

    Attributes:
        nodes, per_node: machines, and cards (CPU ranks) in each.
        card: with its speed; of one known by its memory alone see `note`. A rank on a CPU is a card called "cpu".
        inner: link of a GPU inside its node. outer: one network link of a node. outer_links: how many a node has.
        host_memory: bytes of a node's own memory, where offloaded states go.
        host_assumed: that memory is a guess by the cards.
        note: what was assumed, a sentence, or "".
    """

    nodes: int
    per_node: int
    card: Card
    inner: Link
    outer: Link
    outer_links: int
    host_memory: int
    note: str = ""
    host_assumed: bool = True

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node

    @property
    def cpu(self) -> bool:
        return self.card.name == "cpu"

    @property
    def cluster(self) -> Cluster:
        """For `course_lib.collectives.links`."""
        return Cluster(self.per_node, self.nodes, self.inner, self.outer, self.outer_links)

    def __str__(self) -> str:
        nodes = f"{self.nodes:,} x " if self.nodes > 1 else ""
        return f"{nodes}{self.per_node} x {self.card.name}"


def machines(
    text: str | Machines,
    *,
    inner: str | Link | None = None,
    outer: str | Link | None = None,
    outer_links: int | None = None,
    host_memory: int | None = None,
) -> Machines:
    """The machines behind 2x24GiB (2 cards), 8xa100-80gb, 2x8xh100-80gb (2 nodes of 8), a100-80gb (one), 2xcpu.

    Args:
        inner, outer, outer_links, host_memory: fields of `Machines`, where they differ from what such cards usually
            come with (``WIRING``, ``HOST_SHARE``).

    >>> str(machines("2x8xh100-80gb"))
    '2 x 8 x h100-80gb'
    """
    if isinstance(text, Machines):
        found = text
    else:
        found = _read(text)
    changed: dict[str, Any] = {}
    if inner is not None:
        changed["inner"] = link(inner)
    if outer is not None:
        changed["outer"] = link(outer)
    for name, value in (("outer_links", outer_links), ("host_memory", host_memory)):
        if value is not None:
            check_counts(**{name: value})
            changed[name] = value
    if host_memory is not None:
        changed["host_assumed"] = False
    return replace(found, **changed) if changed else found


def _read(text: Any) -> Machines:
    if isinstance(text, str) and not text.strip():
        raise ValueError("No cards are given: write 4x24GiB, 8xa100-80gb, or 2x8xh100 for 2 machines of 8 cards.")
    read = read_cards(text)
    if read.card is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // read.per_node
        cpu = Card("cpu", memory, False, CPU_FLOPS, CPU_BANDWIDTH)
        note = "Seconds on CPU ranks are a laptop's order of magnitude."
        return Machines(read.nodes, read.per_node, cpu, GLOO, link("ethernet-10"), 1, memory * read.per_node, note)
    card, note, sold_as = read.card, "", read.card.name
    if not card.peak_flops:
        like = _like(card)
        sold_as = like.name
        card = replace(card, peak_flops=like.peak_flops, bandwidth=like.bandwidth)
        note = (
            f"Only the memory of {card.name} is known: its speed and the machine around it are those of an {like.name}."
        )
    inner, outer, links = WIRING.get(sold_as, OTHERS)
    share = SMALL_HOST_SHARE if sold_as in SMALL_CARDS else HOST_SHARE
    desktop = sold_as.startswith("rtx") and read.per_node <= 2
    host = DESKTOP if desktop else share * card.memory * read.per_node
    return Machines(read.nodes, read.per_node, card, link(inner), link(outer), links or read.per_node, host, note)


def _like(card: Card) -> Card:
    """The known card with bf16 whose memory is nearest; of several the slowest, so that nothing is promised."""
    return min(
        (known for known in CARDS.values() if known.bf16),
        key=lambda known: (abs(known.memory - card.memory), known.peak_flops),
    )
