"""Lab 5, exercise 4: a DeepSpeed program that shards nothing and says nothing."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_checks.harness import Contract, NotYet, fresh_seed, named_seed
from course_checks.lab05.common import LENGTH, SLACK, VOCAB, Tied, lab, next_token_loss, trained, under_deepspeed
from course_lib.notebook import table
from course_lib.notebook.page import Page
from course_lib.observe.collectives import record_collectives
from course_lib.observe.holdings import ZeroProbe
from course_lib.on_cpu.deepspeed import prepare_deepspeed
from course_lib.units import nice_bytes

ROWS, STEPS, MICRO_BATCHES = 12, 4, 2  # rows per optimizer step over all ranks
KINDS = {"parameters": "weights", "optimizer_state": "moments"}
SENT = "what a rank sends in a step"
HINTS = {
    "does the configuration name a stage, as a number? DeepSpeed reads past what it does not know": lambda f: (
        f["moments"] > f["whole moments"]
    ),
    "something keeps small weights whole, and here all are small": lambda f: f["clause"] == "weights",
    "the engine counts micro-batches by calls of step()": lambda f: (
        f["clause"] == "updates" or f["norm"](MICRO_BATCHES)
    ),
    "engine.backward() divides by the number of micro-batches already": lambda f: f["norm"](1 / MICRO_BATCHES),
    "which module's forward runs? DeepSpeed works in the engine's": lambda f: (
        f["clause"] in ("the losses", "the norms", SENT)
    ),
}


class Program:
    """A colleague's program in six parts; what each is meant to do stands in the exercise's text. Spoiler below."""

    def config(self, ranks: int) -> dict[str, Any]:
        return {
            "train_batch_size": ROWS,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": "auto", "reduce_bucket_size": 20_000, "stage3_prefetch_bucket_size": 0},
        }

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.tensor_split(dist.get_world_size())[dist.get_rank()]

    def loss(self, engine: Any, rows: torch.Tensor) -> torch.Tensor:
        return next_token_loss(engine.module, rows)

    def backward(self, engine: Any, loss: torch.Tensor) -> None:
        engine.backward(loss / MICRO_BATCHES)

    def step(self, engine: Any, micro_batch: int) -> None:
        if micro_batch == MICRO_BATCHES - 1:
            engine.step()


HEALTHY = {name: vars(Program)[name] for name in ("optimizer", "share")}


def batch_of(seed: int, step: int) -> torch.Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed + step))


def on_a_rank(parts: Callable[[], Any], seed: int) -> dict[str, Any]:
    """A run put together from its parts, and the same training in one process."""
    torch.manual_seed(seed)
    model, program = Tied(), parts()
    if not (isinstance(program, type) and issubclass(program, Program)):
        raise NotYet("return the class itself, a subclass of Program")
    program, twin, ranks = program(), copy.deepcopy(model), dist.get_world_size()
    seen: dict[str, Any] = {name: [] for name in ("losses", "alone", "norms", "right", "sent")}
    optimizer = HEALTHY["optimizer"](program, twin)
    for step in range(STEPS):
        loss = next_token_loss(twin, batch_of(seed, step))
        optimizer.zero_grad()
        loss.backward()
        seen["right"].append(nn.utils.get_total_norm(p.grad for p in trained(twin)).item())
        optimizer.step()
        seen["alone"].append(loss.item())
    prepare_deepspeed()
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, optimizer=program.optimizer(model), config=program.config(ranks))
    for step in range(STEPS):
        rows, total = program.share(batch_of(seed, step)), torch.zeros(())
        with record_collectives() as issued:
            for number, micro_batch in enumerate(rows.chunk(MICRO_BATCHES)):
                loss = program.loss(engine, micro_batch)
                total += loss.detach() / MICRO_BATCHES / ranks
                program.backward(engine, loss)
                program.step(engine, number)
        dist.all_reduce(total)
        seen["losses"].append(total.item())
        seen["norms"].append(float(engine.get_global_grad_norm() or math.nan))
        seen["sent"].append(sum(c.wire_bytes for c in issued))
    held = ZeroProbe(engine).resident()
    return seen | {"updates": engine.global_steps} | {name: held[kind] for kind, name in KINDS.items()}


def observe(parts: type, ranks: int = 2) -> Page:
    """What is to be seen from outside: bytes and updates, printed, and losses and gradients beside one process's."""
    first = under_deepspeed(on_a_rank, lambda: parts, 1, ranks=ranks).results[0]
    model = sum(p.nbytes for p in Tied().parameters())
    print(f"The model has {nice_bytes(model)} of weights. Rank 0 of {ranks} holds between two steps:")
    print(f"weights {nice_bytes(first['weights'])}, moments {nice_bytes(first['moments'])}")
    print(f"It sends {nice_bytes(first['sent'][-1])} in the last step. {STEPS} batches, {first['updates']} updates")
    columns = {"loss": "losses", "loss of one process": "alone", "gradient's norm": "norms", "of one process": "right"}
    rows = [{"step": n} | {name: f"{first[key][n]:.4f}" for name, key in columns.items()} for n in range(STEPS)]
    return table(rows, caption="Losses are means over all ranks; a norm is that of the last update's gradient")


@lab.exercise("It says that it shards", importance=5, difficulty=3, minutes=20)
def repaired(repaired: Callable[[], Any]) -> str:
    """Shares of weights and moments, one process's losses and gradients, stage 3's traffic; healthy parts untouched."""
    seed = fresh_seed()
    frozen, sizes = sum(p.numel() for p in Tied().frozen.parameters()), [p.numel() for p in Tied().parameters()]
    trained_elements = sum(sizes) - frozen
    with named_seed(seed):
        for ranks in (2, 3):
            run = under_deepspeed(on_a_rank, repaired, seed, ranks=ranks)
            for rank, seen in enumerate(run.results):
                facts = {"moments": seen["moments"], "whole moments": 0.9 * 8 * trained_elements}
                contract = Contract(HINTS, facts, f"rank {rank} of {ranks}")
                pairs = list(zip(seen["norms"], seen["right"], strict=True))
                contract.facts["norm"] = lambda f, pairs=pairs: all(abs(a / (f * b) - 1) < 0.01 for a, b in pairs)
                shares = sum(-(-size // ranks) for size in sizes)
                contract.memory("moments", seen["moments"], at_least=1, at_most=8 * shares + SLACK)
                contract.memory("weights", seen["weights"], at_least=4 * shares, at_most=4 * shares + SLACK)
                count = f"{STEPS} batches of {ROWS} rows, and {seen['updates']} updates"
                if seen["updates"] != STEPS:
                    raise contract.broken(count, "updates")
                contract.values("the norms", seen["norms"], seen["right"], rtol=1e-3)
                contract.values("the losses", seen["losses"], seen["alone"], rtol=1e-4)
                once = 4 * (ranks - 1) * shares  # bytes to gather all weights, or to scatter all gradients
                at_most = 3 * MICRO_BATCHES * once * 1.05 + SLACK
                contract.memory(SENT, int(seen["sent"][-1]), at_least=1.8 * MICRO_BATCHES * once, at_most=at_most)
    program = repaired()()
    touched = [name for name, part in HEALTHY.items() if getattr(program, name).__func__ is not part]
    contract.holds(not touched, f"`{' '.join(touched)}` was healthy: change only what is broken")
    held = f"{nice_bytes(seen['weights'])} of weights and {nice_bytes(seen['moments'])} of moments"
    return f"one process's losses and gradients on 2 and 3 ranks; each of 3 holds {held}, and sends {nice_bytes(seen['sent'][-1])}"
