"""Every tensor that is alive in this process: where a rank hides what it holds makes no difference.

An optimizer's own bookkeeping says what the optimizer wants to say. Python's collector knows every tensor object, and
through it the storage behind it, which a view keeps alive as a whole.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable

import torch

from course_lib.observe import tensor_bytes

LET_GO = 0.5  # seconds


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that Python can reach in this process, gradients that only C++ holds included."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def live_bytes() -> int:
    """Bytes of their storages, each storage once."""
    return tensor_bytes(live_tensors())


def settled_bytes(at_most: int) -> int:
    """The same, once it is ``at_most``, or after half a second: a backend's own thread lets go of a collective's tensors a
    moment after it is over."""
    give_up = time.perf_counter() + LET_GO
    while (found := live_bytes()) > at_most and time.perf_counter() < give_up:
        time.sleep(0.01)
    return found


def bytes_behind_views(known: Iterable[torch.Tensor], at_least: int) -> int:
    """Bytes of storages of ``at_least`` bytes and more that some tensor sees less than half of.

    ``known``: tensors whose storages do not count, such as the model's parameters.
    """
    # Whether somebody holds the whole tensor, too, cannot be told: a view keeps that object alive as well as its storage.
    passed_over = {tensor.untyped_storage()._cdata for tensor in known}
    behind: dict[int, int] = {}
    for tensor in live_tensors():
        storage = tensor.untyped_storage()
        if storage._cdata not in passed_over and at_least <= storage.nbytes() >= 2 * tensor.nbytes:
            behind[storage._cdata] = storage.nbytes()
    return sum(behind.values())
