"""``beyond watch FOLDER --ranks N``: the watchdog as a process beside the training."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence

from course_tools.command_line import PROBLEM_FOUND, SUCCESS, ArgumentParser, reports_errors
from course_tools.monitoring.watchdog import Watchdog

VARIABLE = "WATCHDOG_WEBHOOK"


def parser() -> ArgumentParser:
    """The options of the command."""
    parser = ArgumentParser(
        prog="beyond watch",
        description="Watch the heartbeats of a run's ranks until all have ended, and say which one hangs, and where.",
        epilog="Exit code 0: no alarm; 1: there was one; 2: the options mean nothing.",
    )
    parser.add_argument("folder", help="where the ranks' Heartbeat writes")
    parser.add_argument("--ranks", type=int, required=True, metavar="N")
    # every user of the machine can read arguments, and the URL is a secret
    parser.add_argument("--webhook", default="", metavar="URL", help=f"post each sentence there; or set {VARIABLE}")
    parser.add_argument("--start-within", type=float, default=120.0, metavar="SECONDS", help="default 120")
    parser.add_argument("--name", default="", help="of the run, put before what is posted")
    return parser


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Watch until every rank is done, or until SIGINT or SIGTERM."""
    options = parser().parse_args(argv)
    watchdog = Watchdog(
        options.folder,
        ranks=options.ranks,
        webhook=options.webhook or os.environ.get(VARIABLE, ""),
        start_within=options.start_within,
        name=options.name,
        tell=_print_with_time,
    )
    stop = threading.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(which, lambda *_: stop.set()) for which in signals]
    try:
        with watchdog:
            _print_with_time(f"watching {options.ranks} rank{'s' * (options.ranks > 1)} in {options.folder}")
            while not stop.wait(0.2) and not watchdog.finished:
                pass
            if watchdog.finished:
                _print_with_time("every rank is done.")
    finally:
        for which, handler in zip(signals, before, strict=True):
            signal.signal(which, handler)
    return PROBLEM_FOUND if watchdog.alarms else SUCCESS


def _print_with_time(sentence: str) -> None:
    print(time.strftime("%H:%M:%S"), sentence, flush=True)
