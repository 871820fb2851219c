"""Train a small Llama on one GPU, stop and resume: python one_gpu.py --folder run"""

import argparse
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH, STEPS = 65, 16, 16
SIZES = dict(hidden_size=35, intermediate_size=77, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1)


def batch_of(step, rows, seed):  # each row counts from some number on, by ones or by twos
    first, odd = torch.randint(VOCABULARY, (2, rows, 1), generator=torch.Generator().manual_seed(1000 * seed + step))
    return (first + (1 + odd % 2) * torch.arange(LENGTH)) % VOCABULARY


def main(folder, batch_size, max_norm, save_every, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, head_dim=10, use_cache=False, **SIZES)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    Path(folder).mkdir(exist_ok=True)
    saved = sorted(Path(folder).glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    if saved:
        for part, state in zip((model, optimizer, scheduler), torch.load(saved[-1]), strict=True):
            part.load_state_dict(state)

    for step in range(scheduler.last_epoch, STEPS):
        rows = batch_of(step, batch_size, seed).to(device)
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with open(f"{folder}/losses.jsonl", "a") as log:
            log.write(json.dumps({"step": step + 1, "loss": loss.item()}) + "\n")
        if (step + 1) % save_every == 0:
            torch.save([part.state_dict() for part in (model, optimizer, scheduler)], f"{folder}/saving")
            os.rename(f"{folder}/saving", f"{folder}/step-{step + 1}")  # complete, or not there at all


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    for name, value in {"batch_size": 12, "max_norm": 1.0, "save_every": 4, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    main(**vars(parser.parse_args()))
