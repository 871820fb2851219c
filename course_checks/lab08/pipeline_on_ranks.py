"""Runs orders of a pipeline on real ranks: small stages, a sleep for the work of a large one, send and recv between them."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.parallel.schedules import Action

WIDTH, ROWS = 16, 4
FORWARD, BACKWARD = 0.006, 0.012  # seconds


def stage(number: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(40 + number)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def micro_batch(number: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(output: torch.Tensor, micro_batches: int) -> torch.Tensor:
    return output.square().mean() / micro_batches


def run_orders(orders: list[list[Action]], micro_batches: int) -> dict[str, Any]:
    """This rank's order: its events (kind, micro-batch, start, end), the most micro-batches held, its gradients."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model, held, sending, events, most = stage(rank), {}, [], [], 0
    dist.barrier()
    zero = time.perf_counter()
    for kind, number, _ in orders[rank]:
        if kind == "F":
            x = micro_batch(number) if rank == 0 else _receive(rank - 1, number)
            start = time.perf_counter()
            time.sleep(FORWARD)
            y = model(x.requires_grad_(rank > 0))
            held[number] = x, loss_of(y, micro_batches) if rank == last else y
            most = max(most, len(held))
            if rank < last:
                sending.append(dist.isend(y.detach(), rank + 1, tag=number))
        else:
            gradient = None if rank == last else _receive(rank + 1, micro_batches + number)
            start = time.perf_counter()
            time.sleep(BACKWARD)
            x, y = held.pop(number)
            y.backward(gradient)
            if rank > 0:
                sending.append(dist.isend(x.grad, rank - 1, tag=micro_batches + number))
        events.append((kind, number, start - zero, time.perf_counter() - zero))
    for work in sending:
        work.wait()
    return {"events": events, "most": most, "gradients": {n: p.grad for n, p in model.named_parameters()}}


def _receive(rank: int, tag: int) -> torch.Tensor:
    buffer = torch.empty(ROWS, WIDTH)
    dist.recv(buffer, rank, tag=tag)
    return buffer


def whole(stages: int, micro_batches: int) -> list[dict[str, torch.Tensor]]:
    """The gradients of every stage when one process computes all of them."""
    model = nn.Sequential(*(stage(number) for number in range(stages)))
    for number in range(micro_batches):
        loss_of(model(micro_batch(number)), micro_batches).backward()
    return [{n: p.grad for n, p in part.named_parameters()} for part in model]
