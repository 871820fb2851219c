"""``beyond watch FOLDER --ranks N``: the watchdog as a process beside the training."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from course_tools.command_line import PROBLEM_FOUND, SUCCESS, ArgumentParser, reports_errors
from course_tools.monitoring.watchdog import Watchdog


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Watch until every rank is done, or until Ctrl-C."""
    parser = ArgumentParser(
        prog="beyond watch",
        description="Watch the heartbeats of a run's ranks until all have ended, and say which one hangs, and where.",
        epilog="Exit code 0: no alarm; 1: there was one; 2: the options mean nothing.",
    )
    parser.add_argument("folder", help="where the ranks' Heartbeat writes")
    parser.add_argument("--ranks", type=int, required=True, metavar="N")
    # every user of the machine can read arguments, and the URL is a secret
    webhook = os.environ.get("WATCHDOG_WEBHOOK", "")
    parser.add_argument("--webhook", default=webhook, metavar="URL", help="post each sentence; or set WATCHDOG_WEBHOOK")
    parser.add_argument("--start-within", type=float, default=120.0, metavar="SECONDS", help="default 120")
    watchdog = Watchdog(**vars(parser.parse_args(argv)), tell=_print_with_time)
    with contextlib.suppress(KeyboardInterrupt), watchdog:
        _print_with_time(f"watching {watchdog.folder}")
        while not watchdog.finished:
            time.sleep(0.2)
        _print_with_time("every rank is done.")
    return PROBLEM_FOUND if watchdog.alarms else SUCCESS


def _print_with_time(sentence: str) -> None:
    print(time.strftime("%H:%M:%S"), sentence, flush=True)
