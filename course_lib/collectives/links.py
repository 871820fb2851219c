"""What a collective costs, by ranks, bytes and link. Nothing here needs torch.

>>> ring_seconds("all_reduce", 8, 1e9, "nvlink4")
>>> Cluster(gpus=8, nodes=4, inner="nvswitch-h100", outer="infiniband-ndr", outer_links=8).seconds("all_reduce", 1e9)

The alpha-beta model: a message of s bytes costs alpha + s * beta. Assumed, and left out: a rank sends one message and
receives one at the same time; all ranks have the same link and disturb nobody else's; messages of one rank follow each
other; adding up costs nothing.

Sources: Thakur, Rabenseifner, Gropp (2005), "Optimization of Collective Communication Operations in MPICH"; Patarasuk, Yuan
(2009), "Bandwidth optimal all-reduce algorithms"; NVIDIA/nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from course_lib.validation import check_counts, pick, positive


@dataclass(frozen=True)
class Link:
    """One rank's connection to the others; full duplex, so that it sends and receives at once.

    Attributes:
        name: as a reader would say it.
        latency: seconds that a message costs whatever its size (alpha).
        bandwidth: bytes/s in ONE direction (1 / beta). Data sheets of NVLink print both directions together.
        source: where the two figures come from.
    """

    name: str
    latency: float
    bandwidth: float
    source: str = "given by you"

    def __post_init__(self) -> None:
        positive(bandwidth=self.bandwidth)
        if self.latency != 0:
            positive(latency=self.latency)

    def __str__(self) -> str:
        return f"{self.name}: {self.bandwidth / 1e9:g} GB/s in each direction, {self.latency * 1e6:g} us a message"


# No data sheet prints what a message costs. For GPUs and for network cards that write into a GPU's memory these are the
# seconds a hop that NCCL itself reckons with, for ring and its protocol for large messages.
_NCCL = "latency: NVIDIA/nccl, src/graph/tuning.cc, hwLat, Ring/Simple, commit 5067397"
_ASSUMED = "latency: assumed, the order of TCP through an operating system; no data sheet has it, so measure yours"
_NVLINK, _PCI, _NET, _TCP = 3.4e-6, 5.7e-6, 14.0e-6, 30e-6


def _pcie(generation: int, transfers: float) -> Link:
    """`transfers`: GT/s of a lane, in each direction; 16 lanes, 128 payload bits in every 130 sent."""
    return Link(
        f"PCIe {generation}.0 x16",
        _PCI,
        transfers * 1e9 * 16 * 128 / 130 / 8,
        f"PCI Express Base Specification {generation}.0: {transfers:g} GT/s a lane and direction, 128b/130b; {_NCCL}",
    )


def _nvlink(name: str, links: int, each: float, sheet: str) -> Link:
    """`each`: GB/s of one link in one direction; the sheet prints 2 x links x each."""
    printed = f"{2 * links * each:g} GB/s both directions together ({links} links of {each:g} GB/s each way)"
    return Link(name, _NVLINK, links * each * 1e9, f"{sheet}: {printed}; {_NCCL}")


def _rated(name: str, gigabits: float, latency: float, sheet: str) -> Link:
    why = _ASSUMED if latency == _TCP else _NCCL
    return Link(name, latency, gigabits * 1e9 / 8, f"{sheet}: {gigabits:g} Gbit/s in each direction; {why}")


LINKS: dict[str, Link] = {
    "pcie3": _pcie(3, 8),
    "pcie4": _pcie(4, 16),
    "pcie5": _pcie(5, 32),
    "nvlink2": _nvlink("NVLink 2 (V100)", 6, 25, "NVIDIA V100 data sheet"),
    "nvlink3": _nvlink("NVLink 3 (A100)", 12, 25, "NVIDIA A100 data sheet"),
    "nvlink4": _nvlink("NVLink 4 (H100 SXM)", 18, 25, "NVIDIA H100 data sheet"),
    "nvlink5": _nvlink("NVLink 5 (B200)", 18, 50, "NVIDIA Blackwell architecture brief"),
    "nvswitch-a100": _nvlink("NVSwitch of a DGX A100 (8 GPUs)", 12, 25, "NVIDIA DGX A100 data sheet, every GPU to any"),
    "nvswitch-h100": _nvlink("NVSwitch of a DGX H100 (8 GPUs)", 18, 25, "NVIDIA DGX H100 data sheet, every GPU to any"),
    "infiniband-hdr": _rated("InfiniBand HDR, 4 lanes", 200, _NET, "InfiniBand Trade Association, roadmap"),
    "infiniband-ndr": _rated("InfiniBand NDR, 4 lanes", 400, _NET, "InfiniBand Trade Association, roadmap"),
    "roce-100": _rated("RoCE, 100 Gbit/s", 100, _NET, "IEEE 802.3bj (100GBASE)"),
    "roce-200": _rated("RoCE, 200 Gbit/s", 200, _NET, "IEEE 802.3bs (200GBASE)"),
    "roce-400": _rated("RoCE, 400 Gbit/s", 400, _NET, "IEEE 802.3bs (400GBASE)"),
    "ethernet-10": _rated("Ethernet, 10 Gbit/s", 10, _TCP, "IEEE 802.3ae (10GBASE)"),
    "ethernet-25": _rated("Ethernet, 25 Gbit/s", 25, _TCP, "IEEE 802.3by (25GBASE)"),
    "ethernet-100": _rated("Ethernet, 100 Gbit/s", 100, _TCP, "IEEE 802.3bj (100GBASE)"),
}
"""Key -> link. Bandwidths are what the standard or the data sheet rates; programs reach 80 to 95 % of that at best."""


def link(name: str | Link) -> Link:
    """The preset of that key; a ``Link`` passes through."""
    if isinstance(name, Link):
        return name
    pick("link", name, list(LINKS))
    return LINKS[name]


ROUNDS = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2, "broadcast": 2, "reduce": 2}
"""How often a ring of n ranks goes round: each time n - 1 messages of one n-th of the payload follow each other."""


def ring_seconds(collective: str, ranks: int, num_bytes: float, over: str | Link) -> float:
    """Seconds of one collective by a ring; none for a single rank.

    Args:
        collective: one of ``ROUNDS``.
        num_bytes: the payload, bytes, in nccl-tests' sense: the whole array of all_reduce, broadcast and reduce, the
            gathered array of all_gather, the array before it is scattered of reduce_scatter. 0 costs the messages alone.
        over: a link, or the key of a preset.
    """
    wire = link(over)
    pick("collective", collective, list(ROUNDS))
    check_counts(ranks=ranks)
    if isinstance(num_bytes, bool) or not 0 <= num_bytes < math.inf:
        raise ValueError(f"num_bytes={num_bytes!r}: give the payload in bytes, 0 or more.")
    messages = ROUNDS[collective] * (ranks - 1)
    return messages * (wire.latency + num_bytes / ranks / wire.bandwidth)


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines with `gpus` each.

    Attributes:
        gpus: ranks in a node.
        nodes: machines.
        inner: link of a GPU inside its node, or the key of a preset.
        outer: ONE network link of a node, or the key of a preset.
        outer_links: network links of a node, shared by its GPUs (a DGX has one for each of its 8 GPUs, a cloud machine
            often one for all).
    """

    gpus: int
    nodes: int
    inner: str | Link
    outer: str | Link
    outer_links: int = 1

    def __post_init__(self) -> None:
        check_counts(gpus=self.gpus, nodes=self.nodes, outer_links=self.outer_links)
        object.__setattr__(self, "inner", link(self.inner))
        object.__setattr__(self, "outer", link(self.outer))

    @property
    def ranks(self) -> int:
        """GPUs in all."""
        return self.gpus * self.nodes

    @property
    def share_of_outer(self) -> Link:
        """What one GPU gets of the network while all GPUs of its node send."""
        share = min(1.0, self.outer_links / self.gpus)  # one GPU's messages do not spread over several cards
        return Link(f"{self.outer.name}, a GPU's share", self.outer.latency, self.outer.bandwidth * share)

    def parts(self, collective: str, num_bytes: float) -> dict[str, float]:
        """Seconds of each stage of the hierarchical collective, in their order.

        all_reduce: reduce-scatter in the node, all-reduce of each GPU's piece between the nodes (all pieces at once,
        over a shared network), all-gather in the node. So the network carries 2 (m - 1) / m * bytes per node, however
        many GPUs it has. Stages do not overlap here; libraries that cut the array in chunks gain from that they do.

        Args:
            collective: "all_reduce", "reduce_scatter", "all_gather".
            num_bytes: the payload, as in ``ring_seconds``.
        """
        pick("collective", collective, ("all_reduce", "reduce_scatter", "all_gather"))
        scatter = ring_seconds("reduce_scatter", self.gpus, num_bytes, self.inner)
        between = ring_seconds(collective, self.nodes, num_bytes / self.gpus, self.share_of_outer)
        stages = {f"{collective} between nodes": between}
        if collective != "all_gather":
            stages = {"reduce_scatter in the node": scatter} | stages
        if collective != "reduce_scatter":
            stages |= {"all_gather in the node": scatter}  # the same bytes, the other way round
        return stages

    def seconds(self, collective: str, num_bytes: float) -> float:
        """Seconds of the hierarchical collective: the sum of ``parts``."""
        return sum(self.parts(collective, num_bytes).values())

    def flat_seconds(self, collective: str, num_bytes: float) -> float:
        """Seconds of ONE ring through all GPUs, node by node, which knows nothing of the hierarchy.

        Every step waits for its slowest hop: with several nodes that is the network, one link of it. Libraries run
        several rings at once where a node has several network links.
        """
        slowest = self.outer if self.nodes > 1 else self.inner
        return ring_seconds(collective, self.ranks, num_bytes, slowest)
