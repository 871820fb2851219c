"""What lab 5's checks run on each rank: the learner's code, and what one rank alone would have come to.

Phases are told apart in the log of collectives by barriers: the course's own traffic comes before the first one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_checks.harness import bytes_behind_views, live_bytes, settled_bytes
from course_checks.lab05.common import SLACK, slots
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe.holdings import ZeroProbe
from course_lib.on_cpu.deepspeed import assert_sharded, prepare_deepspeed

STEPS, LR, DECAY = 3, 1e-2, 0.1
VOCAB, WIDTH, LENGTH = 61, 24, 6


class Trap(nn.Module):
    """A small next-token model with what trips up code that shards: a frozen layer first, tied weights, a lone scalar,
    an expert that a rank may not use, and 3,841 trainable parameters, which 2, 3 and 4 ranks cannot share out evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.expert = nn.Linear(WIDTH, WIDTH, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.out.weight = self.embedding.weight
        self.uses_expert = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embedding(tokens))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        if self.uses_expert:
            hidden = hidden + self.expert(hidden)
        return self.out(hidden) * self.temperature


def next_token_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token; rows: (sequences, length)."""
    return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def rows_of(step: int, rank: int = 0, count: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + 50 * step + rank)
    return torch.randint(VOCAB, (count, LENGTH), generator=generator)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def flat_gradients(model: nn.Module) -> torch.Tensor:
    """Of all trainable parameters in one vector; zeros where there is no gradient."""
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in trainable(model)])


# ------------------------------------------------------------------------------------------------- a sharded optimizer
def sharded_optimizer(make: Callable[..., Any]) -> dict[str, Any]:
    """Three steps of the learner's optimizer on gradients that all ranks agree on, and what they should have come to."""
    torch.manual_seed(100 + dist.get_rank())  # another seed a rank; the weights are made equal here, as DDP does
    model = Trap()
    for tensor in model.parameters():
        dist.broadcast(tensor.data, 0)
    told = {"expected": _alone(model, "right"), "start": flat(trainable(model)), "after": []}
    told["mistakes"] = {name: _alone(model, name) for name in ("sgd", "no decay", "coupled decay", "always step 1")}
    frozen = flat(list(model.frozen.parameters()))
    before = live_bytes()
    dist.barrier()
    optimizer = make(list(model.parameters()), lr=LR, weight_decay=DECAY)
    for step in range(STEPS):
        next_token_loss(model, rows_of(step)).backward()
        dist.barrier()
        optimizer.step()
        dist.barrier()
        for p in model.parameters():
            p.grad = None
        told["after"].append(flat(trainable(model)))
    in_log = sum(tensor.nbytes for tensor in told["after"])
    before += in_log
    whole = 4 * len(told["start"])
    told["held"] = settled_bytes(before + 12 * slots(len(told["start"]), dist.get_world_size()) + SLACK) - before
    told["behind_views"] = bytes_behind_views([*model.parameters(), *told["after"]], whole)
    told["frozen_moved"] = not torch.equal(frozen, flat(list(model.frozen.parameters())))
    told["frozen_bytes"] = frozen.nbytes
    return told


def _alone(model: nn.Module, kind: str) -> list[torch.Tensor]:
    """The trainable weights after each step of one rank that shards nothing, right or with a known mistake."""
    twin = copy.deepcopy(model)
    make = {"sgd": torch.optim.SGD, "coupled decay": torch.optim.Adam}.get(kind, torch.optim.AdamW)
    optimizer = make(trainable(twin), lr=LR, weight_decay=0.0 if kind == "no decay" else DECAY)
    after = []
    for step in range(STEPS):
        optimizer.zero_grad()
        next_token_loss(twin, rows_of(step)).backward()
        if kind == "always step 1":
            for state in optimizer.state.values():
                state["step"].zero_()
        optimizer.step()
        after.append(flat(trainable(twin)))
    return after


