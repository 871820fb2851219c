"""Measuring links: what is timed, on whom the clock waits, what is said where there is no GPU; and the figure of it."""

from __future__ import annotations

import sys
import time

import cloudpickle
import numpy as np
import pytest
from matplotlib.figure import Figure

from course_lib import figures
from course_lib.collectives import measuring
from course_lib.collectives.links import bus_factor
from course_lib.collectives.measuring import (
    Curve,
    Point,
    bench_collective,
    copy_bandwidth,
    machine,
    topology,
)
from course_lib.collectives.measuring import collectives as measured_by
from course_lib.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])

CONTRIBUTES = {"all_gather": 1 / 2}  # of the payload, what a rank of 2 puts in


# ---------------------------------------------------------------------------------------------- collectives
def test_each_kind_is_the_library_s_call_with_the_payload_of_nccl_tests(no_leftovers):
    def all_kinds():
        return [measured_by._time_all(kind, [4096, 65536], 3, 1) for kind in measuring.KINDS]

    run = launch(all_kinds, ranks=2, quiet=True)
    for kind, times in zip(measuring.KINDS, run.results[0], strict=True):
        assert np.shape(times) == (2, 3) and np.min(times) > 0
        share = CONTRIBUTES.get(kind, 1)
        mine = [c for c in run.collectives if c.rank == 0 and c.kind == kind]
        for payload in (4096, 65536):
            assert sum(c.bytes == payload * share for c in mine) == 3 + 1, kind
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
    assert min(run.results[0][0]) >= 0.05


@pytest.fixture(scope="module")
def curve(private_tmp):
    return bench_collective(
        "all_reduce", [1000, 2**16, 2**20, 2**22, 2**12], ranks=3, repeats=5, warm_up=1, backend="gloo"
    )


def test_a_curve_has_medians_extremes_bandwidths_and_its_stamp(curve):
    assert curve.sizes == [1008, 4104, 65544, 1048584, 4194312]  # whole numbers of fp32 for each of 3 ranks
    for point in curve:
        assert 0 < point.fastest <= point.seconds <= point.slowest
        assert point.algbw == pytest.approx(point.bytes / point.seconds)
        assert point.busbw == pytest.approx(point.algbw * bus_factor("all_reduce", 3))
    assert curve.points[-1].fastest > curve.points[0].fastest
    assert (curve.stamp["ranks"], curve.stamp["backend"]) == (3, "gloo") and "date" in curve.stamp


def test_a_curve_is_fitted_as_a_whole_or_in_part(curve):
    whole, part = curve.fit(), curve.fit(sizes=curve.sizes[::2])
    assert whole.sizes == tuple(curve.sizes) and whole.seconds == tuple(curve.seconds)
    assert part.sizes == tuple(curve.sizes[::2]) and part.seconds == tuple(curve.seconds[::2])
    with pytest.raises(ValueError, match="size=1000 is no choice"):
        curve.fit(sizes=[1000, 1008])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(kind="allreduce"), "kind='allreduce' is no choice: did you mean 'all_reduce'?"),
        (dict(sizes=[]), "sizes is empty"),
        (dict(sizes=[0]), "size=0: give a number above 0."),
        (dict(ranks=1), "ranks=1: a collective to be timed takes at least 2."),
        (dict(ranks=None), "ranks=None"),
        (dict(repeats=0), "repeats=0: give a whole number of at least 1."),
        (dict(warm_up=-1), "warm_up=-1"),
        (dict(backend="mpi"), "backend='mpi' is not one of"),
    ],
)
def test_bad_input_is_a_sentence(change, said):
    with pytest.raises(ValueError) as error:
        bench_collective(**{"kind": "all_reduce", "sizes": [4], "ranks": 2} | change)
    assert said in str(error.value)


