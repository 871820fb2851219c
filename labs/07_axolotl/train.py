"""train.py, as it grew. The wiki page "How to train" says: LR=2e-3 ACCUMULATE=2 python train.py --weight-decay 0.1"""

import argparse
import json
import os

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

BATCH = 2  # sequences at once
STEPS = 12


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/axolotl")  # of the model and the texts
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--max-len", type=int, default=64)
    parser.add_argument("--clip", type=float, default=0.5)
    options = parser.parse_args(arguments)
    lr, accumulate = float(os.environ.get("LR", "1e-3")), int(os.environ.get("ACCUMULATE", "1"))

    model = LlamaForCausalLM.from_pretrained(f"{options.folder}/tiny", dtype=torch.float32)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_then_straight_down)
    rows, losses = pieces(options.folder, options.max_len), []
    for step in range(STEPS):
        taken = rows[step * BATCH * accumulate :][: BATCH * accumulate]  # in the order of the file
        predicted = sum(len(row) - 1 for row in taken)  # every token of the step counts the same
        loss = 0.0
        for at in range(0, len(taken), BATCH):
            ids, labels = padded(taken[at : at + BATCH])
            logits = model(input_ids=ids, attention_mask=(labels != -100).long()).logits[:, :-1]
            part = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            (part / predicted).backward()
            loss += part.item() / predicted
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss)
        print(f"step {step + 1}: loss {loss:.6f}")
    return losses


def warm_up_then_straight_down(step):
    warmup = 3
    return step / warmup if step < warmup else (STEPS - step) / (STEPS - warmup)


def pieces(folder, longest):  # long texts are cut; one token alone has nothing to predict
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/tiny")
    texts = [json.loads(line)["text"] for line in open(f"{folder}/texts.jsonl")]
    rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    return [row[at : at + longest] for row in rows for at in range(0, len(row) - 1, longest)]


def padded(rows):
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [255] * (longest - len(row)) for row in rows])
    return tokens, torch.tensor([row + [-100] * (longest - len(row)) for row in rows])


if __name__ == "__main__":
    main()
