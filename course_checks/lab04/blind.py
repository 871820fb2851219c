"""Lab 4, exercise 4: a data-parallel run whose source nobody shows, seen by its losses and its collectives alone."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_checks.harness import (
    Contract,
    fresh_seed,
    healthy_untouched,
    named_seed,
    phases,
    put_together,
    returned,
    run_ranks,
)
from course_checks.lab04.common import flat, lab
from course_lib.notebook import table
from course_lib.notebook.page import Page

ROWS, STEPS = 11, 5
GRADIENT = "the optimizer's gradient"
HINTS = {
    "it is the ranks' sum: what is it divided by?": lambda f: f["near"](f["ranks"]),
    "the gradients of earlier steps are still in it": lambda f: f["step"] > 0 and f["near"](1, f["so far"]),
    "which gradients travel, of which rows?": lambda f: f["clause"] == GRADIENT,
}


class Training:
    """A colleague's run in eight parts; what each is meant to do stands in the exercise's text. Spoiler below."""

    def sent_at_start(self, model: nn.Module) -> list[torch.Tensor]:
        return [p.detach() for p in model.parameters()]

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        return batch[: len(batch) // dist.get_world_size()]

    def loss(self, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(rows[:, :-1]), rows[:, -1:])

    def weight(self, rows: torch.Tensor, batch: torch.Tensor) -> float:
        return len(rows) * dist.get_world_size() / len(batch)

    def reduced(self, model: nn.Module) -> list[torch.Tensor]:
        return [p.grad for p in model.parameters() if p.dim() > 1]

    def divisor(self) -> float:
        return 1

    def learning_rate(self, step: int) -> float:
        return 0.02 * min(1.0, (step + 1) / 3)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()


HEALTHY = ("loss", "weight", "learning_rate")


class Regressor(nn.Module):
    """Eight numbers to one, about a centre that is kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.randn(8))
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x - self.centre)


def batches(seed: int) -> list[torch.Tensor]:
    """A (ROWS, 9) batch for each step; the last column is the target."""
    x = torch.randn(STEPS, ROWS, 8, generator=torch.Generator().manual_seed(seed))
    return list(torch.cat([x, 1 + torch.sin(x.sum(2, keepdim=True))], 2))


