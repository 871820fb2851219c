"""Seconds of a collective by a ring, and the bandwidth that its seconds say of the wire.

The alpha-beta model: a message of s bytes costs alpha + s * beta. Assumed, and left out: a rank sends one message and
receives one at the same time; all ranks have the same link and disturb nobody else's; messages of one rank follow each
other; adding up costs nothing.

Sources: Thakur, Rabenseifner, Gropp (2005), "Optimization of Collective Communication Operations in MPICH"; Patarasuk, Yuan
(2009), "Bandwidth optimal all-reduce algorithms"; NVIDIA/nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

import math

from course_lib.collectives.links.link import Link, link
from course_lib.validation import check_counts, pick, positive

ROUNDS = {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 2, "broadcast": 2, "reduce": 2}
"""How often a ring of n ranks goes round: each time n - 1 messages of one n-th of the payload follow each other."""
BUS_FACTORS = {"all_to_all": 1, "all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}  # times (n - 1) / n


def ring_seconds(collective: str, ranks: int, num_bytes: float, over: str | Link) -> float:
    """Seconds of one collective by a ring; none for a single rank.

    Args:
        collective: one of ``ROUNDS``.
        num_bytes: the payload, bytes, in nccl-tests' sense (see ``algorithm_bandwidth``). 0 costs the messages alone.
        over: a link, or the key of a preset.
    """
    wire = link(over)
    pick("collective", collective, list(ROUNDS))
    check_counts(ranks=ranks)
    check_payload(num_bytes)
    messages = ROUNDS[collective] * (ranks - 1)
    return messages * (wire.latency + num_bytes / ranks / wire.bandwidth)


def check_payload(num_bytes: float) -> None:
    """Check a payload. Raises ValueError for what is no number of bytes."""
    if isinstance(num_bytes, bool) or not 0 <= num_bytes < math.inf:
        raise ValueError(f"num_bytes={num_bytes!r}: give the payload in bytes, 0 or more.")


def algorithm_bandwidth(num_bytes: float, seconds: float) -> float:
    """Payload over time, bytes/s: what the caller of a collective sees (nccl-tests' ``algbw``).

    Args:
        num_bytes: the payload in nccl-tests' sense: the whole array of all_reduce, broadcast and reduce, the whole
            gathered array of all_gather, the whole array before it is scattered of reduce_scatter, all that one rank
            sends, itself included, of all_to_all.
    """
    positive(num_bytes=num_bytes, seconds=seconds)
    return num_bytes / seconds


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: it makes the speed independent of the number of ranks."""
    known = (*BUS_FACTORS, "broadcast", "reduce", "all_reduce_in_network")
    pick("collective", collective, known)
    check_counts(ranks=ranks)
    if collective == "all_reduce_in_network":  # the switch adds up: NVLink SHARP, InfiniBand SHARP
        return (ranks - 1) / (ranks + 1)
    return BUS_FACTORS[collective] * (ranks - 1) / ranks if collective in BUS_FACTORS else 1.0


def bus_bandwidth(collective: str, num_bytes: float, ranks: int, seconds: float) -> float:
    """``algorithm_bandwidth`` times ``bus_factor``, bytes/s: to be held against one direction of the link."""
    return algorithm_bandwidth(num_bytes, seconds) * bus_factor(collective, ranks)
