"""The rank grid: which ranks form a group along which axis. It is ``arange(ranks).view(pp, dp, cp, tp)`` and no more.

The slowest axis stands first, so that neighbours in rank, which share a machine, are neighbours along the last axis.
The default order is Megatron-core's ("tp-cp-ep-dp-pp", written there with the fastest first).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from course_lib.choices import AXES
from course_lib.validation import check_counts, pick

ORDERS = tuple(f"{axis} fastest" for axis in reversed(AXES))


@dataclass(frozen=True)
class Grid:
    """Ranks along data, pipeline, tensor and context parallelism; ``size`` of them together.

    Attributes:
        dp, pp, tp, cp: ranks along each axis; 1 leaves it out.
        order: "tp fastest", "cp fastest", "dp fastest" or "pp fastest": the axis along which ranks count up first; the
            others keep their order.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    order: str = "tp fastest"

    def __post_init__(self) -> None:
        check_counts(**{axis: getattr(self, axis) for axis in AXES})
        pick("order", self.order, ORDERS)

    @property
    def axes(self) -> tuple[str, ...]:
        """All four, the slowest first, the fastest last."""
        fastest = self.order.split()[0]
        return (*(axis for axis in AXES if axis != fastest), fastest)

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks along each of ``axes``: what ``init_device_mesh`` takes."""
        return tuple(getattr(self, axis) for axis in self.axes)

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.dp * self.pp * self.tp * self.cp

    def check(self, ranks: int) -> Grid:
        """This grid, if it takes exactly `ranks` ranks. Raises ValueError otherwise."""
        if self.size != ranks:
            raise ValueError(f"The grid {self} takes {self.size} ranks and there are {ranks}: {self._advice(ranks)}.")
        return self

    def rank(self, *, dp: int = 0, pp: int = 0, tp: int = 0, cp: int = 0) -> int:
        """The rank at these coordinates. Raises ValueError for one outside the grid."""
        at = {"dp": dp, "pp": pp, "tp": tp, "cp": cp}
        number = 0
        for axis, width in zip(self.axes, self.shape, strict=True):
            if not 0 <= at[axis] < width:
                raise ValueError(f"{axis}={at[axis]} lies outside the grid {self}: give 0 to {width - 1}.")
            number = number * width + at[axis]
        return number

    def coordinates(self, rank: int) -> dict[str, int]:
        """{"pp": …, "dp": …, "cp": …, "tp": …} of a rank. Raises ValueError for one outside the grid."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} lies outside the grid {self}: give 0 to {self.size - 1}.")
        at = {}
        for axis, width in zip(reversed(self.axes), reversed(self.shape), strict=True):
            rank, at[axis] = divmod(rank, width)
        return {axis: at[axis] for axis in AXES}

    def groups(self, *axes: str) -> list[list[int]]:
        """The groups along an axis: lists of ranks that differ in nothing else, in the order of their first rank.

        With two axes, such as "dp" and "cp", the groups that span both. Raises ValueError for an axis that is none.
        """
        if not axes:
            raise ValueError(f"Name the axis of the groups: one of {', '.join(AXES)}.")
        for axis in axes:
            pick("axis", axis, AXES)
        inside, others = self._offsets(axes), self._offsets(tuple(axis for axis in AXES if axis not in axes))
        return [[first + offset for offset in inside] for first in others]

    def _offsets(self, axes: tuple[str, ...]) -> list[int]:
        """The ranks at coordinate 0 of all other axes, in rising order."""
        steps, stride = [], self.size
        for axis, width in zip(self.axes, self.shape, strict=True):
            stride //= width
            if axis in axes:
                steps.append([i * stride for i in range(width)])
        return [sum(at) for at in product(*steps)]

    def group(self, rank: int, *axes: str) -> list[int]:
        """The one of ``groups(*axes)`` that `rank` is in."""
        self.coordinates(rank)  # it has some, or says that it lies outside
        return next(group for group in self.groups(*axes) if rank in group)

    def nodes(self, axis: str, per_node: int) -> int:
        """Machines that the widest group along an axis touches, with ranks 0 to per_node - 1 in the first machine.

        1 means that this axis never leaves a machine. Raises ValueError for an axis that is none, or machines of no rank.
        """
        if per_node < 1:
            raise ValueError(f"per_node={per_node}: give the ranks that a machine holds, at least 1.")
        return max(len({rank // per_node for rank in group}) for group in self.groups(axis))

    def __str__(self) -> str:
        used = " x ".join(f"{axis}={width}" for axis, width in zip(self.axes, self.shape, strict=True) if width > 1)
        return used or "of one rank"

    def _advice(self, ranks: int) -> str:
        rest = self.size // self.dp
        if ranks > 0 and ranks % rest == 0:
            return f"dp={ranks // rest} would use them all"
        return f"start {self.size}, or choose axes whose product is {ranks}"
