"""FSDP2: parameters, gradients and optimizer state sharded over the ranks with PyTorch's ``fully_shard``.

Every rank trains on its slice of the global batch, as under DDP, but keeps only its rows of every parameter; the loop
is the one of a single device (Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from course_lib.launch import rank_device
from course_lib.models import load, tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe, tensor_bytes
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
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.resume import check_saving, load_newest
from course_lib.training.sharded.fsdp_sharding import make_mesh, materialize, on_meta, proof, read_reshard, shard


def train(
    *,
    method: str = "full",
    model: str = "tiny",
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 128,
    lr: float = 1e-3,
    gradient_accumulation_steps: int = 1,
    sync_every_micro_batch: bool = False,
    max_grad_norm: float = 0.0,
    precision: str = "fp32",
    reshard_after_forward: str = "yes",
    mesh: str = "",
    offload: bool = False,
    activation_checkpointing: str = "none",
    prefetch: int = 0,
    meta_init: bool = False,
    wrap: str = "block",
    hidden: int = 128,
    layers: int = 4,
    lora_rank: int = 16,
    checkpoint_dir: str = "",
    save_every: int = 0,
    save_in_background: bool = False,
    resume: bool = False,
    seed: int = 0,
) -> Outcome:
    """Train a model under FSDP2; the default process group must be up.

    Args:
        method: "full", "lora" or "qlora", as in ``course_lib.training.finetune.building``; frozen weights are sharded too.
        model: as in ``course_lib.models.load``.
        steps, global_batch, seq_len, lr, seed: as in ``course_lib.training.ddp``.
        gradient_accumulation_steps: micro-batches a rank; gradients are scattered with the last one, and are whole on every rank before.
        sync_every_micro_batch: scatter them with every one: more traffic, and no rank holds whole gradients.
        max_grad_norm: greatest norm of the whole model's gradients; 0 does not clip.
        precision, offload, prefetch, wrap: as in ``fsdp_sharding.shard``.
        reshard_after_forward: "yes", "no" or a number of ranks, after a block's forward pass; as in ``fsdp_sharding.shard``.
        mesh: "" shards over all ranks, "2x4" over 4 in each of 2 copies of the model.
        activation_checkpointing: "none", "selective", "full".
        meta_init: no rank but the first ever holds the whole model, and that one on the host.
        hidden, layers: of the tiny model.
        lora_rank: of the adapters.
        checkpoint_dir, save_every: a folder, and after how many steps to save into it; "" and 0 save nothing.
        save_in_background: copy the shards, and write while training goes on.
        resume: go on from the newest whole checkpoint of that folder; from the start where there is none.

    Returns:
        Losses from ``extra["first_step"]`` on. In ``extra`` also what ``fsdp_sharding.proof`` found, gradient_norms (one
        a step where ``max_grad_norm`` asks for them) and quantization_constants (bytes, on every rank, beside the parameters').

    Raises:
        ValueError: choices that do not exist, or do not fit each other, the batch or the ranks.
        RuntimeError: the model did not come out sharded.
        course_lib.checkpoints.CheckpointError: a checkpoint that cannot be saved or loaded.
    """
    if max_grad_norm < 0:
        raise ValueError(
            f"max_grad_norm={max_grad_norm}: give the greatest norm that gradients may have, 0 not to clip."
        )
    if meta_init and method == "qlora":
        raise ValueError("meta_init cannot quantize weights that are not there yet: use method='full' or 'lora'.")
    check_saving(checkpoint_dir, save_every, resume)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    micro_batch_size(
        steps=steps,
        global_batch=global_batch,
        ranks=world_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
    )
    device = rank_device()
    grid = make_mesh(mesh, device.type)
    keep = read_reshard(reshard_after_forward, grid.size(-1))

    def build(place: str | torch.device) -> Any:
        whole = tiny_llama(seed=seed, hidden=hidden, layers=layers) if model == "tiny" else load(model)[0]
        return prepare(whole, device=place, storage=dtypes(method, precision).weights, **parts)

    parts: dict[str, Any] = dict(
        method=method,
        precision=precision,
        activation_checkpointing=activation_checkpointing,
        lora_rank=lora_rank,
        seed=seed,
    )
    sharding: dict[str, Any] = dict(
        mesh=grid, reshard_after_forward=keep, precision=precision, offload=offload, wrap=wrap, prefetch=prefetch
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
    first = load_newest(checkpoint_dir, data, model=net, optimizer=optimizer) if resume else 0

    observation = observe(net, optimizer)
    losses, norms, saving = [], [], None
    for step in range(first, steps):
        batch = sample_batch(
            step, global_batch=global_batch, seq_len=seq_len, rank=rank, world_size=world_size, seed=seed
        ).to(device)
        with observation.step(tokens=batch.numel()):
            total = torch.zeros((), device=device)
            micro_batches = batch.chunk(gradient_accumulation_steps)
            for i, micro_batch in enumerate(micro_batches):
                net.set_requires_gradient_sync(sync_every_micro_batch or i == len(micro_batches) - 1)
                loss = (
                    net(input_ids=micro_batch, labels=micro_batch).loss / gradient_accumulation_steps
                )  # gathers unit after unit
                scaler.scale(loss).backward()  # gathers again; as each unit is done, scatters its gradients' sums
                total += loss.detach()
            if max_grad_norm:
                scaler.unscale_(optimizer)
                norm = torch.nn.utils.clip_grad_norm_(
                    trainable(net), max_grad_norm
                )  # over all shards, not this rank's alone
                norms.append(norm.full_tensor().item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)  # for the report only
        losses.append(total.item() / world_size)
        if save_every and (step + 1) % save_every == 0:
            from course_lib.checkpoints import save, save_async  # few runs need them

            what = dict(model=net, optimizer=optimizer, extra=data, trainable_only=method != "full")
            if saving is not None:
                saving.result()  # the one before must be whole first
            saving = save_async(checkpoint_dir, step + 1, **what) if save_in_background else None
            if saving is None:
                save(checkpoint_dir, step + 1, **what)
    if saving is not None:
        saving.result()
    return outcome(
        observation,
        losses,
        type(net).__name__,
        **sharded,
        first_step=first,
        gradient_norms=norms,
        quantization_constants=constants,
    )


if __name__ == "__main__":
    run(train)
