"""``beyond plan --model llama-3.1-8b --gpus 2x24GiB``: how to train it there, and the files that do."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from course_lib.choices import LOSSES, METHODS, OFFLOADS, OPTIMIZERS, PRECISIONS
from course_lib.collectives.links import LINKS
from course_lib.memory import CARDS
from course_lib.memory.breakdown import NINE_OF_TEN_WITHIN as PEAKS_WITHIN
from course_lib.memory.cards import read_memory
from course_lib.memory.presets import written_shape
from course_lib.units import GIB
from course_lib.validation import pick
from course_tools.command_line import BAD_INPUT, SUCCESS, ArgumentParser, print_json, reports_errors
from course_tools.planning import NINE_OF_TEN_WITHIN, Answer, NoPlan, Plan, Settings, plan
from course_tools.planning.answer import words
from course_tools.planning.files import TARGETS, deepspeed, targets_of, why_not, write
from course_tools.planning.files.facts import seconds
from course_tools.planning.machines import Machines, machines
from course_tools.planning.question import HEADROOM, SHARING
from course_tools.planning.search import ALIKE

AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)([kmbt]?)", re.IGNORECASE)
THOUSANDS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
HEADER = ("#", "strategy", "grid", "micro x accumulated", "besides", "GiB", "host GiB", "a step", "MFU", "in all")
BOLD, DIM = "1", "2"
NUMBERS = ("#", "GiB", "host GiB", "a step", "MFU", "in all")  # set to the right


def parser() -> ArgumentParser:
    """The options of the command."""
    made = ArgumentParser(
        prog="beyond plan",
        description="Which way to train a model on given machines: ranked, with what limits each, and as files that run.",
    )
    add = made.add_argument
    add(
        "--model",
        required=True,
        metavar="NAME",
        help="llama-3.1-8b, a name on the hub, a folder with config.json, or widths: layers=2,hidden=64,heads=4,vocab=256",
    )
    add(
        "--gpus",
        required=True,
        metavar="N x CARD",
        help=f"2x24GiB, 8xa100-80gb, 2x8xh100-80gb (2 machines of 8), 2xcpu; cards: {', '.join(CARDS)}",
    )
    add("--host-memory", metavar="SIZE", help="a machine's own memory, 64GiB; default what such machines come with")
    add(
        "--inside",
        metavar="LINK",
        help=f"between the cards of a machine: {', '.join(LINKS)}; default as such machines have",
    )
    add(
        "--between",
        metavar="LINK",
        help="of a machine to the others, one for all its cards; 8xroce-400 are eight of them",
    )
    add(
        "--global-batch",
        type=int,
        metavar="N",
        help="sequences in an optimizer step; default one that suits the training",
    )
    add("--seq-len", type=int, default=2048, metavar="N", help="tokens a sequence; default 2,048")
    add("--tokens", metavar="N", help="of the whole training, such as 300M or 15e12: the plans then say days")
    add("--method", action="append", metavar="M", help=_several(METHODS, "lora and qlora, with --tokens full"))
    add("--strategy", action="append", metavar="S", help=_several(SHARING, "all"))
    add("--optimizer", action="append", metavar="O", help=_several(OPTIMIZERS, "adamw, with 8-bit states as well"))
    add("--offload", action="append", metavar="X", help=_several(OFFLOADS, "each, after what fits without"))
    add("--loss", metavar="L", help=f"{', '.join(LOSSES)}; default eager")
    add("--precision", metavar="P", help=f"{', '.join(PRECISIONS)}; default the best of the card")
    add("--top", type=int, default=4, metavar="N", help="plans to show of each method; default 4")
    add("--write", metavar="TARGET", help=f"the files of the best plan that TARGET can run: {', '.join(TARGETS)}")
    add("--out", default="plan", metavar="DIR", help="folder for them; default plan")
    add(
        "--base-model",
        metavar="MODEL",
        help="folder or name on the hub to load the weights from, where --model names none",
    )
    add("--json", action="store_true", help="everything as JSON, sizes in bytes")
    return made


def _several(names: Iterable[str], default: str) -> str:
    return f"{', '.join(names)}; may be repeated; default {default}"


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print ranked plans. Returns 0; 2 after one sentence on stderr if nothing fits or the input means nothing."""
    given = parser().parse_args(argv)
    if given.write is not None:
        pick("--write", given.write, TARGETS)
    try:
        host = None if given.host_memory is None else read_memory(given.host_memory)
        on = machines(given.gpus, inner=given.inside, host_memory=host, **_between(given.between))
        given.base_model = given.base_model or (
            given.model if "/" in given.model or os.path.exists(given.model) else None
        )
        answer = plan(written_shape(given.model), on, **_question(given))
        written = _written(answer, given) if given.write else []
    except NoPlan as nothing:
        print_json(_nothing(nothing)) if given.json else print(nothing, file=sys.stderr)
        return BAD_INPUT
    if given.json:
        print_json(as_dict(answer, given.base_model) | {"written": written})
    else:
        print("\n".join([table(answer), *([""] + written if written else _offer(answer, given))]))
    return SUCCESS


