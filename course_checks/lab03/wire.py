"""Every message that this rank sends and receives, with the rank at its other end, as PyTorch's dispatcher sees it.

The launch's own recorder has kinds and bytes, not the peer. A dispatch mode sees the operator and its arguments, however
the learner got there: ``dist.send``, ``isend``, ``batch_isend_irecv``, or a collective of the library.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.observe.collectives import KINDS

_OTHER_ROADS = ("c10d", "_c10d_functional", "_c10d_functional_autograd")  # collectives that KINDS does not list
_PEER = {"send": "dst", "recv_": "src"}


class Message(NamedTuple):
    """One call: its kind (``send``, ``recv``, ``all_reduce``, …), the peer (a global rank, -1: none named), its bytes."""

    kind: str
    peer: int
    bytes: int


class Wire(TorchDispatchMode):
    """Notes what this rank sends and receives inside a ``with`` block, in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[Message] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = function._schema.name.split("::")[-1]
        if function.namespace == "c10d" and name in KINDS:
            names = [argument.name for argument in function._schema.arguments]
            self._note(name, dict(zip(names, args, strict=False)) | (kwargs or {}))
        elif function.namespace in _OTHER_ROADS and not name.startswith(("wait_", "_wrap_")):
            self.messages.append(Message(name, -1, 0))
        return function(*args, **(kwargs or {}))

    def _note(self, name: str, values: dict[str, Any]) -> None:
        kind, argument = KINDS[name]
        peer = -1
        if name in _PEER:
            members = dist.get_process_group_ranks(dist.ProcessGroup.unbox(values["process_group"]))
            peer = members[values[_PEER[name]]]
        self.messages.append(Message(kind, peer, _num_bytes(values[argument]) if argument else 0))


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_num_bytes(each) for each in value)
