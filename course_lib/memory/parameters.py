"""Which tensors one GPU holds of a model: counts of elements by place, after tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from course_lib.memory.shapes import Shape

ROW_PARALLEL = ("o", "d")  # their input is split over tensor-parallel ranks; the others' output is


@dataclass(frozen=True)
class Held:
    """Tensors of one pipeline stage on one tensor-parallel rank; (elements, how many such tensors).

    Attributes:
        layers: blocks of the stage.
        matrices, vectors: of all its blocks.
        factors: LoRA's, two a matrix of the blocks.
        outer: embedding, positions, last norm, output layer, where the stage has them.
    """

    layers: int
    matrices: tuple[tuple[int, int], ...]
    vectors: tuple[tuple[int, int], ...]
    factors: tuple[tuple[int, int], ...]
    outer: tuple[tuple[int, int], ...]

    def all_base(self) -> Iterator[tuple[int, int]]:
        yield from self.matrices
        yield from self.vectors
        yield from self.outer


def count(tensors: Iterator[tuple[int, int]] | tuple[tuple[int, int], ...]) -> int:
    """Elements in all."""
    return sum(elements * number for elements, number in tensors)


def local_matrices(shape: Shape, tensor_parallel: int) -> dict[str, tuple[int, int]]:
    """The matrices of one block on one tensor-parallel rank, (out, in). Keys and values are copied where the ranks are
    more than the kv heads."""
    t, kv = tensor_parallel, max(shape.kv_heads // tensor_parallel, 1) * shape.head_dim
    found = {}
    for which, (rows, columns) in shape.block_matrices.items():
        if which in ROW_PARALLEL:
            found[which] = (rows, columns // t)
        else:
            found[which] = (kv if which in "kv" else rows // t, columns)
    return found


def local_factors(shape: Shape, rank: int, tensor_parallel: int) -> dict[str, tuple[int, int]]:
    """LoRA's A and B of each matrix, in elements, on one tensor-parallel rank: the split side is split in them too."""
    return {
        which: (rank * columns, rank * rows)
        for which, (rows, columns) in local_matrices(shape, tensor_parallel).items()
    }


@lru_cache(maxsize=4096)
def held(shape: Shape, tensor_parallel: int, layers: int, first: bool, last: bool, rank: int) -> Held:
    """What one GPU holds. `rank`: of LoRA's factors, 0 for none; `first`, `last`: the stage has the embedding, the head."""
    t = tensor_parallel
    matrices = tuple((rows * columns, layers) for rows, columns in local_matrices(shape, t).values())
    factors = tuple((one, layers) for pair in local_factors(shape, rank, t).values() for one in pair) if rank else ()
    outer = [(shape.vocab * shape.hidden // t, 1)] if first or (last and shape.tied) else []
    outer += [(shape.positions * shape.hidden, 1)] if first and shape.positions else []
    if last:
        outer += [(shape.hidden, 2 if shape.norm_bias else 1)]
        outer += [] if shape.tied else [(shape.vocab * shape.hidden // t, 1)]
    return Held(layers, matrices, tuple((elements, layers) for elements in shape.block_vectors), factors, tuple(outer))
