"""What the checks of lab 2 share: the lab itself, the watch over new tensors, and the bytes of what a learner stores."""

from __future__ import annotations

import functools
import gc
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course_checks.harness.checking import Lab, NotAttempted, NotYet
from course_lib.launch.failures import is_learners
from course_lib.launch.threads import one_thread

lab = Lab("02_single_gpu", title="Stretching one GPU")

# fp32 sums in another order: 1e-7 a sum, a few hundred sums deep
RTOL, ATOL = 2e-4, 2e-6
_WRONG_CALL = re.compile(r"positional argument|unexpected keyword|takes no arguments|keyword-only argument")
NUMBER_BYTES = 4  # a Python number among the stored tensors counts as one of fp32


def guarded(check: Callable[..., str]) -> Callable[..., str]:
    """Run a check on one thread, and answer with a verdict where the learner's function takes other arguments."""

    @functools.wraps(check)
    def run(*args: Any, **kwargs: Any) -> str:
        try:
            with one_thread():
                return check(*args, **kwargs)
        except TypeError as error:
            if _WRONG_CALL.search(str(error)) and not _in_learners_code(error):
                raise NotYet(f"keep the arguments that the stub has: {error}") from error
            raise

    return run


def _in_learners_code(error: BaseException) -> bool:
    return any(is_learners(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))


@dataclass
class NewTensor:
    """A storage that an operator made while :class:`NewTensors` watched."""

    operator: str
    shape: tuple[int, ...]
    bytes: int
    storage: StorageWeakRef


class NewTensors(TorchDispatchMode):
    """Every storage that comes into being inside the ``with`` block, wherever it is kept afterwards.

    It stands below autograd, so it sees what a custom function keeps on ``ctx``, in a closure or on a module as well
    as what autograd itself saves. Views and in-place results are no new storages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[NewTensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs or {}))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                made = NewTensor(str(func), tuple(tensor.shape), storage.nbytes(), StorageWeakRef(storage))
                self.made.append(made)
        return result

    def alive(self, *, besides: Iterable[torch.Tensor] = (), collect: bool = True) -> list[NewTensor]:
        """Those that are still held by somebody, without the storages of ``besides``."""
        known = {t.untyped_storage()._cdata for t in besides}
        held = [new for new in self.made if not new.storage.expired() and new.storage.cdata not in known]
        if held and collect:  # perhaps only by a circle that nobody has collected yet
            gc.collect()
            held = [new for new in held if not new.storage.expired()]
        return held


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def backward(loss: torch.Tensor, why_not: str) -> None:
    """``loss.backward()``. Raises NotYet when no gradient can flow (``why_not``), or when autograd itself stops."""
    if not loss.requires_grad:
        raise NotYet(why_not)
    try:
        loss.backward()
    except RuntimeError as error:
        if _in_learners_code(error):
            raise  # the verdict names the learner's line
        raise NotYet(f"backward() stops: {' '.join(str(error).split())[:250]}") from error


def tensor_like(value: Any, like: torch.Tensor, what: str) -> torch.Tensor:
    """``value`` if it is a tensor of the shape and dtype of ``like``. Raises NotAttempted or NotYet."""
    if value is None or value is ...:
        raise NotAttempted
    if not isinstance(value, torch.Tensor):
        raise NotYet(f"{what} should be a tensor, and is of type {type(value).__name__}")
    if value.shape != like.shape:
        raise NotYet(f"{what} has the shape {tuple(value.shape)}, and should have {tuple(like.shape)}")
    if value.dtype != like.dtype:
        raise NotYet(f"{what} is {str(value.dtype)[6:]}, and should be {str(like.dtype)[6:]}")
    return value


def stored_bytes(stored: Any) -> int:
    """Bytes of what a learner keeps: each storage once and whole, a Python number as :data:`NUMBER_BYTES`."""
    storages: dict[int, int] = {}

    def count(item: Any) -> int:
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
            return 0
        if isinstance(item, Mapping):
            return sum(map(count, item.values()))
        if isinstance(item, (list, tuple, set)):
            return sum(map(count, item))
        if isinstance(item, (bytes, bytearray)):
            return len(item)
        if isinstance(item, (int, float)):
            return NUMBER_BYTES
        return int(getattr(item, "nbytes", 0)) or sum(map(count, getattr(item, "__dict__", {}).values()))

    numbers = count(stored)
    return numbers + sum(storages.values())


def kept(make: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
    """What ``make`` stores of a copy of ``tensor``, whose values are then gone: nothing can be peeked at later."""
    copy = tensor.clone()
    stored = make(copy)
    if stored is None or stored is ...:
        raise NotAttempted
    own = copy.untyped_storage()._cdata
    if any(t.untyped_storage()._cdata == own for t in _tensors(stored)):
        raise NotYet("what you store holds the tensor itself: only codes and their scales may stay")
    copy.fill_(float("nan"))
    return stored
