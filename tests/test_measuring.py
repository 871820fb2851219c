"""Measuring links: what is called, on whom the clock waits, what happens without a GPU; and the figure of it."""

from __future__ import annotations

import sys
import time

import cloudpickle
import numpy as np
import pytest
from matplotlib.figure import Figure
from refusals import assert_refused

from course_lib import figures
from course_lib.collectives import measuring
from course_lib.collectives.links import bus_factor
from course_lib.collectives.measuring import Curve, Point, bench_collective, copy_bandwidth, machine, topology
from course_lib.collectives.measuring import collectives as measured_by
from course_lib.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CONTRIBUTES = {"all_gather": 1 / 2}  # of the payload, what a rank of 2 puts in


def time_all_kinds():
    return [measured_by._time_all(kind, [4096, 65536], 3, 1) for kind in measuring.KINDS]


def test_each_kind_is_the_librarys_call_with_the_payload_of_nccl_tests(no_leftovers):
    run = launch(time_all_kinds, ranks=2, quiet=True)
    for kind, times in zip(measuring.KINDS, run.results[0], strict=True):
        assert np.shape(times) == (2, 3), kind
        local = [c for c in run.collectives if c.rank == 0 and c.kind == kind]
        for payload in (4096, 65536):
            assert sum(c.bytes == payload * CONTRIBUTES.get(kind, 1) for c in local) == 3 + 1, kind
    assert run.results[0] == run.results[1]  # of the slowest rank, so the same for all


def one_rank_is_late(seconds):
    """Seconds by repeat when rank 1 needs longer for what it does after the others are through."""
    import torch.distributed as dist

    real = measured_by._call

    def late(*arguments):
        call = real(*arguments)
        return lambda: (call(), time.sleep(seconds * dist.get_rank()))

    measured_by._call = late
    return measured_by._time_all("all_reduce", [1024], 3, 0)


def test_a_repeat_takes_as_long_as_its_slowest_rank(no_leftovers):
    run = launch(one_rank_is_late, 0.05, ranks=2, quiet=True)
    assert min(run.results[0][0]) >= 0.05  # a sleep is never shorter


def test_a_curve_has_its_sizes_bandwidths_stamp_and_fits(private_tmp):
    curve = bench_collective("all_reduce", [1000, 2**16, 2**12], ranks=3, repeats=3, warm_up=1, backend="gloo")
    assert curve.sizes == [1008, 4104, 65544]  # whole numbers of fp32 for each of 3 ranks
    for point in curve:
        assert point.fastest <= point.seconds <= point.slowest
        assert point.algbw == pytest.approx(point.bytes / point.seconds)
        assert point.busbw == pytest.approx(point.algbw * bus_factor("all_reduce", 3))
    assert (curve.stamp["ranks"], curve.stamp["backend"]) == (3, "gloo") and "date" in curve.stamp
    part = curve.fit(sizes=curve.sizes[::2])
    assert (part.sizes, part.seconds) == (tuple(curve.sizes[::2]), tuple(curve.seconds[::2]))
    assert_refused([(lambda: curve.fit(sizes=[1000, 1008]), ValueError, "size=1000")])


def test_what_cannot_be_measured_is_refused():
    def bench(**settings):
        return bench_collective(**{"kind": "all_reduce", "sizes": [4], "ranks": 2} | settings)

    assert_refused(
        [
            (lambda: bench(kind="allreduce"), ValueError, "'all_reduce'"),
            (lambda: bench(sizes=[]), ValueError, "sizes"),
            (lambda: bench(sizes=[0]), ValueError, "size=0"),
            (lambda: bench(ranks=1), ValueError, "ranks=1"),
            (lambda: bench(repeats=0), ValueError, "repeats=0"),
            (lambda: bench(warm_up=-1), ValueError, "warm_up=-1"),
            (lambda: bench(backend="mpi"), ValueError, "backend='mpi'"),
        ]
    )


def test_without_cuda_there_is_nothing_to_measure(monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert copy_bandwidth() == []
    assert "CUDA" in capsys.readouterr().out and "CUDA" in str(topology())


def test_the_topology_is_the_drivers_own_words(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_gpus", lambda: 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-smi" in str(topology())  # is not there
    driver = tmp_path / "nvidia-smi"
    driver.write_text('#!/bin/sh\n[ "$1" = topo ] && [ "$2" = -m ] && echo "GPU0  X  NV4" || echo "NVIDIA H100"\n')
    driver.chmod(0o755)
    assert str(topology()) == "GPU0  X  NV4"
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert "NV4" not in str(topology())


def test_the_figure_marks_both_regions_and_what_was_not_fitted(monkeypatch):
    times = {2**power: 1e-3 + 1e-9 * 2**power for power in range(10, 27)}  # half the speed at 1e6 bytes
    points = tuple(Point(size, t, 0.9 * t, 1.4 * t, size / t, 1.5 * size / t) for size, t in times.items())
    curve = Curve("all_reduce", 4, 5, points, {"backend": "gloo"})
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **kw: (drawn.append(figure), save(figure, *a, **kw)))
    figures.bandwidth_curve(curve, curve.fit(), held_out=curve.sizes[1::2])
    for axis in drawn[-1].axes:
        (hatched,) = [patch for patch in axis.patches if patch.get_hatch()]
        assert hatched.get_x() + hatched.get_width() == pytest.approx(1e6, rel=0.01)
    fitted, held_out = (line for line in drawn[-1].axes[0].get_lines() if line.get_marker() in ("o", "s"))
    assert (list(fitted.get_xdata()), list(held_out.get_xdata())) == (curve.sizes[::2], curve.sizes[1::2])
