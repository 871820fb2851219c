"""What lab 4's checks run on each rank: the learner's code beside a twin that is trained on one rank alone.

Phases are told apart in the log of collectives by barriers: the course's own traffic comes before the first one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, LR = 3, 1e-2
VOCAB, WIDTH, LENGTH = 64, 64, 8


class SlowBackward(torch.autograd.Function):
    """The identity, whose backward takes ``seconds`` on this rank: a straggler in the middle of backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Trap(nn.Module):
    """A small next-token model with what trips up a data-parallel wrapper: tied weights and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.out.weight = self.embedding.weight
        self.straggle = 0.0  # seconds that backward loses just after the last layer's gradients are ready

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embedding(tokens))
        for i, layer in enumerate(self.layers):
            if i == len(self.layers) - 1:
                hidden = SlowBackward.apply(hidden, self.straggle)
            hidden = hidden + torch.tanh(layer(hidden))
        return self.out(hidden)


def next_token_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token; rows: (sequences, length)."""
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def rows_of_step(step: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCAB, (count, LENGTH), generator=generator)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in trainable(model).items() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def rank_zeros(model: nn.Module) -> nn.Module:
    """A copy of the model with rank 0's weights: where every rank must start."""
    twin = copy.deepcopy(model)
    for tensor in twin.state_dict().values():
        dist.broadcast(tensor, 0)
    return twin


def own_ddp(make_ddp: Callable[..., Any], bucket_bytes: int, straggle: float) -> dict[str, Any]:
    """Three steps of the learner's wrapper and of the twin; the last step with a straggler on the last rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)  # another seed a rank: only a broadcast makes the ranks agree
    model = Trap()
    twin, local = rank_zeros(model), copy.deepcopy(model)
    dist.barrier()
    wrapped = make_ddp(model, bucket_bytes)
    told: dict[str, Any] = {"start": weights(model), "expected_start": weights(twin), "steps": []}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=LR)
    for step in range(STEPS):
        rows = rows_of_step(step, 4 * world_size)
        mine = rows[4 * rank : 4 * (rank + 1)]
        local.load_state_dict(model.state_dict())
        next_token_loss(local, mine).backward()
        next_token_loss(twin, rows).backward()
        model.straggle = straggle if step == STEPS - 1 and rank == world_size - 1 else 0.0
        loss = next_token_loss(wrapped, mine)
        dist.barrier()
        began = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - began
        dist.barrier()
        wrapped.finish()
        dist.barrier()
        told["steps"].append(
            {"got": gradients(model), "expected": gradients(twin), "local": gradients(local), "backward": seconds}
        )
        for each in (optimizer, twin_optimizer):
            each.step()
            each.zero_grad()
        local.zero_grad()
    told["end"], told["expected_end"] = weights(model), weights(twin)
    told["parameter_bytes"] = [p.numel() * p.element_size() for p in trainable(model).values()]
    return told


def accumulate(step_of_learner: Callable[..., Any], sizes: list[int]) -> dict[str, Any]:
    """Two steps over micro-batches of the given sizes under DDP, and the twin's first over the whole batch.

    The second step shows whether gradients were left over, wherever the learner's code zeroes them.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Trap()
    twin = copy.deepcopy(model)
    per_rank = sum(sizes)
    rows = rows_of_step(0, per_rank * world_size)
    mine = rows[rank * per_rank : (rank + 1) * per_rank]
    wrapped = DistributedDataParallel(model)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=LR), []
    optimizer.register_step_pre_hook(lambda *_: kept.append(gradients(model)))
    passes: list[int] = []  # rows of each forward pass, 0 for a backward pass
    model.register_forward_pre_hook(lambda _, given: passes.append(len(given[0])))
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: passes.append(0))
    dist.barrier()
    loss = step_of_learner(wrapped, optimizer, list(mine.split(sizes)), next_token_loss)
    dist.barrier()
    first, steps = list(passes), len(kept)
    after = copy.deepcopy(model)
    if steps == 1:
        step_of_learner(wrapped, optimizer, list(mine.split(sizes)), next_token_loss)
    expected_loss = next_token_loss(twin, mine).item()
    next_token_loss(twin, rows).backward()
    after.zero_grad()
    next_token_loss(after, rows).backward()
    return {
        "loss": loss,
        "expected_loss": expected_loss,
        "kept": kept[:steps],
        "expected": gradients(twin),
        "passes": first,
        "second": (kept[1] if len(kept) > 1 else {}, gradients(after)),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in trainable(model).values()),
    }


