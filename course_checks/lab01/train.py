"""A training script as people write it."""

import torch
from torch.nn.functional import cross_entropy

from course_lib.models import tiny_llama
from course_lib.models.data import byte_tokens, english

TEXT = byte_tokens(english())


def build(layers, hidden, vocab, length, **_):
    return tiny_llama(layers=layers, hidden=hidden, intermediate=4 * hidden, vocab=vocab, max_length=length)


def loss_of(model, ids):
    hidden = model.model(input_ids=ids).last_hidden_state
    logits = model.lm_head(hidden)
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def train(model, steps, batch, length, validate, **_):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    *batches, held_out = TEXT[: (steps + 1) * batch * length].view(-1, batch, length)
    train_losses, held_out_losses = [], []
    for step, ids in enumerate(batches):
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train_losses.append(loss.item())
        if validate:
            held_out_losses.append(loss_of(model, held_out))
        print(f"step {step + 1} of {steps} done")
