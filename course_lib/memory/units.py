"""A model as the shapes of its parameters, unit by unit, in the order of ``model.parameters()``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from course_lib.memory.presets import shape_of
from course_lib.memory.shapes import Shape
from course_lib.validation import pick


class Tensor(NamedTuple):
    """A parameter.

    Attributes:
        shape: of the whole one.
        trainable: False for frozen weights.
        element: bytes an element at rest; 0 leaves it to the run's precision.
    """

    shape: tuple[int, ...]
    trainable: bool = True
    element: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def as_tensors(
    units: Sequence[Sequence[Tensor | Sequence[int]]], trainable: Sequence[Sequence[bool]] | None = None
) -> list[Tensor]:
    """All parameters in one list. `trainable` says for each one whether it is trained, and overrules the tensors."""
    if not units:
        raise ValueError(
            "units is empty: give the shapes of the parameters, a list for each unit (units_of makes them)."
        )
    for unit in units:
        for shape in unit:
            sizes = shape.shape if isinstance(shape, Tensor) else shape
            if not isinstance(sizes, Sequence) or not all(type(size) is int and size >= 0 for size in sizes):
                raise ValueError(f"{shape!r} is no shape: units is a list of lists of shapes, [[(256, 128)], ...].")
    found = [[shape if isinstance(shape, Tensor) else Tensor(tuple(shape)) for shape in unit] for unit in units]
    if trainable is not None:
        if [len(unit) for unit in trainable] != [len(unit) for unit in found]:
            raise ValueError("trainable has another form than units: give True or False for each shape of each unit.")
        found = [
            [tensor._replace(trainable=bool(flag)) for tensor, flag in zip(unit, flags, strict=True)]
            for unit, flags in zip(found, trainable, strict=True)
        ]
    return [tensor for unit in found for tensor in unit]


def units_of(
    model: str | Shape | Any, *, method: str = "full", lora_rank: int = 16, element: int = 4
) -> list[list[Tensor]]:
    """The units of a model: what comes before the blocks, each block, what comes after them.

    FSDP2 makes one unit, the root, of the first and the last of these lists; they stand apart here because DeepSpeed cuts
    parameters in their order.

    Args:
        model: a torch module, sharded or not (then `method` is read off its parameters), or whatever `shape_of` takes.
        method: of a shape: "full"; "lora": frozen weights, and two factors of `lora_rank` beside each matrix of a block;
            "qlora": those matrices in NF4, two weights a byte.
        element: of a shape under "qlora", bytes an element of the packed matrices (their quant_storage).
    """
    if hasattr(model, "named_parameters"):
        return _of_module(model)
    pick("method", method, ("full", "lora", "qlora"))
    shape, full = shape_of(model), method == "full"
    if shape.experts:
        raise ValueError(f"{shape.name} is a mixture of experts: its units are known here of a torch module alone.")
    block: list[Tensor] = []
    of_block = shape.block()
    for rows, columns in of_block.matrices.values():
        packed = (-(-rows * columns // (2 * element)), 1)
        block.append(Tensor(packed, False, element) if method == "qlora" else Tensor((rows, columns), full))
        block += [] if full else [Tensor((lora_rank, columns)), Tensor((rows, lora_rank))]
    block += [Tensor((elements,), full) for elements in of_block.vectors]
    before = [Tensor((shape.vocab, shape.hidden), full)]
    before += [Tensor((shape.positions, shape.hidden), full)] if shape.positions else []
    after = [Tensor((shape.hidden,), full)] * (2 if shape.norm_bias else 1)
    after += [] if shape.tied else [Tensor((shape.vocab, shape.hidden), full)]
    return [before, *([*block] for _ in range(shape.layers)), after]


def _of_module(model: Any) -> list[list[Tensor]]:
    """Parameters by the number behind the last ``layers.`` in their names; those without one before or after."""
    found: dict[str, list[Tensor]] = {"before": []}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        block = next((words[i + 1] for i, word in enumerate(words[:-1]) if word == "layers"), None)
        if block is None:
            block = "before" if len(found) == 1 else "after"
        shape = getattr(
            parameter, "ds_shape", parameter.shape
        )  # ZeRO-3 leaves an empty tensor in the parameter's place
        found.setdefault(block, []).append(Tensor(tuple(shape), parameter.requires_grad, parameter.element_size()))
    return [unit for unit in found.values() if unit]
