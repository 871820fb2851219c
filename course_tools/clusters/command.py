"""``beyond cluster``: write a run's launch file, and print the one command that starts it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from course_lib.files import write_atomically
from course_tools.clusters.job import Job
from course_tools.clusters.targets import TARGETS
from course_tools.clusters.writing import launch_files, options_of, start_command
from course_tools.command_line import ArgumentParser, reports_errors


def parser() -> ArgumentParser:
    """``cluster write`` and ``cluster show`` with the settings of `Job`; ``cluster options`` of one target."""
    parser = ArgumentParser(prog="beyond cluster", description="Launch files for a cluster.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in (("write", "write the launch file into --out"), ("show", "print it, write nothing")):
        command = verbs.add_parser(verb, help=text)
        _add_settings(command)
        command.add_argument("--out", default="launch", metavar="DIR", help="folder of the file; default launch")
    options = verbs.add_parser("options", help="what --set takes for a target")
    options.add_argument("--target", required=True, metavar="TARGET", help=", ".join(TARGETS))
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--target", required=True, metavar="TARGET", help=", ".join(TARGETS))
    add("--name", default="training", help="of the job; default training")
    add("--config", metavar="YAML", help="an Axolotl YAML")
    add("--command", metavar="LINE", help="or what torchrun is to start: '-m module ...', 'script.py ...'")
    add("--nodes", type=int, default=1, dest="num_nodes", metavar="N", help="machines; default 1")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs, and so ranks, of each machine")
    add("--gpu", default=Job.gpu, metavar="CARD", help=f"card, or cpu; default {Job.gpu}")
    add("--cpus-per-gpu", type=int, default=Job.cpus_per_gpu, metavar="N")
    add("--hours", type=float, default=Job.hours, metavar="H", help=f"limit; default {Job.hours}")
    add("--image", help="container image")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    add("--secret", action="append", default=[], metavar="NAME", help="a variable whose value is in no file")
    add("--setup", action="append", default=[], metavar="LINE", help="shell line to run first; repeatable")
    add("--output-dir", metavar="DIR", help="on storage that all machines share")
    add("--max-restarts", type=int, default=Job.max_restarts, metavar="N")
    add("--notice", type=int, default=Job.notice, metavar="SECONDS", help="before a time limit")
    add("--code", default=Job.code, metavar="DIR", help="folder to send along (azureml, skypilot)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="the target's own options")


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Write, show or explain. Returns 0, or 2 after one sentence on stderr when the input means nothing."""
    settings = vars(parser().parse_args(argv))
    verb, target = settings.pop("verb"), settings.pop("target")
    if verb == "options":
        print("\n".join(f"{name:15}{text}" for name, text in options_of(target).items()))
        return 0
    out, job = Path(settings.pop("out")), _job(settings)
    files, command = launch_files(job, target, out), start_command(job, target, out)
    if verb == "show":
        print("\n".join([*files.values(), command]))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(out / name, text)
        print(f"wrote {out / name}")
    where = f"on each of the {job.num_nodes} machines" if target == "torchrun" and job.num_nodes > 1 else "to start it"
    print(f"{where}: {command}")
    return 0


def _job(settings: dict[str, Any]) -> Job:
    settings["env"], settings["options"] = _pairs("--env", settings["env"]), _pairs("--set", settings.pop("set"))
    settings["secrets"] = settings.pop("secret")
    return Job(**settings)


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{flag} {text}: write NAME=VALUE.")
        pairs[name] = value
    return pairs