# -------------------------------------------------------------------------------------------------- machine
@pytest.fixture
def no_cuda(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_cuda_each_says_so_in_one_sentence(no_cuda, capsys):
    assert copy_bandwidth() == []
    for sentence in (str(topology()), capsys.readouterr().out.strip()):
        assert sentence.startswith("There is no CUDA device here") and sentence.count(".") == 1
    assert "date" in topology().stamp
    with pytest.raises(ValueError, match="size=0"):
        copy_bandwidth([0])
    with pytest.raises(ValueError, match="sizes is empty"):
        copy_bandwidth([])


def test_the_topology_is_the_driver_s_own_words(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_gpus", lambda: 2)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-smi is not on the PATH" in str(topology())
    fake = tmp_path / "nvidia-smi"
    fake.write_text('#!/bin/sh\n[ "$1" = topo ] && [ "$2" = -m ] && echo "GPU0  X  NV4" || echo "NVIDIA H100"\n')
    fake.chmod(0o755)
    assert str(topology()) == "GPU0  X  NV4"
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert "does not tell the topology here" in str(topology())


# --------------------------------------------------------------------------------------------------- figure
def drawn_from(alpha, beta, powers):
    points = []
    for power in powers:
        size = 2**power
        middle = alpha + beta * size
        points.append(Point(size, middle, middle * 0.9, middle * 1.4, size / middle, 1.5 * size / middle))
    return Curve("all_reduce", 4, 5, tuple(points), {"backend": "gloo"})


@pytest.fixture
def axes_of(monkeypatch):
    seen = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **kw: (seen.append(figure), real(figure, file, **kw)))
    return lambda: seen[-1].axes


@pytest.mark.parametrize(
    ("alpha", "powers", "words"),
    [
        (1e-3, range(10, 27), ["latency-bound", "bandwidth-bound"]),
        (1e-9, range(10, 27), ["bandwidth-bound"]),
        (1.0, range(10, 27), ["latency-bound"]),
        (1e-3, range(20, 23), ["bandwidth-bound"]),
    ],
)
def test_the_figure_marks_both_regions_and_what_was_not_fitted(alpha, powers, words, axes_of, recwarn):
    curve = drawn_from(alpha, 1e-9, powers)
    picture = figures.bandwidth_curve(curve, curve.fit(), held_out=curve.sizes[1::2])
    assert not [str(w.message) for w in recwarn] and len(picture.data) < 60_000
    left, right = axes_of()
    for axis, label in ((left, "time (ms)"), (right, "bus bandwidth (GB/s)")):
        assert (axis.get_xlabel(), axis.get_ylabel()) == ("payload (bytes)", label)
        assert [text.get_text() for text in axis.texts] == words
        hatched = [patch for patch in axis.patches if patch.get_hatch()]
        assert len(hatched) == (alpha > 1e-6)
        if alpha == 1e-3:  # half the speed at 1e6 bytes
            assert hatched[0].get_x() + hatched[0].get_width() == pytest.approx(1e6, rel=0.01)
        assert 3 <= len(axis.get_xticks()) <= 6
    fitted, *points = left.get_lines()[0], *[line for line in left.get_lines() if line.get_marker() in ("o", "s")]
    assert np.asarray(fitted.get_ydata())[0] > 0
    seen, unseen = points
    assert list(seen.get_xdata()) == curve.sizes[::2] and list(unseen.get_xdata()) == curve.sizes[1::2]
    assert unseen.get_markerfacecolor() == "white" != seen.get_markerfacecolor()
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["fit", "measured", "measured, not fitted"]


def test_the_figure_s_text_carries_the_fit():
    curve = drawn_from(1e-3, 1e-9, range(10, 27))
    said = figures.bandwidth_curve(curve, curve.fit()).alt
    assert said.startswith("all_reduce, 4 ranks, gloo: 1.00 ms at 1.00 KiB, 68.11 ms at 64.00 MiB")
    assert "1.000 ms plus payload over 1.00 GB/s, latency-bound below 976.56 KiB." in said
    with pytest.raises(ValueError, match="at least two sizes"):
        figures.bandwidth_curve(drawn_from(1e-3, 1e-9, [10]), curve.fit())
