"""What fits on a card: the largest micro-batch, the longest sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from course_lib.memory.cards import Card, card
from course_lib.memory.estimate import estimate
from course_lib.memory.presets import shape_of
from course_lib.memory.shapes import Shape
from course_lib.validation import check_counts, positive


def largest_micro_batch(model: str | Shape | Any, memory: int | str | Card, **settings: Any) -> int:
    """Sequences that fit into one forward pass; 0 if not even one does.

    Args:
        memory: bytes on the GPU, or a card or its name ("a100-80gb", "24GiB"). CUDA's context comes out of it.
        settings: of `estimate`, all but `micro_batch_size`.
    """
    if "micro_batch_size" in settings:
        raise ValueError("micro_batch_size is what is looked for: leave it out.")
    room, settings = _room(memory, settings)
    shape = shape_of(model)
    return _largest(lambda number: estimate(shape, micro_batch_size=number, **settings).fits(room))


def longest_sequence(
    model: str | Shape | Any, memory: int | str | Card, *, multiple: int = 128, **settings: Any
) -> int:
    """Tokens of the longest sequence that fits, a multiple of `multiple` and of `context_parallel`; 0 if none does.

    With learned positions (GPT-2) never more than the table has. That a model *runs* at a length does not mean that it
    was trained for it.

    Args: as of `largest_micro_batch`, with `seq_len` in the place of `micro_batch_size`.
    """
    if "seq_len" in settings:
        raise ValueError("seq_len is what is looked for: leave it out.")
    check_counts(multiple=multiple, context_parallel=settings.get("context_parallel", 1))
    room, settings = _room(memory, settings)
    shape = shape_of(model)
    unit = math.lcm(multiple, settings.get("context_parallel", 1))
    most = shape.positions // unit if shape.positions else None
    return unit * _largest(lambda number: estimate(shape, seq_len=unit * number, **settings).fits(room), most)


def _room(memory: int | str | Card, settings: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Bytes, and the settings with the card in them, so that `estimate` says what the card cannot compute."""
    if isinstance(memory, str | Card):
        found = card(memory)
        return found.memory, {"card": found} | settings
    positive(memory=memory)
    return int(memory), settings


def _largest(fits: Callable[[int], bool], most: int | None = None) -> int:
    """The largest number from 1 to `most` that fits, 0 for none: doubling until one does not, then bisection."""
    fitting, failing = 0, 1
    while most is None or failing <= most:
        if not fits(failing):
            break
        fitting, failing = failing, 2 * failing
    else:
        failing = most + 1
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if fits(middle):
            fitting = middle
        else:
            failing = middle
    return fitting
