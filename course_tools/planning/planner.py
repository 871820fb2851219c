"""`plan`: which way to train a model on given machines is the fastest of those that fit."""

from __future__ import annotations

from typing import Any

from course_lib.memory import Shape
from course_lib.memory.estimate import uncounted
from course_lib.validation import check_counts
from course_tools.planning.answer import Answer
from course_tools.planning.fit import run_settings
from course_tools.planning.machines import Machines
from course_tools.planning.question import question
from course_tools.planning.refusing import nothing_fits, refusals
from course_tools.planning.search import Search


def plan(
    model: str | Shape | Any,
    cluster: str | Machines,
    *,
    global_batch: int,
    seq_len: int,
    keep: int = 10,
    prune: bool = True,
    **choices: Any,
) -> Answer:
    """The fastest ways to train that fit, and the first things that do not.

    Args:
        model: a preset's name, a Shape, a mapping of widths, a transformers configuration.
        cluster: the machines, "2x24GiB", "2x8xh100-80gb", or a `Machines`.
        global_batch: sequences of one optimizer step. seq_len: tokens per sequence.
        keep: plans to return. Each method that fits at all is among them.
        prune: False holds every setting against `estimate`; for tests.
        choices: any of the following; what is not given is left open.
        methods, strategies, activation_checkpointing, offload: what may be chosen, names as of `course_lib.choices`.
            Methods train different things, and LoRA's steps are shorter than full training's: name the one you want.
        axes: of "pp", "dp", "cp", "tp", those along which there may be more than one rank.
        sequence_parallel, interleave: whether norms may be split along the sequence, and ranks hold several virtual
            stages.
        precision: None: bf16-mixed, on a card without bf16 fp16-mixed, on CPU ranks fp32.
        attention: "flash" or "eager". lora_rank: of the adapters.
        tokens: to train on; gives `Plan.days`.
        constants: of the cost model.

    Raises:
        ValueError: an unknown model, card or choice, a number below 1, a batch that no rank count divides.
        NoPlan: nothing fits; it says by how much, and what would.
    """
    asked = question(model, cluster, global_batch=global_batch, seq_len=seq_len, **choices)
    check_counts(keep=keep)
    found = Search(asked, keep, prune)
    if not found.plans:
        raise nothing_fits(found)
    return Answer(
        plans=found.plans,
        refused=refusals(found),
        grids=found.grids,
        searched=len(found.table),
        estimated=found.estimated,
        seconds=found.seconds(),
        note=" ".join(
            filter(None, [asked.machines.note, *uncounted(asked.shape, run_settings(asked, found.plans[0]))])
        ),
    )
