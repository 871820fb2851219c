"""Tensor parallelism: every matrix of the model split over the ranks, by hand or by PyTorch's DTensor.

Every rank gets the whole batch and holds a part of each matrix (Shoeybi et al. 2019, "Megatron-LM", arXiv:1909.08053)."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from course_lib.launch import rank_device
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe, record_collectives
from course_lib.training.command_line import run
from course_lib.training.gradients import local
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.tensor.divisibility import check_split
from course_lib.training.tensor.dtensor import shard_tensors
from course_lib.training.tensor.model import TensorParallelLlama
from course_lib.validation import pick

IMPLEMENTATIONS = ("hand", "dtensor")


def train(
    *,
    implementation: str = "hand",
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    lr: float = 1e-3,
    sequence_parallel: bool = False,
    layers: int = 4,
    hidden: int = 128,
) -> Outcome:
    """Train the tiny Llama with every matrix cut over all ranks; the default process group must be up.

    Args:
        implementation: "hand" for `TensorParallelLlama`, plain PyTorch; "dtensor" for `shard_tensors`.
        steps, lr: as in ``course_lib.training.ddp``.
        global_batch, seq_len: of the batch, which goes to every rank as a whole.
        sequence_parallel: cut what lies between the matrices too, along the sequence.
        layers, hidden: of the tiny model.

    Returns:
        In ``extra``: total_elements of the model's parameters, local_elements of them on this rank, and
        collectives_per_step: kind -> (how many, bytes that this rank put into them), counted in the first step.
    """
    world_size = dist.get_world_size()
    pick("implementation", implementation, IMPLEMENTATIONS)
    micro_batch_size(steps=steps, global_batch=global_batch)
    device = rank_device()
    whole = tiny_llama(layers=layers, hidden=hidden).to(device)  # the same weights on every rank
    check_split(whole.config, world_size, seq_len=seq_len, sequence_parallel=sequence_parallel)
    total_elements = sum(p.numel() for p in whole.parameters())
    model, loss_of, after_backward = _split(whole, implementation, sequence_parallel, device)
    del whole
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    observation, losses, issued = observe(model, optimizer), [], []
    for step in range(steps):
        batch = sample_batch(step, global_batch=global_batch, seq_len=seq_len).to(device)
        recording = record_collectives() if step == 0 else nullcontext(issued)
        with observation.step(tokens=batch.numel()), recording as issued:
            with loss_parallel() if implementation == "dtensor" else nullcontext():
                loss = loss_of(batch)
                loss.backward()
            after_backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(local(loss.detach()).item())  # every rank has the loss of the whole batch already
    dist.barrier()
    return outcome(
        observation,
        losses,
        type(model).__name__,
        local_elements=sum(local(p).numel() for p in model.parameters()),
        total_elements=total_elements,
        collectives_per_step=summary([(c.kind, c.bytes) for c in issued]),
    )


def _split(whole: Any, implementation: str, sequence_parallel: bool, device: torch.device) -> tuple[Any, Any, Any]:
    """This rank's part of the model, batch -> loss, and what is left to do after the backward pass."""
    if implementation == "hand":
        model = TensorParallelLlama(whole, dist.group.WORLD, sequence_parallel=sequence_parallel)
        return model, lambda batch: model(batch, batch), model.sum_partial_gradients
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    net = shard_tensors(whole, mesh, sequence_parallel=sequence_parallel, gather_logits=False)
    # The norms' gradients are DTensors that know they are partial sums: the optimizer's step sums them.
    return net, lambda batch: net(input_ids=batch, labels=batch).loss, lambda: None


def summary(seen: list[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    """Kind -> (how many, bytes in all)."""
    counts, sizes = Counter(kind for kind, _ in seen), Counter()
    for kind, size in seen:
        sizes[kind] += size
    return {kind: (count, sizes[kind]) for kind, count in sorted(counts.items())}


if __name__ == "__main__":
    run(train)
