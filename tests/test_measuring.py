"""Measuring an all-reduce by size: what is called, for whom the clock waits, the line through it, and its figure."""

from __future__ import annotations

import random
import sys
import time

import cloudpickle
import numpy as np
import pytest
from matplotlib.figure import Figure
from refusals import assert_refused

from course_lib import figures
from course_lib.collectives import measuring
from course_lib.collectives.measuring import Curve, Point, bench_all_reduce, fit
from course_lib.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def time_two_sizes():
    return measuring._time_all([4096, 65536], 3, warm_up=1)


def test_each_call_is_the_librarys_on_the_whole_payload(no_leftovers):
    run = launch(time_two_sizes, ranks=2, quiet=True)
    assert np.shape(run.results[0]) == (2, 3)
    local = [c for c in run.collectives if c.rank == 0 and c.kind == "all_reduce"]
    for payload in (4096, 65536):
        assert sum(c.bytes == payload for c in local) == 3 + 1
    assert run.results[0] == run.results[1]  # of the slowest rank, so the same for all


def one_rank_is_late(seconds):
    """Seconds by repeat when rank 1 needs longer for what it does after the others are through."""
    import torch.distributed as dist

    real = dist.all_reduce

    def late(*arguments, **options):
        real(*arguments, **options)
        time.sleep(seconds * dist.get_rank())

    dist.all_reduce = late
    return measuring._time_all([1024], 3)


def test_a_repeat_takes_as_long_as_its_slowest_rank(no_leftovers):
    run = launch(one_rank_is_late, 0.05, ranks=2, quiet=True)
    assert min(run.results[0][0]) >= 0.05  # a sleep is never shorter


def test_a_curve_has_its_sizes_stamp_and_fits(private_tmp):
    curve = bench_all_reduce([1001, 2**16, 2**12], ranks=3, repeats=3)
    assert curve.sizes == [1004, 4096, 65536]  # whole numbers of fp32
    for point in curve:
        assert point.fastest <= point.seconds <= point.slowest
    assert curve.stamp["ranks"] == 3 and "date" in curve.stamp
    part = curve.fit(sizes=curve.sizes[::2])
    assert part == fit(curve.sizes[::2], curve.seconds[::2])


def test_what_cannot_be_measured_is_refused():
    curve = Curve(2, (Point(1008, 1.0, 1.0, 1.0), Point(2016, 2.0, 2.0, 2.0)))
    assert_refused(
        [
            (lambda: bench_all_reduce([], ranks=2), ValueError, "sizes"),
            (lambda: bench_all_reduce([0], ranks=2), ValueError, "size=0"),
            (lambda: bench_all_reduce([4], ranks=1), ValueError, "ranks=1"),
            (lambda: bench_all_reduce([4], ranks=2, repeats=0), ValueError, "repeats=0"),
            (lambda: curve.fit(sizes=[1000, 1008]), ValueError, "size=1000"),
            (lambda: fit([1, 1], [1, 2]), ValueError, "two different sizes"),
        ]
    )


SIZES = [2**k for k in range(10, 27)]


def line_at(size):
    return 5e-4 + size / 2e9


def test_a_line_is_found_exactly_and_among_slow_small_sizes():
    """As seen on a shared machine: large sizes within 10 %, small ones up to 15 times too slow."""
    clean = fit(SIZES, list(map(line_at, SIZES)))
    assert (clean.alpha, clean.bandwidth, clean.half_size) == pytest.approx((5e-4, 2e9, 1e6))
    for seed in range(5):
        chance = random.Random(seed)
        times = [line_at(size) * (1 + chance.uniform(-0.05, 0.05)) for size in SIZES]
        for i in chance.sample(range(10), 3):
            times[i] *= chance.uniform(3, 15)
        noisy = fit(SIZES, times)
        assert all(noisy.predict(size) == pytest.approx(line_at(size), rel=0.15) for size in SIZES), seed


def test_alpha_and_beta_are_never_below_zero():
    steep = fit([1e3, 1e6], [1e-7, 1e-3])  # below the line through the origin
    assert steep.alpha == 0 and steep.beta > 0
    falling = fit([1e3, 2e3], [2e-3, 1e-3])
    assert falling.beta == 0 and 1e-3 <= falling.alpha <= 2e-3
    assert falling.bandwidth == falling.half_size == float("inf")


def test_the_figure_marks_both_regions_and_what_was_not_fitted(monkeypatch):
    times = {2**power: 1e-3 + 1e-9 * 2**power for power in range(10, 27)}  # half the speed at 1e6 bytes
    points = tuple(Point(size, t, 0.9 * t, 1.4 * t) for size, t in times.items())
    curve = Curve(4, points, {"backend": "gloo"})
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **kw: (drawn.append(figure), save(figure, *a, **kw)))
    figures.fitted_curve(curve, curve.fit(), held_out=curve.sizes[1::2])
    for axis in drawn[-1].axes:
        (hatched,) = [patch for patch in axis.patches if patch.get_hatch()]
        assert hatched.get_x() + hatched.get_width() == pytest.approx(1e6, rel=0.01)
    fitted, held_out = (line for line in drawn[-1].axes[0].get_lines() if line.get_marker() in ("o", "s"))
    assert (list(fitted.get_xdata()), list(held_out.get_xdata())) == (curve.sizes[::2], curve.sizes[1::2])
