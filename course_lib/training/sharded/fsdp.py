"""Parameters, gradients and optimizer state sharded over the ranks with PyTorch's ``fully_shard`` (FSDP2).

Every rank trains on its slice of the global batch, as under DDP, but keeps only its rows of every parameter; the loop
is the one of a single device (Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course_lib.models import load, tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe, sent_bytes, tensor_bytes
from course_lib.training.command_line import run
from course_lib.training.finetune.building import (
    build_optimizer,
    dtypes,
    grad_scaler,
    prepare,
    quantization_constants,
    trainable,
)
from course_lib.training.micro_batches import micro_batch_size
from course_lib.training.outcome import Outcome
from course_lib.training.sharded.fsdp_sharding import make_mesh, materialize, on_meta, proof, read_reshard, shard


def train(
    *,
    method: str = "full",
    model: str = "tiny",
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    lr: float = 1e-3,
    accumulate: int = 1,
    sync_every_micro_batch: bool = False,
    clip: float = 0.0,
    precision: str = "fp32",
    reshard: str = "yes",
    mesh: str = "",
    offload: bool = False,
    checkpointing: str = "none",
    prefetch: int = 0,
    meta_init: bool = False,
    wrap: str = "block",
    hidden: int = 128,
    layers: int = 4,
    lora_rank: int = 16,
    checkpoints: str = "",
    save_every: int = 0,
    save_in_background: bool = False,
    resume: bool = False,
    seed: int = 0,
) -> Outcome:
    """Train a model under FSDP2; the default process group must be up.

    Args:
        method: "full", "lora" or "qlora", as in ``course_lib.training.finetune.building``; frozen weights are sharded too.
        model: as in ``course_lib.models.load``.
        steps, global_batch, seq_len, lr, seed: as in ``course_lib.training.data_parallel.ddp``.
        accumulate: micro-batches a rank; gradients are scattered with the last one, and are whole on every rank before.
        sync_every_micro_batch: scatter them with every one: more traffic, and no rank holds whole gradients.
        clip: greatest norm of the whole model's gradients; 0 does not clip.
        precision, offload, prefetch, wrap: as in ``fsdp_sharding.shard``.
        reshard: "yes", "no" or a number of ranks, after a block's forward pass; as in ``fsdp_sharding.shard``.
        mesh: "" shards over all ranks, "2x4" over 4 in each of 2 copies of the model.
        checkpointing: of activations: "none", "selective", "full".
        meta_init: no rank but the first ever holds the whole model, and that one on the host.
        hidden, layers: of the tiny model.
        lora_rank: of the adapters.
        checkpoints, save_every: a folder, and after how many steps to save into it; "" and 0 save nothing.
        save_in_background: copy the shards, and write while training goes on.
        resume: go on from the newest whole checkpoint of that folder; from the start where there is none.

    Returns:
        Losses from ``extra["first_step"]`` on. In ``extra`` also what ``fsdp_sharding.proof`` found, gradient_norms (one
        a step where ``clip`` asks for them) and quantization_constants (bytes, on every rank, beside the parameters').

    Raises:
        ValueError: choices that do not exist, or do not fit each other, the batch or the ranks.
        RuntimeError: the model did not come out sharded.
        course_lib.checkpoints.CheckpointError: a checkpoint that cannot be saved or loaded.
    """
    _check(clip, save_every, checkpoints or not (save_every or resume), not meta_init or method != "qlora")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro_batch_size(steps=steps, global_batch=global_batch, ranks=world_size, accumulate=accumulate)
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend() else torch.device("cpu")
    grid = make_mesh(mesh, device.type)
    keep = read_reshard(reshard, grid.size(-1))

    def build(place: str | torch.device) -> Any:
        whole = tiny_llama(seed=seed, hidden=hidden, layers=layers) if model == "tiny" else load(model)[0]
        return prepare(whole, device=place, storage=dtypes(method, precision).weights, **parts)

    parts: dict[str, Any] = dict(
        method=method, precision=precision, checkpointing=checkpointing, lora_rank=lora_rank, seed=seed
    )
    sharding: dict[str, Any] = dict(
        mesh=grid, reshard=keep, precision=precision, offload=offload, wrap=wrap, prefetch=prefetch
    )
    if meta_init:
        whole = build("cpu") if rank == 0 else None
        net = shard(prepare(on_meta(whole), device="meta", **parts), **sharding)
        materialize(net, whole, device, offload=offload)
        del whole
        constants = 0
    else:
        net = build(device)
        constants = tensor_bytes(quantization_constants(net))
        net = shard(net, **sharding)
    optimizer = build_optimizer(trainable(net), "adamw", lr)  # it sees shards, so its moments are shards
    sharded = proof(net, world_size, optimizer)
    scaler = grad_scaler(precision, device)
    data = {"global_batch": global_batch, "seq_len": seq_len, "seed": seed}
    first = _resumed(checkpoints, net, optimizer, data) if resume else 0

    seen = observe(net, optimizer)
    losses, norms, sent, saving = [], [], [], None
    for step in range(first, steps):
        batch = sample_batch(
            step, global_batch=global_batch, seq_len=seq_len, rank=rank, world_size=world_size, seed=seed
        ).to(device)
        sent.append(sent_bytes())
        with seen.step(tokens=batch.numel()):
            total = torch.zeros((), device=device)
            micro_batches = batch.chunk(accumulate)
            for i, micro_batch in enumerate(micro_batches):
                net.set_requires_gradient_sync(sync_every_micro_batch or i == len(micro_batches) - 1)
                loss = net(input_ids=micro_batch, labels=micro_batch).loss / accumulate  # gathers unit after unit
                scaler.scale(loss).backward()  # gathers again; as each unit is done, scatters its gradients' sums
                total += loss.detach()
            if clip:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(trainable(net), clip)  # over all shards, not this rank's alone
                norms.append(norm.full_tensor().item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        sent.append(sent_bytes())
        dist.all_reduce(total, op=dist.ReduceOp.SUM)  # for the report only
        losses.append(total.item() / world_size)
        if save_every and (step + 1) % save_every == 0:
            from course_lib.checkpoints import save, save_async  # few runs need them

            what = dict(model=net, optimizer=optimizer, extra=data, trainable_only=method != "full")
            if saving is not None:
                saving.result()  # the one before must be whole first
            saving = save_async(checkpoints, step + 1, **what) if save_in_background else None
            if saving is None:
                save(checkpoints, step + 1, **what)
    if saving is not None:
        saving.result()
    steps_sent = [b - a for a, b in zip(sent[::2], sent[1::2], strict=True) if a is not None and b is not None]
    late = steps_sent[len(steps_sent) // 2 :]
    return Outcome(
        losses, type(net).__name__, rank, world_size, seen.median_step, seen.tokens_per_second, seen.memory,
        wire_bytes=sum(late) / len(late) if late else None,
        extra={**sharded, "first_step": first, "gradient_norms": norms, "quantization_constants": constants},
    )  # fmt: skip


def _resumed(folder: str, model: Any, optimizer: torch.optim.Optimizer, data: dict[str, int]) -> int:
    """Steps done already: the newest whole checkpoint of `folder` is loaded, or nothing where there is none."""
    from course_lib.checkpoints import latest, load

    newest = latest(folder)
    if newest is None:
        return 0
    told = load(newest, model=model, optimizer=optimizer)
    for name, value in data.items():
        if told[name] != value:
            raise ValueError(f"{name}={value}: {newest} was trained with {told[name]}, another order of the data.")
    return told["step"]


def _check(clip: float, save_every: int, folder: str | bool, weights: bool) -> None:
    if clip < 0:
        raise ValueError(f"clip={clip}: give the greatest norm that gradients may have, 0 not to clip.")
    if save_every < 0:
        raise ValueError(f"save_every={save_every}: give a number of steps, 0 not to save.")
    if not folder:
        raise ValueError("save_every and resume need a folder: give it as checkpoints.")
    if not weights:
        raise ValueError("meta_init cannot quantize weights that are not there yet: use method='full' or 'lora'.")


if __name__ == "__main__":
    run(train)
