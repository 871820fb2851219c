"""Fine-tune all of a model on one GPU: python full.py --model base --data rows.pt --folder run"""

import argparse
import json

import torch
from transformers import AutoModelForCausalLM


def main(model, data, folder, batch_size, steps, lr):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = AutoModelForCausalLM.from_pretrained(model).to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, fused=True)
    rows = torch.load(data)  # input_ids and labels (rows, length); a label of -100 is not trained on

    for step in range(steps):
        start = step * batch_size
        ids, labels = (rows[name][start : start + batch_size].to(device) for name in ("input_ids", "labels"))
        loss = net(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with open(f"{folder}/losses.jsonl", "a") as log:
            log.write(json.dumps({"step": step + 1, "loss": loss.item()}) + "\n")

    net.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "folder"):
        parser.add_argument(f"--{name}", required=True)
    for name, value in {"batch_size": 16, "steps": 4, "lr": 1e-3}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    main(**vars(parser.parse_args()))
