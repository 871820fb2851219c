"""Train a tiny language model on all ranks so that it can be stopped at any moment and goes on as if nothing had happened.

    torchrun --nproc-per-node 2 --max-restarts 3 train.py --checkpoint-dir runs/resumable

A killed rank takes the others down; torchrun starts all of them again, and they go on from the newest complete checkpoint.
On SIGTERM, which is how schedulers say that the time is up, all ranks save at the end of the same step and leave.
"""

import argparse
import json
import math
import signal
import statistics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from course_lib.checkpoints import latest, load, save  # written beside, then renamed: complete or not there
from course_lib.launch import process_group
from course_lib.launch.group import end_process
from course_lib.models.data import sample_batch

GLOBAL_BATCH, SEQ_LEN = 8, 128


class TinyModel(nn.Module):
    """Two transformer blocks over bytes, with dropout, so that the random numbers matter."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(SEQ_LEN, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(sequences, tokens) -> the mean loss of predicting each next token, in nats."""
        x = self.tokens(ids) + self.positions.weight
        logits = self.head(self.blocks(x, mask=nn.Transformer.generate_square_subsequent_mask(SEQ_LEN, ids.device)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def is_spike(loss: float, recent: list[float]) -> bool:
    """Whether this loss is no number, or far above the last ones: their median and the median distance from it."""
    if not math.isfinite(loss):
        return True
    if len(recent) < 8:  # early losses fall too fast to judge
        return False
    middle = statistics.median(recent)
    spread = statistics.median(abs(one - middle) for one in recent)
    return loss > middle + 8 * max(1.5 * spread, 0.02 * middle)


def any_rank(flag: bool, device: str) -> bool:
    """Whether the flag is set on any rank: the same answer on all of them."""
    answer = torch.tensor(float(flag), device=device)
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer.item())


def train(device: str, checkpoint_dir: str, steps: int, save_every: int) -> None:
    asked_to_stop = []

    def ask(*_: object) -> None:
        asked_to_stop.append(True)  # no more: a step may be half done
        signal.alarm(20)  # ends a rank that no longer gets to the end of its step, because a peer is dead

    signal.signal(signal.SIGTERM, ask)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = {"global_batch": GLOBAL_BATCH, "seq_len": SEQ_LEN, "rank": rank, "world_size": world_size}

    torch.manual_seed(0)  # the same weights on every rank
    model = TinyModel().to(device)
    torch.manual_seed(1 + rank)  # and other dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step, position, recent, in_a_row = 0, 0, [], 0  # updates done, the next batch, the last losses, spikes in a row

    if any_rank(latest(checkpoint_dir) is not None, device):
        # Weights, Adam's moments, the schedule, and where this rank's random numbers stood: CPU, CUDA, Python, NumPy.
        told = load(checkpoint_dir, model=model, optimizer=optimizer, scheduler=scheduler)
        step, position, recent = told["step"], told["position"], told["recent"]
    ddp = DistributedDataParallel(model)

    while step < steps:
        batch = sample_batch(position, **share).to(device)
        position += 1
        loss = ddp(batch)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)  # all ranks judge the same number, or one would skip an update that the others make
        mean = mean.item() / world_size
        if is_spike(mean, recent):
            if rank == 0:
                print(json.dumps({"step": step, "skipped": position - 1, "spike": mean}), flush=True)
            optimizer.zero_grad()  # before the update: Adam's moments have not seen this batch
            in_a_row += 1
            if in_a_row > 3:
                raise RuntimeError("4 spikes in a row: it is not one bad batch. Lower the rate, or go further back.")
            continue
        in_a_row = 0
        recent = [*recent[-31:], mean]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            print(json.dumps({"step": step, "loss": mean}), flush=True)
        stop = any_rank(bool(asked_to_stop), device)
        if stop or step == steps:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a later one would set the alarm again, in the last save
            signal.alarm(0)
        if stop or step % save_every == 0 or step == steps:
            extra = {"position": position, "recent": recent}
            save(checkpoint_dir, step, model=model, optimizer=optimizer, scheduler=scheduler, extra=extra)
        if stop:
            break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint-dir", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    torch.set_num_threads(1)
    with process_group() as device:  # NCCL where each rank has a GPU
        train(device, **vars(parser.parse_args()))
    end_process(0)  # without the interpreter's own clean-up, in which gloo's threads can hang
