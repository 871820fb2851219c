"""The collectives that were written by hand against the library's, on CPU ranks over gloo, all in one run.

Every figure is the median of ROUNDS rounds, in seconds a call of the slowest rank. The racers alternate within a round, so
that a noisy minute hits all of them; small tensors are reduced several times a round.

    python benchmarks/collectives.py
"""

from __future__ import annotations

import os
import statistics
import sys

RANKS, ROUNDS, LIMIT = 4, 11, 1.5
SIZES = [2**10, 2**14, 2**18, 2**22, 2**26]  # bytes of fp32
FIT_SIZES, FIT_ROUNDS, FIT_LIMIT = [2**k for k in range(12, 27)], 25, 0.25


def race(sizes: list[int], rounds: int) -> dict[str, dict[int, list[float]]]:
    """On each rank: seconds a call, by racer and bytes."""
    import time

    import torch
    import torch.distributed as dist

    from course_lib.collectives import by_hand

    racers = {
        "dist.all_reduce": dist.all_reduce,
        "ring": by_hand.ring,
        "through the root": by_hand.through_the_root,
    }
    took: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in racers}
    for size in sizes:
        value, calls = torch.zeros(size // 4), max(1, min(5, 2**22 // size))
        for turn in range(rounds + 1):
            for name, all_reduce in racers.items():
                dist.barrier()
                began = time.perf_counter()
                for _ in range(calls):
                    all_reduce(value)
                if turn:  # the first round meets fresh connections and fresh memory
                    took[name][size].append((time.perf_counter() - began) / calls)
    return took


def one_ring(size: int) -> None:
    import torch

    from course_lib.collectives import by_hand

    by_hand.ring(torch.zeros(size // 4))


def words(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def against_library() -> dict[str, bool]:
    """Print the hand-written all-reduces beside the library's. Returns goals, each met or not."""
    import torch

    from course_lib.launch import launch

    by_rank = launch(race, SIZES, ROUNDS, ranks=RANKS, threads=1, timeout=1200, quiet=True).results
    run = launch(one_ring, SIZES[-1], ranks=RANKS, quiet=True)
    sent = sum(c.bytes for c in run.collectives if c.kind == "send" and c.rank == 0)
    took = {
        name: {size: [max(turn) for turn in zip(*(t[name][size] for t in by_rank), strict=True)] for size in SIZES}
        for name in by_rank[0]
    }
    median = {name: {size: statistics.median(by[size]) for size in SIZES} for name, by in took.items()}
    print(
        f"all-reduce, {RANKS} CPU ranks, gloo, torch {torch.__version__}, {os.cpu_count()} cores, medians of {ROUNDS}"
    )
    print(f"{'milliseconds (times the library)':34}" + "".join(f"{words(size):>18}" for size in SIZES))
    for name, by in median.items():
        ratios = [f"{1e3 * by[s]:10.2f} ({by[s] / median['dist.all_reduce'][s]:4.2f})" for s in SIZES]
        print(f"{name:34}" + "".join(f"{ratio:>18}" for ratio in ratios))
    largest = SIZES[-1]
    pairs = zip(took["ring"][largest], took["dist.all_reduce"][largest], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    print(f"ring at {words(largest)}: {ratio:.2f} times the library, median over rounds of the round's own ratio")
    return {
        f"hand-written ring at {words(largest)} within {LIMIT} times the library": ratio <= LIMIT,
        "the ring's bytes a rank are 2(n-1)/n of the tensor's": sent * RANKS == 2 * (RANKS - 1) * largest,
    }


def fit_holds() -> dict[str, bool]:
    """Fit alpha and beta on every other size, predict the sizes between, print both with the scatter over the rounds.

    By each size's median. A size's fastest round is one lucky call in many: among small sizes it varies twofold.
    """
    from course_lib.collectives.measuring import bench_collective

    ranks = max(2, min(RANKS, os.cpu_count() or 2))  # ranks that share a core measure the scheduler
    curve = bench_collective("all_reduce", FIT_SIZES, ranks=ranks, repeats=FIT_ROUNDS, backend="gloo")
    fitted_on = curve.sizes[::2]
    line = curve.fit(sizes=fitted_on)
    print(f"all-reduce, {ranks} CPU ranks, gloo, {FIT_ROUNDS} rounds; fit on every other size: {line}")
    print(f"{'':>10}{'fastest':>10}{'median':>10}{'slowest':>10}{'predicted':>11}   milliseconds; median to predicted")
    errors = {}
    for point in curve:
        predicted = line.predict(point.bytes)
        error = point.seconds / predicted - 1
        if point.bytes not in fitted_on:
            errors[point.bytes] = error
        times = (point.fastest, point.seconds, point.slowest)
        numbers = "".join(f"{1e3 * seconds:10.2f}" for seconds in times)
        print(
            f"{words(point.bytes):>10}{numbers}{1e3 * predicted:11.2f}{error:+8.0%}{'' if point.bytes in fitted_on else '   not fitted'}"
        )
    worst = max(errors, key=lambda size: abs(errors[size]))
    print(f"worst prediction of a size that was not fitted: {errors[worst]:+.0%} at {words(worst)}")
    return {f"alpha and beta predict sizes not fitted within {FIT_LIMIT:.0%}": abs(errors[worst]) <= FIT_LIMIT}


def main() -> int:
    goals = against_library() | fit_holds()
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'}  {goal}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
