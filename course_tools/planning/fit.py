"""Bytes of one setting, by `course_lib.memory`, and whether the machines hold them."""

from __future__ import annotations

from typing import Any, NamedTuple

from course_lib.memory import Breakdown, estimate
from course_lib.memory.moments import sizes, stage
from course_lib.memory.moments import step as one_step
from course_lib.memory.run_choices import Run, run_of
from course_lib.memory.sharded import BUCKET_ELEMENTS
from course_tools.planning.answer import Settings
from course_tools.planning.question import Question

HOST_STATES = 16  # bytes a trained parameter that is stepped on the host: fp32 weight, gradient, two moments


class Needs(NamedTuple):
    """Of the fullest GPU, and of a node's host (bytes; 0 without offload)."""

    memory: Breakdown
    host: int

    def fits(self, question: Question) -> bool:
        return self.memory.device <= question.machines.card.memory and self.host <= question.machines.host_memory


def needs(question: Question, chosen: Settings) -> Needs:
    """What the fullest GPU and its host need."""
    arguments = estimate_arguments(question, chosen)
    found = estimate(question.shape, **arguments) if chosen.chunks == 1 else _interleaved(question, chosen)
    return Needs(found, host_bytes(question, chosen, found.num_parameters, found.num_trainable))


def estimate_arguments(question: Question, chosen: Settings) -> dict[str, Any]:
    """The call of `estimate`. States are shared by data- and context-parallel ranks together, which hold the same."""
    cpu = question.machines.cpu
    return {
        "method": chosen.method, "precision": question.precision, "strategy": chosen.strategy,
        "ranks": chosen.dp * chosen.cp, "tensor_parallel": chosen.tp, "pipeline_parallel": chosen.pp,
        "context_parallel": chosen.cp, "sequence_parallel": chosen.sequence_parallel,
        "micro_batch": chosen.micro_batch, "seq_len": question.seq_len, "micro_batches": chosen.micro_batches,
        "checkpointing": chosen.checkpointing, "attention": question.attention, "offload": chosen.offload,
        "lora_rank": question.lora_rank, "device": "cpu" if cpu else "cuda", "step": "loop" if cpu else "fused",
    }  # fmt: skip


def run_for(question: Question, method: str, strategy: str, offload: str, checkpointing: str) -> Run:
    """The `Run` of these choices, as `estimate` makes it."""
    cpu = question.machines.cpu
    return run_of(
        method, question.precision, "adamw", strategy, offload, "loop" if cpu else "fused", "cpu" if cpu else "cuda",
        checkpointing, question.attention, question.lora_rank, True, BUCKET_ELEMENTS,
    )  # fmt: skip


def in_flight(pp: int, m: int, v: int, first: bool) -> float:
    """Micro-batches whose activations a stage holds at a time, under 1F1B or its interleaved form.

    The first stage p + (p - 1) / v and the last (v p - p + 1) / v, in units of a whole stage, never more than m; with one
    chunk p and 1. Source: arXiv:2205.05198, section 4.2.3 (factor 1 + (p - 1) / (p v)).
    """
    return min(float(m), pp + (pp - 1) / v if v > 1 else pp) if first else min(float(m), (v * pp - pp + 1) / v)


def _interleaved(question: Question, chosen: Settings) -> Breakdown:
    """`estimate` for a pipeline with chunks: its own two stages, with more micro-batches in flight."""
    s, shape = chosen, question.shape
    run = run_for(question, s.method, s.strategy, s.offload, s.checkpointing)
    size = sizes(shape, s.micro_batch, question.seq_len, s.tp, s.cp, s.sequence_parallel, run.rank)
    layers = -(-shape.layers // s.pp)
    ends = (
        one_step(
            stage(run, shape, s.dp * s.cp, s.tp, layers, first, not first, s.micro_batches > 1), size,
            in_flight(s.pp, s.micro_batches, s.chunks, first),
        )
        for first in (True, False)
    )  # fmt: skip
    return max(ends, key=lambda end: end.peak)


def host_bytes(question: Question, chosen: Settings, parameters: int, trained: int) -> int:
    """Of a node, for what is offloaded from all its GPUs; `parameters`, `trained`: of the whole model."""
    if chosen.offload == "none":
        return 0
    ranks = chosen.dp * chosen.cp * chosen.tp * chosen.pp
    there = HOST_STATES * trained
    if chosen.offload == "all":
        there += {"full": 2.0, "lora": 2.0, "qlora": 0.52}[chosen.method] * parameters
    return int(there / ranks * min(question.machines.per_node, ranks))
