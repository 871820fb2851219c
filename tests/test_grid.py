"""The rank grid against numpy's own arange().reshape(), and its sentences."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from course_lib.choices import AXES
from course_lib.parallel.grid import ORDERS, Grid


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [dict(dp=2, pp=2, tp=2), dict(dp=3, pp=2, tp=4, cp=5), dict(), dict(tp=8)])
def test_it_is_an_arange_in_the_order_of_its_axes(order, sizes):
    grid = Grid(**sizes, order=order)
    assert f"{grid.axes[-1]} fastest" == order and sorted(grid.axes) == sorted(AXES)
    numbers = np.arange(grid.size).reshape(grid.shape)
    for at in np.ndindex(*grid.shape):
        coordinates = {axis: int(i) for axis, i in zip(grid.axes, at, strict=True)}
        rank = int(numbers[at])
        assert grid.rank(**coordinates) == rank and grid.coordinates(rank) == coordinates
    for axis in AXES:
        rows = np.moveaxis(numbers, grid.axes.index(axis), -1).reshape(-1, getattr(grid, axis))
        assert grid.groups(axis) == rows.tolist()
        assert all(grid.group(rank, axis) == row for row in rows.tolist() for rank in row)
    both = np.moveaxis(numbers, [grid.axes.index("dp"), grid.axes.index("cp")], [-2, -1])  # ranks of one set of weights
    both = both.reshape(-1, grid.dp * grid.cp)
    assert sorted(map(sorted, grid.groups("dp", "cp"))) == sorted(map(sorted, both.tolist()))


def test_megatrons_order_keeps_tensor_parallel_ranks_together():
    grid = Grid(dp=2, pp=2, tp=2)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.coordinates(5) == {"pp": 1, "dp": 0, "cp": 0, "tp": 1}
    assert [grid.nodes(axis, 4) for axis in ("tp", "dp", "pp")] == [1, 1, 2]
    assert Grid(dp=2, pp=2, tp=2, order="pp fastest").nodes("pp", 4) == 1


def test_a_large_grid_is_cheap():
    grid = Grid(dp=8, pp=16, cp=16, tp=8).check(16_384)  # Llama 3 405B's, arXiv:2407.21783, table 4
    assert grid.nodes("tp", 8) == 1 and grid.nodes("cp", 8) == 16
    assert len(grid.groups("dp")) == 2048


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Grid(tp=0), "tp=0: give a whole number of at least 1."),
        (lambda: Grid(dp=2.0), "dp=2.0: give a whole number"),
        (lambda: Grid(order="ep fastest"), "did you mean 'tp fastest'?"),
        (
            lambda: Grid(dp=2, pp=2, tp=2).check(6),
            r"The grid pp=2 x dp=2 x tp=2 takes 8 ranks and there are 6: start 8",
        ),
        (lambda: Grid(dp=2, pp=2, tp=2).check(16), "dp=4 would use them all"),
        (lambda: Grid(tp=2).rank(tp=2), "tp=2 lies outside the grid tp=2: give 0 to 1."),
        (lambda: Grid(tp=2).rank(dp=-1), "dp=-1 lies outside"),
        (lambda: Grid().coordinates(1), "rank 1 lies outside the grid of one rank: give 0 to 0."),
        (lambda: Grid(tp=2).group(2, "tp"), "rank 2 lies outside"),
        (lambda: Grid().groups("ep"), "axis='ep' is no choice: "),
        (lambda: Grid().groups(), "Name the axis"),
        (lambda: Grid().nodes("tp", 0), "per_node=0"),
    ],
)
def test_misfits_get_a_sentence(wrong, words):
    with pytest.raises(ValueError, match=words):
        wrong()


def test_it_needs_no_torch():
    code = (
        "import sys; import course_lib.parallel.grid; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
