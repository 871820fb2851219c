"""Data-parallel training that can be killed at any moment and continues exactly, even on fewer ranks.

A resume must restore weights, optimizer, learning-rate schedule, random numbers and the position in the data, and sums must
not depend on the number of ranks (see ``gradient_sums``). Equal bit for bit on CPU ranks; on GPUs only as far as their
kernels are deterministic (``torch.use_deterministic_algorithms``).

    torchrun --nproc_per_node 2 --max-restarts 3 -m course_lib.training.resumable.program --checkpoint-dir runs/x
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from course_lib.checkpoints import CheckpointError, latest, load, save
from course_lib.checkpoints.errors import share
from course_lib.launch import rank_device
from course_lib.launch.threads import one_thread
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.observe import observe
from course_lib.training.command_line import run
from course_lib.training.outcome import Outcome, outcome
from course_lib.training.resumable.callbacks import Reports
from course_lib.training.resumable.faults import SPOILED_LOSS, die, forget_after_load, parts_to_load, spoiled
from course_lib.training.resumable.gradient_sums import shards_of, stream_seed, sum_as_it_comes, sum_exactly
from course_lib.training.resumable.journal import Journal, read, steps_that_count
from course_lib.training.resumable.spikes import SpikeDetector
from course_lib.training.resumable.state import (
    Progress,
    configuration,
    digest,
    fingerprint,
    set_dropout,
    snapshot,
    warm_up_and_cosine,
)
from course_lib.training.resumable.validation import PATIENCE, check, check_same, give_up_after


def train(
    *,
    steps: int = 20,
    global_batch: int = 8,
    seq_len: int = 64,
    lr: float = 1e-3,
    warmup: int = 3,
    dropout: float = 0.1,
    max_grad_norm: float = 0.0,
    virtual_ranks: int = 4,
    exact: bool = True,
    checkpoint_dir: str = "",
    save_every: int = 5,
    keep: int = 2,
    resume: bool = True,
    stop_at: int = 0,
    on_spike: str = "none",
    heartbeat: str = "",
    heartbeat_every: float = 10.0,
    log: Callable[..., None] | None = None,
    spoil_step: int = -1,
    forget: str = "",
    die_at: int = -1,
    die_rank: int = 0,
    hidden: int = 128,
    layers: int = 4,
    seed: int = 0,
) -> Outcome:
    """Train the tiny Llama with dropout so that it can be stopped and resumed; the default process group must be up.

    Args:
        steps: updates of the whole run; the learning rate's schedule is made for them.
        global_batch, seq_len, seed: as in ``course_lib.training.ddp``.
        lr, warmup: AdamW's highest learning rate, reached after ``warmup`` updates; a cosine brings it to a tenth.
        dropout: share of attention weights and of the MLPs' outputs that is zeroed.
        max_grad_norm: greatest norm of the gradients; 0 does not clip.
        virtual_ranks: shards of the global batch, each with its own stream of random numbers. At least as many as the
            ranks will ever be; a run keeps its number.
        exact: add gradients in one fixed order, for losses equal bit for bit on 1, 2 or 4 ranks; else by all-reduce.
        checkpoint_dir, save_every, keep: a folder, after how many updates to save into it, how many to keep. The end of the
            run is saved too. "" saves nothing.
        resume: go on from the newest whole checkpoint of the folder, where there is one.
        stop_at: leave after so many updates, saving nothing, as a job does whose time is up; 0 for ``steps``.
        on_spike: "skip" leaves out the update of a batch whose loss or gradient norm is a spike (``course_lib.training.resumable.spikes``);
            "rollback" also goes back to the last checkpoint, and on with the batches after the spike; "none" tells it.
        heartbeat, heartbeat_every: as in ``callbacks.Reports``.
        log: called as ``log(step, **numbers)`` after each update, on every rank.
        spoil_step, forget, die_at, die_rank: faults to plant, as in ``faults``: the batch at this place of the
            data is random bytes, with 100 times its loss; what a resume gets wrong; the update before which a rank dies.
        hidden, layers: of the tiny model.

    Returns:
        Losses of all updates from the first one on, those before the resume read from the journal in ``checkpoint_dir``. In
        ``extra``: first_step (of this process), last_norm, left_out (batches that no update stands for), fingerprint (of
        all tensors at the end), failed_saves, and record: the journal's folder, or its events where there is none
        (``comparison`` reads both).

    Raises:
        ValueError: choices that do not exist, or do not fit each other, the checkpoint or the ranks.
        CheckpointError: a checkpoint that cannot be loaded, or the last one that cannot be saved; an earlier one that
            cannot be saved is told, and training goes on.
        RuntimeError: spike after spike, without progress between them.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check(**locals())
    device = rank_device()
    model = tiny_llama(seed=seed, hidden=hidden, layers=layers).to(device)  # the same weights on every rank
    set_dropout(model, dropout)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine(warmup, steps))
    detector, at = SpikeDetector(), Progress()
    data = {"seed": seed, "global_batch": global_batch, "seq_len": seq_len, "virtual_ranks": virtual_ranks}
    asked = {
        **data,
        "steps": steps,
        "lr": lr,
        "warmup": warmup,
        "dropout": dropout,
        "max_grad_norm": max_grad_norm,
        "exact": exact,
    }

    def save_here() -> bool:
        journal.to_disk()
        extra = {"progress": asdict(at), "detector": detector.state_dict(), "asked": asked}
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        try:
            with reports.long(at.step, "save"):
                save(checkpoint_dir, at.step, **parts, extra=extra, keep=keep)
        except CheckpointError as error:
            if at.step == steps:
                raise
            journal.write("not saved", step=at.step, why=str(error))
            if rank == 0:
                print(f"{error} Training goes on.", flush=True)
            return False
        journal.write("saved", **snapshot(model, optimizer, scheduler, at))
        return True

    def load_newest(lost: str = "") -> Progress:
        with reports.long(at.step, "load"):
            told = load(checkpoint_dir, model=model, **parts_to_load(lost, optimizer, scheduler))
        for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = rate
        detector.load_state_dict(told["detector"])
        check_same(data, asked, told["asked"], tell=rank == 0)
        return Progress(**told["progress"])

    with one_thread(), Reports(heartbeat, heartbeat_every, log, rank) as reports:
        newest = share(latest(checkpoint_dir) if checkpoint_dir and rank == 0 else None)
        if newest is not None and not resume:
            raise ValueError(f"{newest} is there already: resume from it, or give the new run a folder of its own.")
        journal = Journal(checkpoint_dir, rank, share(read(checkpoint_dir) if checkpoint_dir and rank == 0 else []))
        if newest is not None:
            at = load_newest(forget)
            forget_after_load(forget, model, at)
        first, failed_saves, norm, gone_back = at.step, 0, None, Counter()
        real = configuration(
            model,
            optimizer,
            **data,
            warmup=warmup,
            steps=steps,
            max_grad_norm=max_grad_norm,
            exact=exact,
            world_size=world_size,
        )
        journal.write("start", config=real, **snapshot(model, optimizer, scheduler, at))
        if on_spike == "rollback" and newest is None:
            save_here()  # a spike may come before the first checkpoint

        observation = observe(model, optimizer)
        while at.step < (stop_at or steps):
            die(at.step, die_at, rank, die_rank)
            batch = sample_batch(at.position, global_batch=global_batch, seq_len=seq_len, seed=seed).to(device)
            if at.position == spoil_step:
                batch = spoiled(batch, seed)
            shards = batch.chunk(virtual_ranks)
            mine = shards_of(rank, world_size, virtual_ranks)
            with observation.step(tokens=shards[0].numel() * len(mine)):
                rows = []
                reports.beat(at.step, "forward and backward")
                for virtual_rank in mine:
                    torch.manual_seed(stream_seed(seed, virtual_rank, at.drawn))  # this shard's dropout, on any rank
                    loss = model(input_ids=shards[virtual_rank], labels=shards[virtual_rank]).loss / virtual_ranks
                    loss = loss * SPOILED_LOSS if at.position == spoil_step else loss
                    loss.backward()
                    rows.append(torch.cat([*(p.grad.flatten() for p in parameters), loss.detach().view(1)]))
                    optimizer.zero_grad()
                reports.beat(at.step, "sum of gradients")
                total = sum_exactly(torch.stack(rows), virtual_ranks) if exact else sum_as_it_comes(torch.stack(rows))
                *gradients, mean = total.split([*(p.numel() for p in parameters), 1])  # the loss went along with them
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.grad = gradient.view_as(parameter)
                norm = get_total_norm([p.grad for p in parameters]).item()
                verdict = detector.update(at.step, mean.item(), norm)  # the same on every rank, before any update
                told = {"step": at.step, "position": at.position, "drawn": at.drawn, "loss": mean.item(), "norm": norm}
                at.position, at.drawn = at.position + 1, at.drawn + 1
                good = verdict.ok or on_spike == "none"
                reports.beat(at.step, "update")
                if good:
                    if max_grad_norm:
                        clip_grads_with_norm_(parameters, max_grad_norm, torch.tensor(norm, device=device))
                    told |= {"lr": optimizer.param_groups[0]["lr"], "batch": digest(batch)}
                    optimizer.step()
                    scheduler.step()
                    at.step += 1
                optimizer.zero_grad()
            if not verdict.ok:
                journal.write("spike", **told, kind=verdict.kind, reason=verdict.reason, action=on_spike)
            if good:
                journal.write("step", **told)
                own = torch.stack(rows)[:, -1].sum().item() * virtual_ranks / len(mine)  # what an average would hide
                reports.log(
                    told["step"],
                    tokens=shards[0].numel() * len(mine),
                    loss=told["loss"],
                    own_loss=own,
                    gradient_norm=norm,
                    learning_rate=told["lr"],
                )
                if checkpoint_dir and (at.step % save_every == 0 or at.step == steps):
                    failed_saves += not save_here()
                continue
            if on_spike == "skip":
                give_up_after(PATIENCE, verdict.in_a_row, verdict)
            else:
                after_the_spike = at.position
                at = load_newest()
                at.position = after_the_spike
                journal.write("rollback", **asdict(at))
                gone_back[at.step] += 1
                give_up_after(PATIENCE, gone_back[at.step], verdict)
        dist.barrier()  # nobody leaves, and takes the connections down, while another still writes
    journal.close()
    state = fingerprint(model, optimizer)
    return outcome(
        observation,
        [told["loss"] for _, told in sorted(steps_that_count(journal.events).items())],
        type(model).__name__,
        first_step=first,
        last_norm=norm,
        left_out=at.position - at.step,
        failed_saves=failed_saves,
        fingerprint=digest(torch.tensor(bytearray("".join(state.values()).encode()))),
        record=checkpoint_dir or journal.events,
    )


if __name__ == "__main__":
    run(train)