def on_a_rank(parts: Callable[[], Any], seed: int) -> dict[str, Any]:
    """A run put together from its parts, and the same training in one process that has rank 0's weights."""
    torch.manual_seed(seed + 17 * dist.get_rank())
    model = Regressor()
    twin, seen = copy.deepcopy(model), {name: [] for name in ("rows", "gradients", "right", "losses", "alone")}
    for tensor in twin.state_dict().values():
        dist.broadcast(tensor, src=0)
    training = put_together(parts, Training)
    model.layers.register_forward_pre_hook(lambda _, args: seen["rows"][-1].append(args[0].detach() + model.centre))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: seen["gradients"][-1].append(flat(model.parameters())))
    dist.barrier()
    for tensor in returned(training.sent_at_start(model), (list, tuple), "the tensors of sent_at_start"):
        dist.broadcast(tensor, src=0)
    pairs = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    seen["start"] = all(torch.equal(mine, right) for mine, right in pairs)
    for step, batch in enumerate(batches(seed)):
        seen["rows"].append([]), seen["gradients"].append([])
        rows = training.share(batch.clone())
        loss = training.loss(model, rows)
        (loss * training.weight(rows, batch)).backward()
        for gradient in returned(training.reduced(model), (list, tuple), "the gradients of reduced"):
            dist.all_reduce(gradient)
            gradient /= training.divisor()
        optimizer.param_groups[0]["lr"] = training.learning_rate(step)
        training.update(optimizer)
        twin.zero_grad()
        alone = Training.loss(training, twin, batch)
        alone.backward()
        (
            seen["losses"].append(loss.item()),
            seen["alone"].append(alone.item()),
            seen["right"].append(flat(twin.parameters())),
        )
        with torch.no_grad():
            for p in twin.parameters():
                p -= Training.learning_rate(training, step) * p.grad
    seen["end"] = max(float((a - b).abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    return seen


def observe(parts: type, ranks: int = 2) -> Page:
    """What is to be seen from outside: tensors and collectives, printed, and losses beside one process's."""
    run = run_ranks(on_a_rank, lambda: parts, 1, ranks=ranks)
    tensors = ", ".join(f"{name} {tensor.nbytes}" for name, tensor in Regressor().state_dict().items())
    print(f"bytes of the model's tensors: {tensors}")
    for rank in range(ranks):
        counts = Counter(f"{c.kind} of {c.bytes} bytes" for phase in phases(run, rank)[1:] for c in phase)
        print(f"rank {rank} of {ranks}:", ", ".join(f"{count} x {what}" for what, count in counts.items()) or "nothing")
    lines = []
    for step, alone in enumerate(run.results[0]["alone"]):
        by_rank = {f"rank {rank}": f"{seen['losses'][step]:.4f}" for rank, seen in enumerate(run.results)}
        lines.append({"step": step, "one process": f"{alone:.4f}"} | by_rank)
    return table(lines, caption="Losses before each step; one process trains on the whole batch")


@lab.exercise("A run seen from outside", importance=5, difficulty=3, minutes=20)
def repaired(repaired: Callable[[], Any]) -> str:
    """The training of one process, each rank on its own rows, the gradient averaged once; healthy parts as they were."""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks in (2, 3):
            run = run_ranks(on_a_rank, repaired, seed, ranks=ranks)
            contract = Contract(about=f"{ranks} ranks")
            start = all(seen["start"] for seen in run.results)
            contract.holds(start, "when training starts, a tensor of some rank's model is not rank 0's")
            for rank, seen in enumerate(run.results):
                _right(seen, f"rank {rank} of {ranks}", ranks)
            for step, batch in enumerate(batches(seed)):
                rows = torch.cat([torch.cat(seen["rows"][step]) for seen in run.results])
                ordered = [each[each[:, 0].argsort()] for each in (rows, batch[:, :-1])]
                once = len(rows) == len(batch) and torch.allclose(*ordered, atol=1e-5)
                contract.holds(
                    once, f"step {step}: the ranks train on {len(rows)} rows of a batch of {len(batch)}, each once?"
                )
            size = 4 * flat(Regressor().parameters()).numel()
            sent = sum(c.bytes for phase in phases(run, 0)[1:] for c in phase)
            contract.memory(f"rank 0 in {STEPS} steps", sent, at_least=STEPS * size, at_most=(STEPS + 1) * size + 256)
    healthy_untouched(repaired(), Training, HEALTHY)
    return f"the training of one process on 2 and 3 ranks; {contract.evidence()}"


def _right(seen: dict[str, Any], about: str, ranks: int) -> None:
    contract, so_far = Contract(HINTS, {"ranks": ranks}, about), torch.zeros(())
    for step, (rows, gradients, right) in enumerate(zip(seen["rows"], seen["gradients"], seen["right"], strict=True)):
        contract.about, so_far = f"{about}, step {step}", so_far + right
        count, most = sum(map(len, rows)), -(-ROWS // ranks)
        contract.holds(count <= most, f"{count} rows of a batch of {ROWS} go through the model, and {most} should")
        contract.holds(len(gradients) == 1, f"the optimizer steps {len(gradients)} times")
        got = gradients[0]
        near = lambda factor, of=right, got=got: torch.allclose(got, factor * of, rtol=1e-2, atol=1e-4)  # noqa: E731
        contract.facts |= {"step": step, "so far": so_far, "near": near}
        contract.values(GRADIENT, got, right, rtol=1e-3, atol=1e-5)
    contract.about = about
    contract.holds(
        seen["end"] < 1e-4, f"the gradients are right, and a weight ends {seen['end']:.2g} off: look at the update"
    )