# ------------------------------------------------------------------------------------------- gradients, reduce-scattered
def gradient_slice(function: Callable[..., Any], skip_expert: bool) -> dict[str, Any]:
    """One backward on rows of this rank's own, and the learner's reduce-scatter. ``skip_expert``: not on the last rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Trap()
    locals_ = []
    for each in range(ranks):
        model.uses_expert = not (skip_expert and each == ranks - 1 and ranks > 1)
        next_token_loss(model, rows_of(0, each)).backward()
        locals_.append(flat_gradients(model))
        model.zero_grad()
    size, padding = len(locals_[0]), -len(locals_[0]) % ranks
    expected = torch.cat([torch.stack(locals_).mean(0), torch.zeros(padding)])
    local = torch.cat([locals_[rank], torch.zeros(padding)])
    del locals_
    before = live_bytes()
    model.uses_expert = not (skip_expert and rank == ranks - 1 and ranks > 1)
    next_token_loss(model, rows_of(0, rank)).backward()
    dist.barrier()
    got = function(list(model.parameters()))
    dist.barrier()
    held = settled_bytes(before + 4 * slots(size, ranks) + SLACK) - before
    behind_views = bytes_behind_views(model.parameters(), 4 * size)
    mine = slice(rank * slots(size, ranks), (rank + 1) * slots(size, ranks))
    return {
        "got": got.detach().clone() if isinstance(got, torch.Tensor) else got,
        "expected": expected,
        "local": local[mine],
        "held": held,
        "behind_views": behind_views,
        "kept": [name for name, p in model.named_parameters() if p.grad is not None],
        "size": size,
        "frozen": sum(p.numel() for p in model.frozen.parameters()),
    }


# --------------------------------------------------------------------------------------------- checkpoints, re-sharded
SHARDED = ("weights", "exp_avg", "exp_avg_sq")


def train_on_shards(shards: list[dict[str, Any]] | None, first: int, last: int, save_at: int = -1) -> dict[str, Any]:
    """Train from step ``first`` to ``last`` with AdamW's state in slices; from ``shards``, or from the beginning.

    Returns the whole weights at the end, and this rank's shard as it was after ``save_at`` steps.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Trap()
    whole = flat(trainable(model))
    numel, size = len(whole), slots(len(whole), ranks)
    padded = torch.cat([whole, torch.zeros(-numel % ranks)])
    mine = nn.Parameter(padded[rank * size : (rank + 1) * size].clone())
    optimizer = torch.optim.AdamW([mine], lr=LR, weight_decay=DECAY)
    if shards is not None:
        shard = shards[rank]
        mine.data.copy_(shard["weights"])
        moments = {name: shard[name].clone() for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[mine] = {"step": torch.tensor(float(shard["step"])), **moments}
    saved: dict[str, Any] = {}
    for step in range(first, last + 1):  # the last round only gathers
        if step == save_at:
            state = optimizer.state[mine]
            saved = {"rank": rank, "ranks": ranks, "numel": numel, "step": step, "weights": mine.data.clone()}
            saved |= {name: state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
        dist.all_gather_into_tensor(padded, mine.data)
        at = 0
        for p in trainable(model):
            p.data.copy_(padded[at : at + p.numel()].view_as(p))
            at += p.numel()
        if step < last:
            model.zero_grad()
            next_token_loss(model, rows_of(step)).backward()
            gradients = torch.cat([flat_gradients(model), torch.zeros(-numel % ranks)])
            mine.grad = gradients[rank * size : (rank + 1) * size].clone()
            optimizer.step()
    return {"shard": saved, "weights": padded[:numel].clone()}


# -------------------------------------------------------------------------------------------------- DeepSpeed's own engine
def train_by_config(config: dict[str, Any]) -> dict[str, Any]:
    """Two steps by a DeepSpeed configuration, beside one rank's AdamW on the whole batch.

    Its AdamW is PyTorch's: DeepSpeed's own would have to be compiled first.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = tiny_llama(hidden=32, layers=1)
    twin = copy.deepcopy(model)
    config = copy.deepcopy(config) | {"zero_force_ds_cpu_optimizer": False}
    settings = config.pop("optimizer")["params"]
    for name in ("torch_adam", "adam_w_mode"):  # DeepSpeed's words; PyTorch knows none of them
        settings.pop(name, None)
    prepare_deepspeed()
    import deepspeed

    sharded = torch.optim.AdamW(model.parameters(), **settings)
    engine, *_ = deepspeed.initialize(model=model, optimizer=sharded, config=config)
    assert_sharded(engine)
    size, accumulate = engine.train_batch_size(), engine.gradient_accumulation_steps()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    losses, expected = [], []
    for step in range(2):
        mine = sample_batch(step, global_batch=size, seq_len=32, rank=rank, world_size=ranks).to(engine.device)
        total = torch.zeros((), device=engine.device)
        for micro_batch in mine.chunk(accumulate):
            loss = engine(input_ids=micro_batch, labels=micro_batch).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / accumulate / ranks
        dist.all_reduce(total)
        losses.append(total.item())
        whole = sample_batch(step, global_batch=size, seq_len=32, rank=0, world_size=1)
        loss = twin(input_ids=whole, labels=whole).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    probe = ZeroProbe(engine)
    return {
        "wrapper": type(engine).__name__,
        "stage": engine.zero_optimization_stage(),
        "losses": losses,
        "expected": expected,
        "resident": probe.resident(),
        "on_host": probe.on_host(),
        "weights": sum(p.numel() for p in model.parameters()),
    }
