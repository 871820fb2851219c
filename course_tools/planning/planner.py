"""`plan`: which way to train a model on given machines is the simplest of those that fit and are about as fast."""

from __future__ import annotations

import time
from typing import Any

from course_lib.memory import Shape
from course_lib.memory.estimate import uncounted
from course_lib.validation import check_counts
from course_tools.planning.answer import Answer, Plan
from course_tools.planning.fit import run_settings
from course_tools.planning.machines import Machines
from course_tools.planning.question import Question, question
from course_tools.planning.refusing import helps, nothing_fits, refusals
from course_tools.planning.search import Search


def plan(
    model: str | Shape | Any,
    cluster: str | Machines,
    *,
    seq_len: int,
    global_batch: int | None = None,
    keep: int = 10,
    **choices: Any,
) -> Answer:
    """The best ways to train that fit, and the first things that do not.

    Best of a method is the simplest of those whose steps are within `search.ALIKE` of the fastest: one process
    before DDP, then ZeRO and FSDP, tensor, context and pipeline parallelism. 8-bit states and offload are for what does
    not fit without.

    Args:
        model: a preset's name, a Shape, a mapping of widths, a transformers configuration.
        cluster: the machines, "2x24GiB", "2x8xh100-80gb", or a `Machines`.
        seq_len: tokens per sequence.
        global_batch: sequences of one optimizer step; None for a number that suits the training and divides.
        keep: plans to return of each method.
        choices: any of the following; what is not given is left open.
        methods: "full", "lora", "qlora": different trainings, each with its own plans. Not given: LoRA and QLoRA, or, where
            `tokens` are, full training.
        strategies, activation_checkpointing, offload, optimizers: what may be chosen, names as of `course_lib.choices`.
        axes: of "pp", "dp", "cp", "tp", those along which there may be more than one rank.
        sequence_parallel: whether norms may be split along the sequence.
        precision: None: bf16-mixed, on a card without bf16 fp16-mixed, on CPU ranks fp32.
        attention: "flash" or "eager". loss: of `course_lib.choices.LOSSES`; the clock takes each for "eager".
        compile: whether blocks run under torch.compile, which no target writes.
        lora_rank: of the adapters.
        tokens: to train on; gives `Plan.days`.
        headroom: share of a card's memory that stays free.
        constants: of the cost model.

    Raises:
        ValueError: an unknown model, card or choice, a number below 1, a batch that no rank count divides.
        NoPlan: nothing fits; it says by how much, and what would.
    """
    asked = question(model, cluster, global_batch=global_batch, seq_len=seq_len, **choices)
    check_counts(keep=keep)
    started = time.perf_counter()
    found = Search(asked, keep)
    if not found.plans:
        raise nothing_fits(found)
    return Answer(
        plans=found.plans,
        refused=refusals(found),
        searched=len(found.table),
        estimated=len(found.checked),
        seconds=time.perf_counter() - started,
        batch_note=asked.batch_note,
        notes=(*_notes(asked, found.plans[0]), *helps(found)),
    )


def _notes(asked: Question, best: Plan) -> tuple[str, ...]:
    """What was assumed, and what a reader would want to change."""
    notes = [asked.machines.note, *uncounted(asked.shape, run_settings(asked, best))]
    if asked.lora_targets == "attention" and {"lora", "qlora"} & set(asked.methods):
        notes.append(
            "Adapters lie beside attention's matrices alone: PEFT would copy the weights of all experts to adapt them. QLoRA "
            "has experts in NF4, too."
        )
    gpus, batch = asked.machines.gpus, asked.global_batch
    if batch % gpus and batch > gpus:
        notes.append(f"{batch:,} sequences do not divide among {gpus:,} GPUs; {-(-batch // gpus) * gpus:,} would.")
    return tuple(filter(None, notes))
