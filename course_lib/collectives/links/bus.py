"""Bus bandwidth: what a collective's measured speed says about the wire, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable

from course_lib.validation import check_counts, pick, positive

_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_reduce_in_network": lambda n: (n - 1) / (n + 1),  # the switch adds up: NVLink SHARP, InfiniBand SHARP
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


def bus_factor(collective: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, without unit.

    The algorithm bandwidth is payload / seconds; times this factor it is the bus bandwidth, which does not depend on the
    number of ranks and can be held against the link's data sheet. The payload of all_gather and reduce_scatter is the
    whole array, not one rank's share.

    Args:
        collective: "all_reduce", "all_reduce_in_network", "reduce_scatter", "all_gather", "all_to_all", "broadcast",
            "reduce".
        ranks: GPUs that take part, at least 1.

    Raises:
        ValueError: an unknown collective (the nearest is offered), or fewer than one rank.

    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md, summary.
    """
    pick("collective", collective, tuple(_FACTORS))
    check_counts(ranks=ranks)
    return _FACTORS[collective](ranks)


def algorithm_bandwidth(num_bytes: float, seconds: float) -> float:
    """Payload over time, bytes/s: what the caller of a collective sees (nccl-tests' ``algbw``).

    Args:
        num_bytes: the payload in nccl-tests' sense: the whole array of all_reduce, broadcast and reduce, the whole
            gathered array of all_gather, the whole array before it is scattered of reduce_scatter, all that one rank
            sends, itself included, of all_to_all.

    Raises:
        ValueError: a number that is not above 0.
    """
    positive(num_bytes=num_bytes, seconds=seconds)
    return num_bytes / seconds


def bus_bandwidth(collective: str, num_bytes: float, ranks: int, seconds: float) -> float:
    """``algorithm_bandwidth`` times ``bus_factor``, bytes/s: to be held against one direction of the link.

    Raises:
        ValueError: as ``bus_factor``, and for a number that is not above 0.
    """
    return algorithm_bandwidth(num_bytes, seconds) * bus_factor(collective, ranks)