def uneven(loss_weight: Callable[..., Any], rows_by_rank: list[int]) -> dict[str, Any]:
    """One backward of DDP over shards of unequal size, weighted by the learner, and the twin's over all rows."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Trap()
    twin = copy.deepcopy(model)
    rows = rows_of_step(0, sum(rows_by_rank))
    mine = rows.split(rows_by_rank)[rank]
    weight = loss_weight(len(mine), sum(rows_by_rank), world_size)
    if weight is None or weight is ...:
        return {"weight": None}
    wrapped = DistributedDataParallel(model)
    (next_token_loss(wrapped, mine) * float(weight)).backward()
    next_token_loss(twin, rows).backward()
    return {"weight": float(weight), "got": gradients(model), "expected": gradients(twin)}


# ---------------------------------------------------------------------------------------------------- planted bugs
def make_regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def regression_data(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    samples = torch.randn(count, 8, generator=generator)
    return samples, torch.sin(samples.sum(1, keepdim=True))


def repaired(train: Callable[..., Any], steps: int, micro_batch: int, lr: float) -> dict[str, Any]:
    """The learner's training, and what the right one and each planted bug would give, computed without ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(500 + rank)
    own_start = make_regressor()
    start = rank_zeros(own_start)
    samples, targets = regression_data()
    torch.manual_seed(500 + rank)  # the model that the learner's code makes is own_start again
    dist.barrier()
    model = train(make_regressor, samples, targets, steps=steps, micro_batch=micro_batch, lr=lr)
    dist.barrier()
    if not isinstance(model, nn.Module):
        return {"model": model if model is None or model is ... else type(model).__name__}
    kinds = {
        "right": dict(same_rows=False, average_parameters=False),
        "same rows": dict(same_rows=True, average_parameters=False),
        "parameters": dict(same_rows=False, average_parameters=True),
    }
    outcomes = {
        name: _simulate(start, samples, targets, world_size, steps, micro_batch, lr, **k) for name, k in kinds.items()
    }
    inner = getattr(model, "module", model)
    return {
        "model": "given",
        "end": weights(inner),
        "outcomes": outcomes,
        "gradient_bytes": sum(p.numel() * p.element_size() for p in own_start.parameters()),
    }


def _simulate(
    start: nn.Module,
    samples: torch.Tensor,
    targets: torch.Tensor,
    world_size: int,
    steps: int,
    micro_batch: int,
    lr: float,
    *,
    same_rows: bool,
    average_parameters: bool,
) -> dict[str, torch.Tensor]:
    """Data parallelism played by one process: one model and optimizer a rank, averaged by hand."""
    models = [copy.deepcopy(start) for _ in range(world_size)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=lr) for model in models]
    for step in range(steps):
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(step))
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            at = 0 if same_rows else rank
            rows = order[at * micro_batch : (at + 1) * micro_batch]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(samples[rows]), targets[rows]).backward()
        if not average_parameters:
            _average([[p.grad for p in model.parameters()] for model in models])
        for optimizer in optimizers:
            optimizer.step()
        if average_parameters:
            _average([[p.data for p in model.parameters()] for model in models])
    return weights(models[0])


def _average(tensors_by_rank: list[list[torch.Tensor]]) -> None:
    for same in zip(*tensors_by_rank, strict=True):
        mean = torch.stack(same).mean(0)
        for tensor in same:
            tensor.copy_(mean)
