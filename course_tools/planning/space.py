"""Every way to share out the GPUs and to train on them: the table that `search` goes through."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache

import numpy as np

from course_lib.choices import ACTIVATION_CHECKPOINTING, AXES, STRATEGIES, why_not, why_not_tensor_parallel
from course_lib.memory import Shape
from course_lib.parallel.grid import Grid
from course_tools.planning.question import Question
from course_tools.planning.table import Table, Way

LARGEST_MICRO_BATCH = 64
LEAST_TOKENS = 1024  # of a sequence on one context-parallel rank
VIRTUAL_STAGES = range(1, 9)


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def tensor_degrees(shape: Shape, per_node: int) -> list[int]:
    """Tensor-parallel ranks that stay in a node and over which the model splits."""
    return [tp for tp in divisors(per_node) if not why_not_tensor_parallel(shape, tp)]


def expert_degrees(shape: Shape, dp: int) -> list[int]:
    """Expert-parallel ranks among `dp` data-parallel ones; 1 alone where the model is no mixture."""
    if shape.experts is None:
        return [1]
    return [ep for ep in divisors(math.gcd(dp, shape.experts.number)) if ep & (ep - 1) == 0]


def grids(question: Question) -> list[Grid]:
    """Grids that use every GPU and give each data-parallel rank the same number of sequences."""
    shape, gpus, batch = question.shape, question.machines.gpus, question.global_batch
    found = []
    for tp in tensor_degrees(shape, question.machines.per_node):
        if gpus % tp:
            continue
        for pp in divisors(gpus // tp):
            if pp > shape.layers:
                break
            for cp in divisors(gpus // tp // pp):
                each = question.seq_len // cp
                if cp > 1 and (cp & (cp - 1) or question.seq_len % (2 * cp) or each < LEAST_TOKENS):
                    continue
                grid = Grid(dp=gpus // (tp * pp * cp), tp=tp, pp=pp, cp=cp)
                if batch % grid.dp == 0 and all(getattr(grid, axis) == 1 or axis in question.axes for axis in AXES):
                    found += [replace(grid, ep=ep) for ep in expert_degrees(shape, grid.dp)]
    return found


def ways(question: Question) -> list[Way]:
    """What some program runs together; ranks on a CPU have nothing to offload, and no 8-bit optimizer.

    Adapters have few states: theirs are stepped by the first optimizer that is asked for.

    Raises:
        ValueError: nothing of what is asked for goes together; the reason for the first combination.
    """
    cpu, nodes = question.machines.cpu, question.machines.nodes
    found, reasons = [], []
    optimizers = [name for name in question.optimizers if "8bit" not in name or not cpu]
    if not optimizers:
        raise ValueError("Ranks on a CPU have no 8-bit optimizer: take optimizer='adamw'.")
    for method, strategy, offload in itertools.product(question.methods, question.strategies, question.offload):
        if cpu and offload != "none":
            reasons.append("Ranks on a CPU have nothing to offload: take offload='none'.")
            continue
        groups = divisors(question.machines.per_node)[1:] if strategy == "hsdp" else [0]
        if strategy == "hsdp" and (nodes == 1 or offload != "none"):
            reasons.append("hsdp has a copy of the model on each of several machines, and offloads nothing: take fsdp.")
            continue
        name = "fsdp" if strategy == "hsdp" else strategy
        for optimizer in optimizers if method == "full" else optimizers[:1]:
            reason = why_not(method=method, strategy=name, offload=offload, optimizer=optimizer)
            if not reason and optimizer.startswith("paged") and strategy != "single":
                reason = "Paged states are planned on one GPU alone: take adamw8bit."
            reasons += [reason] if reason else []
            found += [Way(method, name, offload, optimizer, group) for group in groups if not reason]
    if not found:
        raise ValueError(reasons[0])
    return found


def way_fault(way: Way, grid: Grid) -> str:
    """Why this way is none for this grid, in one sentence; "" where it is one.

    Beyond what no program runs, a single data-parallel rank has nothing to share: then the strategy is "single", unless
    ZeRO-2 and 3 or FSDP offload on it. And QLoRA, which is for few cards, is planned on data-parallel ranks alone.
    """
    ranks = grid.dp * grid.cp
    if way.shard and (ranks % way.shard or ranks == way.shard or max(grid.pp, grid.cp, grid.ep) > 1):
        return (
            f"Copies sharded over {way.shard} ranks each want several times as many data-parallel ranks, pp=1 and cp=1."
        )
    if grid.ep > 1 and way.strategy not in ("ddp", "fsdp"):
        return "expert parallelism is planned with ddp and fsdp alone: DeepSpeed has its own way."
    if ranks > 1 and way.strategy == "single":
        return "strategy='single' is for one data-parallel rank: take ddp, zero1, zero2, zero3 or fsdp."
    offloads = way.offload != "none" and "gradients" in STRATEGIES[way.strategy].shards
    if ranks == 1 and way.strategy != "single" and not offloads:
        return f"{way.strategy} shares among data-parallel ranks and there is one: take strategy='single'."
    if way.method == "qlora" and max(grid.pp, grid.cp) > 1:
        return "qlora is planned on data-parallel ranks alone: take pp=1 and cp=1."
    chosen = way._asdict()
    del chosen["shard"]
    return why_not(**chosen, ranks=ranks, tp=grid.tp, pp=grid.pp)


@lru_cache(maxsize=1024)
def micro_batch_sizes(sequences: int) -> tuple[int, ...]:
    """Sequences of one forward pass that divide a data-parallel rank's sequences: small ones, and powers of two."""
    return tuple(b for b in divisors(sequences) if b <= 8 or (b & (b - 1) == 0 and b <= LARGEST_MICRO_BATCH))


