"""Four training programs that hang on three ranks. ``hangs`` reads this file as text and runs it as train.py."""

import time

import torch
import torch.distributed as dist


def another_order():
    gradient, loss = torch.ones(8), torch.ones(1)
    if dist.get_rank() == 2:
        dist.broadcast(loss, 0)
        dist.all_reduce(gradient)
    else:
        dist.all_reduce(gradient)
        dist.broadcast(loss, 0)


def own_branch():
    gradient = torch.ones(8)
    dist.all_reduce(gradient)
    if dist.get_rank() == 0:
        time.sleep(600)  # the validation set is larger than somebody thought
    dist.barrier()


def left_early():
    gradient = torch.ones(8)
    batches = 3 if dist.get_rank() == 1 else 4
    for _ in range(batches):
        dist.all_reduce(gradient)


def other_shape():
    rank = dist.get_rank()
    activations = torch.ones(8 if rank == 0 else 12)
    for piece in activations.split(4):
        if rank == 0:
            dist.send(piece, 1)
        if rank == 1:
            dist.recv(piece, 0)
    dist.barrier()
