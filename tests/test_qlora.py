"""The fine-tuning program: it learns, its accumulation is the big batch, its adapter can be saved, loaded and merged."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from refusals import assert_refused

from course_lib.models import byte_tokenizer, load
from course_lib.models.data import IGNORED, instructions
from course_lib.training import command_line, qlora
from course_lib.training.finetune import one_device
from course_lib.training.finetune.building import build_model

TINY = dict(model="tiny", seq_len=160, steps=3, micro_batch_size=2, held_out=2, lr=2e-3, precision="fp32")
pytestmark = pytest.mark.usefixtures("one_thread")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(64).reshape(2, 32)).logits


def test_training_lowers_the_held_out_loss_and_gives_gradients_to_the_trained_alone():
    for method in ("full", "lora", "qlora"):
        outcome = one_device.train(**TINY, method=method)
        assert len(outcome.losses) == 3 and 5.3 < outcome.losses[0] < 6.0  # ln 256 = 5.55
        assert outcome.extra["held_out_after"] < outcome.extra["held_out_before"] - 0.05, method
        assert outcome.wrapper == ("LlamaForCausalLM" if method == "full" else "PeftModelForCausalLM")
        assert (outcome.extra["quantization_constants"] > 0) == (method == "qlora")
        assert outcome.memory["gradients"] == 4 * outcome.extra["trainable"]  # fp32, and none for what is frozen
        assert outcome.memory["gradients"] < outcome.memory["parameters"] or method == "full"


def test_accumulation_is_the_big_batch_although_its_parts_have_different_numbers_of_answer_tokens():
    whole, *parted = (
        one_device.train(
            **TINY | dict(micro_batch_size=size), gradient_accumulation_steps=4 // size, method="lora"
        ).losses
        for size in (4, 2, 1)
    )
    batches = one_device.shuffled(one_device.examples(byte_tokenizer(), "train", 160), 1, 160, 0)
    counts = [one_device.trained_tokens(next(batches)) for _ in range(4)]
    assert max(counts) > 1.2 * min(counts)  # a mean of means would be off, by 1e-3 and more
    for losses in parted:
        assert losses == pytest.approx(whole, rel=1e-5)  # fp32 adds up in another order: 2e-7 seen


def test_the_loss_is_taken_over_answers_only_and_padding_changes_nothing():
    tokenizer = byte_tokenizer()
    rows = one_device.examples(tokenizer, "held_out", 300)[:3]
    assert len({len(row["labels"]) for row in rows}) > 1
    model, _ = build_model("tiny", device="cpu")
    batch = one_device.padded(rows, 300)
    assert batch["labels"].shape == (3, 300)
    total = 0.0
    for row in rows:  # one at a time and unpadded, in the open
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        log_probabilities = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        answer = labels[0, 1:] != IGNORED
        total -= log_probabilities[answer].gather(1, labels[0, 1:][answer, None]).sum().item()
        text = tokenizer.decode(labels[labels != IGNORED])
        assert text.removesuffix("<|im_end|>") in {pair["answer"] for pair in instructions("held_out")}
    assert one_device.held_out_loss(model, rows, 300) == pytest.approx(
        total / one_device.trained_tokens(batch), rel=1e-5
    )
    assert model.training


def test_an_adapter_is_saved_and_loaded(tmp_path, monkeypatch):
    keep, trained = one_device.save_to, {}

    def save_and_keep(folder, model):
        keep(folder, model)
        trained[folder] = logits(model)

    monkeypatch.setattr(one_device, "save_to", save_and_keep)
    for method in ("lora", "qlora"):
        folder = str(tmp_path / method)
        one_device.train(**TINY, method=method, save=folder)
        loaded = logits(PeftModel.from_pretrained(load("tiny")[0], folder))
        assert (loaded - logits(load("tiny")[0])).abs().max() > 1e-2  # the adapter does something
        off = (loaded - trained[folder]).abs().max().item()
        # trained beside rounded weights, and now beside the exact ones: the rounding shows, and is small
        assert off < 1e-5 if method == "lora" else 1e-3 < off < 0.5, method


def test_what_the_lesson_shows_trains_as_the_program_does(tmp_path):
    for part in load("tiny"):
        part.save_pretrained(tmp_path / "tiny")
    same = dict(steps=3, micro_batch_size=2, seq_len=160, lr=2e-3)
    torch.manual_seed(0)
    shown = qlora.train(folder=str(tmp_path / "tiny"), save=str(tmp_path / "adapter"), **same)
    general = one_device.train(**TINY | same, method="qlora", gradient_accumulation_steps=1)
    assert shown.losses[0] == pytest.approx(general.losses[0], rel=1e-5)  # B is zero: A's random numbers do not matter
    assert shown.losses == pytest.approx(general.losses, rel=1e-2) and shown.losses[-1] < shown.losses[0]
    adapted = PeftModel.from_pretrained(load("tiny")[0], tmp_path / "adapter")
    assert (logits(adapted) - logits(load("tiny")[0])).abs().max() > 1e-2


def test_bad_input_is_refused():
    assert_refused(
        [
            (lambda: one_device.train(**TINY | dict(seq_len=20)), ValueError, "seq_len=20"),
            (lambda: one_device.train(**TINY | dict(steps=0)), ValueError, "steps=0"),
            (lambda: one_device.train(**TINY, optimizer="adam"), ValueError, "'adamw'"),
        ]
    )


def test_the_command_line_prints_one_line_of_json(capsys):
    words = "--model tiny --method full --steps 1 --seq-len 160 --held-out 1".split()
    command_line.run(one_device.train, words, own_group=False)
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["wrapper"] == "LlamaForCausalLM" and len(outcome["losses"]) == 1
