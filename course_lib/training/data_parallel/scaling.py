"""How much faster do three hosts train than one? DDP of the tiny Llama over links of a chosen speed.

All hosts are emulated on this machine, whose cores they share, so computing is emulated, too: the tiny model's own work is
small, and every layer also sleeps its share of `compute_seconds`, one third of it forward and two thirds backward. The
gradients, their transfer over the link and DDP's overlap of both are real."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib.collectives.links import Link, ring_seconds
from course_lib.launch.emulation import emulated_hosts, through_the_link
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.validation import positive

BUCKET_MIB = 0.75  # of 3.1 MiB: about a layer each, as 25 MiB is about a layer of a small real model


@dataclass(frozen=True)
class Scaling:
    """One row of the comparison.

    Attributes:
        hosts: emulated machines of one rank each.
        tokens_per_second: of all hosts together.
        step_seconds: median of the steps after the first two (of the slowest rank in each).
        gradient_bytes: that each rank all-reduces in a step.
        losses: mean over the ranks, by step.
        emulation: how hosts, links and computing were emulated, in a sentence or two.
    """

    hosts: int
    tokens_per_second: float
    step_seconds: float
    gradient_bytes: int
    losses: list[float]
    emulation: str


def scaling(
    hosts: int,
    link: Link | str | None,
    *,
    compute_seconds: float = 0.2,
    steps: int = 6,
    gradient_accumulation_steps: int = 1,
    adapters: bool = False,
    seq_len: int = 32,
    how: str | None = None,
) -> Scaling:
    """Tokens a second of data-parallel training; every host brings a batch of its own, as many tokens as one alone.

    Args:
        hosts: 1 or more.
        link: of each host, as in ``emulated_hosts``.
        compute_seconds: slept in each micro-batch, in the place of computing.
        steps: optimizer steps, at least 3.
        gradient_accumulation_steps: micro-batches a step; gradients travel once a step.
        adapters: train LoRA adapters of rank 2 instead of all weights.
        seq_len: tokens of a micro-batch on a host.
        how: "namespaces", "delay" or None, as in ``emulated_hosts``.
    """
    positive(compute_seconds=compute_seconds, seq_len=seq_len, gradient_accumulation_steps=gradient_accumulation_steps)
    if steps < 3:
        raise ValueError(f"steps={steps}: the first two are warm-up, so take at least 3.")
    with emulated_hosts(hosts, 1, link, how=how) as machines:
        run = machines.launch(
            train,
            steps=steps,
            compute_seconds=compute_seconds,
            gradient_accumulation_steps=gradient_accumulation_steps,
            adapters=adapters,
            seq_len=seq_len,
            threads=1,
            quiet=True,
            timeout=600,
        )
        times = [max(of_ranks) for of_ranks in zip(*(result[0] for result in run.results), strict=True)]
        step = statistics.median(times[2:])
        tokens = hosts * gradient_accumulation_steps * seq_len
        emulation = f"{machines} Computing: {compute_seconds * 1e3:g} ms of sleep a micro-batch."
    return Scaling(hosts, tokens / step, step, run.results[0][2], run.results[0][1], emulation)


def expected_step(
    hosts: int,
    link: Link | str,
    *,
    gradient_bytes: int,
    compute_seconds: float = 0.2,
    gradient_accumulation_steps: int = 1,
    layers: int = 4,
) -> float:
    """Seconds of a step by arithmetic: computing, and what of the all-reduce does not hide under it.

    Gradients arrive layer by layer in the last micro-batch's backward, which takes two thirds of its computing; the wire
    may start when the last layer's are there, and has the first layer's yet to carry when backward ends.
    """
    wire = ring_seconds("all_reduce", hosts, gradient_bytes, link)
    hidden = compute_seconds * 2 / 3 * (layers - 1) / layers
    return gradient_accumulation_steps * compute_seconds + max(wire - hidden, wire / layers)


def train(
    *, steps: int, compute_seconds: float, gradient_accumulation_steps: int, adapters: bool, seq_len: int
) -> tuple[list[float], list[float], int]:
    """One rank of the comparison; the process group must be up. Returns seconds and losses by step, and gradient bytes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # of the adapters
    model = tiny_llama(seed=0)
    sleep_in_layers(model, compute_seconds)
    if adapters:
        add_adapters(model, rank=2)
    model = through_the_link(
        DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB, broadcast_buffers=False, gradient_as_bucket_view=True)
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    times, losses = [], []
    for step in range(steps):
        batch = sample_batch(
            step,
            global_batch=world_size * gradient_accumulation_steps,
            seq_len=seq_len,
            rank=rank,
            world_size=world_size,
        )
        dist.barrier()  # so that a step's time is that of the step, and not of a rank that came late to it
        total = torch.zeros(())
        began = time.perf_counter()
        for i, micro_batch in enumerate(batch.split(1)):
            with nullcontext() if i == gradient_accumulation_steps - 1 else model.no_sync():
                loss = model(input_ids=micro_batch, labels=micro_batch).loss / gradient_accumulation_steps
                loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return times, losses, sum(p.numel() * p.element_size() for p in trained)


class Adapted(torch.nn.Module):
    """A frozen linear layer and a low-rank one beside it (LoRA, arXiv:2106.09685).

    By hand: PEFT does the same, and importing it takes each rank longer than the whole comparison.
    """

    def __init__(self, frozen: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = torch.nn.Linear(frozen.in_features, rank, bias=False)
        self.b = torch.nn.Linear(rank, frozen.out_features, bias=False)
        torch.nn.init.zeros_(self.b.weight)  # so nothing changes yet

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.b(self.a(x))


def add_adapters(model: torch.nn.Module, *, rank: int) -> None:
    """Freeze the model and put an adapter beside each linear layer of its blocks, in place."""
    model.requires_grad_(False)
    linears = [
        (block, name)
        for layer in model.model.layers
        for block in layer.children()
        for name, child in block.named_children()
        if isinstance(child, torch.nn.Linear)
    ]
    for block, name in linears:
        setattr(block, name, Adapted(getattr(block, name), rank))


def sleep_in_layers(model: torch.nn.Module, seconds: float) -> None:
    """Make each of the model's layers sleep: a third of its share in forward, the rest before its gradients are made."""
    layers = model.model.layers
    share = seconds / len(layers)

    def forward(module, inputs, output):
        time.sleep(share / 3)
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: time.sleep(share * 2 / 3))

    for layer in layers:
        layer.register_forward_hook(forward)
