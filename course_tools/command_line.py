"""What all commands of `beyond` share: a parser with short errors, one way to report bad input, JSON, sub-commands.

Only the standard library is imported here, and nothing newer than Python 3.8: `beyond doctor` must start anywhere.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from course_lib.validation import did_you_mean

SUCCESS, PROBLEM_FOUND, BAD_INPUT = 0, 1, 2  # exit codes of every command


class ArgumentParser(argparse.ArgumentParser):
    """Like argparse's, but an error is one sentence instead of a page of usage, and options are never abbreviated."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Raise ValueError, which `reports_errors` turns into one line on stderr and exit code 2."""
        raise ValueError(f"{message[:1].upper()}{message[1:]} (--help lists the options).")


def reports_errors(main: Callable[..., int]) -> Callable[..., int]:
    """Decorate a command's main(): bad input or a file that cannot be used ends in one sentence and exit code 2."""

    @functools.wraps(main)
    def wrapped(argv: Sequence[str] | None = None) -> int:
        try:
            return main(sys.argv[1:] if argv is None else list(argv))
        except BrokenPipeError:
            raise  # the reader of our output went away, which is no error of the user's
        except OSError as error:
            named = error.strerror and error.filename is not None
            print(f"{error.filename}: {error.strerror}." if named else error, file=sys.stderr)
        except ValueError as error:
            print(error, file=sys.stderr)
        return BAD_INPUT

    return wrapped


def print_json(value: Any) -> None:
    """Print a value as indented JSON; what JSON does not know, such as a path, is printed as text."""
    print(json.dumps(value, indent=2, default=str))


def run_command(
    commands: Mapping[str, tuple[str, str]], argv: Sequence[str], *, prog: str, description: str, epilog: str = ""
) -> int:
    """Run the command named by the first argument, importing its module only now.

    Args:
        commands: name to (module with a ``main(argv)``, help text).
        argv: the command's name and its arguments.
        prog: name of the program that these are commands of.
        description: what ``--help`` says at the top.
        epilog: what it says at the bottom, printed as it is.

    Returns:
        The command's exit code.
    """
    parser = ArgumentParser(
        prog=prog, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in commands.items():
        subparsers.add_parser(name, help=text, add_help=False)
    if argv and argv[0] not in commands and not argv[0].startswith("-"):
        nearest = did_you_mean(argv[0], commands)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"choose one of {', '.join(commands)}."
        raise ValueError(f"{prog} has no command {argv[0]!r}: {hint}")
    name = parser.parse_args(argv[:1]).command
    return importlib.import_module(commands[name][0]).main(argv[1:])
