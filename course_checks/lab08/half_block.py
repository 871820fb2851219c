"""Lab 8, exercise 1: half a transformer block under tensor and sequence parallelism, and the gradients it leaves partial."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from course_checks.harness import Contract, LiveTensors, fresh, fresh_seed, in_bytes, named_seed, run_ranks
from course_checks.lab08.common import RANKS, SIZES, lab, my_groups
from course_lib.observe import tensor_bytes
from course_lib.observe.collectives import Collective, record_collectives

CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # name -> the dimension of nn.Linear's tensor that is cut
PARTIAL = ("norm.weight", "norm.bias", "down.bias")  # each rank's gradient knows its own tokens only
HIDDEN, INNER, TOKENS = 24, 40, 16  # with 4 ranks a gathered input is larger than what may be kept
KEPT, FORWARD, BACKWARD, FINISH = "what forward keeps for backward", "forward", "backward", "finish_gradients"
HINTS = {
    "the bias of down belongs to the sum, so each token gets it once: add it after the reduce-scatter": lambda f: (
        f["clause"] == "the output" and f["biases"](f["the output"])
    ),
    "a part of a tensor is a view that keeps the whole one: clone it": lambda f: f["clause"] == "bytes of parameters",
    "keep this rank's tokens, and gather them once more in backward": lambda f: (
        f["clause"] == KEPT or f["clause"] == BACKWARD and f["kinds"].count("all_gather") < 2
    ),
    "what completes gradients belongs into finish_gradients": lambda f: (
        f["clause"] == BACKWARD and "all_reduce" in f["kinds"]
    ),
    "norm and the bias of down see only this rank's tokens: their gradients are partial sums": lambda f: (
        f["clause"] in PARTIAL and f["own"](f[f["clause"]])
    ),
    "partial sums are to be added up, not averaged": lambda f: f["clause"] in PARTIAL and f["mean"](f[f["clause"]]),
    "up.bias acts on columns that this rank has alone, and on all tokens: its gradient is whole": lambda f: (
        f["clause"] == "up.bias" and f["finished"]
    ),
}


class WholeHalfBlock(nn.Module):
    """x + down(gelu(up(norm(x)))), on one rank."""

    def __init__(self, seed: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(HIDDEN, eps=0.1),
            nn.Linear(HIDDEN, inner),
            nn.Linear(inner, HIDDEN),
        )
        for number, parameter in enumerate(self.parameters()):
            parameter.data = fresh(tuple(parameter.shape), seed, number) / parameter.shape[-1] ** 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def on_a_rank(make: Callable[..., Any], seed: int) -> str:
    """The case of 4 ranks as evidence; in groups of 2 and of 1 each group has values of its own."""
    said = [
        _right(make, group, seed + dist.get_rank() % (RANKS // size))
        for size, group in zip(SIZES, my_groups(), strict=True)
    ]
    return said[0]


def _right(make: Callable[..., Any], group: dist.ProcessGroup, seed: int) -> str:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    tokens, inner = TOKENS * (1 + (ranks == 2)), INNER * (1 + (ranks == 2))
    whole, x, gradient = WholeHalfBlock(seed, inner), *(fresh((tokens, HIDDEN), seed, 9 + i) for i in range(2))
    x.requires_grad_()
    out = whole(x)
    out.backward(gradient)
    facts = {"members": tuple(dist.get_process_group_ranks(group))}
    contract = Contract(HINTS, facts, f"rank {rank} of a group of {ranks}")
    given = copy.deepcopy(whole)
    matrices = [StorageWeakRef(part.weight.untyped_storage()) for part in (given.up, given.down)]
    block = make(given.norm, given.up, given.down, group)
    del given
    names = dict(block.named_parameters())
    expected = {n: p.chunk(ranks, CUT[n])[rank] if n in CUT else p for n, p in whole.named_parameters()}
    contract.values("the parameter", names, expected, rtol=0)
    most = int(1.01 * sum(p.nbytes for p in expected.values()))
    contract.memory("bytes of parameters", tensor_bytes(names.values()), at_most=most, at_least=most // 2)

    gc.collect()
    own = {parameter.untyped_storage()._cdata for parameter in names.values()}
    left = [storage for storage in matrices if storage.cdata not in own and not storage.expired()]
    contract.holds(not left, "somebody still holds the whole up or down that you were given", "bytes of parameters")

    part, own = x.detach().chunk(ranks)[rank].clone().requires_grad_(), gradient.chunk(ranks)[rank].clone()
    before = part.detach().clone()
    dist.barrier(group)
    with record_collectives() as calls, LiveTensors() as live:
        mine = block(part)
    often = out.chunk(ranks)[rank] + (ranks - 1) * whole.down.bias
    contract.facts["biases"] = lambda yours: ranks > 1 and torch.allclose(yours, often, 1e-3, 1e-4)
    contract.values("the output", mine, out.chunk(ranks)[rank], rtol=1e-4, atol=1e-5)
    contract.holds(torch.equal(part, before), "forward changes its input, which the norm still wants")
    sends = 4 * tokens * HIDDEN * (ranks - 1) / ranks
    _sent(contract, FORWARD, calls, {"all_gather": 1, "reduce_scatter": 1}, sends)
    needed = part.nbytes + 2 * 4 * tokens * inner // ranks  # the norm's result; gelu's input and result
    room = needed + part.nbytes + 4 * tokens * HIDDEN // 3 + 100
    kept = live.bytes(hoped=room + mine.nbytes) - mine.nbytes
    contract.memory(KEPT, kept, at_most=room, at_least=needed // 2)

    with record_collectives() as calls:
        mine.backward(own)
    contract.values("the gradient of the input", part.grad, x.grad.chunk(ranks)[rank], rtol=1e-3, atol=1e-4)
    _sent(contract, BACKWARD, calls, {"all_gather": 2, "reduce_scatter": 1}, sends)
    partial = {name: names[name].grad.clone() for name in PARTIAL if names[name].grad is not None}
    with record_collectives() as calls:
        block.finish_gradients()
    _inside(contract, FINISH, calls)
    for name, parameter in whole.named_parameters():
        right = parameter.grad.chunk(ranks, CUT[name])[rank] if name in CUT else parameter.grad
        contract.facts["own"] = lambda yours, name=name: ranks > 1 and torch.allclose(yours, partial[name])
        contract.facts["mean"] = lambda yours, right=right: ranks > 1 and torch.allclose(ranks * yours, right, 1e-3)
        contract.facts["finished"] = True
        contract.holds(names[name].grad is not None, f"{name} has no gradient after finish_gradients")
        contract.values(name, names[name].grad, right, rtol=1e-3, atol=1e-4)
    _sent(contract, FINISH, calls, {"all_reduce": 1}, 2 * 4 * 3 * HIDDEN * (ranks - 1) / ranks)
    return (
        f"one rank's output and gradients in groups of 4, 2 and 1 ranks; of 4 ranks each sent {in_bytes(sends)} per "
        f"collective, kept {in_bytes(kept)} for backward, and finished {len(PARTIAL)} gradients in "
        f"one all-reduce of {in_bytes(12 * HIDDEN)}"
    )


def _sent(contract: Contract, what: str, calls: list[Collective], due: dict[str, int], size: float) -> None:
    """Just these collectives, each sending this many bytes; on one rank none is needed, and any is welcome."""
    contract.facts["kinds"] = [call.kind for call in calls]
    _inside(contract, what, calls)
    issued = sorted(f"{c.kind} that sends {in_bytes(c.wire_bytes)}" for c in calls if len(c.group) > 1)
    wanted = sorted(f"{kind} that sends {in_bytes(size)}" for kind, count in due.items() for _ in range(count))
    told = f"{what} calls {', '.join(issued) or 'nothing'}, and should call {', '.join(wanted)}"
    contract.holds(not size or issued == wanted, told, what)


def _inside(contract: Contract, what: str, calls: list[Collective]) -> None:
    astray = [call for call in calls if call.group != contract.facts["members"]]
    contract.holds(not astray, f"{what} calls {astray and astray[0].kind} in another group than the one given", what)


@lab.exercise("Half a block, cut twice", importance=4, difficulty=4, minutes=30)
def half_block(half_block: Callable[..., Any]) -> str:
    """Output, input gradient and every parameter's gradient of one rank; bytes sent, and bytes kept for backward."""
    seed = fresh_seed()
    with named_seed(seed):
        return run_ranks(on_a_rank, half_block, seed, ranks=RANKS).results[0]
