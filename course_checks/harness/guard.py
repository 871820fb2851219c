"""What stands between a check and a learner's code: wrong calls, changed inputs and endless loops become sentences."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from course_checks.harness.comparing import NotYet
from course_lib.launch.failures import is_learners, place

PLAIN = (bool, int, float, str, bytes, type(None))


class Guarded:
    """A learner's function as a check calls it.

    A call with arguments that the function does not take raises NotYet. So does a function that changes what it was
    given, where `keeps_inputs` is true; on ranks, where a task may be to fill a tensor, that is for the check to ask.
    """

    def __init__(self, function: Callable[..., Any], *, keeps_inputs: bool):
        self.function, self.keeps_inputs = function, keeps_inputs
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.keeps_inputs:  # lists and dicts as copies: a check's own cases stay as they are
            args, kwargs = copied(args), copied(kwargs)
        given = [*args, *kwargs.values()]
        before = [snapshot(value) for value in given] if self.keeps_inputs else []
        try:
            result = self.function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # it never began
                raise NotYet(f"keep the arguments that the stub has: {error}") from error
            raise
        names = [f"argument {number + 1}" for number in range(len(args))] + [f"`{name}`" for name in kwargs]
        for name, value, then in zip(names, given, before, strict=False):
            if not unchanged(value, then):
                raise NotYet(
                    f"{self.__name__} changes {name}, the {type(value).__name__} that it was given: the caller still needs "
                    "it, so work on a copy"
                )
        return result

    def __reduce__(self) -> tuple:
        return _on_a_rank, (self.function,)


def _on_a_rank(function: Callable[..., Any]) -> Guarded:
    return Guarded(function, keeps_inputs=False)


def copied(value: Any) -> Any:
    """`value` with fresh lists, dicts and sets; what they hold is shared, so that tensors keep their graph."""
    if type(value) in (list, tuple, set):
        return type(value)(item if type(item) in PLAIN else copied(item) for item in value)
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return value


def snapshot(value: Any) -> Any:
    """A copy of a list, dict, set, array or tensor, and of those inside it, to compare with later."""
    if isinstance(value, (list, tuple)):
        return [item if type(item) in PLAIN else snapshot(item) for item in value]
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, set):
        return set(value)
    return value if type(value) in PLAIN else _numbers(value)


def unchanged(value: Any, before: Any) -> bool:
    """True if `value` still is what it was when `snapshot` copied it; objects of other types are not looked at."""
    if isinstance(value, (list, tuple)):
        return len(value) == len(before) and all(
            item is then or unchanged(item, then) for item, then in zip(value, before, strict=True)
        )
    if isinstance(value, Mapping):
        return value.keys() == before.keys() and all(unchanged(value[key], before[key]) for key in before)
    if isinstance(value, set):
        return value == before
    if type(value) in PLAIN:
        return bool(value is before or value == before)
    return bool(_numbers(value) == before)


def _numbers(value: Any) -> tuple | None:
    """Shape and bytes of a tensor or an array; None for everything else."""
    if hasattr(value, "untyped_storage"):
        if (
            value.device.type != "cpu"
            or value.is_sparse
            or not hasattr(value, "numpy")
            or type(value).__name__ == "DTensor"
        ):
            return None
        import torch

        with torch.utils._python_dispatch._disable_current_modes():
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
            return tuple(value.shape), flat.numpy().tobytes()
    if type(value).__module__ == "numpy":
        return value.shape, value.tobytes()
    return None


class Endless(BaseException):
    """Raised in the learner's code when a check's time is over; no `except Exception` swallows it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise NotYet when the block takes longer than `seconds`. Only the main thread can be stopped.

    Ranks have a limit of their own, in `launch`, and `without_limit` leaves their time out: this one is for an endless loop
    in the notebook's own process.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    over = True

    def stop(*_: Any) -> None:
        if not over:
            raise Endless

    before = signal.signal(signal.SIGALRM, stop)
    over = False
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # once more every second: a bare `except:` in a loop swallows it
    try:
        yield
    except Endless as error:
        over = True
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        learners = [frame for frame in frames if is_learners(frame[0])]
        where = f", at {place(*learners[-1])}" if learners else ""
        raise NotYet(
            f"stopped after {seconds:g} s: your code was still running{where}. Does a loop never end?"
        ) from None
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def without_limit() -> Iterator[None]:
    """Stop the clock of `time_limit` for a block that has a limit of its own."""
    left = 0.0
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        left, again = signal.setitimer(signal.ITIMER_REAL, 0.0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left, again)


@contextmanager
def refused(sentence: str, *targets: tuple[Any, str]) -> Iterator[None]:
    """Within the block each target, an owner and the name of its function, raises NotYet with this sentence."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotYet(sentence)

    with ExitStack() as stack:
        for owner, name in targets:
            stack.enter_context(patch.object(owner, name, refuse))
        yield
