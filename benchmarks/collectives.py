"""The library's all-reduce on CPU ranks over gloo: latency and bandwidth fitted on some sizes, tried on the others.

python benchmarks/collectives.py
"""

from __future__ import annotations

import os
import sys

RANKS, FIT_SIZES, FIT_ROUNDS, FIT_LIMIT = 4, [2**k for k in range(12, 27)], 25, 0.25


def words(size: int) -> str:
    return f"{size // 2**20} MiB" if size >= 2**20 else f"{size // 2**10} KiB"


def fit_holds() -> dict[str, bool]:
    """Fit alpha and beta on every other size, predict the sizes between, print both with the scatter over the rounds.

    By each size's median. A size's fastest round is one lucky call in many: among small sizes it varies twofold.
    """
    from course_lib.collectives.measuring import bench_all_reduce

    ranks = max(2, min(RANKS, os.cpu_count() or 2))  # ranks that share a core measure the scheduler
    curve = bench_all_reduce(FIT_SIZES, ranks=ranks, repeats=FIT_ROUNDS)
    fitted_on = curve.sizes[::2]
    line = curve.fit(sizes=fitted_on)
    print(f"all-reduce, {ranks} ranks, {curve.stamp['backend']}, {FIT_ROUNDS} rounds; fit on every other size: {line}")
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
    goals = fit_holds()
    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'}  {goal}")
    return 0 if all(goals.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
