"""Compute the seconds of a collective by the alpha-beta model: a message of s bytes costs alpha + s * beta.

Assumed, and left out, the same for every algorithm: a rank sends one message and receives one at the same time; all
ranks have the same link and disturb nobody else's; messages of one rank follow each other; adding up costs nothing.

Sources: Thakur, Rabenseifner, Gropp (2005), "Optimization of Collective Communication Operations in MPICH"; Chan,
Heimlich, Purkayastha, van de Geijn (2007), "Collective communication: theory, practice, and experience"; Patarasuk, Yuan
(2009), "Bandwidth optimal all-reduce algorithms".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from course_lib.collectives.links.link import Link, link
from course_lib.validation import check_counts, pick

COLLECTIVES = ("broadcast", "reduce", "all_reduce", "reduce_scatter", "all_gather", "gather", "scatter")


class Path(NamedTuple):
    """The chain of messages that nobody can shorten: whoever is last in it ends the collective.

    `messages` of them follow each other; together they carry `arrays` times the collective's payload.
    """

    messages: int
    arrays: float


# log2 of the ranks, rounded up: generations of a binomial tree
def _levels(n: int) -> int:
    return (n - 1).bit_length()


def _share(n: int) -> float:
    return (n - 1) / n


def _both(*parts: Path) -> Path:
    return Path(sum(part.messages for part in parts), sum(part.arrays for part in parts))


def _one_by_one(n: int) -> Path:
    """One rank sends (or receives) a whole array to (or from) each other, one after another."""
    return Path(n - 1, n - 1.0)


def _pieces_one_by_one(n: int) -> Path:
    """The same with one n-th of the array for each."""
    return Path(n - 1, _share(n))


def _folded(n: int, of_power: Path) -> Path:
    """Ranks beyond the largest power of two hand their array to a partner before, and get the sum after."""
    extra = 0 if n & (n - 1) == 0 else 1
    return Path(of_power.messages + 2 * extra, of_power.arrays + 2.0 * extra)


def _power(n: int) -> int:
    return 1 << (n.bit_length() - 1)


_PATHS: dict[str, dict[str, Callable[[int], Path]]] = {
    "naive": {  # everything through one rank
        "broadcast": _one_by_one,
        "reduce": _one_by_one,
        "gather": _pieces_one_by_one,
        "scatter": _pieces_one_by_one,
        "all_reduce": lambda n: _both(_one_by_one(n), _one_by_one(n)),  # reduce, then broadcast
    },
    "ring": {  # n pieces, each rank sends to its right-hand neighbour
        "reduce_scatter": _pieces_one_by_one,
        "all_gather": _pieces_one_by_one,
        "all_reduce": lambda n: Path(2 * (n - 1), 2 * _share(n)),
        "broadcast": lambda n: Path(2 * (n - 1), 2 * _share(n)),  # n pieces in a row along the chain of n - 1 hops
        "reduce": lambda n: Path(2 * (n - 1), 2 * _share(n)),
    },
    "tree": {  # binomial: who has it passes it on
        "broadcast": lambda n: Path(_levels(n), float(_levels(n))),
        "reduce": lambda n: Path(_levels(n), float(_levels(n))),
        "all_reduce": lambda n: Path(2 * _levels(n), 2.0 * _levels(n)),
        "gather": lambda n: Path(_levels(n), _share(n)),
        "scatter": lambda n: Path(_levels(n), _share(n)),
    },
    "recursive_doubling": {  # partners at distance 1, 2, 4, … exchange all they have
        "all_reduce": lambda n: _folded(n, Path(_levels(_power(n)), float(_levels(_power(n))))),
        "all_gather": lambda n: Path(_levels(n), _share(n)),
    },
}
ALGORITHMS = tuple(_PATHS)


def algorithms(collective: str) -> list[str]:
    """Which algorithms there are for a collective. Raises ValueError for an unknown one."""
    pick("collective", collective, COLLECTIVES)
    return [name for name, paths in _PATHS.items() if collective in paths]


def path(algorithm: str, collective: str, ranks: int) -> Path:
    """Messages one after another and payloads on the longest chain; none for a single rank.

    Args:
        algorithm: one of ``ALGORITHMS``.
        collective: one of ``COLLECTIVES``.
        ranks: 1 or more.

    Raises:
        ValueError: an unknown algorithm or collective, one that does not go with the other, ranks below 1, or ranks that
            recursive doubling cannot pair off for all_gather (no power of two).
    """
    pick("algorithm", algorithm, ALGORITHMS)
    pick("collective", collective, COLLECTIVES)
    if collective not in _PATHS[algorithm]:
        others = ", ".join(algorithms(collective))
        raise ValueError(f"There is no {collective} by {algorithm} here: choose one of {others}.")
    check_counts(ranks=ranks)
    if (algorithm, collective) == ("recursive_doubling", "all_gather") and ranks & (ranks - 1):
        raise ValueError(f"ranks={ranks}: {algorithm} of {collective} pairs all ranks off, so take a power of two.")
    return Path(0, 0.0) if ranks == 1 else _PATHS[algorithm][collective](ranks)


def seconds(algorithm: str, collective: str, ranks: int, num_bytes: float, over: str | Link) -> float:
    """Seconds of one collective: messages * alpha + payloads * bytes * beta along ``path``.

    Args:
        algorithm, collective, ranks: as in ``path``.
        num_bytes: the payload, bytes, in nccl-tests' sense (see ``algorithm_bandwidth``); of gather and scatter the
            root's whole array. 0 costs the messages alone.
        over: a link, or the key of a preset.

    Raises:
        ValueError: as ``path``; bytes below 0; an unknown link.
    """
    wire = link(over)
    check_payload(num_bytes)
    chain = path(algorithm, collective, ranks)
    return chain.messages * wire.latency + chain.arrays * num_bytes / wire.bandwidth


def check_payload(num_bytes: float) -> None:
    """Check a payload. Raises ValueError for what is no number of bytes."""
    if isinstance(num_bytes, bool) or not 0 <= num_bytes < math.inf:
        raise ValueError(f"num_bytes={num_bytes!r}: give the payload in bytes, 0 or more.")
