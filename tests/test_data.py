"""The texts: what each rank gets of a batch, the instruction pairs, and which of their tokens are trained."""

import hashlib
import json
import subprocess
import sys

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from course_lib.models import byte_tokenizer, data


def test_english_is_real_text_of_a_few_hundred_kilobytes_in_a_fixed_order():
    text = data.english()
    assert 350_000 < len(text) < 1_500_000
    assert text.startswith('The "assert" statement')
    assert text.count(" the ") > 1000
    assert data.english() is text


def test_english_is_the_same_in_another_process():
    code = """if True:
        import hashlib
        from course_lib.models import data
        print(hashlib.sha256(data._english_tokens().numpy().tobytes()).hexdigest())"""
    digest = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert digest.decode().strip() == hashlib.sha256(data.byte_tokens(data.english()).numpy().tobytes()).hexdigest()


def test_byte_tokens_are_utf8_and_fit_the_tiny_vocabulary():
    assert data.byte_tokens("é!").tolist() == [0xC3, 0xA9, 0x21]
    assert data.byte_tokens("").shape == (0,) and data.byte_tokens("").dtype == torch.int64
    assert bytes(data.byte_tokens("日本").tolist()).decode() == "日本"


def test_sequences_follow_each_other_without_the_rest():
    assert data.sequences(torch.arange(10), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="too few"):
        data.sequences(torch.arange(3), 4)
    with pytest.raises(ValueError, match="seq_len=0"):
        data.sequences(torch.arange(3), 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("global_batch", [7, 8, 12])
def test_the_ranks_batches_one_after_another_are_the_batch_of_one_rank(world_size, global_batch):
    whole = data.sample_batch(5, global_batch=global_batch, seq_len=16)
    parts = [
        data.sample_batch(5, global_batch=global_batch, seq_len=16, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert torch.equal(torch.cat(parts), whole)
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert whole.shape == (global_batch, 16) and whole.dtype == torch.int64


def test_each_step_and_seed_has_its_own_batch_and_gets_it_again():
    def batch(step, seed):
        return data.sample_batch(step, global_batch=4, seq_len=8, seed=seed)

    torch.manual_seed(1)
    first, expected = batch(0, 0), torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), expected)  # nothing drawn from the caller's generator
    assert torch.equal(batch(0, 0), first)
    others = [batch(1, 0), batch(0, 1), batch(2, 0)]
    assert not any(torch.equal(first, other) for other in others)
    assert not torch.equal(others[0], others[1])  # step 1 of seed 0 is not step 0 of seed 1


def test_a_batch_is_the_callers_own():
    first = data.sample_batch(0, global_batch=2, seq_len=8)
    kept = first.clone()
    first.zero_()
    data.TextWindows(8)[0].zero_()
    assert torch.equal(data.sample_batch(0, global_batch=2, seq_len=8), kept)
    assert data.TextWindows(8)[0].sum() > 0


def test_own_tokens_are_drawn_from_start_to_end():
    tokens = torch.arange(6)
    batches = [data.sample_batch(step, global_batch=2, seq_len=4, tokens=tokens) for step in range(40)]
    drawn = {tuple(row) for row in torch.cat(batches).tolist()}
    assert drawn == {(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5)}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"global_batch": 2, "world_size": 3}, "2 sequences cannot be split over 3 ranks"),
        ({"global_batch": 4, "world_size": 2, "rank": 2}, "rank=2"),
        ({"global_batch": 4, "rank": -1}, "rank=-1"),
        ({"global_batch": 4, "seq_len": 0}, "seq_len=0"),
        ({"global_batch": 4, "step": -1}, "step=-1"),
        ({"global_batch": 4, "seq_len": 10**9}, "shorten"),
    ],
)
def test_a_batch_that_cannot_be_is_refused_in_one_sentence(options, word):
    with pytest.raises(ValueError, match=word) as caught:
        data.sample_batch(**{"step": 0, "seq_len": 8, **options})
    assert "\n" not in str(caught.value)


