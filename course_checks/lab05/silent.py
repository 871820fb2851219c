"""Lab 5, exercise 4: a DeepSpeed program that shards nothing and says nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_checks.harness import (
    Contract,
    fresh_seed,
    healthy_untouched,
    learnable_tokens,
    named_seed,
    put_together,
    returned,
)
from course_checks.lab05.common import LENGTH, SLACK, VOCAB, Tied, lab, next_token_loss, trained, under_deepspeed
from course_lib.notebook import table
from course_lib.notebook.page import Page
from course_lib.observe.holdings import ZeroProbe
from course_lib.on_cpu.deepspeed import prepare_deepspeed
from course_lib.units import nice_bytes

ROWS, STEPS, MICRO_BATCHES = 12, 4, 2  # rows per optimizer step over all ranks
HINTS = {
    'DeepSpeed drops a value of "auto" and keys that it does not know; without a stage there is none': lambda f: (
        not f["stage"]
    ),
    "something keeps small weights whole, and here all are small": lambda f: (
        f["clause"] == "a rank's weights" and f["a rank's weights"] > f["shares"]
    ),
    "the engine counts micro-batches by calls of step()": lambda f: f["clause"] == "updates",
    "engine.backward() divides by the number of micro-batches already": lambda f: f["norm"](1 / MICRO_BATCHES),
    "which module's forward runs? DeepSpeed works in the engine's": lambda f: (
        f["clause"] in ("the loss", "the gradient norm")
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


HEALTHY = ("optimizer", "share")


def batch_of(seed: int, step: int) -> torch.Tensor:
    return learnable_tokens(ROWS, LENGTH, VOCAB, seed + step)


def on_a_rank(parts: Callable[[], Any], seed: int) -> dict[str, Any]:
    """A run put together from its parts, and the same training in one process."""
    torch.manual_seed(seed)
    model, program, ranks = Tied(), put_together(parts, Program), dist.get_world_size()
    twin = copy.deepcopy(model)
    seen: dict[str, Any] = {name: [] for name in ("losses", "alone", "norms", "right")}
    optimizer = Program.optimizer(program, twin)
    for step in range(STEPS):
        loss = next_token_loss(twin, batch_of(seed, step))
        optimizer.zero_grad()
        loss.backward()
        seen["right"].append(nn.utils.get_total_norm(p.grad for p in trained(twin)).item())
        optimizer.step()
        seen["alone"].append(loss.item())
    prepare_deepspeed()
    import deepspeed

    config = returned(program.config(ranks), dict, "the configuration")
    engine, *_ = deepspeed.initialize(model=model, optimizer=program.optimizer(model), config=config)
    for step in range(STEPS):
        rows, total = program.share(batch_of(seed, step)), torch.zeros(())
        for number, micro_batch in enumerate(rows.chunk(MICRO_BATCHES)):
            loss = returned(program.loss(engine, micro_batch), torch.Tensor, "the loss")
            total += loss.detach() / MICRO_BATCHES / ranks
            program.backward(engine, loss)
            program.step(engine, number)
        dist.all_reduce(total)
        seen["losses"].append(total.item())
        seen["norms"].append(engine.get_global_grad_norm())
    held = ZeroProbe(engine).resident()
    seen |= {"weights": held["parameters"], "moments": held["optimizer_state"], "updates": engine.global_steps}
    seen |= {"stage": engine.zero_optimization_stage(), "clipped at": engine.gradient_clipping()}
    return seen | {"rows": engine.train_batch_size()}


def observe(parts: type, ranks: int = 2) -> Page:
    """What is to be seen from outside: bytes and updates, printed, and losses and gradients beside one process's."""
    first = under_deepspeed(on_a_rank, lambda: parts, 1, ranks=ranks).results[0]
    model = sum(p.nbytes for p in Tied().parameters())
    print(f"The model has {nice_bytes(model)} of weights. Rank 0 of {ranks} holds between two steps:")
    print(f"weights {nice_bytes(first['weights'])}, moments {nice_bytes(first['moments'])}.")
    print(f"It has had {STEPS} batches, and has updated its weights {first['updates']} times.")
    columns = {"loss": "losses", "loss of one process": "alone", "gradient's norm": "norms", "of one process": "right"}
    seen = {name: [f"{x:.4f}" if x else "DeepSpeed has none" for x in first[key]] for name, key in columns.items()}
    rows = [{"step": step} | {name: column[step] for name, column in seen.items()} for step in range(STEPS)]
    return table(rows, caption="Losses are means over all ranks; a norm is that of the last update's gradient")


@lab.exercise("It says that it shards", importance=5, difficulty=3, minutes=20)
def repaired(repaired: Callable[[], Any]) -> str:
    """A share of the weights, one process's losses and gradients; healthy parts untouched."""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks in (2, 3):
            run = under_deepspeed(on_a_rank, repaired, seed, ranks=ranks)
            shares = 4 * sum(-(-p.numel() // ranks) for p in Tied().parameters())
            for rank, seen in enumerate(run.results):
                contract = Contract(HINTS, {"stage": seen["stage"], "shares": shares}, f"rank {rank} of {ranks}")
                contract.holds(seen["stage"] == 3, f"ZeRO's stage is {seen['stage']}, not 3")
                contract.memory("a rank's weights", seen["weights"], at_least=shares, at_most=shares + SLACK)
                count = f"{STEPS} batches of {ROWS} rows, and {seen['updates']} updates"
                contract.holds(seen["updates"] == STEPS, count, "updates")
                contract.holds(seen["rows"] == ROWS, f"the engine is told of {seen['rows']} rows per step, not {ROWS}")
                clipped = f"gradients are clipped to a norm of {seen['clipped at']}"
                contract.holds(not seen["clipped at"], clipped, "clipping")
                pairs = list(zip(seen["norms"], seen["right"], strict=True))
                contract.facts["norm"] = lambda f, pairs=pairs: all(abs(a / (f * b) - 1) < 0.01 for a, b in pairs)
                contract.values("the gradient norm", seen["norms"], seen["right"], rtol=1e-3)
                contract.values("the loss", seen["losses"], seen["alone"], rtol=1e-4)
    healthy_untouched(repaired(), Program, HEALTHY)
    held = f"{nice_bytes(seen['weights'])} of weights and {nice_bytes(seen['moments'])} of moments"
    return f"one process's losses and gradients on 2 and 3 ranks; each of 3 holds {held}"
