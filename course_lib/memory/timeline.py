"""One training step as a sequence of operations, with the bytes that are alive after each of them, by category.

`estimate` answers with the worst moment of a step. Here is the whole step, from the same tapes (`course_lib.memory.blocks`):
its highest point is `estimate`'s peak, and what stands there can be read off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from course_lib.memory.blocks import SYMBOLS, block, head
from course_lib.memory.breakdown import CATEGORIES
from course_lib.memory.phases import numerics_of, sizes, stage
from course_lib.memory.presets import shape_of
from course_lib.memory.settings import RunSettings, check_sizes
from course_lib.memory.tape import Moment, Size, plus, times
from course_lib.validation import pick

WIDER = 30  # moments for each operation outside the blocks: there are few of them, and the worst is often among them


@dataclass(frozen=True)
class Timeline:
    """Bytes over one step.

    Attributes:
        parts: category -> bytes after each operation, an array for each of CATEGORIES. Operations outside the blocks
            take WIDER places each.
        phases: (name, first, last place): forward, backward, optimizer step.
        at_work: what ran at each place: "block", "loss", "embedding", "optimizer", "zero_grad".
    """

    parts: dict[str, np.ndarray]
    phases: list[tuple[str, int, int]]
    at_work: list[str]

    @property
    def total(self) -> np.ndarray:
        return np.sum(list(self.parts.values()), axis=0)

    @property
    def worst(self) -> int:
        """The place with the most bytes."""
        return int(self.total.argmax())

    @property
    def peak(self) -> int:
        return int(self.total[self.worst])

    @property
    def at_peak(self) -> dict[str, int]:
        """Category -> bytes at the worst moment."""
        return {name: int(values[self.worst]) for name, values in self.parts.items()}


def step_timeline(
    model: Any,
    *,
    micro_batch_size: int = 1,
    seq_len: int = 2048,
    num_microbatches: int = 1,
    activation_checkpointing: str = "none",
    loss: str = "eager",
) -> Timeline:
    """Bytes alive after every operation of one step on one GPU, in fp32, every weight trained, by fused AdamW.

    Args:
        model, micro_batch_size, seq_len, loss: as of `estimate`.
        num_microbatches: with several, the last one is shown, to which the others have left their gradients.
        activation_checkpointing: "none" or "full".
    """
    pick("activation_checkpointing", activation_checkpointing, ("none", "full"))
    checkpointed, accumulate = activation_checkpointing == "full", num_microbatches > 1
    shape = shape_of(model)
    run = RunSettings(
        precision="fp32",
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        num_microbatches=num_microbatches,
        activation_checkpointing=activation_checkpointing,
        loss=loss,
    )
    check_sizes(shape, run)
    r = stage(run.run, shape, 1, 1, shape.layers, True, True, int(accumulate)).resident
    elements = sizes(shape, run, 0).elements
    body, x = block(numerics_of(run.run, shape))
    top, y = head(numerics_of(run.run, shape))
    kept = x.size if checkpointed else body.saved()
    # token ids and labels; cosines and sines of one sequence, which all blocks share
    small = plus({"N": 16}, {} if shape.positions else {"one": 2 * run.seq_len * shape.head_dim * run.run.stored})
    tied = r.embedding_gradient if shape.tied else 0
    from_head = tied if accumulate else r.outer_gradient - r.embedding_gradient + tied
    before, of_block = (r.gradients, 0) if accumulate else (0, r.block_gradient)
    stream = {"Nh": run.run.stored}  # the gradient that goes from block to block
    backward = body.backward_moments(accumulate=accumulate)
    if checkpointed:  # the block runs once more, while the gradient waits at its end
        again = body.forward_moments(x)
        backward = [moment._replace(passing=plus(moment.passing, stream)) for moment in again] + backward
    layers, none = shape.layers, Moment({}, {}, {})
    rows: list[np.ndarray] = []
    at_work: list[str] = []
    phases: list[tuple[str, int, int]] = []

    def in_bytes(*moments: Moment) -> np.ndarray:
        return np.array([_by_category(moment, elements) for moment in moments])

    def add(name: str, moments: np.ndarray, saved: Size, gradients: float) -> None:
        """`moments` of one run of `name`, while the rest of the model keeps `saved` and has `gradients`."""
        wide = 1 if name == "block" else WIDER
        below = in_bytes(Moment(plus(small, saved), {"one": gradients}, {}))
        rows.append(np.repeat(moments + below, wide, axis=0))
        at_work.extend([name] * wide * len(moments))

    def end(phase: str) -> None:
        phases.append((phase, phases[-1][2] if phases else 0, len(at_work)))

    forward, again_and_back = in_bytes(*body.forward_moments(x, keep=not checkpointed)), in_bytes(*backward)
    for i in range(layers):
        add("block", forward, times(kept, i), before)
    add("loss", in_bytes(*top.forward_moments(y)), times(kept, layers), before)
    end("forward")
    add("loss", in_bytes(*top.backward_moments(accumulate=accumulate)), times(kept, layers), before)
    for i in reversed(range(layers)):
        add("block", again_and_back, times(kept, i), before + from_head + (layers - 1 - i) * of_block)
    # autograd adds the two gradients of a tied matrix up into a third tensor, and then to what is there
    twice = 2 * tied + (r.embedding_gradient if accumulate else 0)
    add("embedding", in_bytes(Moment({}, {"one": twice}, stream)), times(small, -1), r.gradients)
    end("backward")
    add("optimizer", in_bytes(*[Moment({}, {}, {"one": r.step})] * 2), times(small, -1), r.gradients)
    add("zero_grad", in_bytes(none, none), times(small, -1), 0)
    end("optimizer step")
    parts = dict(zip(CATEGORIES, np.concatenate(rows).T, strict=True))
    parts["weights"] += r.weights
    parts["optimizer state"] += r.optimizer
    return Timeline(parts, phases, at_work)


def _by_category(moment: Moment, elements: np.ndarray) -> np.ndarray:
    """Bytes in the order of CATEGORIES. Whatever has the width of the vocabulary belongs to the loss."""
    saved, gradients, passing = (
        {symbol: each * elements[SYMBOLS.index(symbol)] for symbol, each in size.items()} for size in moment
    )
    logits = saved.pop("NV", 0) + passing.pop("NV", 0)
    return np.array([0, 0, sum(gradients.values()), sum(saved.values()), logits, 0, sum(passing.values())])