def test_text_windows_under_a_distributed_sampler():
    windows = data.TextWindows(32, limit=10)
    assert len(windows) == 10 and windows[-1].tolist() == windows[9].tolist()
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(windows, num_replicas=2, rank=rank, shuffle=False)
        seen += [batch for batch in DataLoader(windows, batch_size=5, sampler=sampler)]
    assert [tuple(batch.shape) for batch in seen] == [(5, 32), (5, 32)]
    assert torch.equal(torch.cat(seen)[[0, 5, 1]], torch.stack([windows[i] for i in (0, 1, 2)]))
    with pytest.raises(IndexError):
        windows[10]


def test_text_windows_overlap_by_their_stride_and_need_one_window():
    windows = data.TextWindows(4, tokens=torch.arange(9), stride=2)
    assert [window.tolist() for window in windows] == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    assert len(data.TextWindows(4, tokens=torch.arange(4))) == 1
    for wrong in ({"stride": 0}, {"limit": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            data.TextWindows(4, tokens=torch.arange(9), **wrong)


# Instruction pairs


def test_instructions_are_split_for_good():
    train, held_out, everything = (data.instructions(split) for split in ("train", "held_out", "all"))
    assert len(everything) >= 300 and len(train) + len(held_out) == len(everything)
    assert not {pair["id"] for pair in train} & {pair["id"] for pair in held_out}
    assert 0.04 < len(held_out) / len(everything) < 0.18
    train[0]["answer"] = "changed"
    assert data.instructions("train")[0]["answer"] != "changed"
    with pytest.raises(ValueError, match="held_out"):
        data.instructions("test")


def test_a_pair_keeps_its_side_whatever_joins_it():
    assert [name for name in (f"q{i}" for i in range(40)) if data._is_held_out(name)] == ["q9", "q14", "q24", "q25"]


GOOD = {"id": "a", "topic": "t", "question": "q", "answer": "a line\u2028goes on"}


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "no JSON"),
        ("[1]", "exactly the fields"),
        (json.dumps({**GOOD, "id": "b", "more": "x"}), "exactly the fields"),
        (json.dumps({**GOOD, "id": "b", "answer": " "}), "'answer'"),
        (json.dumps({**GOOD, "id": "b", "topic": 3}), "'topic'"),
        (json.dumps(GOOD), "'a' stands there already"),
    ],
)
def test_a_bad_line_is_named(line, word):
    good = json.dumps(GOOD, ensure_ascii=False)
    assert data._read_pairs(good + "\n\n") == [GOOD]
    with pytest.raises(ValueError, match="line 2") as caught:
        data._read_pairs(f"{good}\n{line}\n")
    assert word in str(caught.value)


def test_only_the_answer_and_its_end_are_trained():
    tokenizer = byte_tokenizer()
    pair = {"id": "x", "topic": "t", "question": "Why?", "answer": "Because."}
    (example,) = data.chat_examples(tokenizer, [pair], 512)
    prompt = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    prompt_ids = tokenizer(prompt)["input_ids"]
    answer_ids = [*b"Because.", tokenizer.eos_token_id]
    assert example["input_ids"] == prompt_ids + answer_ids
    assert example["labels"] == [data.IGNORED] * len(prompt_ids) + answer_ids


def test_long_examples_are_cut_and_a_prompt_without_room_is_refused():
    tokenizer = byte_tokenizer()
    pair = {"id": "x", "topic": "t", "question": "Why?", "answer": "Because."}
    full = data.chat_examples(tokenizer, [pair], 512)[0]
    prompt = full["labels"].count(data.IGNORED)
    cut = data.chat_examples(tokenizer, [pair], prompt + 3)[0]
    assert cut == {key: values[: prompt + 3] for key, values in full.items()}
    with pytest.raises(ValueError, match=f"'x' takes {prompt} tokens"):
        data.chat_examples(tokenizer, [pair], prompt)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        data.chat_examples(tokenizer, [pair], 512)


def test_all_pairs_become_examples():
    examples = data.chat_examples(byte_tokenizer(), data.instructions("all"), 4096)
    assert all(len(e["input_ids"]) == len(e["labels"]) and e["labels"][-1] == 255 for e in examples)
