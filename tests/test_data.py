"""The texts: what each rank gets of a batch, the instruction pairs, and which of their tokens are trained."""

import itertools
import json
from functools import partial

import torch
from refusals import assert_refused

from course_lib.models import byte_tokenizer, data


def test_texts_become_bytes_and_sequences_without_the_rest():
    text = data.english()  # real text, in a fixed order
    assert 350_000 < len(text) < 1_500_000
    assert text.startswith('The "assert" statement') and text.count(" the ") > 1000
    assert data.byte_tokens("é!").tolist() == [0xC3, 0xA9, 0x21]
    assert data.sequences(torch.arange(10), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert_refused(
        [
            (partial(data.sequences, torch.arange(3), 4), ValueError, "too few"),
            (partial(data.sequences, torch.arange(3), 0), ValueError, "seq_len=0"),
        ]
    )


def test_the_ranks_batches_one_after_another_are_the_batch_of_one_rank():
    for world_size, global_batch in itertools.product((1, 2, 3, 7), (7, 8, 12)):
        case = (world_size, global_batch)
        batch = partial(data.sample_batch, 5, global_batch=global_batch, seq_len=16)
        parts = [batch(rank=rank, world_size=world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat(parts), batch()), case
        sizes = [len(part) for part in parts]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1, case
        assert batch().shape == (global_batch, 16) and batch().dtype == torch.int64, case


def test_each_step_and_seed_has_its_own_batch_and_gets_it_again():
    def batch(step, seed):
        return data.sample_batch(step, global_batch=4, seq_len=8, seed=seed)

    torch.manual_seed(1)
    first, expected = batch(0, 0), torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), expected)  # nothing drawn from the caller's generator
    assert torch.equal(batch(0, 0), first)
    others = [first, batch(1, 0), batch(0, 1), batch(2, 0)]  # step 1 of seed 0 is not step 0 of seed 1
    assert not any(torch.equal(first, other) for first, other in itertools.combinations(others, 2))


def test_a_batch_is_the_callers_own():
    first = data.sample_batch(0, global_batch=2, seq_len=8)
    kept = first.clone()
    first.zero_()
    assert torch.equal(data.sample_batch(0, global_batch=2, seq_len=8), kept)
    batches = [data.sample_batch(step, global_batch=2, seq_len=4, tokens=torch.arange(6)) for step in range(40)]
    assert {row[0] for row in torch.cat(batches).tolist()} == {0, 1, 2}  # from the start of the text to its end


def test_a_batch_that_cannot_be_is_refused():
    batch = partial(data.sample_batch, 0, global_batch=4, seq_len=8)
    assert_refused(
        [
            (partial(batch, world_size=5), ValueError, "5 ranks"),
            (partial(batch, world_size=2, rank=2), ValueError, "rank=2"),
            (partial(batch, rank=-1), ValueError, "rank=-1"),
            (partial(batch, seq_len=0), ValueError, "seq_len=0"),
            (partial(batch, seq_len=10**9), ValueError, "shorten"),
            (partial(data.sample_batch, -1, global_batch=4, seq_len=8), ValueError, "step=-1"),
        ]
    )


def test_instructions_are_split_for_good():
    train, held_out, everything = (data.instructions(split) for split in ("train", "held_out", "all"))
    assert len(everything) >= 300 and len(train) + len(held_out) == len(everything)
    assert not {pair["id"] for pair in train} & {pair["id"] for pair in held_out}
    assert 0.04 < len(held_out) / len(everything) < 0.18
    train[0]["answer"] = "changed"
    assert data.instructions("train")[0]["answer"] != "changed"
    assert_refused([(partial(data.instructions, "test"), ValueError, "held_out")])
    # a pair keeps its side whatever joins it
    assert [name for name in (f"q{i}" for i in range(40)) if data._is_held_out(name)] == ["q9", "q14", "q24", "q25"]


GOOD = {"id": "a", "topic": "t", "question": "q", "answer": "a line\u2028goes on"}


def test_a_bad_line_is_named():
    good = json.dumps(GOOD, ensure_ascii=False)
    assert data._read_pairs(good + "\n\n") == [GOOD]
    for line, fragment in (
        ("{", "no JSON"),
        (json.dumps({**GOOD, "more": "x"}), "exactly the fields"),
        (json.dumps({**GOOD, "id": "b", "answer": " "}), "'answer'"),
        (json.dumps({**GOOD, "id": "b", "topic": 3}), "'topic'"),
        (json.dumps(GOOD), "'a'"),
    ):
        read = partial(data._read_pairs, f"{good}\n{line}\n")
        assert_refused([(read, ValueError, "line 2"), (read, ValueError, fragment)])


def test_only_the_answer_and_its_end_are_trained_and_no_answer_is_cut():
    tokenizer = byte_tokenizer()
    examples = data.chat_examples(tokenizer, "held_out", 4096)
    pair = data.instructions("held_out")[0]
    prompt = tokenizer(f"<|im_start|>user\n{pair['question']}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answer = [*pair["answer"].encode(), tokenizer.eos_token_id]
    assert examples[0] == {"input_ids": prompt + answer, "labels": [data.IGNORED] * len(prompt) + answer}
    assert len(examples) == len(data.instructions("held_out"))
    lengths = sorted(len(example["labels"]) for example in examples)
    assert [len(e["labels"]) for e in data.chat_examples(tokenizer, "held_out", lengths[0])] == [lengths[0]]
    without = byte_tokenizer()
    without.chat_template = None
    assert_refused(
        [
            (partial(data.chat_examples, tokenizer, "held_out", lengths[0] - 1), ValueError, f"{lengths[0]} tokens"),
            (partial(data.chat_examples, without, "held_out", 512), ValueError, "chat template"),
        ]
    )


def test_padding_is_not_trained_and_every_epoch_has_each_pair_once():
    rows = data.chat_examples(byte_tokenizer(), "held_out", 4096)[:5]
    batches = data.shuffled(rows, 2, 4096, seed=0)
    seen = [next(batches) for _ in range(5)]  # two epochs of five pairs, the middle batch from both
    ids, labels = (torch.cat([batch[name] for batch in seen]) for name in ("input_ids", "labels"))
    assert ids.shape == labels.shape == (10, 4096)
    epochs = [[rows.index(unpadded(*row)) for row in zip(ids[half], labels[half], strict=True)] for half in HALVES]
    assert [sorted(epoch) for epoch in epochs] == [[0, 1, 2, 3, 4]] * 2 and epochs[0] != epochs[1]


HALVES = slice(0, 5), slice(5, 10)


def unpadded(ids, labels):
    end = int((labels != data.IGNORED).nonzero().max()) + 1  # an answer ends with a trained token
    assert not ids[end:].any()
    return {"input_ids": ids[:end].tolist(), "labels": labels[:end].tolist()}
