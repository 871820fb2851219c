"""Train a classifier on one GPU, stop and resume: python one_gpu.py --folder run"""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR

FEATURES, CLASSES, STEPS = 12, 5, 8


def batch_of(step, rows, seed):
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(1000 * seed + step))
    return x, x[:, :CLASSES].argmax(1)


def main(folder, batch_size, accumulate, max_norm, save_every, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, CLASSES))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
    if os.path.exists(f"{folder}/state.pt"):
        for part, state in zip((model, optimizer, scheduler), torch.load(f"{folder}/state.pt"), strict=True):
            part.load_state_dict(state)

    for step in range(scheduler.last_epoch, STEPS):
        x, y = (part.to(device) for part in batch_of(step, batch_size, seed))
        loss_of_step = 0.0
        for rows, labels in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            loss = cross_entropy(model(rows), labels) / accumulate
            loss.backward()
            loss_of_step += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with open(f"{folder}/losses.jsonl", "a") as log:
            log.write(json.dumps({"step": step + 1, "loss": loss_of_step}) + "\n")
        if (step + 1) % save_every == 0:
            torch.save([part.state_dict() for part in (model, optimizer, scheduler)], f"{folder}/state.pt")

    torch.save(model.state_dict(), f"{folder}/pytorch_model.bin")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    for name, value in {"batch_size": 24, "accumulate": 2, "max_norm": 0.5, "save_every": 3, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    main(**vars(parser.parse_args()))
