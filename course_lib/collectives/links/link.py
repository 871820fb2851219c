"""A link between two ranks, and those that the course talks about, each with where its figures come from."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.validation import pick, positive


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
_NCCL = "latency: NVIDIA/nccl, src/graph/tuning.cc, hwLat, Ring/Simple, commit 01afd20"
_ASSUMED = "latency: assumed, the order of TCP through an operating system; no data sheet has it, so measure yours"
_NVLINK, _PCI, _NET, _TCP = 3.4e-6, 5.7e-6, 9.6e-6, 30e-6


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
