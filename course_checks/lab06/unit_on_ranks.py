"""Exercise 1 on each rank: a chain of the learner's units beside the whole chain, with a look at what is alive."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from course_checks.harness import LiveTensors, NotYet, returned
from course_checks.lab06.common import chunk_rows
from course_lib.launch.failures import own_line
from course_lib.launch.rank import PEER_LOST

WIDTH, ROWS, LR = 64, 2, 0.05
HIDDEN = (101, 85, 117, 93, 109)  # odd, and each another: no unit divides by 2, 3 or 4, and its bytes tell which it is
FROZEN = 2  # its parameters are not trained, and gradients must pass through it all the same
STEPS, ACCUMULATED = 3, 2  # the step with number ACCUMULATED calls backward twice


class Watch(LiveTensors):
    """Live tensors, with notes of how many bytes were alive at which moment."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[tuple[str, int, int]] = []  # (what, number, bytes)
        self.usual = 0  # bytes that need no second look

    def note(self, what: str, number: int, above: int = 0) -> None:
        """Remember a moment; `above`: bytes that may be there beyond the usual ones."""
        self.moments.append((what, number, self.bytes(self.usual + above)))


class Block(nn.Module):
    """What a unit wraps: ``x + up(tanh(down(x)))``, telling when it computes."""

    def __init__(self, number: int, alive: Watch | None = None) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, HIDDEN[number]), nn.Linear(HIDDEN[number], WIDTH)
        self.number, self.alive = number, alive
        if number == FROZEN:
            self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.down(x))
        if self.alive is not None:
            self.alive.note("inside", self.number, above=4 * (2 * WIDTH + 1) * HIDDEN[self.number])
        return x + self.up(hidden)