def _question(given: argparse.Namespace) -> dict[str, Any]:
    for flag, known in (("method", METHODS), ("strategy", SHARING), ("optimizer", OPTIMIZERS), ("offload", OFFLOADS)):
        for value in getattr(given, flag) or ():
            pick(f"--{flag}", value, list(known))
    if given.top < 1:
        raise ValueError(f"--top {given.top}: give a whole number of at least 1.")
    return {
        "global_batch": given.global_batch,
        "seq_len": given.seq_len,
        "tokens": _amount(given.tokens),
        "methods": given.method and tuple(dict.fromkeys(given.method)),
        "strategies": given.strategy,
        "optimizers": given.optimizer,
        "offload": given.offload,
        "loss": given.loss,
        "precision": given.precision,
        "keep": given.top,
    }


def _between(text: str | None) -> dict[str, Any]:
    """roce-400, 8xroce-400."""
    if text is None:
        return {}
    number, name = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.*)", text.strip()).groups()
    return {"outer": name, "outer_links": int(number or 1)}


def _amount(text: str | None) -> float | None:
    """300M, 1.4T, 15e12."""
    if text is None:
        return None
    found = AMOUNT.fullmatch(text.replace(",", "").strip())
    if not found or not float(found[1]):
        raise ValueError(f"--tokens {text}: give a number of tokens, such as 300M, 1.4T or 15e12.")
    return float(found[1]) * THOUSANDS[found[2].lower()]


def table(answer: Answer) -> str:
    """The plans for a reader: what each is, what it needs and takes, and the first that did not fit."""
    best = answer.best
    room = best.machines.card.memory / GIB
    rows = [_row(number, one) for number, one in enumerate(answer.plans, 1)]
    shown = [
        i
        for i, name in enumerate(HEADER)
        if name not in ("in all", "besides", "host GiB") or any(row[i] for row in rows)
    ]
    widths = {i: max(len(line[i]) for line in (HEADER, *rows)) for i in shown}
    lines = [
        f"{best.model.name}, {best.model.parameters / 1e9:,.3g} billion parameters, on {best.machines} "
        f"({room:,.1f} GiB each; a machine's own memory {best.machines.host_memory / GIB:,.0f} GiB"
        f"{', assumed' if best.machines.host_assumed else ''}{_links(best.machines)})",
        f"a step: {best.global_batch:,} sequences of {best.seq_len:,} tokens, {best.precision}"
        + (f" ({answer.batch_note})" if answer.batch_note else ""),
        *answer.notes,
    ]
    numbered = zip(answer.plans, rows, strict=True)
    for method, group in itertools.groupby(numbered, key=lambda pair: pair[0].method):
        lines += ["", METHODS[method], _line(HEADER, shown, widths)]
        for one, row in group:
            lines += [_styled(_line(row, shown, widths), BOLD)]
            lines += [_styled(f"{'':{widths[0]}}  limited by {one.limit}", DIM)]
    lines += [
        "",
        f"Steps within {ALIKE:.0%} of the fastest are alike, and the simplest comes first: nine of ten published ones are "
        f"predicted within {NINE_OF_TEN_WITHIN:.0%}, of published peaks of memory nine of ten within {PEAKS_WITHIN:.0%}. "
        f"{HEADROOM:.0%} of a card stays free; where a plan fills the rest, try one step first.",
    ]
    if answer.refused:
        lines += ["", "did not fit", *(f"  {one.sentence}" for one in answer.refused)]
    return "\n".join(
        [*lines, "", f"{answer.searched:,} configurations compared in {seconds(answer.seconds)}; none was run."]
    )


def _links(on: Machines) -> str:
    """What connects the cards, where there are several."""
    inside = f"; {on.inner.name} inside" if on.per_node > 1 else ""
    return inside + (f"; {on.outer_links} x {on.outer.name} to the others" if on.nodes > 1 else "")


def _row(number: int, one: Plan) -> tuple[str, ...]:
    besides = [*one.besides, *([f"{one.copies} copies"] if one.copies > 1 else [])]
    return (
        str(number),
        one.sharing,
        words(one.grid),
        f"{one.micro_batch_size} x {one.num_microbatches}",
        ", ".join(besides),
        f"{one.memory_bytes / GIB:,.1f}",
        f"{one.host / GIB:,.1f}" if one.host else "",
        seconds(one.step_seconds),
        f"{one.mfu:.1%}",
        "" if one.days is None else _long(one.days),
    )


