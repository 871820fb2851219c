"""Memory snapshots: what `torch.cuda.memory._dump_snapshot` writes on a GPU, emulated on a CPU, and read on both.

https://pytorch.org/memory_viz draws such files.
"""

from __future__ import annotations

import linecache
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from course_lib.memory.allocator import replay
from course_lib.observe.memory import AllocatorLog, storage_of

if TYPE_CHECKING:
    import torch

OLDER = "older than the recording"
NO_LINE = "no line of Python (backward on a GPU, or inside an operator)"
REQUESTS = {"alloc": 1, "free_completed": -1}  # actions in a trace, and which way memory goes
SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True)
class Snapshot:
    """What was recorded, event by event.

    Attributes:
        allocated: bytes that tensors have asked for. reserved: bytes of the allocator's segments.
        holders: the peak, by the line of Python that asked for the memory, the largest first: "asked for by", "bytes"
            and "tensors", 0 where these are not known one by one.
    """

    allocated: np.ndarray
    reserved: np.ndarray
    holders: list[dict[str, Any]]

    @property
    def peak(self) -> int:
        return int(self.allocated.max())


def emulate_snapshot(
    path: str | Path, step: Callable[[], Any], held: Iterable[torch.Tensor] = (), limit: int | None = None
) -> None:
    """Call `step` on the CPU and write the snapshot that a GPU's allocator might have written.

    Real: each tensor's size to the byte, its order, and the line that asked for it, from PyTorch's profiler. Emulated: the
    segments, by the rules of the CUDA caching allocator, and the addresses.

    Args:
        held: tensors that are there already (see `training_tensors`).
        limit: bytes of an emulated card. Where they run out, the snapshot ends, as a GPU's does, with an "oom" entry: the
            request that failed, the bytes that were free, the line that asked. The step itself goes on to its end.
    """
    log = AllocatorLog(held)
    del held
    stacks: list[tuple[int, int, list[dict[str, Any]]]] = []
    with log, _stacks_noted(stacks):
        step()
    frames = {log.block_at(at, address): stack for at, address, stack in reversed(stacks)}  # the first one counts
    replayed = replay((event[1:] for event in log.events), limit)
    trace: list[dict[str, Any]] = []
    blocks: dict[int, dict[str, Any]] = {}  # those that are there at the end
    reserved = 0
    for event, moment in zip(log.events[: len(replayed.timeline)], replayed.timeline, strict=True):
        address, stack = (event.id + 1) << 36, frames.get(event.id, []) if event.at else []
        entry = {"addr": address, "size": event.bytes, "stream": 0, "time_us": event.at // 1000, "frames": stack}
        if event.allocate:
            size = {"size": event.bytes, "requested_size": event.bytes}
            blocks[event.id] = {"address": address, "state": "active_allocated", "frames": stack} | size
        else:
            del blocks[event.id]
        if event.at:  # as on a GPU, where the recording does not know what came before
            change, at = moment.reserved - reserved, (1 << 50) + len(trace)
            if change:
                action = "segment_alloc" if change > 0 else "segment_free"
                trace.append(entry | {"action": action, "frames": [], "addr": at, "size": abs(change)})
            for action in ("alloc",) if event.allocate else ("free_requested", "free_completed"):
                trace.append(entry | {"action": action})
        reserved = moment.reserved
    if replayed.out_of_memory is not None:
        failed, cached = log.events[len(replayed.timeline)], reserved
        if not failed.at:
            raise ValueError(f"limit={limit:,} bytes cannot hold what is there before the step: give more.")
        reserved = sum(segment.bytes for segment in replayed.segments)  # the cached ones were given back in vain
        entry = {"stream": 0, "time_us": failed.at // 1000, "frames": []}
        if cached > reserved:
            trace.append(entry | {"action": "segment_free", "addr": (1 << 50) + len(trace), "size": cached - reserved})
        oom = {"action": "oom", "device_free": limit - reserved, "size": failed.bytes}
        trace.append(entry | oom | {"frames": frames.get(failed.id, [])})
    left = sum(block["size"] for block in blocks.values())
    segment = {"device": 0, "address": 1 << 50, "stream": 0, "segment_type": "large", "blocks": list(blocks.values())}
    segment |= {"total_size": reserved, "allocated_size": left, "active_size": left, "requested_size": left}
    written = {"segments": [segment], "device_traces": [trace], "allocator_settings": {}}
    Path(path).write_bytes(pickle.dumps(written))


def read_snapshot(path: str | Path) -> Snapshot:
    """What a snapshot, real or emulated, recorded on the device that was busiest. It is a pickle: read only your own."""
    loaded = pickle.loads(Path(path).read_bytes())
    traces = loaded["device_traces"]
    if not any(traces):
        raise ValueError(
            f"{path} records no allocation: run the step between _record_memory_history and _dump_snapshot."
        )
    device = max(range(len(traces)), key=lambda i: len(traces[i]))
    trace = traces[device]
    segments = [segment for segment in loaded["segments"] if segment.get("device", 0) == device]

    def over_time(ways: dict[str, int], at_end: str) -> np.ndarray:
        changes = np.cumsum([ways.get(event["action"], 0) * event["size"] for event in trace])
        return changes + sum(segment[at_end] for segment in segments) - changes[-1]

    allocated = over_time(REQUESTS, "requested_size")
    alive: dict[int, dict[str, Any]] = {}
    for event in trace[: int(allocated.argmax()) + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    holders: dict[str, list[int]] = {}
    for event in alive.values():
        holders.setdefault(_asked_by(event.get("frames", ())), []).append(event["size"])
    rows = [{"asked for by": line, "tensors": len(sizes), "bytes": sum(sizes)} for line, sizes in holders.items()]
    rows.append(
        {"asked for by": OLDER, "tensors": 0, "bytes": int(allocated.max()) - sum(row["bytes"] for row in rows)}
    )
    rows.sort(key=lambda row: -row["bytes"])
    return Snapshot(allocated, over_time(SEGMENTS, "total_size"), rows)


def _asked_by(frames: Iterable[dict[str, Any]]) -> str:
    """The innermost line outside PyTorch: file, number and source."""
    import torch

    for frame in frames:
        name = frame["filename"]
        if not name.startswith((os.path.dirname(torch.__file__), "<")):
            where = "this notebook" if "ipykernel" in name else f"{Path(name).name}:{frame['line']}"
            return f"{where}: {linecache.getline(name, frame['line']).strip()}"
    return NO_LINE


def _stacks_noted(stacks: list[tuple[int, int, list[dict[str, Any]]]]) -> Any:
    """A context that notes of each operator's results the time, the address and the Python stack, innermost first."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if tensors:
                now, stack = time.time_ns(), _stack()
                stacks.extend((now, storage_of(tensor).data_ptr(), stack) for tensor in tensors)
            return result

    return Noted()


def _stack() -> list[dict[str, Any]]:
    """The Python stack below `emulate_snapshot`, without this module."""
    found, frame = [], sys._getframe(1)
    while frame is not None and frame.f_code is not emulate_snapshot.__code__:
        code = frame.f_code
        if code.co_filename != __file__:
            found.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return found
