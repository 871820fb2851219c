"""train.py, as it grew: every number that decides about the losses is in here, in five places.

The wiki page "How to train" says:   LR=2e-3 ACCUMULATE=2 python train.py --weight-decay 0.1
"""

import argparse

import torch

BATCH = 2  # sequences at once
STEPS = 6


def main(environ: dict[str, str], arguments: list[str], model: torch.nn.Module, rows: list[list[int]]) -> list[float]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--max-len", type=int, default=64)
    parser.add_argument("--clip", type=float, default=0.5)
    options = parser.parse_args(arguments)
    lr, accumulate = float(environ.get("LR", "1e-3")), int(environ.get("ACCUMULATE", "1"))

    matrices, vectors = [[p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_straight_down)
    losses, rows = [], [row[at : at + options.max_len] for row in rows for at in range(0, len(row), options.max_len)]
    for step in range(STEPS):
        first = step * BATCH * accumulate
        taken = rows[first : first + BATCH * accumulate]  # in the order of the file
        told = sum(len(row) - 1 for row in taken)  # the mean is over the tokens of the step, whatever the micro-batch
        total = 0.0
        for at in range(0, len(taken), BATCH):
            ids, labels = padded(taken[at : at + BATCH])
            logits = model(input_ids=ids, attention_mask=(labels != -100).long()).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            (loss / told).backward()
            total += loss.item() / told
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)
    return losses


def warm_up_then_straight_down(step: int) -> float:
    warmup = 2
    return step / warmup if step < warmup else (STEPS - step) / (STEPS - warmup)


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [255] * (longest - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (longest - len(row)) for row in rows])
    return ids, labels
