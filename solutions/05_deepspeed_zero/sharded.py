"""Train a classifier with ZeRO stage 3, stop and resume: torchrun --nproc_per_node 2 sharded.py --folder run"""

import argparse
import json
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

FEATURES, CLASSES, STEPS = 12, 5, 8


def batch_of(step, rows, seed):
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(1000 * seed + step))
    return x, x[:, :CLASSES].argmax(1)


def main(folder, batch_size, accumulate, max_norm, save_every, seed):
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    config = {
        "train_batch_size": batch_size,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": max_norm,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "checkpoint": {"load_universal": os.path.exists(f"{folder}/state/latest_universal")},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    if os.path.exists(f"{folder}/state/latest"):
        engine.load_checkpoint(f"{folder}/state")

    for step in range(engine.global_steps, STEPS):
        x, y = (part.chunk(ranks)[rank].to(engine.device) for part in batch_of(step, batch_size, seed))
        loss_of_step = torch.zeros((), device=engine.device)
        for rows, labels in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            loss = cross_entropy(engine(rows), labels)
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()  # steps optimizer and scheduler after the last of them
            loss_of_step += loss.detach() / accumulate / ranks
        dist.all_reduce(loss_of_step)
        if rank == 0:
            with open(f"{folder}/losses.jsonl", "a") as log:
                log.write(json.dumps({"step": step + 1, "loss": loss_of_step.item()}) + "\n")
        if (step + 1) % save_every == 0:
            engine.save_checkpoint(f"{folder}/state")

    engine.save_16bit_model(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--local_rank", type=int, default=0)
    for name, value in {"batch_size": 24, "accumulate": 2, "max_norm": 0.5, "save_every": 3, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    options.pop("local_rank")
    main(**options)
