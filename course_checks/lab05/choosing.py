"""Lab 5, exercise 6: which stage, and what to offload, on a given machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.harness import NotYet, named_mistake, returned
from course_checks.lab05.common import NO_SLIP, Slips, gib, lab
from course_checks.lab05.machines import MACHINES, MORE, SETTINGS, Machine, Setting, gpu_bytes, host_bytes
from course_lib.memory import card, shape_of

SENTENCES = {
    "highest": "you take the most sharded setting that fits; every stage above what the memory asks for is paid on the links",
    "ladder": "you offload only when no stage fits without. Count the seconds: stage 3 gathers the weights twice for every "
    "micro-batch, and ZeRO-2 with its optimizer on the host may be cheaper",
    "once": "stages 2 and 3 communicate for every micro-batch, stage 1 once a step: micro_batches is missing in your count",
    "stage 3 twice": "stage 3 moves three times the weights for every micro-batch: gathered for forward, gathered again for "
    "backward, gradients reduce-scattered",
    "host free": "you take the first of SETTINGS that fits, as if the way to the host and back took no time, or that of a link "
    "between GPUs: gradients go down for every micro-batch, weights come up, and all of it over host_link",
    "host whole": "each rank moves its own slice to the host: one part in `gpus`",
    "no host memory": "the host's memory is not looked at: offloading needs 16 bytes a parameter there, 18 with the weights",
    "host a rank": "the ranks of a host share out what is offloaded: 16 or 18 bytes a parameter in all, not each",
    "host a slice": "all slices lie in the one host's memory: 16 or 18 bytes a parameter in all, not over `gpus`",
}


def link_seconds(machine: Machine, setting: Setting, slips: Slips = NO_SLIP) -> float:
    """Seconds that a rank's links are busy in one optimizer step, with these slips made."""
    (stage, offload), gpus = setting, machine.gpus
    times = 1 if "once" in slips else machine.micro_batches
    piece = 2 * shape_of(machine.model).parameters / gpus  # bytes of a rank's slice of weights, or of gradients
    passes = {1: 2, 2: times + 1, 3: (2 if "stage 3 twice" in slips else 3) * times}[stage]
    between = (gpus - 1) * piece * passes
    moved = 0.0
    if offload != "none" and "host free" not in slips:
        up = 2 * times if offload == "all" else 1
        moved = (gpus if "host whole" in slips else 1) * piece * (times + up)
    return between / machine.gpu_link + moved / machine.host_link


def fits(machine: Machine, setting: Setting, slips: Slips = NO_SLIP) -> bool:
    host = host_bytes(machine, setting)
    if "host a rank" in slips:
        host *= machine.gpus
    if "host a slice" in slips:
        host //= machine.gpus
    on_gpu = gpu_bytes(machine, setting) <= card(machine.card).memory
    return on_gpu and ("no host memory" in slips or host <= machine.host_memory)


def best(machine: Machine, slips: Slips = NO_SLIP) -> Setting | None:
    """The setting with the fewest seconds among those that fit, the first of SETTINGS where two are equal."""
    fitting = [setting for setting in SETTINGS if fits(machine, setting, slips)]
    if "highest" in slips:
        return fitting[-1] if fitting else None
    if "ladder" in slips:
        return min(fitting, key=lambda setting: setting[1] != "none", default=None)
    return min(fitting, key=lambda setting: round(link_seconds(machine, setting, slips), 9), default=None)


@lab.exercise("Stage and offload for a machine", importance=5, difficulty=4, minutes=30)
def choose_stage(choose: Callable[..., Any]) -> str:
    """Fits on the GPUs and in the host, and keeps the links busy for the fewest seconds; refuses what cannot fit."""
    asked = [*MACHINES, *MORE]
    answers = [_answer(choose, machine) for machine in asked]
    wanted = [best(machine) for machine in asked]
    wrong = [i for i, (mine, right) in enumerate(zip(answers, wanted, strict=True)) if mine != right]
    if wrong:
        i = wrong[0]
        why = named_mistake(answers, best, asked, SENTENCES)
        raise NotYet(f"{asked[i]}: {_what(asked[i], answers[i], wanted[i])}{f': {why}' if why else ''}")
    seen = []
    for machine, setting in zip(MACHINES, wanted, strict=False):
        assert setting is not None, "something fits each machine that the notebook shows"
        where = f"{machine.model} on {machine.gpus} x {machine.card}"
        seen.append(f"{where}: {_named(setting)}, {link_seconds(machine, setting):.2f} s")
    return f"{'; '.join(seen)}; and {len(MORE)} machines more, one of which nothing fits"


def _answer(choose: Callable[..., Any], machine: Machine) -> Setting | None:
    """None: refused. Raises NotYet for what is no setting."""
    try:
        answer = choose(machine)
    except ValueError:
        return None
    answer = returned(answer, (tuple, list), "the choice")
    if tuple(answer) not in SETTINGS:
        raise NotYet(f"{machine}: {answer!r} is none of SETTINGS: give (stage, offload), such as {SETTINGS[2]}")
    return tuple(answer)


def _what(machine: Machine, mine: Setting | None, right: Setting | None) -> str:
    if mine is None and right is not None:
        return f"you refuse, and {_named(right)} fits: {_needs(machine, right)}"
    assert mine is not None
    if gpu_bytes(machine, mine) > card(machine.card).memory:
        return f"{_named(mine)} does not fit on the GPUs: {_needs(machine, mine)}{'' if right else '; nothing fits: raise ValueError'}"
    if host_bytes(machine, mine) > machine.host_memory:
        told = f"{_named(mine)} does not fit into the host: {_needs(machine, mine)}"
        return told if right else f"{told}; nothing fits: raise ValueError"
    assert right is not None, "it fits, so something does"
    costs, least = link_seconds(machine, mine), link_seconds(machine, right)
    if abs(costs - least) < 1e-9:
        return f"{_named(mine)} and {_named(right)} take the same time on the links: then the lower stage"
    return f"{_named(mine)} fits, and takes {costs:.2f} s on the links a step; {_named(right)} fits, too, and takes {least:.2f} s"


def _named(setting: Setting) -> str:
    what = {
        "none": "",
        "optimizer": " with the optimizer on the host",
        "all": " with weights and optimizer on the host",
    }
    return f"stage {setting[0]}{what[setting[1]]}"


def _needs(machine: Machine, setting: Setting) -> str:
    host = host_bytes(machine, setting)
    there = f", {gib(host)} of the host's {gib(machine.host_memory)}" if host else ""
    return f"{gib(gpu_bytes(machine, setting))} of a card's {gib(card(machine.card).memory)}{there}"
