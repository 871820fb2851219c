"""Seconds of a collective by size, on real ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from course_lib.collectives.links import Fit, algorithm_bandwidth, bus_bandwidth, fit
from course_lib.launch import launch
from course_lib.notebook.ledger import stamp
from course_lib.validation import pick, positive

if TYPE_CHECKING:
    import torch

    from course_lib.launch.emulation import Hosts

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
_ITEM = 4  # bytes of an fp32 number


@dataclass(frozen=True)
class Point:
    """One size of a curve.

    Attributes:
        bytes: payload in nccl-tests' sense (see ``course_lib.collectives.links.algorithm_bandwidth``).
        seconds, fastest, slowest: median and extremes over the repeats; each repeat's time is its slowest rank's.
        algbw, busbw: algorithm and bus bandwidth of the median, bytes/s.
    """

    bytes: int
    seconds: float
    fastest: float
    slowest: float
    algbw: float
    busbw: float


@dataclass(frozen=True)
class Curve:
    """What ``bench_collective`` measured: the points by size, and where and when."""

    kind: str
    ranks: int
    repeats: int
    points: tuple[Point, ...]
    stamp: dict[str, str | int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    @property
    def sizes(self) -> list[int]:
        """Payloads, bytes."""
        return [point.bytes for point in self.points]

    @property
    def seconds(self) -> list[float]:
        """Medians."""
        return [point.seconds for point in self.points]

    @property
    def fastest(self) -> list[float]:
        """Minima, seconds: what the machine does when nothing else disturbs it."""
        return [point.fastest for point in self.points]

    def rows(self) -> list[dict[str, Any]]:
        """For ``course_lib.notebook.table``: times in ms, bandwidths in GB/s."""
        return [
            {
                "bytes": p.bytes, "median (ms)": p.seconds * 1e3, "fastest (ms)": p.fastest * 1e3,
                "slowest (ms)": p.slowest * 1e3, "algbw (GB/s)": p.algbw / 1e9, "busbw (GB/s)": p.busbw / 1e9,
            }
            for p in self.points
        ]  # fmt: skip

    def fit(self, *, sizes: Sequence[int] | None = None, of: str = "seconds") -> Fit:
        """Alpha and beta of the curve, or of those of its sizes that are named.

        Args:
            sizes: payloads to fit on, as they stand in ``self.sizes``; ``None`` for all.
            of: "seconds" (medians) or "fastest".

        Raises:
            ValueError: a size that was not measured, fewer than two, another `of`.
        """
        pick("of", of, ("seconds", "fastest"))
        for size in sizes or ():
            pick("size", size, self.sizes)
        chosen = [p for p in self.points if sizes is None or p.bytes in sizes]
        return fit([p.bytes for p in chosen], [getattr(p, of) for p in chosen])

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: a recorded run."""
        return asdict(self)


def bench_collective(
    kind: str,
    sizes: Sequence[int],
    *,
    ranks: int | None = None,
    repeats: int = 15,
    warm_up: int = 2,
    backend: str | None = None,
    on: Hosts | None = None,
) -> Curve:
    """Time the library's collective on real ranks, fp32, one call at a time.

    Before each call the ranks meet in a barrier; the clock runs until the result is there (on CUDA: until the device is
    idle). Rounds go through all sizes in turn, so that a noisy second does not fall on one size alone. A single call
    includes the cost of starting it, which nccl-tests' averages over many calls in flight hide.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce".
        sizes: payloads in bytes, each above 0; rounded up to whole fp32 numbers a rank.
        ranks: 2 or more; with `on` it may be left out.
        repeats: rounds that count.
        warm_up: rounds before them that do not.
        backend: "gloo", "nccl", None for what the machine has.
        on: emulated hosts to run on, instead of plain ranks.

    Raises:
        ValueError: an unknown kind, numbers that make no sense, `on` with other ranks than it has,
            or with a link that only holds DDP's gradients back.
        course_lib.launch.RankFailed, course_lib.launch.RanksHung: as ``launch``.
    """
    pick("kind", kind, KINDS)
    if not len(sizes):
        raise ValueError("sizes is empty: give the payloads to measure, in bytes.")
    for size in sizes:
        positive(size=size)
    for name, value, least in (("repeats", repeats, 1), ("warm_up", warm_up, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number of at least {least}.")
    if on is not None:
        of_hosts = on.hosts * on.ranks_per_host
        if ranks not in (None, of_hosts) or backend not in (None, "gloo"):
            raise ValueError(f"The hosts have {of_hosts} ranks and speak gloo: leave ranks and backend out with on=….")
        if on.how == "delay" and on.link is not None:
            raise ValueError(
                "These hosts hold back DDP's gradients alone, so this would time the machine, not the link."
            )
        ranks = of_hosts
    if type(ranks) is not int or ranks < 2:
        raise ValueError(f"ranks={ranks!r}: a collective to be timed takes at least 2.")
    unit = _ITEM * ranks
    payloads = sorted({-(-int(size) // unit) * unit for size in sizes})
    how = dict(threads=1, quiet=True, timeout=600)
    if on is not None:
        run = on.launch(_time_all, kind, payloads, repeats, warm_up, **how)
    else:
        run = launch(_time_all, kind, payloads, repeats, warm_up, ranks=ranks, backend=backend, **how)
    points = []
    for payload, times in zip(payloads, run.results[0], strict=True):
        middle = statistics.median(times)
        points.append(
            Point(
                payload, middle, min(times), max(times), algorithm_bandwidth(payload, middle),
                bus_bandwidth(kind, payload, ranks, middle),
            )
        )  # fmt: skip
    stamped = stamp(ranks=ranks, backend=run.stamp["backend"])
    if on is not None:
        stamped["emulated"] = str(on)
    return Curve(kind, ranks, repeats, tuple(points), stamped)


def _time_all(kind: str, payloads: list[int], repeats: int, warm_up: int) -> list[list[float]]:
    """In a rank. Returns for each payload the seconds of the slowest rank, by repeat."""
    import torch
    import torch.distributed as dist

    on_gpu = "nccl" in dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    finish: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    calls = [_call(kind, payload // _ITEM, device) for payload in payloads]
    times = torch.zeros(len(calls), repeats, dtype=torch.float64, device=device)
    for turn in range(-warm_up, repeats):
        for i, call in enumerate(calls):
            dist.barrier()
            finish()
            began = time.perf_counter()
            call()
            finish()
            if turn >= 0:
                times[i, turn] = time.perf_counter() - began
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def _call(kind: str, numbers: int, device: torch.device) -> Callable[[], Any]:
    """The collective over `numbers` fp32 numbers, on tensors that are made once."""
    import torch
    import torch.distributed as dist

    share = numbers // dist.get_world_size()
    # zeros, not ones: an all-reduce in place doubles what it finds each time, and inf may take another path
    whole = torch.zeros(numbers, device=device)
    if kind == "all_gather":
        mine = torch.zeros(share, device=device)
        return lambda: dist.all_gather_into_tensor(whole, mine)
    if kind == "reduce_scatter":
        mine = torch.zeros(share, device=device)
        return lambda: dist.reduce_scatter_tensor(mine, whole)
    if kind == "all_to_all":
        other = torch.zeros(numbers, device=device)
        return lambda: dist.all_to_all_single(other, whole)
    if kind == "broadcast":
        return lambda: dist.broadcast(whole, 0)
    if kind == "reduce":
        return lambda: dist.reduce(whole, 0)
    return lambda: dist.all_reduce(whole)
