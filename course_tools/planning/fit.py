"""Bytes of one setting, by `course_lib.memory`, and whether the machines hold them."""

from __future__ import annotations

from typing import NamedTuple

from course_lib.memory import Breakdown
from course_lib.memory.estimate import breakdown_of
from course_lib.memory.settings import Run, RunSettings
from course_tools.planning.answer import Settings
from course_tools.planning.question import Question

HOST_STATES = 16  # bytes per trained parameter that is stepped on the host: fp32 weight, gradient, two moments
HOST_WEIGHTS = {"full": 2.0, "lora": 2.0, "qlora": 0.52}  # bytes per parameter of the model, where those lie there too


class Needs(NamedTuple):
    """Of the fullest GPU, and of a node's host (bytes; 0 without offload)."""

    memory: Breakdown
    host: int

    def fits(self, question: Question) -> bool:
        return self.memory.device <= question.machines.card.memory and self.host <= question.machines.host_memory


def needs(question: Question, chosen: Settings) -> Needs:
    """What the fullest GPU and its host need."""
    memory = breakdown_of(question.shape, run_settings(question, chosen))
    return Needs(memory, host_bytes(question, chosen, memory.num_parameters, memory.num_trainable))


def run_settings(question: Question, chosen: Settings) -> RunSettings:
    """For `estimate`. States are shared by data- and context-parallel ranks together, which hold the same."""
    return RunSettings(
        method=chosen.method,
        precision=question.precision,
        strategy=chosen.strategy,
        offload=chosen.offload,
        step="loop" if question.machines.cpu else "fused",
        device="cpu" if question.machines.cpu else "cuda",
        activation_checkpointing=chosen.activation_checkpointing,
        attention=question.attention,
        lora_rank=question.lora_rank,
        ranks=chosen.dp * chosen.cp,
        tensor_parallel=chosen.tp,
        pipeline_parallel=chosen.pp,
        context_parallel=chosen.cp,
        sequence_parallel=chosen.sequence_parallel,
        micro_batch_size=chosen.micro_batch_size,
        seq_len=question.seq_len,
        num_microbatches=chosen.num_microbatches,
        virtual_stages=chosen.virtual_stages,
    )


def run_of(question: Question, method: str, strategy: str, offload: str) -> Run:
    """What follows from these choices, whatever the grid and the batch."""
    return run_settings(question, Settings(strategy, method, offload=offload)).run


def host_bytes(question: Question, chosen: Settings, parameters: int, trained: int) -> int:
    """Of a node, for what is offloaded from all its GPUs; `parameters`, `trained`: of the whole model."""
    if chosen.offload == "none":
        return 0
    ranks = chosen.grid.size
    total = HOST_STATES * trained
    if chosen.offload == "all":
        total += HOST_WEIGHTS[chosen.method] * parameters
    return int(total / ranks * min(question.machines.per_node, ranks))
