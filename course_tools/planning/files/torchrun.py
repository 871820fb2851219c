"""A script for bash that starts the course's own training program on the plan's ranks, one agent a machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from course_tools.clusters.launchers import RENDEZVOUS_TIMEOUTS
from course_tools.clusters.shell import Shell, option, wrapped
from course_tools.planning.files import deepspeed
from course_tools.planning.files.facts import about, comment, hub_id, layout, model_name
from course_tools.planning.files.programs import not_said, program_of

if TYPE_CHECKING:
    from course_tools.planning import Plan

FILE = "torchrun.sh"
PORT = 29500


def files(plan: Plan, base_model: str | None) -> dict[str, str]:
    """``torchrun.sh``, the same on every machine; options typed after it go on to the training program, and win.

    The program for ZeRO reads DeepSpeed's configuration: it is a second file, and the script finds it beside itself.
    """
    nodes, per_node = layout(plan)
    name = base_model or hub_id(plan) or "tiny"
    module, arguments = program_of(plan, model=name)
    notes = []
    if "model" not in arguments and model_name(plan) != "tiny":
        notes.append(f"{module} trains the course's tiny Llama: the plan's grid and its batch, not its model.")
    if left := not_said(plan, module, arguments):
        notes.append(f"It {' and '.join(left)}, whatever the plan says.")
    started = ["torchrun", f"--nnodes={nodes}", f"--nproc_per_node={per_node}"]
    if nodes == 1:
        how = f"Start: bash {FILE} [--steps 5 ...]"
        started.append("--standalone")
        first = ""
    else:
        how = f"On each of the {nodes} machines: bash {FILE} FIRST_MACHINE:{PORT} [--steps 5 ...]"
        first = f'endpoint="${{1:?give HOST:{PORT} of the first machine, the same on every machine}}"\nshift\n'
        started += [
            "--rdzv_backend=c10d",
            Shell('--rdzv_endpoint="$endpoint"'),
            "--rdzv_id=plan",
            f"--rdzv_conf={RENDEZVOUS_TIMEOUTS}",
        ]
    beside = {}
    if "config" in arguments:
        notes.append(f"It reads {deepspeed.FILE}, which lies beside this script on every machine.")
        beside[deepspeed.FILE] = json.dumps(arguments["config"], indent=2) + "\n"
        arguments["config"] = Shell(f'"$(dirname "$0")/{deepspeed.FILE}"')
    line = wrapped([*started, "-m", module, *options(arguments), Shell('"$@"')])
    text = f"#!/usr/bin/env bash\n{comment([*about(plan), *notes, how])}set -euo pipefail\n{first}exec {line}\n"
    return {FILE: text} | beside


def options(arguments: dict[str, Any]) -> list[str]:
    """Keyword arguments of a ``train`` as words of its command line (`course_lib.training.command_line`)."""
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(option(f"--{flag}", value))
    return words
