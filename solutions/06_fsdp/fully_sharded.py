"""Train a small Llama with FSDP2, stop and resume: torchrun --nproc_per_node 2 fully_sharded.py --folder run"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, STEPS = 65, 16, 16
SIZES = dict(hidden_size=35, intermediate_size=77, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1)


def batch_of(step, rows, seed):  # each row counts from some number on, by ones or by twos
    first, odd = torch.randint(VOCABULARY, (2, rows, 1), generator=torch.Generator().manual_seed(1000 * seed + step))
    return (first + (1 + odd % 2) * torch.arange(LENGTH)) % VOCABULARY


def state_of(model, optimizer, scheduler):
    weights, moments = states.get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict()}


def main(folder, batch_size, max_norm, save_every, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if batch_size % ranks:
        raise ValueError(f"{ranks} ranks cannot share {batch_size} rows evenly")
    mesh = init_device_mesh(device, (ranks,))
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, head_dim=10, use_cache=False, **SIZES)).to(device)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    Path(folder).mkdir(exist_ok=True)
    saved = sorted(Path(folder).glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    if saved:
        state = state_of(model, optimizer, scheduler)
        dcp.load(state, checkpoint_id=saved[-1])
        states.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    for step in range(scheduler.last_epoch, STEPS):
        rows = batch_of(step, batch_size, seed).chunk(ranks)[rank].to(device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean_loss = loss.detach() / ranks
        dist.all_reduce(mean_loss)
        if rank == 0:
            with open(f"{folder}/losses.jsonl", "a") as log:
                log.write(json.dumps({"step": step + 1, "loss": mean_loss.item()}) + "\n")
        if (step + 1) % save_every == 0:
            dcp.save(state_of(model, optimizer, scheduler), checkpoint_id=f"{folder}/saving")
            if rank == 0:  # every rank has written its rows when save() returns
                os.rename(f"{folder}/saving", f"{folder}/step-{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    for name, value in {"batch_size": 12, "max_norm": 1.0, "save_every": 4, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    main(**vars(parser.parse_args()))
