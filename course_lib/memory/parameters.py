"""Which tensors one GPU holds of a model: counts of elements by place, after tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from course_lib.memory.blocks import has_adapter
from course_lib.memory.shapes import Block, Shape

ROW_PARALLEL = ("o", "d", "sd")  # their input is split over tensor-parallel ranks; the others' output is
WHOLE = ("qa", "kva")  # latents, which every tensor-parallel rank computes


@dataclass(frozen=True)
class Held:
    """Tensors of one pipeline stage on one tensor-parallel rank; (elements, how many such tensors).

    Attributes:
        layers: blocks of the stage.
        matrices, vectors: of all its blocks.
        experts: of a mixture, all experts of a block and its router, a tensor each, as transformers keeps them.
        factors: LoRA's, two a matrix of the blocks.
        outer: embedding, positions, last norm, output layer, where the stage has them.
        largest: elements of its largest block.
    """

    layers: int
    matrices: tuple[tuple[int, int], ...]
    vectors: tuple[tuple[int, int], ...]
    experts: tuple[tuple[int, int], ...]
    factors: tuple[tuple[int, int], ...]
    outer: tuple[tuple[int, int], ...]
    largest: int

    def all_base(self) -> Iterator[tuple[int, int]]:
        yield from self.matrices
        yield from self.experts
        yield from self.vectors
        yield from self.outer


def count(tensors: Iterable[tuple[int, int]]) -> int:
    """Elements in all."""
    return sum(elements * number for elements, number in tensors)


def local_matrices(block: Block, tensor_parallel: int) -> dict[str, tuple[int, int]]:
    """The matrices of one block on one tensor-parallel rank, (out, in)."""
    t = tensor_parallel
    found = {}
    for which, (rows, columns) in block.matrices.items():
        if which in ROW_PARALLEL:
            found[which] = (rows, columns // t)
        else:
            found[which] = (rows if which in WHOLE else rows // t, columns)
    return found


def local_factors(block: Block, rank: int, tensor_parallel: int, targets: str) -> dict[str, tuple[int, int]]:
    """LoRA's A and B of each matrix, in elements, on one tensor-parallel rank: the split side is split in them too.

    Experts have none here: they are parameters of their own, no linear layers; `uncounted` says what PEFT does to some.
    """
    return {
        which: (rank * columns, rank * rows)
        for which, (rows, columns) in local_matrices(block, tensor_parallel).items()
        if has_adapter(which, targets)
    }


def local_experts(block: Block, split: int) -> dict[str, int]:
    """Elements of a block's experts on one rank; `split`: tensor-parallel x expert-parallel ranks, which all but the router
    are shared out among."""
    elements = {which: number * rows * columns for which, (number, rows, columns) in block.experts.items()}
    return {which: size if which == "router" else size // split for which, size in elements.items()}


def kinds_of(shape: Shape, layers: int, first: bool) -> list[tuple[Block, int]]:
    """The kinds of blocks among the first or the last `layers` of a model, with how many there are of each."""
    e = shape.experts
    if e is None or not e.dense:
        return [(shape.block(), layers)]
    plain = sum(layer in e.dense for layer in _range(shape, layers, first))
    by_kind = {False: layers - plain, True: plain}
    return [(block, number) for block, _ in shape.kinds if (number := by_kind[not block.experts])]


def up_to_first_mixture(shape: Shape, layers: int, first: bool) -> float:
    """Share of the parameters of the first or the last `layers` that lie before, and in, the first mixture among them; of a
    model without plain blocks, in the first block."""
    e = shape.experts
    if e is None or not e.dense:
        return 1 / layers
    sizes = [shape.block(layer).parameters for layer in _range(shape, layers, first)]
    mixtures = [i for i, layer in enumerate(_range(shape, layers, first)) if layer not in e.dense]
    return sum(sizes[: mixtures[0] + 1]) / sum(sizes) if mixtures else 1 / layers


def _range(shape: Shape, layers: int, first: bool) -> range:
    return range(layers) if first else range(shape.layers - layers, shape.layers)


@lru_cache(maxsize=8192)
def held(
    shape: Shape,
    tensor_parallel: int,
    layers: int,
    first: bool,
    last: bool,
    rank: int,
    experts: int = 1,
    targets: str = "all",
) -> Held:
    """What one GPU holds.

    Args:
        rank: of LoRA's factors, 0 for none. first, last: the stage has the embedding, the head.
        experts: expert-parallel ranks. targets: `lora_targets`.
    """
    t = tensor_parallel
    matrices, vectors, mixtures, factors, sizes = [], [], [], [], []
    for block, number in kinds_of(shape, layers, first):
        of_block = [rows * columns for rows, columns in local_matrices(block, t).values()]
        of_experts = list(local_experts(block, t * experts).values())
        sizes.append(sum(of_block) + sum(of_experts) + sum(block.vectors))
        matrices += [(elements, number) for elements in of_block]
        mixtures += [(elements, number) for elements in of_experts]
        vectors += [(elements, number) for elements in block.vectors]
        if rank:
            factors += [(one, number) for pair in local_factors(block, rank, t, targets).values() for one in pair]
    outer = [(shape.vocab * shape.hidden // t, 1)] if first or (last and shape.tied) else []
    outer += [(shape.positions * shape.hidden, 1)] if first and shape.positions else []
    if last:
        outer += [(shape.hidden, 2 if shape.norm_bias else 1)]
        outer += [] if shape.tied else [(shape.vocab * shape.hidden // t, 1)]
    return Held(layers, *map(tuple, (matrices, vectors, mixtures, factors, outer)), max(sizes))
