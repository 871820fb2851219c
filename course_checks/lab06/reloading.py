"""Lab 6, exercise 5: a checkpoint that 4 ranks saved, loaded by another number of ranks, each reading its own rows."""

from __future__ import annotations

import atexit
import functools
import gc
import math
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from course_checks.harness import LiveTensors, NotYet, nothing, run_ranks
from course_checks.lab06.common import chunk_rows, lab
from course_checks.lab06.reader import ShardReader, save_shard

SAVED_BY = 4
# 6 rows on 4 ranks are 2, 2, 2 and none; 5 are 2, 2, 1 and none; 2 are 1, 1, none and none; 10 are 3, 3, 3 and 1
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.weight": (256, 48),
    "up.weight": (10, 48),
    "up.bias": (10,),
    "middle.weight": (6, 10),
    "norm.weight": (6,),
    "down.weight": (5, 6),
    "down.bias": (5,),
    "head.weight": (2, 5),
    "scale": (1,),
}


@lab.exercise("A checkpoint at another world size", importance=5, difficulty=4, minutes=30)
def load_shard(load: Callable[..., Any]) -> str:
    """Saved by 4 real ranks of fully_shard; on 3, 1, 2 and 8 ranks each reads its own rows, and nothing but them."""
    folder = _saved()
    for ranks in (3, 8, 2):  # the rules of who has which rows, without processes
        for rank in range(ranks):
            for name in SHAPES:
                reader = ShardReader(folder, SAVED_BY, SHAPES)
                _right_rows(load(reader, name, rank, ranks), reader, name, rank, ranks)
    told = {}
    for ranks in (3, 1):
        run = run_ranks(_load, load, folder, ranks=ranks)
        for rank, each in enumerate(run.results):
            _right_memory(each, rank, ranks)
        told[ranks] = run.results[0]
    return (
        f"saved by fully_shard on {SAVED_BY} ranks; on 3 rank 0 read {told[3]['read']:,} of {_total():,} bytes, at most "
        f"{told[3]['peak']:,} bytes alive beyond its model; empty shards on 3 and 8 ranks; all of it on 1"
    )


def _total() -> int:
    return 4 * sum(math.prod(shape) for shape in SHAPES.values())


def whole(name: str) -> torch.Tensor:
    """The value of each element tells where it is."""
    return torch.arange(math.prod(SHAPES[name]), dtype=torch.float32).view(SHAPES[name])


@functools.cache
def _saved() -> str:
    """The folder of the checkpoint, saved once a session and removed at its end."""
    folder = tempfile.mkdtemp(prefix="lab06-checkpoint-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run_ranks(_save, folder, ranks=SAVED_BY)
    return folder


def _model() -> torch.nn.Module:
    """A bag of parameters under the names of SHAPES, sharded by fully_shard."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Module()
    for name, shape in SHAPES.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _save(folder: str) -> None:
    import torch.distributed as dist

    model = _model()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shards = {}
    for name, p in model.named_parameters():
        local = p.to_local().detach()
        rows = chunk_rows(SHAPES[name][0], ranks, rank)
        assert len(local) == len(rows), "fully_shard cuts as torch.chunk does"
        shards[name] = local.copy_(whole(name)[rows.start : rows.stop])
    save_shard(Path(folder), rank, shards)


def _load(load: Callable[..., Any], folder: str) -> dict[str, Any]:
    """Fill a model of this many ranks by the learner's function; how much was read, and alive at most."""
    import torch.distributed as dist

    model = _model()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reader = ShardReader(folder, SAVED_BY, SHAPES)
    gc.freeze()  # a collection then looks only at what is made from here on: 1 ms, not 100
    with LiveTensors(every=True) as alive:
        for name, p in model.named_parameters():
            rows, local = load(reader, name, rank, ranks), p.to_local()
            if not isinstance(rows, torch.Tensor) or rows.shape != local.shape:
                raise NotYet(
                    f"rank {rank} of {ranks}: fully_shard keeps {tuple(local.shape)} of {name} here, and you give "
                    f"{tuple(rows.shape) if isinstance(rows, torch.Tensor) else type(rows).__name__}"
                )
            with torch.no_grad():
                local.copy_(rows)
            del rows
    equal = [torch.equal(p.full_tensor(), whole(name)) for name, p in model.named_parameters()]
    largest = max(p.to_local().nbytes for p in model.parameters())
    return {"read": reader.bytes_read, "largest": largest, "peak": alive.highest, "equal": all(equal)}


def _right_rows(value: Any, reader: ShardReader, name: str, rank: int, ranks: int) -> None:
    """The rows that torch.chunk gives this rank, and no byte read but theirs."""
    if value is None or value is ...:
        raise nothing("this rank's rows")
    where = f"{name} of {SHAPES[name][0]} rows, rank {rank} of {ranks}"
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        raise NotYet(f"{where}: return a tensor of float32, not {getattr(value, 'dtype', type(value).__name__)}")
    rows = chunk_rows(SHAPES[name][0], ranks, rank)
    expected = whole(name)[rows.start : rows.stop]
    if value.shape != expected.shape:
        raise NotYet(f"{where}: {_why_shape(value, name, rank, ranks, expected)}")
    if not torch.equal(value, expected):
        wrong = next(i for i in range(len(rows)) if not torch.equal(value[i], expected[i]))
        is_row = int(value[wrong].flatten()[0]) // math.prod(SHAPES[name][1:])
        raise NotYet(
            f"{where}: your row {wrong} is row {is_row} of the whole tensor, and should be {rows[wrong]}. Of its rows the ranks "
            f"that saved hold {', '.join(str(len(chunk_rows(SHAPES[name][0], SAVED_BY, r))) for r in range(SAVED_BY))}"
        )
    if reader.bytes_read > expected.nbytes:
        raise NotYet(
            f"{where}: you read {reader.bytes_read:,} bytes for a shard of {expected.nbytes:,}"
            + (": the whole tensor" if reader.bytes_read == 4 * math.prod(SHAPES[name]) else "")
            + ". Of each saved shard read only the rows that overlap with yours"
        )


def _why_shape(value: torch.Tensor, name: str, rank: int, ranks: int, expected: torch.Tensor) -> str:
    """Which other rule of cutting gives this shape."""
    total = SHAPES[name][0]
    told = f"your shard has the shape {tuple(value.shape)}, and fully_shard keeps {tuple(expected.shape)}"
    if value.shape[1:] != expected.shape[1:]:
        return told + (": an empty shard keeps its other dimensions" if not expected.numel() else "")
    if len(value) == -(-total // ranks):
        return f"{told}: padded to the size of the others; the last ranks have fewer rows, or none"
    floor, more = divmod(total, ranks)
    if len(value) == floor + (rank < more):
        return (
            f"{told}: one row more for the first ranks is array_split's rule; torch.chunk gives ceil(rows / ranks) each"
        )
    if len(value) in (floor, total - floor * (ranks - 1)):
        return f"{told}: {floor} rows each leaves {more} over; torch.chunk gives ceil(rows / ranks) until none are left"
    return told


def _right_memory(told: dict[str, Any], rank: int, ranks: int) -> None:
    assert told["equal"], "rows that were compared one by one give the whole"
    if ranks > 1 and told["peak"] > 2.5 * told["largest"]:
        raise NotYet(
            f"rank {rank} of {ranks} had {told['peak']:,} bytes alive while loading, and its largest shard has "
            f"{told['largest']:,}: it holds more than its own rows at a time"
        )
