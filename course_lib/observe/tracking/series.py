"""One metric of one rank over the steps."""

from __future__ import annotations

Series = list[tuple[int, float, float]]  # (step, value, seconds since 1970 by the writer's clock)


def newest_of_each_step(series: Series) -> Series:
    """In the order of steps. A run that resumed from a checkpoint did some steps twice: the later one counts."""
    return [entry for _, entry in sorted({entry[0]: entry for entry in series}.items())]
