"""What exercise 1's check runs on each rank: the learner's parallel MLP beside the whole one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from course_checks.harness import NotYet, nothing
from course_checks.lab08.common import SIZES, my_groups

HIDDEN, INNER, ROWS = 24, 64, 10
SPLIT = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None}  # name -> the dimension that is cut


def whole_layers() -> dict[str, nn.Linear]:
    """The whole MLP, the same on every rank; its biases are large, so that one too many shows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        layers = {"up": nn.Linear(HIDDEN, INNER), "down": nn.Linear(INNER, HIDDEN)}
        for layer in layers.values():
            nn.init.normal_(layer.bias)
    return layers


def shard(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What rank `rank` of `ranks` keeps of a whole tensor."""
    return tensor if SPLIT[name] is None else tensor.chunk(ranks, SPLIT[name])[rank]


def parallel_mlp(make_mlp: Callable[..., Any]) -> dict[int, dict[str, Any]]:
    """Forward and backward of the learner's MLP in groups of 4, 2 and 1; three barriers around each."""
    groups = my_groups()
    torch.manual_seed(100 + dist.get_rank())  # another seed a rank: nothing may depend on chance
    return {size: _one_group(make_mlp, groups[size], size) for size in SIZES}


def _one_group(make_mlp: Callable[..., Any], group: Any, size: int) -> dict[str, Any]:
    rank, place = dist.get_rank(), dist.get_rank(group)
    rows = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(rank // size))  # the same in a group
    weights = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(77))
    twin, layers = whole_layers(), whole_layers()
    gc.freeze()  # the collection below then looks only at what is made from here on: 1 ms, not 100
    kept = [StorageWeakRef(layer.weight.untyped_storage()) for layer in layers.values()]
    mlp = make_mlp(layers["up"], layers["down"], group)
    if not isinstance(mlp, nn.Module):
        raise NotYet(f"ParallelMLP should be an nn.Module, and is {type(mlp).__name__}")
    layers.clear()
    gc.collect()
    whole = {f"{name}.{what}": p for name, layer in twin.items() for what, p in layer.named_parameters()}
    told: dict[str, Any] = {
        "alive": sum(not ref.expired() for ref in kept),
        "views": [n for n, p in mlp.named_parameters() if p.untyped_storage().nbytes() > p.nbytes],
        "kinds": {n: type(p.data).__name__ for n, p in mlp.named_parameters()},
        "shapes": {n: tuple(p.shape) for n, p in mlp.named_parameters()},
        "expected shapes": {n: tuple(shard(n, p, place, size).shape) for n, p in whole.items()},
    }
    if told["shapes"] != told["expected shapes"] or set(told["kinds"].values()) != {"Tensor"}:
        for _ in range(3):  # the log of collectives is cut in equal phases, also where nothing can be run
            dist.barrier()
        return told
    own = dict(mlp.named_parameters())
    told["start"] = {n: (p.detach().clone(), shard(n, whole[n], place, size).detach()) for n, p in own.items()}
    x, y = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    dist.barrier()
    output = mlp(x)
    if output is None or output is ...:
        raise nothing("the output of forward")
    if not isinstance(output, torch.Tensor):
        raise NotYet(f"your forward returned {type(output).__name__}: return the output, ({ROWS}, {HIDDEN})")
    dist.barrier()
    if output.shape == weights.shape:
        (output * weights).sum().backward()
    dist.barrier()
    inner = nn.functional.gelu(twin["up"](y))
    expected = twin["down"](inner)
    (expected * weights).sum().backward()
    part = inner.chunk(size, 1)[place] @ twin["down"].weight.chunk(size, 1)[place].T
    told["output"], told["expected"] = output.detach(), expected.detach()
    told["part"], told["bias"] = part.detach(), twin["down"].bias.detach()
    told["input gradient"], told["expected input gradient"] = x.grad, y.grad
    told["gradients"] = {n: p.grad for n, p in own.items()}
    told["expected gradients"] = {n: shard(n, p.grad, place, size).clone() for n, p in whole.items()}
    return told
