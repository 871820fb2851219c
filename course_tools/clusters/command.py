"""``beyond cluster``: write a run's launch files, and print the one command that starts it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from course_tools.clusters.job import Job
from course_tools.clusters.writing import TARGETS, launch_files, options_of, start_command, write
from course_tools.command_line import ArgumentParser, reports_errors


def parser() -> ArgumentParser:
    """``cluster write`` and ``cluster show`` with the settings of `Job`; ``cluster options`` of one target."""
    made = ArgumentParser(prog="beyond cluster", description="Launch files for a cluster.")
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in (("write", "write the files into --out"), ("show", "print the files, write nothing")):
        one = verbs.add_parser(verb, help=text)
        _settings(one)
        one.add_argument("--out", default="launch", metavar="DIR", help="folder of the files; default launch")
    options = verbs.add_parser("options", help="what --set takes for a target")
    options.add_argument("--target", required=True, metavar="TARGET", help=", ".join(TARGETS))
    return made


def _settings(one: argparse.ArgumentParser) -> None:
    one.add_argument("--target", required=True, metavar="TARGET", help=", ".join(TARGETS))
    one.add_argument("--name", default="training", help="of the job; default training")
    one.add_argument("--config", metavar="YAML", help="an Axolotl YAML")
    one.add_argument("--command", metavar="LINE", help="or what torchrun is to start: '-m module ...', 'script.py ...'")
    one.add_argument("--nodes", type=int, default=1, dest="num_nodes", metavar="N", help="machines; default 1")
    one.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs, and so ranks, of each machine")
    one.add_argument("--gpu", default=Job.gpu, metavar="CARD", help=f"card, or cpu; default {Job.gpu}")
    one.add_argument("--cpus-per-gpu", type=int, default=Job.cpus_per_gpu, metavar="N")
    one.add_argument("--hours", type=float, default=Job.hours, metavar="H", help=f"limit; default {Job.hours}")
    one.add_argument("--image", help="container image")
    one.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="may be repeated")
    one.add_argument(
        "--secret", action="append", default=[], metavar="NAME", help="a variable whose value is in no file"
    )
    one.add_argument("--setup", action="append", default=[], metavar="LINE", help="shell line to run first; repeatable")
    one.add_argument("--output-dir", metavar="DIR", help="on storage that all machines share")
    one.add_argument("--max-restarts", type=int, default=Job.max_restarts, metavar="N")
    one.add_argument("--notice", type=int, default=Job.notice, metavar="SECONDS", help="before a time limit")
    one.add_argument("--code", default=Job.code, metavar="DIR", help="folder to send along (azureml, skypilot)")
    one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="the target's own options")


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Returns 0, or 2 after one sentence on stderr when the input means nothing."""
    given = vars(parser().parse_args(argv))
    verb, target = given.pop("verb"), given.pop("target")
    if verb == "options":
        print("\n".join(f"{name:15}{text}" for name, text in options_of(target).items()))
        return 0
    out, job = given.pop("out"), _job(given)
    if verb == "show":
        for name, text in launch_files(job, target, out).items():
            print(f"# ---- {out}/{name}\n{text}")
        print(start_command(job, target, out))
        return 0
    written = write(job, target, out)
    where = f"on each of the {job.num_nodes} machines" if target == "torchrun" and job.num_nodes > 1 else "to start it"
    print(f"wrote {', '.join(map(str, written.files))}\n{where}: {written.command}")
    return 0


def _job(given: dict[str, Any]) -> Job:
    given["env"], given["options"] = _pairs("--env", given["env"]), _pairs("--set", given.pop("set"))
    given["secrets"] = given.pop("secret")
    return Job(**given)


def _pairs(flag: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{flag} {text}: write NAME=VALUE.")
        pairs[name] = value
    return pairs
