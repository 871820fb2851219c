"""The fine-tuning program: it learns, its accumulation is the big batch, its adapter can be saved, loaded and merged."""

from __future__ import annotations

import json

import pytest
import torch

from course_lib.models import byte_tokenizer, load
from course_lib.models.data import IGNORED, instructions
from course_lib.training import command_line
from course_lib.training.finetune import qlora
from course_lib.training.finetune.building import build_model, trainable
from course_lib.training.finetune.qlora import Batch

TINY = dict(model="tiny", seq_len=160, steps=3, micro_batch_size=2, held_out=2, lr=2e-3, precision="fp32")


pytestmark = pytest.mark.usefixtures("one_thread")


def logits(model) -> torch.Tensor:
    ids = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_training_lowers_the_held_out_loss_and_says_what_it_trained(method):
    outcome = qlora.train(**TINY, method=method)
    assert len(outcome.losses) == TINY["steps"] and 5.3 < outcome.losses[0] < 6.0  # ln 256 = 5.55
    assert outcome.extra["held_out_after"] < outcome.extra["held_out_before"] - 0.05
    assert outcome.wrapper == ("LlamaForCausalLM" if method == "full" else "PeftModelForCausalLM")
    assert (outcome.extra["quantization_constants"] > 0) == (method == "qlora")
    gradients = outcome.memory["gradients"]
    assert gradients == 4 * outcome.extra["trainable"]  # fp32, and none for what is frozen
    assert gradients < outcome.memory["parameters"] or method == "full"


def test_accumulation_is_the_big_batch_although_its_parts_have_different_numbers_of_answer_tokens():
    losses = [
        qlora.train(**TINY | cut, method="lora").losses
        for cut in (
            dict(micro_batch_size=4, gradient_accumulation_steps=1),
            dict(micro_batch_size=2, gradient_accumulation_steps=2),
            dict(micro_batch_size=1, gradient_accumulation_steps=4),
        )
    ]
    batches = qlora.shuffled(qlora.examples(byte_tokenizer(), "train", 160), 1, 160, 0)
    counts = [qlora.trained_tokens(next(batches)) for _ in range(4)]
    assert max(counts) > 1.2 * min(counts)  # a mean of means would be off
    # fp32 adds up in another order: 2e-7 seen. The mean of means is off by 1e-3 and more.
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)


def test_the_loss_is_taken_over_answers_only_and_padding_changes_nothing():
    tokenizer = byte_tokenizer()
    rows = qlora.examples(tokenizer, "held_out", 300)[:3]
    assert len({len(row["labels"]) for row in rows}) > 1
    model, _ = build_model("tiny", device="cpu")
    batch: Batch = qlora.padded(rows, 300)
    assert batch["labels"].shape == (3, 300)
    total = 0.0
    for row in rows:  # one at a time and unpadded, in the open
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        told = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        answer = labels[0, 1:] != IGNORED
        total -= told[answer].gather(1, labels[0, 1:][answer, None]).sum().item()
        text = tokenizer.decode(labels[labels != IGNORED])
        assert text.removesuffix("<|im_end|>") in {pair["answer"] for pair in instructions("held_out")}
    assert qlora.held_out_loss(model, rows, 300) == pytest.approx(total / qlora.trained_tokens(batch), rel=1e-5)
    assert model.training


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_an_adapter_is_saved_loaded_and_merged(method, tmp_path):
    trained = {}
    keep = qlora.save_to

    def save_and_keep(folder, model):
        keep(folder, model)
        trained["logits"], trained["weights"] = logits(model), [p.clone() for p in trainable(model)]

    qlora.save_to = save_and_keep
    try:
        qlora.train(**TINY, method=method, save=str(tmp_path))
    finally:
        qlora.save_to = keep
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {file.name for file in tmp_path.iterdir()}

    beside = logits(qlora.with_adapter("tiny", str(tmp_path), device="cpu"))
    together = qlora.merged("tiny", str(tmp_path), device="cpu")
    assert type(together).__name__ == "LlamaForCausalLM" and not any(
        "lora" in n for n, _ in together.named_parameters()
    )
    # W x + s B A x against (W + s B A) x: fp32 rounding of numbers around 1
    torch.testing.assert_close(logits(together), beside, rtol=0, atol=1e-5)
    assert (beside - logits(load("tiny")[0])).abs().max() > 1e-2  # the adapter does something
    off = (beside - trained["logits"]).abs().max().item()
    if method == "lora":
        assert off < 1e-5
    else:  # trained beside rounded weights, and now beside the exact ones: the rounding shows, and is small
        assert 1e-3 < off < 0.5


def test_answers_are_greedy_and_leave_the_mode_alone():
    model, tokenizer = build_model("tiny", device="cpu")
    first = qlora.answer(model, tokenizer, "What is NF4?", max_new_tokens=8)
    assert isinstance(first, str) and first == qlora.answer(model, tokenizer, "What is NF4?", max_new_tokens=8)
    assert model.training


def test_bad_input_is_a_sentence():
    with pytest.raises(ValueError, match="seq_len=20: the shortest held_out pair has [0-9]+ tokens of this model"):
        qlora.train(**TINY | dict(seq_len=20))
    with pytest.raises(ValueError, match="steps=0: give a whole number of at least 1"):
        qlora.train(**TINY | dict(steps=0))
    with pytest.raises(ValueError, match="did you mean 'adamw'"):
        qlora.train(**TINY, optimizer="adam")


def test_the_command_line_prints_one_line_of_json(capsys):
    told = ["--model", "tiny", "--method", "full", "--steps", "1", "--seq-len", "160", "--held-out", "1"]
    command_line.run(qlora.train, told, own_group=False)
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["wrapper"] == "LlamaForCausalLM" and len(outcome["losses"]) == 1


def test_smollm2_learns_beside_four_bit_weights():
    outcome = qlora.train(
        steps=2,
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        seq_len=96,
        held_out=1,
        lr=1e-3,
        precision="fp32",
        activation_checkpointing="full",
    )
    assert outcome.extra["trainable"] == 4_884_480  # rank 16 beside 210 matrices
    assert outcome.extra["held_out_after"] < outcome.extra["held_out_before"] - 0.02
    # 28.3 million numbers stay fp32 (the embedding and the norms), 106.2 million take half a byte
    assert outcome.memory["parameters"] < 0.36 * 4 * 134_515_008