def _long(days: float) -> str:
    """Hours below two days, years above two of those."""
    if days < 2:
        return f"{24 * days:,.3g} h"
    return f"{days:,.3g} days" if days < 2 * 365 else f"{days / 365:,.3g} years"


def _styled(line: str, style: str) -> str:
    """On a terminal, bold or dim; plain where somebody reads it from a file."""
    return f"\033[{style}m{line}\033[0m" if sys.stdout.isatty() else line


def _line(row: Sequence[str], shown: Sequence[int], widths: dict[int, int]) -> str:
    cells = [row[i].rjust(widths[i]) if HEADER[i] in NUMBERS else row[i].ljust(widths[i]) for i in shown]
    return "  ".join(cells).rstrip()


def _offer(answer: Answer, given: argparse.Namespace) -> list[str]:
    """What could be written next: the best plan that some target can run, and why none runs plan 1 where none does."""
    lines: list[str] = []
    for number, one in enumerate(answer.plans, 1):
        can = sorted(targets_of(one, base_model=given.base_model), key=lambda target: target != "axolotl")
        if can:  # Axolotl first: it starts a training as it is
            more = f" (or {', '.join(can[1:])})" if can[1:] else ""
            return [*lines, f"Write plan {number}: the same with --write {can[0]} --out DIR{more}"]
        if number == 1:  # and it reaches furthest: what it cannot do is what stands in the way
            lines = [
                f"No target writes plan 1. {why_not(one, 'axolotl', base_model=given.base_model)}",
                *_megatron(one),
            ]
    return lines


def _megatron(best: Plan) -> list[str]:
    """The plan's grid and batch as words for Megatron-LM's pretrain_gpt.py, where it can run the plan."""
    if best.method != "full" or best.strategy not in ("single", "ddp", "zero1") or best.offload != "none":
        return []
    words = {
        "tensor-model-parallel-size": best.tp,
        "pipeline-model-parallel-size": best.pp,
        "context-parallel-size": best.cp,
        "num-virtual-stages-per-pipeline-rank": best.virtual_stages,
    }
    line = [f"--{name} {value}" for name, value in words.items() if value > 1]
    line += ["--sequence-parallel"] if best.sequence_parallel else []
    line += ["--use-distributed-optimizer"] if best.strategy == "zero1" else []
    line += [f"--micro-batch-size {best.micro_batch_size} --global-batch-size {best.global_batch}"]
    return [f"Megatron-LM takes its grid and batch as {' '.join(line)}"]


def _written(answer: Answer, given: argparse.Namespace) -> list[str]:
    """Write the best plan that the target can run; a line for each that it cannot, and for what was written."""
    lines = []
    for number, one in enumerate(answer.plans, 1):
        reason = why_not(one, given.write, base_model=given.base_model)
        if not reason:
            paths = write(one, given.write, given.out, base_model=given.base_model)
            lines += [f"wrote {path}: plan {number}, {one}" for path in paths]
            return lines + (deepspeed.notes(one) if given.write == "deepspeed" else [])
        lines.append(f"plan {number} is not for {given.write}: {reason}")
    raise ValueError(
        f"None of these plans is for {given.write}: {lines[0].split(': ', 1)[1]} --top N looks at more of them."
    )


def as_dict(answer: Answer, base_model: str | None) -> dict[str, Any]:
    """For JSON: bytes, seconds, shares."""
    best = answer.best
    return {
        "model": best.model.name,
        "machines": str(best.machines),
        "card_bytes": best.machines.card.memory,
        "global_batch": best.global_batch,
        "seq_len": best.seq_len,
        "tokens": best.tokens,
        "plans": [
            _settings(one)
            | {
                "memory_bytes": one.memory_bytes,
                "memory": one.memory.as_dict(),
                "host_bytes": one.host,
                "step_seconds": one.step_seconds,
                "parts": one.parts,
                "mfu": one.mfu,
                "days": one.days,
                "limit": one.limit,
                "targets": targets_of(one, base_model=base_model),
            }
            for one in answer.plans
        ],
        "refused": [
            _settings(one.settings) | {"needs": one.needs, "has": one.has, "where": one.where, "sentence": one.sentence}
            for one in answer.refused
        ],
        "searched": answer.searched,
        "seconds": answer.seconds,
        "batch_note": answer.batch_note,
        "notes": answer.notes,
    }


def _settings(one: Settings) -> dict[str, Any]:
    return {field.name: getattr(one, field.name) for field in fields(Settings)}


def _nothing(nothing: NoPlan) -> dict[str, Any]:
    return {
        "plans": [],
        "sentence": str(nothing),
        "missing_bytes": nothing.nearest.missing,
        "would": list(nothing.would),
    }
