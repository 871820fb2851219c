"""``beyond class gpus``: who has which GPU of this box, the folder a class leases them through, a lease for a command."""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from course_lib.launch.leases import FOLDER_VARIABLE, NAME_VARIABLE, NoTurn, Pool
from course_lib.launch.leases.messages import duration
from course_tools.command_line import ArgumentParser, reports_errors


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="beyond class gpus",
        description="Without a word after it: who has which GPU, since when, and who waits.",
        epilog=f"The folder is of this machine only. Learners have it in {FOLDER_VARIABLE}, their names in {NAME_VARIABLE}.",
    )
    parser.add_argument("--folder", default=os.environ.get(FOLDER_VARIABLE, ""), help=f"default: ${FOLDER_VARIABLE}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    init = commands.add_parser("init", help="make the folder, and print the lines that learners need")
    init.add_argument("where", metavar="FOLDER", help="a new folder on a disk of this machine, such as /var/tmp/gpus")
    init.add_argument("--gpus", type=int, help="how many there are; default: what nvidia-smi lists")
    run = commands.add_parser(
        "run",
        help="run -n 2 --name Ada -- COMMAND: lease for as long as it lives",
        usage="beyond class gpus [--folder F] run [-n N] [--name NAME] [--wait SECONDS] -- COMMAND …",
    )
    run.add_argument("-n", type=int, default=1, help="GPUs; default 1")
    run.add_argument("--name", default="", help=f"of the learner; default: ${NAME_VARIABLE}, or the user's name")
    run.add_argument("--wait", type=float, metavar="SECONDS", help="give up after that long, with exit code 1")
    return parser


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Exit codes 0; 1: the turn did not come within --wait; 2: bad input; under `run` else the command's own."""
    end = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:end])
    if options.command == "init":
        return _init(Pool(options.where, options.gpus))
    if not options.folder:
        raise ValueError(f"Which folder? Set {FOLDER_VARIABLE}, or give --folder; gpus init FOLDER makes one")
    if options.command is None:
        return _show(Pool(options.folder))
    try:
        return _run(options, argv[end + 1 :])
    except NoTurn as error:
        print(error, file=sys.stderr)
        return 1


def _init(pool: Pool) -> int:
    pool.make()
    print(
        f"{pool.folder} lends {pool.gpus} GPU{'s' * (pool.gpus > 1)}. Each learner's shell, or what starts their notebooks,"
    )
    print("needs these lines; then each run of `launch` waits its turn by itself:")
    print(f"export {FOLDER_VARIABLE}={shlex.quote(pool.folder)}")
    print(f"export {NAME_VARIABLE}=Ada   # each their own")
    for folder in Path(pool.folder).parents:
        if not folder.stat().st_mode & 0o001:
            print(f"{folder} is closed to other users of this box: choose a folder that they can reach.")
    return 0


def _show(pool: Pool) -> int:
    holders, now = {holder.gpu: holder for holder in pool.holders()}, time.time()
    for gpu in range(pool.gpus):
        if (held := holders.get(gpu)) is None:
            print(f"GPU {gpu}: free")
        else:
            how_long = "?" if held.since is None else duration(now - held.since)
            print(f"GPU {gpu}: {held.name}, for {how_long}, process {held.pid or '?'}")
    queue = pool.waiting()
    print("In the queue, whose turn is next first:" if queue else "Nobody waits.")
    for ticket in queue:
        print(f"  {ticket.name} wants {ticket.wants}, for {duration(now - ticket.since)}")
    return 0


def _run(options: argparse.Namespace, command: list[str]) -> int:
    """Become the command, with the locks open: the lease is its own, and ends when the last of its processes has."""
    if not command:
        raise ValueError("Which command? Put it behind two dashes: gpus run -n 1 -- python train.py")
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(f"{command[0]}: no such command here.")
    before = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # Ctrl-Z in the queue would keep all those behind waiting
    try:
        pool, tell = Pool(options.folder), functools.partial(print, file=sys.stderr, flush=True)
        lease = pool.lease(options.n, name=options.name, wait=options.wait, tell=tell).take()
    except KeyboardInterrupt:
        return 130
    finally:
        signal.signal(signal.SIGTSTP, before)
    for descriptor in lease.descriptors:
        os.set_inheritable(descriptor, True)
    # what it launches shall use these GPUs, and not wait for others
    environment = {k: v for k, v in os.environ.items() if k != FOLDER_VARIABLE} | lease.environment
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, command, environment)