def virtual_stages(question: Question, pp: int, m: int) -> tuple[int, ...]:
    """Stages per rank: interleaving needs micro-batches in rounds of `pp`, and a layer for each stage."""
    if pp == 1 or m % pp:
        return (1,)
    return tuple(v for v in VIRTUAL_STAGES if pp * v <= question.shape.layers)


def table(question: Question, only: list[Grid] | None = None) -> Table:
    """Every setting, or those of the grids in `only`. Raises ValueError where the GPUs cannot be shared out at all."""
    all_grids, all_ways = grids(question) if only is None else only, ways(question)
    if not all_grids:
        raise ValueError(
            f"{question.machines.gpus:,} GPUs and global_batch={question.global_batch:,} do not go together: no number of "
            f"data-parallel ranks divides both; take a global_batch that is a multiple of {question.machines.gpus:,}."
        )
    kept = np.array([i for i, name in enumerate(ACTIVATION_CHECKPOINTING) if name in question.activation_checkpointing])
    fitting: dict[tuple, np.ndarray] = {}
    columns: list[np.ndarray] = []
    for index, grid in enumerate(all_grids):
        tp, pp = grid.tp, grid.pp
        key = (grid.dp * grid.cp, tp, pp > 1, grid.cp > 1, grid.ep > 1)
        if key not in fitting:
            room = question.machines.per_node // tp  # data-parallel ranks in a machine, which a copy stays in
            able = [not way_fault(way, grid) and way.shard <= room for way in all_ways]
            fitting[key] = np.flatnonzero(able)
        splits = (0, 1) if question.sequence_parallel and tp > 1 and (question.seq_len // grid.cp) % tp == 0 else (0,)
        sequences = question.global_batch // grid.dp
        sizes = [
            (b, sequences // b, v)
            for b in micro_batch_sizes(sequences)
            for v in virtual_stages(question, pp, sequences // b)
        ]
        columns.append(_product(index, fitting[key], np.array(sizes), kept, np.array(splits)))
    rows = np.concatenate(columns, axis=1)
    grid, way, b, m, v, kept_row, split = rows
    if not len(way):
        reasons = (way_fault(one, all_grids[0]) for one in all_ways)
        raise ValueError(
            next(filter(None, reasons), "hsdp has no room here for several copies of the model: take fsdp.")
        )
    return Table(all_ways, all_grids, way, grid, b, m, v, kept_row, split.astype(bool))


def _product(grid: int, ways: np.ndarray, sizes: np.ndarray, kept: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Columns grid, way, b, m, v, kept, split of every combination."""
    parts = np.indices((len(ways), len(sizes), len(kept), len(splits))).reshape(4, -1)
    b, m, v = sizes[parts[1]].T
    return np.stack([np.full(parts.shape[1], grid), ways[parts[0]], b, m, v, kept[parts[2]], splits[parts[3]]])
