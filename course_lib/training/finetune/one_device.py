"""Fine-tune a model on the course's questions and answers on one device: QLoRA, LoRA, or every weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from course_lib.models.data import IGNORED, chat_examples, instructions
from course_lib.observe import observe, tensor_bytes
from course_lib.training.command_line import run
from course_lib.training.finetune.building import (
    autocast,
    best_precision,
    build_model,
    build_optimizer,
    grad_scaler,
    quantization_constants,
    trainable,
)
from course_lib.training.outcome import Outcome, outcome
from course_lib.validation import check_counts

Batch = dict[str, torch.Tensor]  # input_ids and labels, int64 (micro_batch_size, seq_len)


def train(
    *,
    model: str = "smollm2",
    method: str = "qlora",
    steps: int = 20,
    micro_batch_size: int = 2,
    gradient_accumulation_steps: int = 2,
    seq_len: int = 128,
    lr: float = 5e-4,
    precision: str = "auto",
    optimizer: str = "adamw",
    activation_checkpointing: str = "none",
    attention: str = "flash",
    lora_rank: int = 16,
    held_out: int = 8,
    seed: int = 0,
    save: str | None = None,
) -> Outcome:
    """Fine-tune a model on the course's questions and answers, on one device.

    Args:
        model: as in `course_lib.models.load`.
        method, precision, optimizer, activation_checkpointing, attention, lora_rank: as in `course_lib.training.finetune.building`;
            precision "auto" is the best that this device computes fast.
        steps: optimizer steps.
        micro_batch_size: sequences that go through the model at once.
        gradient_accumulation_steps: micro-batches of one optimizer step.
        seq_len: tokens a sequence, padding included; pairs that are longer are left out.
        lr: learning rate.
        held_out: how many held-out pairs are asked before and after.
        seed: of the adapters and of the order of the pairs.
        save: a folder that the adapter (with "full" the model) is written to.

    Returns:
        Losses a token, and in `extra`: held_out_before, held_out_after, trainable (parameters), precision,
        quantization_constants (bytes that NF4 needs besides `memory["parameters"]`).
    """
    check_counts(
        steps=steps,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        held_out=held_out,
    )
    precision = best_precision() if precision == "auto" else precision
    net, tokenizer = build_model(
        model,
        method=method,
        precision=precision,
        attention=attention,
        activation_checkpointing=activation_checkpointing,
        lora_rank=lora_rank,
        seed=seed,
    )
    device = net.device
    optim = build_optimizer(trainable(net), optimizer, lr)
    scaler = grad_scaler(precision, device)
    exam = examples(tokenizer, "held_out", seq_len)[:held_out]
    batches = shuffled(examples(tokenizer, "train", seq_len), micro_batch_size, seq_len, seed)
    before = held_out_loss(net, exam, seq_len, precision)

    observation = observe(net, optim)
    losses = []
    for _ in range(steps):
        with observation.step(tokens=gradient_accumulation_steps * micro_batch_size * seq_len):
            window = [next(batches) for _ in range(gradient_accumulation_steps)]
            answer_tokens = sum(trained_tokens(batch) for batch in window)  # of the whole step, known before it starts
            total = torch.zeros((), device=device)
            for batch in window:
                batch = {key: value.to(device) for key, value in batch.items()}
                with autocast(precision, device):
                    # the sum over this micro-batch's answer tokens, divided by the tokens of the whole step
                    loss = net(**batch, num_items_in_batch=answer_tokens).loss
                scaler.scale(loss).backward()
                total += loss.detach()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
        losses.append(total.item())

    extra: dict[str, Any] = {
        "held_out_before": before,
        "held_out_after": held_out_loss(net, exam, seq_len, precision),
        "trainable": sum(p.numel() for p in trainable(net)),
        "precision": precision,
        "quantization_constants": tensor_bytes(quantization_constants(net)),
    }
    if save:
        save_to(save, net)
    return outcome(observation, losses, type(net).__name__, **extra)


def examples(tokenizer: Any, split: str, seq_len: int) -> list[dict[str, list[int]]]:
    """The split's pairs that fit in `seq_len` tokens whole: half an answer teaches to stop in the middle.

    Raises ValueError where none fits.
    """
    every = chat_examples(tokenizer, instructions(split), max_length=4096)
    fitting = [example for example in every if len(example["input_ids"]) <= seq_len]
    if not fitting:
        shortest = min(len(example["input_ids"]) for example in every)
        raise ValueError(
            f"seq_len={seq_len}: the shortest {split} pair has {shortest} tokens of this model; allow more."
        )
    return fitting


def padded(rows: Sequence[dict[str, list[int]]], seq_len: int) -> Batch:
    """Rows as one batch, int64 (rows, seq_len), padded on the right with token 0 and the label -100.

    No attention mask: a token sees only what stands before it, and padding stands behind. Every batch has the same
    shape, so its bytes can be predicted.
    """

    def fill(key: str, value: int) -> torch.Tensor:
        return torch.tensor([row[key] + [value] * (seq_len - len(row[key])) for row in rows])

    return {"input_ids": fill("input_ids", 0), "labels": fill("labels", IGNORED)}


def shuffled(rows: Sequence[dict[str, list[int]]], micro_batch_size: int, seq_len: int, seed: int) -> Iterator[Batch]:
    """Batches without end, each epoch in an order of its own; an epoch's last rows go on in the next one."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[dict[str, list[int]]] = []
    while True:
        while len(waiting) < micro_batch_size:
            waiting += [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
        yield padded(waiting[:micro_batch_size], seq_len)
        waiting = waiting[micro_batch_size:]


def trained_tokens(batch: Batch) -> int:
    """Tokens that the loss is taken over: those of the answers. (The first of a row is never predicted.)"""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


@torch.no_grad()
def held_out_loss(model: Any, rows: Sequence[dict[str, list[int]]], seq_len: int, precision: str = "fp32") -> float:
    """Mean loss an answer token over `rows`, four rows at a time. The model comes back in the mode that it was in."""
    training = model.training
    model.eval()
    total = tokens = 0.0
    for start in range(0, len(rows), 4):
        batch = padded(rows[start : start + 4], seq_len)
        with autocast(precision, model.device):
            on_device = {key: value.to(model.device) for key, value in batch.items()}
            total += model(**on_device, num_items_in_batch=1).loss.item()  # the sum over the answers' tokens
        tokens += trained_tokens(batch)
    model.train(training)
    return total / tokens


@torch.no_grad()
def answer(model: Any, tokenizer: Any, question: str, max_new_tokens: int = 60, precision: str = "fp32") -> str:
    """What the model answers, each time with its likeliest token. The model comes back in the mode that it was in."""
    training = model.training
    model.eval()
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with autocast(precision, model.device):
        written = model.generate(
            **prompt.to(model.device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    model.train(training)
    return tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def save_to(folder: str, model: Any) -> None:
    """Write the adapter, or a model without one, to `folder`."""
    # "auto" would ask the hub whether the vocabulary has grown; it has not
    model.save_pretrained(folder, **({"save_embedding_layers": False} if hasattr(model, "peft_config") else {}))


if __name__ == "__main__":
    run(train, own_group=False)
