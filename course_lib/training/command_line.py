"""A command line for a training program, built from the signature of its ``train`` function."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import NoneType
from typing import Any, get_args, get_type_hints

from course_lib.launch import process_group
from course_lib.observe import Outcome


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
        kind = next(k for k in get_args(kinds[name]) or (kinds[name],) if k is not NoneType)  # float for float | None
        if kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(option, type=kind, default=default, help=f"default: {default}")
    return vars(parser.parse_args(argv))


def run(train: Callable[..., Outcome], argv: Sequence[str] | None = None, *, own_group: bool = True) -> None:
    """Run ``train`` on this rank with the process group up; rank 0 prints its outcome as one line of JSON.

    Args:
        own_group: False for a program that brings the process group up by itself (Accelerate, Lightning).
    """
    arguments = parse(train, argv)
    if own_group:
        with process_group():
            outcome = train(**arguments)
    else:
        outcome = train(**arguments)
        _leave_together()
    if outcome.rank == 0:
        print(json.dumps(asdict(outcome)))
        sys.stdout.flush()


def _leave_together() -> None:
    """Take a process group down that Accelerate or Lightning left up, when all ranks have come here.

    A rank that ends while another one's gloo threads still listen to it can abort that one (seen once, as
    SIGABRT).
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
