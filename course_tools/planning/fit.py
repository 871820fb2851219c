"""Bytes of one setting, by `course_lib.memory`, and whether the machines hold them."""

from __future__ import annotations

from typing import NamedTuple

from course_lib.memory import Breakdown, host_memory
from course_lib.memory.estimate import breakdown_of
from course_lib.memory.settings import RunSettings
from course_tools.planning.answer import Settings
from course_tools.planning.question import Question


class Needs(NamedTuple):
    """Of the fullest GPU, and of a node's host, in bytes."""

    memory: Breakdown
    host: int

    def fits(self, question: Question) -> bool:
        return self.memory.device <= question.room and self.host <= question.machines.host_memory


def needs(question: Question, chosen: Settings) -> Needs:
    """What the fullest GPU and its host need."""
    settings = run_settings(question, chosen)
    host = host_memory(question.shape, settings, question.machines.per_node)
    return Needs(breakdown_of(question.shape, settings), host.peak)


def run_settings(question: Question, chosen: Settings) -> RunSettings:
    """For `estimate`."""
    return RunSettings(
        method=chosen.method,
        precision=question.precision,
        strategy=chosen.strategy,
        offload=chosen.offload,
        optimizer=chosen.optimizer,
        step="loop" if question.machines.cpu else "fused",
        device="cpu" if question.machines.cpu else "cuda",
        activation_checkpointing=chosen.activation_checkpointing,
        attention=question.attention,
        loss=question.loss,
        compile=question.compile,
        lora_rank=question.lora_rank,
        lora_targets=question.lora_targets,
        quantize_experts=question.lora_targets == "attention" and chosen.method == "qlora",
        ranks=chosen.dp // chosen.copies,  # a machine's copy is all that its GPUs know of
        tensor_parallel=chosen.tp,
        pipeline_parallel=chosen.pp,
        context_parallel=chosen.cp,
        expert_parallel=chosen.ep,
        sequence_parallel=chosen.sequence_parallel,
        micro_batch_size=chosen.micro_batch_size,
        seq_len=question.seq_len,
        num_microbatches=chosen.num_microbatches,
        reduce_each_micro_batch=chosen.strategy == "fsdp" and chosen.pp == 1,
        virtual_stages=chosen.virtual_stages,
    )
