"""Train a classifier on one GPU, stop and resume: python one_gpu.py --folder run"""

import argparse
import json
import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 12, 5


def dataset(rows, seed):
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


def main(folder, batch_size, accumulate, max_norm, save_every, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, CLASSES))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train, test = dataset(8 * batch_size, seed), dataset(47, seed + 1)
    scheduler = LinearLR(optimizer, 1.0, 0.1, total_iters=len(train) // batch_size)
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(train, batch_size // accumulate, shuffle=True, generator=order)
    test_loader = DataLoader(test, 8)
    if os.path.exists(f"{folder}/state.pt"):
        for part, state in zip((model, optimizer, scheduler), torch.load(f"{folder}/state.pt"), strict=True):
            part.load_state_dict(state)

    done, loss_of_step = scheduler.last_epoch, 0.0
    for number, (x, y) in enumerate(loader, 1):
        if number <= done * accumulate:
            continue  # trained on before the stop
        loss = cross_entropy(model(x.to(device)), y.to(device)) / accumulate
        loss.backward()
        loss_of_step += loss.item()
        if number % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            with open(f"{folder}/losses.jsonl", "a") as log:
                log.write(json.dumps({"step": scheduler.last_epoch, "loss": loss_of_step}) + "\n")
            loss_of_step = 0.0
            if scheduler.last_epoch % save_every == 0:
                torch.save([part.state_dict() for part in (model, optimizer, scheduler)], f"{folder}/state.pt")

    model.eval()
    with torch.no_grad():
        right = [model(x.to(device)).argmax(1) == y.to(device) for x, y in test_loader]
    with open(f"{folder}/accuracy.json", "w") as file:
        json.dump(torch.cat(right).float().mean().item(), file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    for name, value in {"batch_size": 12, "accumulate": 2, "max_norm": 0.5, "save_every": 3, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    main(**vars(parser.parse_args()))
