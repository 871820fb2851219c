"""Every way to share out the GPUs and to train on them: the table that `search` goes through."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from course_lib.memory import Shape
from course_tools.planning.question import Question
from course_tools.planning.table import CHECKPOINTING, Table, Way

LARGEST_MICRO_BATCH = 64
LEAST_TOKENS = 1024  # of a sequence on one context-parallel rank
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8)


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def tensor_degrees(shape: Shape, per_node: int) -> list[int]:
    """Tensor-parallel ranks that stay in a node and divide heads, kv heads (or repeat them), MLP and vocabulary."""
    return [
        t for t in divisors(per_node)
        if shape.heads % t == shape.intermediate % t == shape.vocab % t == 0
        and (shape.kv_heads % t == 0 or t % shape.kv_heads == 0)
    ]  # fmt: skip


def grids(question: Question) -> list[tuple[int, int, int, int]]:
    """(dp, tp, pp, cp) that use every GPU and give each data-parallel rank the same number of sequences."""
    shape, gpus, batch = question.shape, question.machines.gpus, question.global_batch
    found = []
    for tp in tensor_degrees(shape, question.machines.per_node):
        if gpus % tp:
            continue
        for pp in divisors(gpus // tp):
            if pp > shape.layers:
                break
            for cp in divisors(gpus // tp // pp):
                if cp > 1 and (cp & (cp - 1) or question.seq_len % (2 * cp)
                               or question.seq_len // cp < LEAST_TOKENS):  # fmt: skip
                    continue
                dp = gpus // (tp * pp * cp)
                sizes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp}
                if batch % dp == 0 and all(size == 1 or axis in question.axes for axis, size in sizes.items()):
                    found.append((dp, tp, pp, cp))
    return found


def ways(question: Question) -> list[Way]:
    """Method, strategy and offload that some program runs together."""
    found = []
    for method in question.methods:
        for strategy in question.strategies:
            for offload in question.offload:
                if offload != "none" and question.machines.cpu:
                    continue  # they lie there already
                if offload == "all" and strategy not in ("zero3", "fsdp"):
                    continue
                if offload == "optimizer" and strategy not in ("zero1", "zero2", "zero3"):
                    continue  # FSDP2 offloads parameters, gradients and states together
                found.append(Way(method, strategy, offload))
    return found


def goes(way: Way, grid: tuple[int, int, int, int]) -> bool:
    """Whether a program runs this way on this grid.

    One data-parallel rank has nothing to shard ("single"), but ZeRO-2 and 3 and FSDP can offload on it. DeepSpeed's
    pipeline takes no ZeRO-2 or 3, and no offload (deepspeedai/Megatron-DeepSpeed issue 369). bitsandbytes' matrices are not split by tensor parallelism.
    """
    dp, tp, pp, cp = grid
    if dp * cp == 1:
        offloads = way.offload != "none" and way.strategy in ("zero2", "zero3", "fsdp")
        if way.strategy != "single" and not offloads:
            return False
    elif way.strategy == "single":
        return False
    if pp > 1 and (way.strategy in ("zero2", "zero3") or (way.strategy == "zero1" and way.offload != "none")):
        return False
    return way.method != "qlora" or tp == pp == cp == 1


@lru_cache(maxsize=1024)
def micro_batches(sequences: int) -> tuple[int, ...]:
    """Sequences of one forward pass that divide a data-parallel rank's sequences: small ones, and powers of two."""
    return tuple(b for b in divisors(sequences) if b <= 8 or (b & (b - 1) == 0 and b <= LARGEST_MICRO_BATCH))


def chunks(question: Question, pp: int, m: int) -> tuple[int, ...]:
    """Layer groups a stage: interleaving needs micro-batches in rounds of `pp`, and layers that fill the groups."""
    if pp == 1 or m % pp or not question.interleave:
        return (1,)
    each = -(-question.shape.layers // pp)
    return tuple(v for v in CHUNKS if each % v == 0 and pp * v <= question.shape.layers)


def table(question: Question, only: list[tuple[int, int, int, int]] | None = None) -> Table:
    """Every setting, or those of the grids in `only`. Raises ValueError where the GPUs cannot be shared out at all."""
    all_grids, all_ways = grids(question) if only is None else only, ways(question)
    if not all_grids:
        raise ValueError(
            f"{question.machines.gpus:,} GPUs and global_batch={question.global_batch:,} do not go together: no number of "
            f"data-parallel ranks divides both; take a global_batch that is a multiple of {question.machines.gpus:,}."
        )
    kept = np.array([CHECKPOINTING.index(name) for name in CHECKPOINTING if name in question.checkpointing])
    fitting: dict[tuple[bool, ...], np.ndarray] = {}
    columns: list[np.ndarray] = []
    for index, grid in enumerate(all_grids):
        dp, tp, pp, cp = grid
        key = (dp * cp == 1, tp > 1, pp > 1, cp > 1)
        if key not in fitting:
            fitting[key] = np.array([i for i, way in enumerate(all_ways) if goes(way, grid)], dtype=int)
        splits = (0, 1) if question.sequence_parallel and tp > 1 and (question.seq_len // cp) % tp == 0 else (0,)
        sequences = question.global_batch // dp
        sizes = [(b, sequences // b, v) for b in micro_batches(sequences) for v in chunks(question, pp, sequences // b)]
        columns.append(_product(index, fitting[key], np.array(sizes), kept, np.array(splits)))
    rows = np.concatenate(columns, axis=1)
    grid, way, b, m, v, kept_row, split = rows
    if not len(way):
        raise ValueError(
            "None of the strategies asked for runs on these GPUs: 'single' is for one GPU, the others for several."
        )
    return Table(all_ways, all_grids, way, grid, b, m, v, kept_row, split.astype(bool))


def _product(grid: int, ways: np.ndarray, sizes: np.ndarray, kept: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Columns grid, way, b, m, v, kept, split of every combination."""
    parts = np.indices((len(ways), len(sizes), len(kept), len(splits))).reshape(4, -1)
    b, m, v = sizes[parts[1]].T
    return np.stack([np.full(parts.shape[1], grid), ways[parts[0]], b, m, v, kept[parts[2]], splits[parts[3]]])
