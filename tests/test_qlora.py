"""The fine-tuning program: it learns, its accumulation is the big batch, its adapter can be saved, loaded and merged."""

from __future__ import annotations

import json

import pytest
import torch
from refusals import assert_refused

from course_lib.models import byte_tokenizer, load
from course_lib.models.data import IGNORED, instructions
from course_lib.training import command_line
from course_lib.training.finetune import qlora
from course_lib.training.finetune.building import build_model

TINY = dict(model="tiny", seq_len=160, steps=3, micro_batch_size=2, held_out=2, lr=2e-3, precision="fp32")
pytestmark = pytest.mark.usefixtures("one_thread")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(64).reshape(2, 32)).logits


def test_training_lowers_the_held_out_loss_and_gives_gradients_to_the_trained_alone():
    for method in ("full", "lora", "qlora"):
        outcome = qlora.train(**TINY, method=method)
        assert len(outcome.losses) == 3 and 5.3 < outcome.losses[0] < 6.0  # ln 256 = 5.55
        assert outcome.extra["held_out_after"] < outcome.extra["held_out_before"] - 0.05, method
        assert outcome.wrapper == ("LlamaForCausalLM" if method == "full" else "PeftModelForCausalLM")
        assert (outcome.extra["quantization_constants"] > 0) == (method == "qlora")
        assert outcome.memory["gradients"] == 4 * outcome.extra["trainable"]  # fp32, and none for what is frozen
        assert outcome.memory["gradients"] < outcome.memory["parameters"] or method == "full"


def test_accumulation_is_the_big_batch_although_its_parts_have_different_numbers_of_answer_tokens():
    whole, *parted = (
        qlora.train(**TINY | dict(micro_batch_size=size), gradient_accumulation_steps=4 // size, method="lora").losses
        for size in (4, 2, 1)
    )
    batches = qlora.shuffled(qlora.examples(byte_tokenizer(), "train", 160), 1, 160, 0)
    counts = [qlora.trained_tokens(next(batches)) for _ in range(4)]
    assert max(counts) > 1.2 * min(counts)  # a mean of means would be off, by 1e-3 and more
    for losses in parted:
        assert losses == pytest.approx(whole, rel=1e-5)  # fp32 adds up in another order: 2e-7 seen


def test_the_loss_is_taken_over_answers_only_and_padding_changes_nothing():
    tokenizer = byte_tokenizer()
    rows = qlora.examples(tokenizer, "held_out", 300)[:3]
    assert len({len(row["labels"]) for row in rows}) > 1
    model, _ = build_model("tiny", device="cpu")
    batch = qlora.padded(rows, 300)
    assert batch["labels"].shape == (3, 300)
    total = 0.0
    for row in rows:  # one at a time and unpadded, in the open
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        log_probabilities = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        answer = labels[0, 1:] != IGNORED
        total -= log_probabilities[answer].gather(1, labels[0, 1:][answer, None]).sum().item()
        text = tokenizer.decode(labels[labels != IGNORED])
        assert text.removesuffix("<|im_end|>") in {pair["answer"] for pair in instructions("held_out")}
    assert qlora.held_out_loss(model, rows, 300) == pytest.approx(total / qlora.trained_tokens(batch), rel=1e-5)
    assert model.training


def test_an_adapter_is_saved_loaded_and_merged(tmp_path, monkeypatch):
    keep, trained = qlora.save_to, {}

    def save_and_keep(folder, model):
        keep(folder, model)
        trained[folder] = logits(model)

    monkeypatch.setattr(qlora, "save_to", save_and_keep)
    for method in ("lora", "qlora"):
        folder = str(tmp_path / method)
        qlora.train(**TINY, method=method, save=folder)
        beside, together = qlora.with_adapter("tiny", folder, device="cpu"), qlora.merged("tiny", folder, device="cpu")
        assert type(together).__name__ == "LlamaForCausalLM"
        assert not any("lora" in name for name, _ in together.named_parameters())
        # W x + s B A x against (W + s B A) x: fp32 rounding of numbers around 1
        torch.testing.assert_close(logits(together), logits(beside), rtol=0, atol=1e-5)
        assert (logits(beside) - logits(load("tiny")[0])).abs().max() > 1e-2  # the adapter does something
        off = (logits(beside) - trained[folder]).abs().max().item()
        # trained beside rounded weights, and now beside the exact ones: the rounding shows, and is small
        assert off < 1e-5 if method == "lora" else 1e-3 < off < 0.5, method


def test_bad_input_is_refused():
    assert_refused(
        [
            (lambda: qlora.train(**TINY | dict(seq_len=20)), ValueError, "seq_len=20"),
            (lambda: qlora.train(**TINY | dict(steps=0)), ValueError, "steps=0"),
            (lambda: qlora.train(**TINY, optimizer="adam"), ValueError, "'adamw'"),
        ]
    )


def test_the_command_line_prints_one_line_of_json(capsys):
    words = "--model tiny --method full --steps 1 --seq-len 160 --held-out 1".split()
    command_line.run(qlora.train, words, own_group=False)
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["wrapper"] == "LlamaForCausalLM" and len(outcome["losses"]) == 1
