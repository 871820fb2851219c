"""Train a classifier on any number of GPUs, stop and resume: accelerate launch many_gpus.py --folder run"""

import argparse
import json
import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 12, 5


def dataset(rows, seed):
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def main(folder, batch_size, accumulate, max_norm, save_every, seed):
    accelerator = Accelerator(gradient_accumulation_steps=accumulate)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train, test = dataset(8 * batch_size, seed), dataset(47, seed + 1)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=len(train) // batch_size)  # prepared, it would go too fast
    order = torch.Generator().manual_seed(5)
    rows = batch_size // accumulate // accelerator.num_processes
    loader = DataLoader(train, rows, shuffle=True, generator=order)
    model, optimizer, loader, test_loader = accelerator.prepare(model, optimizer, loader, DataLoader(test, 8))
    accelerator.register_for_checkpointing(scheduler)
    if os.path.exists(f"{folder}/state"):
        accelerator.load_state(f"{folder}/state")
    done, losses = scheduler.last_epoch, []

    for x, y in accelerator.skip_first_batches(loader, done * accumulate):
        with accelerator.accumulate(model):
            loss = cross_entropy(model(x), y)
            accelerator.backward(loss)  # divides by accumulate
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            scheduler.step()
            loss_of_step = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
            losses.clear()
            if accelerator.is_main_process:
                with open(f"{folder}/losses.jsonl", "a") as log:
                    log.write(json.dumps({"step": scheduler.last_epoch, "loss": loss_of_step}) + "\n")
            if scheduler.last_epoch % save_every == 0:
                accelerator.save_state(f"{folder}/state")

    model.eval()
    with torch.no_grad():
        right = [accelerator.gather_for_metrics(model(x).argmax(1) == y) for x, y in test_loader]
    if accelerator.is_main_process:
        with open(f"{folder}/accuracy.json", "w") as file:
            json.dump(torch.cat(right).float().mean().item(), file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    for name, value in {"batch_size": 12, "accumulate": 2, "max_norm": 0.5, "save_every": 3, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    main(**vars(parser.parse_args()))
