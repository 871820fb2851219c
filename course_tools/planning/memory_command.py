"""``beyond memory``: one estimate as a table or as JSON; its options are those of `estimate`."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Sequence
from typing import Any

from course_lib.choices import CHOICES
from course_lib.memory import Breakdown, Host, Shape, card, estimate, host_memory
from course_lib.memory.breakdown import HALF_WITHIN, HELD_OUT, NINE_OF_TEN_WITHIN
from course_lib.memory.cards import read_memory
from course_lib.memory.estimate import uncounted
from course_lib.memory.fitting import largest_micro_batch, longest_sequence
from course_lib.memory.presets import written_shape
from course_lib.memory.settings import RunSettings
from course_lib.units import GIB
from course_lib.validation import check_counts
from course_tools.command_line import ArgumentParser, print_json, reports_errors

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")


def options() -> dict[str, inspect.Parameter]:
    """The settings of `estimate` by name, the model left out."""
    return {name: one for name, one in inspect.signature(estimate).parameters.items() if one.kind is one.KEYWORD_ONLY}


def explained() -> dict[str, str]:
    """What the docstring of `estimate` says of each setting."""
    entry = r"^        (\w+(?:, \w+)*): (.*(?:\n {12}.*|\n(?=\n {12}))*)"
    found = re.findall(entry, estimate.__doc__ or "", flags=re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}


def parser() -> ArgumentParser:
    """An option for each setting of `estimate`; what a value must be is `estimate`'s business."""
    made = ArgumentParser(prog="beyond memory", description="GPU memory of a training step, before it runs.")
    made.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="llama-3.1-8b, a name on the hub, a folder with config.json, or widths: layers=2,hidden=64,heads=4,vocab=256",
    )
    says = explained()
    for name, setting in options().items():
        flag, default = "--" + name.replace("_", "-"), setting.default
        said = says.get(name, "").replace("%", "%%")
        if name == "card":
            made.add_argument(flag, metavar="CARD", help="a100-80gb, t4, ..., or 24GiB: say whether and what fits it")
        elif isinstance(default, bool):
            made.add_argument(
                flag,
                action=argparse.BooleanOptionalAction,
                default=default,
                help=f"{said} Default {'on' if default else 'off'}.",
            )
        elif isinstance(default, int):
            made.add_argument(flag, type=int, default=default, metavar="N", help=f"{said} Default {default:,}.")
        else:
            choices = ", ".join(CHOICES[name])
            made.add_argument(flag, default=default, metavar="X", help=f"{choices}; default {default}. {said}")
    made.add_argument("--per-node", type=int, default=8, metavar="N", help="GPUs of a machine, at most; default 8")
    made.add_argument("--host-memory", metavar="SIZE", help="64GiB: a machine's own memory; say whether that does")
    made.add_argument("--json", action="store_true", help="bytes, as JSON")
    return made


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print one estimate. Returns 0, or 2 after one sentence on stderr when the input means nothing."""
    given = vars(parser().parse_args(argv))
    as_json, model = given.pop("json"), written_shape(given.pop("model"))
    per_node, has = given.pop("per_node"), given.pop("host_memory")
    check_counts(per_node=per_node)
    has = None if has is None else read_memory(has)
    need = estimate(model, **given)
    settings = RunSettings(**{name: value for name, value in given.items() if name != "card"})
    host = host_memory(model, settings, per_node)
    room = None if given["card"] is None else _room(model, need, given)
    missing = uncounted(model, settings)
    if room and room["fits"] and missing:
        room["fits"] = None  # nobody knows
    if as_json:
        hosts = {"loading": host.loading, "training": host.training, "memory": has}
        answer = {"model": model.name, "active_parameters": model.active_parameters, "settings": given} | need.as_dict()
        print_json(answer | {"card": room, "host": hosts, "uncounted": missing})
    else:
        print("\n".join([*table(model, need, given, room), *_host_lines(host, has), *_missing_lines(missing)]))
    return 0


def _room(model: Shape, need: Breakdown, given: dict[str, Any]) -> dict[str, Any]:
    """What the card holds, with every other setting as given."""
    found = card(given["card"])
    training = given | {"eval_micro_batch_size": 0}  # how much evaluates at a time is another question
    batch = {name: value for name, value in training.items() if name not in ("card", "micro_batch_size")}
    length = {name: value for name, value in given.items() if name not in ("card", "seq_len")}
    return {
        "name": found.name,
        "memory": found.memory,
        "fits": need.fits(found.memory),
        "largest_micro_batch": largest_micro_batch(model, found, **batch),
        "longest_sequence": longest_sequence(model, found, **length),
    }


def _host_lines(host: Host, has: int | None) -> list[str]:
    lines = ["", "memory of a machine, its processes and the data apart"]
    lines += [_line("while the model is loaded", host.loading), _line("offloaded", host.training)]
    if has is not None:
        fits = "fits" if host.peak <= has else f"does not fit: {(host.peak - has) / GIB:.2f} GiB too much"
        lines.append(f"{has / GIB:.1f} GiB: {fits}")
    return lines


def _missing_lines(missing: tuple[str, ...]) -> list[str]:
    return ["", "not counted", *(f"  {sentence}" for sentence in missing)] if missing else []


def table(model: Shape, need: Breakdown, given: dict[str, Any], room: dict[str, Any] | None) -> list[str]:
    """The estimate for a reader: what lies where, when it is worst, and whether it fits."""
    usual = {name: one.default for name, one in options().items()}
    chosen = [f"{name}={value}" for name, value in given.items() if value != usual[name] and name != "card"]
    active = f" ({model.active_parameters:,} for each token)" if model.experts else ""
    here = " on this GPU's part of it" if need.num_trainable < need.num_parameters and given["method"] == "full" else ""
    wide_experts = model.experts and given["method"] == "qlora" and not given["quantize_experts"]
    wide_experts = wide_experts and given["transformers"] == 5
    lines = [
        f"{model.name}: {need.num_parameters:,} parameters{active}, {need.num_trainable:,} of them trained{here}",
        f"settings: {', '.join(chosen) or 'all as usual'}",
        *(["bitsandbytes leaves the experts in 16 bits: see --quantize-experts"] if wide_experts else []),
        "",
        f"{'':30}{'bytes':>20}{'GiB':>10}",
        *(_line(name, getattr(need, name)) for name in CATEGORIES),
        "",
        "phases of a step",
        *(_line(name, value, "  <- peak" if name == need.peak_phase else "") for name, value in need.phases.items()),
        "",
        *(_line(f"reserved, {name}", getattr(need.reserved, name)) for name in ("low", "expected", "high")),
        _line("CUDA context", need.cuda_context),
        _line("a card must have", need.device),
    ]
    if room is not None:
        verdict = "fits" if room["fits"] else "what is counted fits, and not all is counted"
        if room["fits"] and need.device * (1 + HALF_WITHIN) > room["memory"]:
            verdict += ", by less than the estimate is sure of"
        if room["fits"] is False:
            verdict = f"does not fit: {(need.device - room['memory']) / GIB:.2f} GiB too much"
        lines += [
            "",
            f"{room['name']} ({room['memory'] / GIB:.1f} GiB): {verdict}",
            *(
                [f"  reserved on it, expected: {need.reserved_on(room['memory']) / GIB:.2f} GiB"]
                if room["fits"]
                else []
            ),
            f"  of {HELD_OUT} published peaks that were held out, half were predicted within {HALF_WITHIN:.0%}, nine of ten "
            f"within {NINE_OF_TEN_WITHIN:.0%}",
            f"  largest micro-batch at this length: {room['largest_micro_batch']:,}",
            f"  longest sequence at this micro-batch: {room['longest_sequence']:,} tokens",
        ]
    return lines


def _line(name: str, count: int, mark: str = "") -> str:
    return f"{name:30}{count:>20,}{count / GIB:>10.2f}{mark}"
