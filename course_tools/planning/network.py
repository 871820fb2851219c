"""Which links each axis of the grid runs over, and what a collective costs on them.

Ranks are placed as `course_lib.parallel.grid.Grid` counts them: neighbours along the tensor axis are neighbours in the
node, then the context axis, then the data axis; pipeline stages are furthest apart.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from course_lib.collectives.links import Cluster, Link
from course_tools.planning.constants import Constants
from course_tools.planning.machines import Machines


class Wire(NamedTuple):
    """Seconds of a message: `latency` each, and `each` for every byte of payload."""

    latency: float
    each: float

    def seconds(self, count: float, total_bytes: float) -> float:
        """Of `count` messages of `total_bytes` together."""
        return count * self.latency + total_bytes * self.each


class Network:
    """The machines' links at the rate that programs reach."""

    def __init__(self, machines: Machines, constants: Constants) -> None:
        """Links of a Machines, slowed down by ``constants.inner`` and ``constants.outer``."""
        self.per_node = machines.per_node
        self.names = {"inner": machines.inner.name, "outer": machines.outer.name}
        self.inner = _slower(machines.inner, constants.inner)
        share = machines.cluster.share_of_outer
        self.outer = _slower(share, constants.outer)
        self._known: dict[tuple[str, int, int], Wire] = {}

    def inside(self, stride: int, size: int) -> bool:
        """Whether a group of `size` ranks, each `stride` ranks after the one before, stays in a node."""
        return stride * size <= self.per_node

    def link_name(self, stride: int, size: int) -> str:
        return self.names["inner" if self.inside(stride, size) else "outer"]

    def wire(self, collective: str, stride: int, size: int) -> Wire:
        """Of a collective, or a "send" to the next rank of the group. While a group crosses nodes, the GPUs of a node share
        its network cards, for all groups send at the same time."""
        key = (collective, stride, size)
        if key not in self._known:
            self._known[key] = self._wire(*key)
        return self._known[key]

    def _wire(self, collective: str, stride: int, size: int) -> Wire:
        if size == 1:
            return Wire(0.0, 0.0)
        if collective == "send":
            over = self.inner if self.inside(stride, size) else self.outer
            return Wire(over.latency, 1 / over.bandwidth)
        here = math.gcd(size, max(self.per_node // stride, 1))  # ranks of the group in a node
        if collective == "all_to_all":  # a rank's own part stays, those for the node and for others travel at once
            inside, outside = (here - 1) / size / self.inner.bandwidth, (size - here) / size / self.outer.bandwidth
            return Wire(self.inner.latency if here == size else self.outer.latency, max(inside, outside))
        group = Cluster(here, size // here, self.inner, self.outer, here)
        latency = group.seconds(collective, 0)
        return Wire(latency, (group.seconds(collective, 1e9) - latency) / 1e9)


def _slower(link: Link, share: float) -> Link:
    return Link(link.name, link.latency, link.bandwidth * share, link.source)