class Passed(torch.autograd.Function):
    """The identity, whose backward tells that all units after ``number`` are done, and left ``above`` bytes of .grad."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alive: Watch, number: int, above: int) -> torch.Tensor:
        ctx.alive, ctx.number, ctx.above = alive, number, above
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.alive.note("backward", ctx.number, above=ctx.above)
        return gradient, None, None, None


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def sharded(whole: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """What ``rank`` keeps of a flat tensor, zeros at the end where it does not divide."""
    each = -(-whole.numel() // ranks)
    mine = whole.new_zeros(each)
    rows = chunk_rows(whole.numel(), ranks, rank)
    mine[: len(rows)] = whole[rows.start : rows.stop]
    return mine


def rows_of(step: int, ranks: int) -> torch.Tensor:
    return torch.randn(2 * ROWS * ranks, WIDTH, generator=torch.Generator().manual_seed(step))


def own_unit(make_unit: Callable[..., Any]) -> dict[str, Any]:
    """Steps of the learner's units and of the whole chain, from another seed on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    twin = [_block(number, 0) for number in range(len(HIDDEN))]
    whole = [sum(p.numel() for p in block.parameters()) for block in twin]
    shards = [-(-numel // ranks) for numel in whole]
    told: dict[str, Any] = {"whole": whole, "shards": shards, "start": [], "steps": []}
    gc.freeze()  # a collection then looks only at what is made from here on: 1 ms, not 100
    with Watch() as alive:
        units = []
        for number in range(len(HIDDEN)):
            units.append(make_unit(_block(number, rank, alive)))
            _right_form(units[-1], number, shards[number], whole[number])
        told["rest"] = alive.bytes(hoped=4.2 * sum(shards))
        alive.usual = told["rest"] + 2 * min(whole)
        told["own storage"] = [unit_shard(unit).untyped_storage().nbytes() for unit in units]
    told["start"] = [_pair(unit_shard(unit), flat(block.parameters())) for unit, block in zip(units, twin, strict=True)]
    optimizer = torch.optim.SGD([p for unit in units for p in unit.parameters()], lr=LR)
    twin_optimizer = torch.optim.SGD([p for block in twin for p in block.parameters()], lr=LR)
    for step in range(STEPS):
        told["steps"].append(_step(step, units, twin, alive, shards))
        optimizer.step()
        twin_optimizer.step()
        optimizer.zero_grad()
        twin_optimizer.zero_grad()
    return told


def gradient_bytes(shards: list[int], first: int = 0) -> int:
    """Of the shards' gradients, from unit ``first`` on; ``shards``: elements."""
    return 4 * sum(size for number, size in enumerate(shards) if number >= first and number != FROZEN)


def unit_shard(unit: Any) -> torch.Tensor:
    return next(iter(unit.parameters())).detach()


def _block(number: int, rank: int, alive: Watch | None = None) -> Block:
    torch.manual_seed(1000 * rank + number)
    return Block(number, alive)


def _pair(mine: torch.Tensor | None, whole: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(what the learner has, what it should be)."""
    expected = sharded(whole, dist.get_world_size(), dist.get_rank())
    return None if mine is None else mine.detach().clone(), expected


def _right_form(unit: Any, number: int, shard: int, whole: int) -> None:
    """One flat parameter of the right size; anything else could not be compared."""
    returned(unit, nn.Module, "your unit")
    shapes = [tuple(p.shape) for p in unit.parameters()]
    if shapes == [(shard,)]:
        if next(iter(unit.parameters())).requires_grad == (number == FROZEN):
            raise NotYet(
                "the shard of a frozen module requires a gradient: take requires_grad over from its parameters"
                if number == FROZEN
                else "your shard does not require a gradient: make it an nn.Parameter"
            )
        return
    count = sum(p.numel() for p in unit.parameters())
    if any(isinstance(p, DTensor) for p in unit.parameters()):
        raise NotYet(
            "unit.parameters() are DTensors: fully_shard has done the work. Build the unit from all_gather and reduce_scatter, "
            f"around one flat nn.Parameter of {shard:,} elements"
        )
    if count >= whole:
        raise NotYet(
            f"unit.parameters() gives {count:,} elements, all of the module's {whole:,}: the optimizer would keep states "
            "for them all. What it may see is one flat shard; the module's own parameters must go"
        )
    if count and len(shapes) == 1 and shard > count >= whole // dist.get_world_size():
        raise NotYet(
            f"{whole:,} elements on {dist.get_world_size()} ranks: your shard has {count:,}, and the rest is lost. Pad "
            f"with zeros to {shard:,} a rank"
        )
    raise NotYet(
        f"unit.parameters() should give one flat nn.Parameter of {shard:,} elements, this rank's shard, and gives "
        + (", ".join(map(str, shapes[:4])) or "none")
    )


def _step(step: int, units: list[Any], twin: list[Block], alive: Watch, shards: list[int]) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = rows_of(step, ranks)
    mine = rows[2 * ROWS * rank : 2 * ROWS * (rank + 1)]
    parts = list(mine.split(ROWS)) if step == ACCUMULATED else [mine]
    told: dict[str, Any] = {}
    x = rows
    for block in twin:
        x = block(x)
    x.square().mean().backward()
    local = _local_gradients(twin, mine) if step == 0 else None
    alive.moments.clear()
    dist.barrier()
    with alive:
        for part in parts:
            x = part.clone()
            for number, unit in enumerate(units):
                x = unit(x)
                if not isinstance(x, torch.Tensor):
                    raise NotYet(f"your unit's forward returned {type(x).__name__}: return what the module returns")
                alive.note("between", number)
                x = Passed.apply(x, alive, number, gradient_bytes(shards, number + 1))
            loss = x.square().mean() / len(parts)
            del x
            _backward(loss)
            del loss
        told["end"] = alive.bytes(alive.usual + gradient_bytes(shards))
    dist.barrier()
    told["moments"] = list(alive.moments)
    gradients = [next(iter(unit.parameters())).grad for unit in units]
    told["gradients"] = {
        number: _pair(gradient, flat(p.grad for p in block.parameters()))
        for number, (gradient, block) in enumerate(zip(gradients, twin, strict=True))
        if number != FROZEN
    }
    if local is not None:
        told["local"] = {number: sharded(each, ranks, rank) for number, each in local.items()}
    told["frozen"] = gradients[FROZEN] is not None
    return told


def _backward(loss: torch.Tensor) -> None:
    """backward(); what the engine itself refuses has no line of the learner's, and still is the learner's."""
    try:
        loss.backward()
    except RuntimeError as error:
        frames = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
        lost = any(sign in str(error).lower() for sign in PEER_LOST)
        if own_line(frames) or lost or isinstance(error, NotImplementedError):
            raise
        why = " ".join(str(error).split())[:300]
        if "storage of size 0" in why:
            raise NotYet(
                f"backward() reads parameters that you have freed and not gathered again (PyTorch: {why})"
            ) from error
        raise NotYet(f"backward() stops outside your lines: {why}") from error


def _local_gradients(twin: list[Block], rows: torch.Tensor) -> dict[int, torch.Tensor]:
    """What this rank's rows alone would give, without touching the twin's .grad."""
    x = rows
    for block in twin:
        x = block(x)
    trained = [(n, p) for n, block in enumerate(twin) for p in block.parameters() if p.requires_grad]
    grads = torch.autograd.grad(x.square().mean(), [p for _, p in trained])
    numbers = sorted({n for n, _ in trained})
    return {n: flat(g for (m, _), g in zip(trained, grads, strict=True) if m == n) for n in numbers}
