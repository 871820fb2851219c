"""Lab 6, exercise 1: one FSDP unit in FSDP2's layout, rows of every parameter, checked method by method on ranks."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector as vector

from course_checks.harness import Contract, LiveTensors, NotYet, fresh_seed, named_seed, run_ranks
from course_checks.lab06.common import lab
from course_lib.launch.failures import own_line, place
from course_lib.observe.collectives import Collective, record_collectives

SIZES = (
    (204, 12),
    (180, 24),
    (216, 12),
    (192, 36),
    (228, 24),
)  # rows of the modules' matrices: 1 to 4 ranks share them
FROZEN = 2  # the module that is not trained; gradients must pass through it all the same
WIDTH, SLACK = 60, 21_000  # SLACK: bytes of activations; the smallest module's matrix has twice as many
SHARD, VIEW, KEPT = "a shard", "the storage of a shard", "what is alive at rest"
WHOLE, INSIDE = "a gathered parameter", "what is alive beyond the shards while it computes"
AFTER, DONE = "what is alive beyond the shards after its forward", "what is alive beyond the shards after its backward"
CALLS, GRADIENT = "the number of calls", "the gradient of the shards"


def when(clause: str, fact: str = "clause") -> Callable[[dict[str, Any]], bool]:
    """For a hint: this clause does not hold, and this fact does."""
    return lambda facts: facts["clause"] == clause and bool(facts[fact])


HINTS = {
    "rank 0's weights count, and the ranks start from different seeds: broadcast before you cut": when(SHARD, "rank"),
    "a view keeps the whole storage alive, or loses its memory with it: clone() the rows": when(VIEW),
    "the module's own parameters, or a gathered copy, are still there": when(KEPT),
    "after the optimizer has changed the shards, gather() must send them anew": when(WHOLE, "step"),
    "what arrives lies rank by rank, and each rank's part holds its rows of all parameters": when(WHOLE),
    "is the module before it free? Is there a second copy?": when(INSIDE),
    "free what you gathered. Autograd keeps the tensor for backward, so resize its storage to 0": when(AFTER),
    "modules that are done still hold parameters or full gradients": when(DONE),
    "gradients are all-reduced: every rank then holds all of them, and moves twice the bytes": when("all_reduce"),
    "all parameters of a module go into one call, not parameter by parameter": when(CALLS, "many"),
    "gathered once a step: what forward gathered was kept for backward": when(CALLS, "once"),
    "reduce_scatter sums, and FSDP averages: divide by the number of ranks": when(GRADIENT, "sum"),
    "line r of what you send goes to rank r, and must hold its rows of all gradients": when(GRADIENT, "flat"),
    "it is that of this rank's own data: the ranks' gradients were never added up": when(GRADIENT, "own"),
    "one backward() is right, and a second without zero_grad() is not: it must add to .grad": when(GRADIENT, "step"),
}


def module(number: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed + number)
    rows, few = SIZES[number]
    layers = nn.Linear(WIDTH, rows), nn.Tanh(), nn.Linear(rows, few), nn.Tanh(), nn.Linear(few, WIDTH)
    return nn.Sequential(*layers).requires_grad_(number != FROZEN)


class Chain:
    """A chain of modules with the learner's units, looked at moment by moment, and the same chain in one process."""

    def __init__(self, make: Callable[..., Any], seed: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.seed, self.live, self.peak, self.storages = seed, LiveTensors(), 0, {}
        self.contract = Contract(HINTS, {"rank": self.rank, "ranks": self.ranks, "step": 0})
        self.twin = [module(number, seed) for number in range(len(SIZES))]
        self.whole = [sum(p.nbytes for p in block.parameters()) for block in self.twin]
        self.shares = [whole // self.ranks for whole in self.whole]
        with self.live:
            self.blocks = [module(number, seed + 1000 * self.rank) for number in range(len(SIZES))]
            self.units = [make(block) for block in self.blocks]
            self.right_shards()
        for number, (block, unit) in enumerate(zip(self.blocks, self.units, strict=True)):
            wire(block, unit, trained=number != FROZEN)
            block[2].register_forward_pre_hook(lambda *_, number=number: self.inside(number))

    def at(self, moment: str) -> Contract:
        self.contract.about = f"rank {self.rank} of {self.ranks}, {moment}"
        return self.contract

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.ranks)[self.rank]

    def beyond(self, hoped: int = 0) -> int:
        """Bytes alive that were not there before forward; up to `hoped` and SLACK need no second look."""
        return max(0, self.live.bytes(self.base + hoped + SLACK) - self.base)

    def right_shards(self) -> None:
        """Step 1: rank 0's rows of each parameter, in memory of their own."""
        for number, (unit, twin) in enumerate(zip(self.units, self.twin, strict=True)):
            contract, shards = self.at(f"module {number}"), list(getattr(unit, "shards", ()))
            listed = [isinstance(shard, nn.Parameter) for shard in shards] == [True] * len(list(twin.parameters()))
            contract.holds(listed, "self.shards should be a list with an nn.Parameter for each of module.parameters()")
            for (name, p), shard in zip(twin.named_parameters(), shards, strict=True):
                rows, behind = self.mine(p), shard.untyped_storage().nbytes()
                sentence = f"{name}'s shard has the shape {tuple(shard.shape)}, not {tuple(rows.shape)}: the rows are shared evenly"
                contract.holds(shard.shape == rows.shape, sentence)
                sentence = f"{name} has requires_grad={p.requires_grad}, and its shard {shard.requires_grad}"
                contract.holds(shard.requires_grad == p.requires_grad, sentence)
                sentence = f"{name}'s shard has {shard.nbytes:,} bytes, and the storage behind it {behind:,}"
                contract.holds(shard.nbytes <= behind <= self.shares[number], sentence, VIEW)
                contract.values(SHARD, {name: shard}, {name: rows}, rtol=0.0)
        self.rest = self.base = self.live.bytes(sum(self.shares))
        self.at("no module computes").memory(KEPT, self.rest, at_most=sum(self.shares) + 1000)

    def inside(self, number: int) -> None:
        """In forward, and not yet through: this module is whole, and no other."""
        contract, whole = self.at(f"module {number}"), self.whole[number]
        for name, p in self.blocks[number].named_parameters():
            right = self.twin[number].get_parameter(name)
            storage = p.untyped_storage()
            contract.holds(storage.nbytes() >= right.nbytes, f"{name} has no memory while the module computes")
            sentence = (
                f"{name} has another storage than before, and backward reads the one of forward: fill that one again"
            )
            contract.holds(self.storages.setdefault(p, storage._cdata) == storage._cdata, sentence)
            contract.values(WHOLE, {name: p}, {name: right}, rtol=2e-4, atol=2e-6)
        beyond = self.beyond(whole)
        self.peak = max(self.peak, self.base + beyond)
        contract.memory(INSIDE, beyond, at_least=whole - SLACK, at_most=whole + SLACK)

    def done(self, number: int) -> None:
        """In backward, when the modules from `number` on have had theirs."""
        gradients = sum(share for n, share in enumerate(self.shares) if n >= number and n != FROZEN)
        self.at(f"module {number}").memory(DONE, self.beyond(gradients), at_most=gradients + SLACK)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if x.requires_grad:
                x.register_hook(lambda _, number=number: self.done(number))
            x = x + block(x)
            self.at(f"module {number}").memory(AFTER, self.beyond(), at_most=SLACK)
        return x

    def right_forward(self) -> None:
        """Step 2, under no_grad."""
        with self.live, torch.no_grad(), record_collectives() as calls:
            self.forward(torch.randn(1, WIDTH))
        self.traffic(calls, "a forward under no_grad", backwards=0)

    def right_step(self, step: int) -> None:
        """Step 3: forward and backward, in step 1 twice, on this rank's data, against the mean over all ranks' data."""
        backwards, generator = 1 + step, torch.Generator().manual_seed(self.seed + step)
        data = torch.randn(self.ranks, backwards, 1, WIDTH, generator=generator, requires_grad=True)
        trained, facts = [p for b in self.twin for p in b.parameters() if p.requires_grad], self.contract.facts
        losses = [backwards * reduce(lambda x, b: x + b(x), self.twin, rows).square().mean() for rows in data]
        of_own_data = torch.autograd.grad(losses[self.rank], trained, retain_graph=True)
        (sum(losses) / self.ranks).backward()
        facts["step"], self.base = step, self.rest
        with self.live, record_collectives() as calls:
            for x in data[self.rank]:
                self.forward(x.clone()).square().mean().backward()
                self.base += self.beyond(sum(self.shares))  # gradients, which are there when the second forward begins
        contract = self.at(f"training step {step + 1}")
        shards = [shard for number, unit in enumerate(self.units) if number != FROZEN for shard in unit.shards]
        contract.holds(all(s.grad is not None for s in shards if s.numel()), "after backward() a shard has no .grad")
        got = vector(shard if shard.grad is None else shard.grad for shard in shards)
        right, own = vector(self.mine(p.grad) for p in trained), vector(map(self.mine, of_own_data))
        blocks = [block for number, block in enumerate(self.twin) if number != FROZEN]
        flat = torch.cat([self.mine(vector(p.grad for p in block.parameters())) for block in blocks])
        for slip, value in {"sum": self.ranks * right, "flat": flat, "own": own}.items():
            facts[slip] = torch.allclose(got, value, 1e-3, 1e-6)
        contract.values(GRADIENT, got, right, rtol=1e-3, atol=1e-6)
        self.traffic(calls, f"training step {step + 1}", backwards=backwards)
        optimizer = torch.optim.SGD([*shards, *trained], lr=0.05)
        optimizer.step()
        optimizer.zero_grad()

    def traffic(self, calls: list[Collective], what: str, *, backwards: int) -> None:
        """Two gathers of each module per backward, and one reduce-scatter of each trained one."""
        if self.ranks == 1:
            return
        contract, kinds = self.at(what), {"all_gather": self.shares}
        kinds["reduce_scatter"] = [self.ranks * share for n, share in enumerate(self.shares) if n != FROZEN]
        strange = " ".join({call.kind for call in calls} - kinds.keys())
        contract.holds(not strange, f"it calls {strange}; all_gather and reduce_scatter are enough", strange)
        for (kind, sizes), times in zip(kinds.items(), (2 * backwards or 1, backwards), strict=True):
            put, needed, least = [c.bytes for c in calls if c.kind == kind], times * len(sizes), times * sum(sizes)
            contract.facts |= {"many": len(put) >= 2 * needed, "once": len(put) < needed}
            sentence = f"{len(put)} calls of {kind} for {len(sizes)} modules, and {times} for each are needed"
            contract.holds(len(put) == needed, sentence, CALLS)
            contract.memory(f"the input of {kind}", sum(put), at_least=least, at_most=1.01 * least)


@torch.no_grad()
def as_hook(method: Callable[[], Any], *_: Any) -> None:
    """As a hook, which must not return anything."""
    method()


def wire(block: nn.Module, unit: Any, *, trained: bool) -> None:
    """Call the unit's methods at their moments."""
    parameters = list(block.parameters())
    block.register_forward_pre_hook(partial(as_hook, unit.gather))
    block.register_forward_hook(partial(as_hook, unit.free))
    block.register_full_backward_pre_hook(partial(as_hook, unit.gather))
    last = partial(as_hook, lambda: all(p.grad is not None for p in parameters) and unit.reduce())
    for p in parameters if trained else ():
        p.register_post_accumulate_grad_hook(last)
    if not trained:
        block.register_full_backward_hook(partial(as_hook, unit.free))


def on_a_rank(make: Callable[..., Any], seed: int) -> dict[str, Any]:
    """What is right, step by step, and the method that is not written yet."""
    gc.freeze()  # what the rank brought along need not be looked at
    seen: dict[str, Any] = {"right": []}
    try:
        chain = Chain(make, seed)
        seen["right"].append(f"each of {chain.ranks} ranks keeps at most {chain.rest:,} of {sum(chain.whole):,} bytes")
        chain.right_forward()
        seen["right"].append(f"{chain.peak:,} while a module computes")
        for step in range(2):
            chain.right_step(step)
    except RuntimeError as error:
        if "inplace operation" in str(error):
            raise NotYet("autograd saw gather() write into the parameters: write through p.data") from error
        if "storage of size 0" in str(error):
            line = own_line([(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)])
            where = f" at {place(*line)}" if line else " in backward"
            raise NotYet(f"a parameter is read{where} while it has no memory, be it only for its p[0]") from error
        if not isinstance(error, NotImplementedError) or str(error):  # a stub's has no words
            raise
        seen["stub"] = traceback.extract_tb(error.__traceback__)[-1].name
    return seen


@lab.exercise("One FSDP unit", importance=5, difficulty=4, minutes=30)
def own_unit(make_unit: Callable[..., Any]) -> str:
    """The whole chain's numbers; rows at rest, one module at a time in full; two all-gathers, one reduce-scatter each."""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks in (2, 1, 4, 3):
            seen = run_ranks(on_a_rank, make_unit, seed, ranks=ranks).results[0]
    right = ", and ".join(seen["right"])
    if "stub" in seen:
        step, stub = len(seen["right"]), f"{seen['stub']}() is not written yet"
        raise NotYet(f"step {step} of 3 is right: {right}. Step {step + 1}: {stub}" if step else f"in __init__: {stub}")
    calls = "two all-gathers and one reduce-scatter per trained module and step"
    return f"equal to the whole chain on 1, 2, 3 and 4 ranks; {right}; {calls}"
