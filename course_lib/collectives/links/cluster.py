"""Machines of several GPUs: a fast link inside, a slow one between, and collectives that cross the slow one once."""

from __future__ import annotations

from dataclasses import dataclass

from course_lib.collectives.links.link import Link, link
from course_lib.collectives.links.ring import check_payload, ring_seconds
from course_lib.validation import check_counts, pick

HIERARCHICAL = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


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
        all_to_all: pairwise, first with the GPUs of the same node, then with all others.

        Args:
            collective: "all_reduce", "reduce_scatter", "all_gather", "all_to_all".
            num_bytes: the payload, as in ``ring_seconds``.
        """
        pick("collective", collective, HIERARCHICAL)
        check_payload(num_bytes)
        g, m, inner, outer = self.gpus, self.nodes, self.inner, self.share_of_outer
        if collective == "all_to_all":
            piece = num_bytes / self.ranks  # what each GPU has for each
            return {
                "all_to_all in the node": (g - 1) * (inner.latency + piece / inner.bandwidth),
                "all_to_all between nodes": (self.ranks - g) * (outer.latency + piece / outer.bandwidth),
            }
        scatter = {"reduce_scatter in the node": ring_seconds("reduce_scatter", g, num_bytes, inner)}
        between = {f"{collective} between nodes": ring_seconds(collective, m, num_bytes / g, outer)}
        gather = {"all_gather in the node": ring_seconds("all_gather", g, num_bytes, inner)}
        return {
            "all_reduce": scatter | between | gather,
            "reduce_scatter": scatter | between,
            "all_gather": between | gather,
        }[collective]

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
