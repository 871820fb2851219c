"""Collectives that this rank issues in a stretch of code, seen from within a training program."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.observe.collectives import KINDS, _num_bytes

FUNCTIONAL = {  # DTensor's collectives: operators of torch.ops._c10d_functional, this rank's contribution first
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}


class CountCollectives(TorchDispatchMode):
    """Within the block every collective of this thread, and of its backward passes, is noted and goes on unchanged.

    `launch` notes them too, but for the notebook: a program under torchrun has nobody to ask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []  # (kind, bytes that this rank put in)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes plain tensors and collectives first, and those come by here
        namespace, _, name = func._schema.name.partition("::")
        values = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        if namespace == "c10d" and name in KINDS:
            kind, argument = KINDS[name]
            self.seen.append((kind, _num_bytes(values[argument]) if argument else 0))
        elif namespace == "_c10d_functional" and name in FUNCTIONAL:
            self.seen.append((FUNCTIONAL[name], _num_bytes(args[0])))
        return func(*args, **(kwargs or {}))
