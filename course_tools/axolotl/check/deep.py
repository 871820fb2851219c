"""Axolotl's own validators, in a process of their own: its import takes ten seconds and PyTorch with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

from course_tools.axolotl.check.findings import Finding, dotted
from course_tools.axolotl.check.settings import Settings

TIMEOUT = 180.0  # seconds: on a busy machine the import alone takes a minute
QUIET = {"AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
ANSWER = "AXOLOTL SAYS "
ASSUMED = (8, 0)  # where the card is known by its memory alone


def ask(settings: Settings, known: list[Finding]) -> list[Finding]:
    """What Axolotl's `validate_config` says about a YAML on these cards, as findings with its words quoted.

    Args:
        known: findings that exist already; a refusal of the same key is not told twice.
    """
    capabilities = pretended(settings)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "course_tools.axolotl.check.deep"],
            input=json.dumps({"values": settings.document.values, "capabilities": capabilities}, default=str),
            env=os.environ | QUIET, cwd=settings.folder, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [Finding("note", "", None, f"Axolotl's own validation was not done after {TIMEOUT:.0f} s.")]
    answer = next((line for line in done.stdout.splitlines() if line.startswith(ANSWER)), "")
    if not answer:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [
            Finding("note", "", None, f"Axolotl's own validation did not run: {last}", "install the course's Axolotl")
        ]
    said = json.loads(answer.removeprefix(ANSWER))
    named = {finding.key for finding in known if finding.level == "error"}
    found = [
        one
        for one in (_finding(settings, problem) for problem in said["errors"])
        if one.key not in named or not one.key
    ]
    found += [
        Finding("note", "", None, f"Axolotl: “{line}”")
        for line in said["warnings"]
        if "load required plugin" not in line
    ]
    return found


def pretended(settings: Settings) -> dict[str, Any]:
    """The capabilities that Axolotl would read off the cards."""
    cluster = settings.cluster
    major, minor = (cluster.capability if cluster else None) or ASSUMED
    return {
        "bf16": (major, minor) >= (8, 0), "fp8": (major, minor) >= (9, 0), "tf32": (major, minor) >= (8, 0),
        "n_gpu": cluster.per_node if cluster else 1, "n_node": cluster.nodes if cluster else 1,
        "compute_capability": f"sm_{major}{minor}",
    }  # fmt: skip


def _finding(settings: Settings, problem: dict[str, Any]) -> Finding:
    path = _there(problem["path"], settings.document.values)
    words = problem["words"].removeprefix("Value error, ").strip().rstrip(".")
    if not path:
        keys = [word for word in re.findall(r"[a-z][a-z0-9_]+", words) if word in settings.document.values]
        path = (max(keys, key=len),) if keys else ()
    return Finding(
        "error", dotted(path), settings.document.line(*path) if path else None, f"Axolotl refuses it: “{words}”."
    )


def _there(steps: list[Any], values: Any) -> tuple[str | int, ...]:
    """The steps that lead into the values; pydantic names classes between them."""
    path: list[str | int] = []
    for step in steps:
        if isinstance(values, dict) and step in values or isinstance(values, list) and step in range(len(values)):
            path.append(step)
            values = values[step]
        elif not path and isinstance(step, str):
            return (step,)  # a key that is missing
    return tuple(path)


def validate(values: dict[str, Any], capabilities: dict[str, Any]) -> dict[str, Any]:
    """Axolotl's verdict: {"errors": [{"path", "words"}], "warnings": [lines of its log]}. Imports Axolotl."""
    import logging

    import torch
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault
    from pydantic import ValidationError

    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("axolotl").addHandler(handler)
    config = DictDefault(values)
    errors: list[dict[str, Any]] = []
    try:
        prepare_plugins(config)
    except Exception as error:  # a plugin may raise anything, and what it raises is the answer
        errors.append({"path": ["plugins"], "words": f"{type(error).__name__}: {error}"})
        config.pop("plugins", None)
    try:
        validate_config(
            config, capabilities=capabilities, env_capabilities={"torch_version": torch.__version__.split("+")[0]}
        )
    except ValidationError as error:
        errors += [{"path": list(one["loc"]), "words": one["msg"]} for one in error.errors()]
    except Exception as error:  # validators of Axolotl raise what they like: an OSError for a missing JSON, a TypeError
        errors.append({"path": [], "words": f"{type(error).__name__}: {error}"})
    finally:
        logging.getLogger("axolotl").removeHandler(handler)
    return {"errors": errors, "warnings": list(dict.fromkeys(lines))}


if __name__ == "__main__":
    question = json.load(sys.stdin)
    print(ANSWER + json.dumps(validate(question["values"], question["capabilities"]), default=str))
