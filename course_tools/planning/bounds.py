"""What a setting needs at the very least, for many at once: it spares `estimate` those that cannot fit anyway.

Two phases of a step, of those `course_lib.memory.phases` knows, with everything left out that is not sure: the
optimizer's step, and the forward pass of the last block under 1F1B. Never above `estimate`: a test holds it to that.
"""

from __future__ import annotations

import numpy as np

from course_lib.choices import ACTIVATION_CHECKPOINTING
from course_lib.memory.breakdown import CUDA_CONTEXT, LEAST_WASTE
from course_lib.memory.parameters import Held, count, held
from course_lib.memory.phases import sizes, stage
from course_lib.memory.settings import RunSettings
from course_tools.planning.fit import run_of
from course_tools.planning.question import Question
from course_tools.planning.table import Table

SURE = 0.999  # roundings of single tensors go both ways


def least_bytes(question: Question, table: Table) -> np.ndarray:
    """Bytes that a card must have at least, as `Breakdown.device` counts them."""
    resting, stepping = _static(question, table)
    pp = table.axis("pp")
    layers = -(-question.shape.layers // pp)
    in_flight = np.minimum(np.where(table.v > 1, pp + (pp - 1) / table.v, pp), table.m)
    block = _block(question, table) * table.b / table.axis("cp")
    # behind a frozen embedding the first block keeps less than the others
    frozen = np.array([way.method != "full" for way in table.ways])[table.way]
    forward = resting + np.maximum(in_flight * (layers - frozen) - 1, 0) * block
    return SURE * np.maximum(forward, stepping) * (1 + LEAST_WASTE) + CUDA_CONTEXT


def sizes_of(h: Held) -> tuple[int, int, int]:
    """Elements of the blocks' matrices, of the whole base model, of LoRA's factors."""
    return count(h.matrices), count(h.all_base()), count(h.factors)


def _static(question: Question, table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Weights and states; the same with what the optimizer's step needs, for each row."""
    shape = question.shape
    resting = np.zeros((len(table.grids), len(table.ways)))
    stepping = np.zeros_like(resting)
    runs = [run_of(question, way) for way in table.ways]
    for index, grid in enumerate(table.grids):
        pp = grid.pp
        here = held(shape, grid.tp, -(-shape.layers // pp), True, pp == 1, question.lora_rank, grid.ep)
        whole = held(shape, grid.tp, -(-shape.layers // pp), True, pp == 1, question.lora_rank)
        for number, (way, run) in enumerate(zip(table.ways, runs, strict=True)):
            full = way.method == "full"
            ranks = grid.dp * grid.cp // way.copies(grid)
            sharded = bool(run.shards)  # then a rank has its part of all experts, whoever computes with them
            matrices, base, factors = sizes_of(whole if sharded else here)
            trained = base if full else factors
            weights = run.at_rest * base + (0 if full else run.factors * factors)
            if way.method == "qlora":
                weights = run.at_rest * (base - matrices) + matrices / 2 + run.factors * factors
            moments = {"adamw8bit": 2, "paged_adamw8bit": 0, "muon": run.state, "sgd": 0}.get(
                way.optimizer, 2 * run.state
            )
            states = (moments + run.master) * trained / (ranks if run.shards else 1)
            gradients = run.gradient * trained * (2 if way.strategy == "ddp" else 1)
            if "weights" in run.shards:
                weights, gradients = weights / ranks, gradients / ranks
            elif run.shards:
                gradients = 0.0
            if way.offload != "none":
                states = gradients = 0.0
            if way.offload == "all":
                weights = 0.0
            resting[index, number] = weights + states
            stepping[index, number] = weights + states + gradients
    return resting[table.grid, table.way], stepping[table.grid, table.way]


def _block(question: Question, table: Table) -> np.ndarray:
    """Bytes that autograd keeps of one block, of one sequence that nobody shares, for each row."""
    shape = question.shape
    degrees = sorted({grid.tp for grid in table.grids})
    values = np.zeros((len(degrees), len(table.ways), len(ACTIVATION_CHECKPOINTING), 2))
    known: dict[tuple, list[float]] = {}
    for i, tp in enumerate(degrees):
        for split in (False, True) if tp > 1 else (False,):
            for j, way in enumerate(table.ways):
                run = run_of(question, way)
                key = (i, split, run.numerics)
                if key not in known:
                    at = RunSettings(tensor_parallel=tp, sequence_parallel=split, seq_len=question.seq_len)
                    one, two = (sizes(shape, at._replace(micro_batch_size=b), run.rank) for b in (1, 2))
                    rows = stage(run, shape, 1, tp, 1, False, False, 0).forms.matrix[[0, 5, 4]]
                    known[key] = (rows @ (two.elements - one.elements)).tolist()
                values[i, j, :, int(split)] = known[key]
    which = np.array([degrees.index(grid.tp) for grid in table.grids])[table.grid]
    return values[which, table.way, table.kept, table.split.astype(int)]
