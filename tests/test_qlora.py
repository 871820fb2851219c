"""The QLoRA program that the lesson shows: it trains what a plain loop around our own NF4 trains, and its adapter loads."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel

from course_lib.models import byte_tokenizer, load
from course_lib.models.data import chat_examples, shuffled
from course_lib.training import qlora
from course_lib.training.methods import prepare, trainable

SIZES = dict(micro_batch_size=2, seq_len=160)
pytestmark = pytest.mark.usefixtures("one_thread")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(64).reshape(2, 32)).logits


def by_a_plain_loop(steps: int, lr: float) -> list[float]:
    """Each linear quantized by `course_lib`, not by transformers; nothing checkpointed."""
    model = prepare(load("tiny")[0], method="qlora")
    optimizer = torch.optim.AdamW(trainable(model), lr=lr)
    batches = shuffled(chat_examples(byte_tokenizer(), "train", SIZES["seq_len"]), **SIZES, seed=0)
    losses = []
    for _ in range(steps):
        losses.append(model(**next(batches)).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item() for loss in losses]


def test_what_the_lesson_shows_trains_as_a_plain_loop_does(tmp_path):
    for part in load("tiny"):
        part.save_pretrained(tmp_path / "tiny")
    same = dict(steps=3, lr=2e-3)
    torch.manual_seed(0)
    shown = qlora.train(folder=str(tmp_path / "tiny"), save=str(tmp_path / "adapter"), **same, **SIZES)
    plain = by_a_plain_loop(**same)
    assert shown.losses[0] == pytest.approx(plain[0], rel=1e-5)  # B is zero: A's random numbers do not matter
    assert shown.losses == pytest.approx(plain, rel=1e-2) and shown.losses[-1] < shown.losses[0]
    assert shown.memory["gradients"] == 4 * 149_504  # fp32, of the adapters alone
    adapted = PeftModel.from_pretrained(load("tiny")[0], tmp_path / "adapter")
    assert (logits(adapted) - logits(load("tiny")[0])).abs().max() > 1e-2
