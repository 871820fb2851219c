"""What the checks of lab 2 share: the lab itself, the watch over new tensors, and the bytes of what a learner stores."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from course_checks.harness import Lab, NotYet, nothing, returned, tensors_in
from course_lib.launch.failures import is_learners

lab = Lab("02_single_gpu", title="Stretching one GPU")

NUMBER_BYTES = 4  # a Python number among the stored tensors counts as one of fp32


def _in_learners_code(error: BaseException) -> bool:
    return any(is_learners(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__))


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
    """``value`` if it is a tensor of the shape and dtype of ``like``. Raises NotYet otherwise."""
    returned(value, torch.Tensor, what)
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
        raise nothing("what you store")
    own = copy.untyped_storage()._cdata
    if any(t.untyped_storage()._cdata == own for t in tensors_in(stored)):
        raise NotYet("what you store holds the tensor itself: only codes and their scales may stay")
    copy.fill_(float("nan"))
    return stored
