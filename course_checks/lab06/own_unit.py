"""Lab 6, exercise 1: one FSDP unit in FSDP2's layout, rows of every parameter, checked method by method on ranks."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector as vector

from course_checks.harness import Contract, LiveTensors, NotYet, fresh_seed, named_seed, run_ranks
from course_checks.lab06.common import chunk_rows, lab
from course_lib.observe.collectives import Collective, record_collectives

WIDTH, LR = 61, 0.05
SIZES = ((201, 2), (185, 5), (217, 1), (193, 3), (209, 7))  # rows of the modules' matrices; some are fewer than ranks
FROZEN = 2  # the module that is not trained; gradients must pass through it all the same
STEPS = 2  # in the last one backward() runs twice
SLACK = 22_000  # bytes of activations; a matrix of the smallest module has twice as many
SHARD, ROWS, KEPT = "a shard", "the rows of a shard", "what is alive at rest"
WHOLE, INSIDE = "a gathered parameter", "what is alive beyond the shards while it computes"
AFTER, DONE = "what is alive beyond the shards after its forward", "what is alive beyond the shards after its backward"
CALLS, GRADIENT = "the number of calls", "the gradient of the shards"


def at(clause: str, fact: str = "clause") -> Callable[[dict[str, Any]], bool]:
    """For a hint: this clause does not hold, and this fact does."""
    return lambda facts: facts["clause"] == clause and bool(facts[fact])


HINTS = {
    "rank 0's weights count, and the ranks start from different seeds: broadcast before you cut": at(SHARD, "rank"),
    "torch.chunk gives each rank ceil(rows / ranks) rows until none is left": at(ROWS),
    "a view keeps the whole storage alive: clone() the rows": at(KEPT, "behind views"),
    "the module's own parameters, or a gathered copy, are still there": at(KEPT),
    "after the optimizer has changed the shards, gather() must send them anew": at(WHOLE, "step"),
    "what arrives lies rank by rank, and each rank's part holds its rows of all parameters": at(WHOLE),
    "is the module before it free? Is there a second copy?": at(INSIDE),
    "free what you gathered. Autograd keeps the tensor for backward, so resize its storage to 0": at(AFTER),
    "modules that are done still hold parameters or full gradients": at(DONE),
    "gradients are all-reduced: every rank then holds all of them, and moves twice the bytes": at("all_reduce"),
    "all parameters of a module go into one call, not parameter by parameter": at(CALLS, "many"),
    "gathered once a step: what forward gathered was kept for backward": at(CALLS, "once"),
    "reduce_scatter sums, and FSDP averages: divide by the number of ranks": at(GRADIENT, "sum"),
    "it is that of this rank's own data: the ranks' gradients were never added up": at(GRADIENT, "own"),
    "one backward() is right, and a second without zero_grad() is not: it must add to .grad": at(GRADIENT, "step"),
}
REFUSED = {  # what autograd says -> what it means here
    "storage of size 0": "backward() reads parameters that are freed: gather() must fill the same tensors again",
    "inplace operation": "autograd saw that gather() writes into the parameters: write through p.data",
}


class Block(nn.Module):
    """`x + up(tanh(down(x))) * gate(x)`, which calls `inside` while it computes."""

    def __init__(self, number: int, seed: int, inside: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(seed + number)
        rows, few = SIZES[number]
        self.down, self.up, self.gate = nn.Linear(WIDTH, rows), nn.Linear(rows, WIDTH), nn.Linear(WIDTH, few)
        self.inside = inside
        self.requires_grad_(number != FROZEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside()
        return x + self.up(torch.tanh(self.down(x))) * torch.tanh(self.gate(x)).sum(-1, keepdim=True)


class Chain:
    """A chain of modules, each with the learner's unit, and the same chain in one process, looked at moment by moment."""

    def __init__(self, make: Callable[..., Any], seed: int) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.seed, self.live, self.peak = seed, LiveTensors(), 0
        self.contract = Contract(HINTS, {"rank": self.rank, "ranks": self.ranks, "step": 0})
        self.twin = [Block(number, seed) for number in range(len(SIZES))]
        self.whole = [sum(p.nbytes for p in block.parameters()) for block in self.twin]
        self.shares = [sum(-(-len(p) // self.ranks) * p[0].nbytes for p in b.parameters()) for b in self.twin]
        self.trained = sum(self.shares) - self.shares[FROZEN]
        with self.live:
            own = seed + 1000 * self.rank
            self.blocks = [Block(n, own, lambda n=n: self.inside(n)) for n in range(len(SIZES))]
            self.units = [make(block) for block in self.blocks]
            self.right_shards()
        for number, (block, unit) in enumerate(zip(self.blocks, self.units, strict=True)):
            wire(block, unit, trained=number != FROZEN)

    def at(self, moment: str) -> Contract:
        self.contract.about = f"rank {self.rank} of {self.ranks}, {moment}"
        return self.contract

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        rows = chunk_rows(len(whole), self.ranks, self.rank)
        return whole[rows.start : rows.stop]

    def beyond(self, hoped: int = 0) -> int:
        """Bytes alive that were not there before forward; up to `hoped` and SLACK need no second look."""
        return max(0, self.live.bytes(self.base + hoped + SLACK) - self.base)

    def right_shards(self) -> None:
        """Step 1: rank 0's rows of each parameter, in memory of their own."""
        for number, (unit, twin) in enumerate(zip(self.units, self.twin, strict=True)):
            contract, shards = self.at(f"module {number}"), list(getattr(unit, "shards", ()))
            count = len(list(twin.parameters()))
            told = f"self.shards should be a list of {count} nn.Parameters, one for each of module.parameters()"
            contract.holds([isinstance(shard, nn.Parameter) for shard in shards] == [True] * count, told)
            for (name, p), shard in zip(twin.named_parameters(), shards, strict=True):
                rows, shape = self.mine(p), tuple(shard.shape)
                told = f"the shard of {name} with its {len(p)} rows has the shape {shape}, not {tuple(rows.shape)}"
                contract.holds(shard.shape == rows.shape, told, ROWS)
                told = f"requires_grad of {name} is {p.requires_grad}, and that of its shard {shard.requires_grad}"
                contract.holds(shard.requires_grad == p.requires_grad, told)
                told = f"the shard of {name} is a view of the parameter, and its memory went with it: clone() the rows"
                contract.holds(shard.untyped_storage().nbytes() >= shard.nbytes, told)
                contract.values(SHARD, {name: shard}, {name: rows}, rtol=0.0)
        behind = sum(shard.untyped_storage().nbytes() for unit in self.units for shard in unit.shards)
        self.contract.facts["behind views"] = behind > 1.5 * sum(self.shares)
        self.rest = self.base = self.live.bytes(sum(self.shares))
        self.at("no module computes").memory(KEPT, self.rest, at_most=sum(self.shares) + 1000)

    def inside(self, number: int) -> None:
        """In forward, and not yet through: this module is whole, and no other."""
        contract, whole = self.at(f"module {number}"), self.whole[number]
        for (name, right), p in zip(
            self.twin[number].named_parameters(), self.blocks[number].parameters(), strict=True
        ):
            there = p.untyped_storage().nbytes() >= right.nbytes
            contract.holds(there, f"{name} has no memory while the module computes: gather() must give it some")
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
            x = block(x)
            self.at(f"module {number}").memory(AFTER, self.beyond(), at_most=SLACK)
        return x

    def right_forward(self) -> None:
        """Step 2, under no_grad."""
        x = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(self.seed))
        with self.live, torch.no_grad(), record_collectives() as calls:
            self.forward(x)
        self.traffic(calls, "a forward under no_grad", backwards=0)

    def right_step(self, step: int) -> None:
        """Step 3: forward and backward, once or twice, on this rank's data, against the mean over all ranks' data."""
        backwards, generator = 1 + (step == STEPS - 1), torch.Generator().manual_seed(self.seed + step)
        data = torch.randn(self.ranks, backwards, 1, WIDTH, generator=generator, requires_grad=True)
        twin, facts = nn.Sequential(*self.twin), self.contract.facts
        trained = [p for p in twin.parameters() if p.requires_grad]
        of_own_data = torch.autograd.grad(backwards * twin(data[self.rank]).square().mean(), trained)
        (backwards * twin(data).square().mean()).backward()
        facts["step"], self.base = step, self.rest
        with self.live, record_collectives() as calls:
            for x in data[self.rank]:
                backward(self.forward(x.clone()).square().mean())
                self.base += self.beyond(self.trained)  # gradients, which are there when the second forward begins
        contract = self.at(f"training step {step + 1}")
        shards = [shard for number, unit in enumerate(self.units) if number != FROZEN for shard in unit.shards]
        missing = sum(shard.grad is None for shard in shards if shard.numel())
        contract.holds(not missing, f"after backward() {missing} of {len(shards)} shards have no .grad")
        got = vector(shard if shard.grad is None else shard.grad for shard in shards)
        right, own = vector(self.mine(p.grad) for p in trained), vector(map(self.mine, of_own_data))
        facts |= {
            "sum": torch.allclose(got, self.ranks * right, 1e-3, 1e-6),
            "own": torch.allclose(got, own, 1e-3, 1e-6),
        }
        contract.values(GRADIENT, got, right, rtol=1e-3, atol=1e-6)
        self.traffic(calls, f"training step {step + 1}", backwards=backwards)
        optimizer = torch.optim.SGD([*shards, *trained], lr=LR)
        optimizer.step()
        optimizer.zero_grad()

    def traffic(self, calls: list[Collective], what: str, *, backwards: int) -> None:
        """Two gathers of each module per backward, and one reduce-scatter of each trained one."""
        if self.ranks == 1:
            return
        contract, kinds, modules = self.at(what), {call.kind for call in calls}, len(SIZES)
        strange = " ".join(kinds - {"all_gather", "reduce_scatter"})
        contract.holds(not strange, f"{strange}: all_gather and reduce_scatter are all that it needs", strange)
        gather, scatter = ("all_gather", modules, sum(self.shares)), ("reduce_scatter", modules - 1, self.trained)
        for (kind, count, shares), times in ((gather, 2 * backwards or 1), (scatter, backwards)):
            put = [call.bytes for call in calls if call.kind == kind]
            many, once = len(put) >= 2 * count * times, kind == "all_gather" and len(put) < count * times
            contract.facts |= {"many": many, "once": once}
            told = f"{len(put)} calls of {kind} for {count} modules, and {times} for each are needed"
            contract.holds(len(put) == count * times, told, CALLS)
            least = shares * times * (1 if kind == "all_gather" else self.ranks)
            contract.memory(f"the input of all calls of {kind}", sum(put), at_least=least, at_most=1.01 * least)


def wire(module: nn.Module, unit: Any, *, trained: bool) -> None:
    """Call the unit's methods at their moments."""

    def hook(method: Callable[[], Any]) -> Callable[..., None]:
        @torch.no_grad()
        def call(*_: Any) -> None:
            method()

        return call

    module.register_forward_pre_hook(hook(unit.gather))
    module.register_forward_hook(hook(unit.free))
    module.register_full_backward_pre_hook(hook(unit.gather))
    parameters = list(module.parameters())
    if trained:
        last = hook(lambda: unit.reduce() if all(p.grad is not None for p in parameters) else None)
        for p in parameters:
            p.register_post_accumulate_grad_hook(last)
    else:
        module.register_full_backward_hook(hook(unit.free))


def backward(loss: torch.Tensor) -> None:
    """backward(); what the engine itself refuses has no line of the learner's."""
    try:
        loss.backward()
    except RuntimeError as error:
        for words, meaning in REFUSED.items():
            if words in str(error):
                raise NotYet(meaning) from error
        raise


def on_a_rank(make: Callable[..., Any], seed: int) -> dict[str, Any]:
    """What is right, step by step, and the method that is not written yet."""
    gc.freeze()  # what the rank brought along need not be looked at
    seen: dict[str, Any] = {"right": []}
    try:
        chain = Chain(make, seed)
        ranks, whole = f"each of {chain.ranks} ranks", sum(chain.whole)
        seen["right"].append(f"{ranks} keeps at most {chain.rest:,} of {whole:,} bytes")
        chain.right_forward()
        seen["right"].append(
            f"{ranks} has {chain.rest:,} of {whole:,} bytes at rest, {chain.peak:,} while a module computes"
        )
        for step in range(STEPS):
            chain.right_step(step)
    except NotImplementedError as stub:
        if str(stub):  # PyTorch's, not a stub's
            raise
        seen["stub"] = traceback.extract_tb(stub.__traceback__)[-1].name
    return seen


@lab.exercise("One FSDP unit", importance=5, difficulty=4, minutes=35)
def own_unit(make_unit: Callable[..., Any]) -> str:
    """The whole chain's numbers; rows at rest, one module at a time in full; two all-gathers, one reduce-scatter each."""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks in (2, 1, 4, 3):
            seen = run_ranks(on_a_rank, make_unit, seed, ranks=ranks).results[0]
    right = seen["right"]
    if "stub" in seen:
        done = f"step {len(right)} of 3 is right: {right[-1]}. Step {len(right) + 1}: " if right else "__init__ calls "
        raise NotYet(f"{done}{seen['stub']}() is not written yet")
    return f"equal to the whole chain on 1, 2, 3 and 4 ranks; {right[-1]}; two all-gathers and one reduce-scatter per trained module and step"
