"""A command line for a training program, built from the signature of its ``train`` function."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from types import NoneType, UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from course_lib.launch.group import end_process, exit_now, process_group
from course_lib.training.outcome import Outcome


def parse(train: Callable[..., Any], argv: Sequence[str] | None = None) -> dict[str, Any]:
    """``--global-batch 8 --lr 1e-3`` to ``{"global_batch": 8, "lr": 0.001}``; types come from the annotations.

    Raises:
        SystemExit: as argparse does, with the usage, for an unknown option or a value of the wrong type.
    """
    module = inspect.getmodule(train)
    parser = argparse.ArgumentParser(
        prog=f"python -m {module.__spec__.name}" if module and module.__spec__ else f"python {sys.argv[0]}",
        description=(inspect.getdoc(train) or "Train.").splitlines()[0],
    )
    kinds = get_type_hints(train)
    for name, parameter in inspect.signature(train).parameters.items():
        option = "--" + name.replace("_", "-")
        default = parameter.default
        kind = kinds[name]
        if get_origin(kind) is UnionType:  # float for float | None
            kind = next(k for k in get_args(kind) if k is not NoneType)
        if get_origin(kind) is Callable:
            continue  # no word on a command line is one
        if kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
        else:
            required = default is parameter.empty
            word = {"required": True} if required else {"default": default, "help": f"default: {default}"}
            parser.add_argument(option, type=kind, **word)
    return vars(parser.parse_args(argv))


def run(train: Callable[..., Outcome], argv: Sequence[str] | None = None, *, own_group: bool = True) -> None:
    """Run ``train`` on this rank with the process group up; rank 0 prints its outcome as one line of JSON.

    Under a launcher the process ends here, and at once where ``train`` fails: its peers hear of it, and nobody waits
    for what they will never join.

    Args:
        own_group: False for a program that brings the process group up by itself, as Accelerate does.
    """
    arguments = parse(train, argv)
    launched = "RANK" in os.environ
    with process_group() if own_group else nullcontext():
        try:
            outcome = train(**arguments)
        except BaseException as error:
            if not launched:
                raise
            _end_with(error)
        if outcome.rank == 0:
            print(json.dumps(asdict(outcome)), flush=True)
    if launched:
        end_process(0)


def _end_with(error: BaseException) -> NoReturn:
    """End the process as the interpreter does for this exception, without what could hold it back."""
    status = error.code if isinstance(error, SystemExit) else 1
    if status is not None and not isinstance(status, int):  # sys.exit("a sentence")
        print(status, file=sys.stderr)
        status = 1
    elif not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    exit_now(status or 0)
