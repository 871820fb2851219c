"""The texts that the course trains on: the standard library's documentation, and question/answer pairs of our own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # the label that torch's cross entropy and transformers leave out of the loss
_FIELDS = ("id", "topic", "question", "answer")


@lru_cache(maxsize=1)
def english() -> str:
    """Real English that every Python brings along: the language reference behind `help()`, 0.47 to 0.51 MB.

    Topics come in alphabetical order. The wording is that of the running Python, so two Python versions train on
    slightly different text; losses to compare come from one of them. Source: `pydoc_data.topics`.
    """
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def byte_tokens(text: str) -> torch.Tensor:
    """The UTF-8 bytes of `text` as token ids: int64 of shape (number of bytes,), each below 256."""
    return torch.tensor(list(text.encode()), dtype=torch.long)


@lru_cache(maxsize=1)
def _english_tokens() -> torch.Tensor:
    return byte_tokens(english())  # shared by all callers of this process: hand out copies only


def sequences(tokens: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Cut tokens (n,) into rows (n // seq_len, seq_len) that follow each other; what is shorter than a row is left out.

    A view of `tokens`, no copy. Raises ValueError where there is not even one row.
    """
    _check_lengths(tokens, seq_len)
    rows = len(tokens) // seq_len
    return tokens[: rows * seq_len].view(rows, seq_len)


def rank_slice(rows: int, rank: int, world_size: int) -> slice:
    """The rows of a global batch that `rank` works on, in order; where they do not divide, the first ranks get one more.

    rank_slice(7, 1, 3) is slice(3, 5). Raises ValueError where a rank would get nothing, or does not exist.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is none of the {world_size} ranks: give 0 to {world_size - 1}.")
    if rows < world_size:
        raise ValueError(f"{rows} sequences cannot be split over {world_size} ranks: give each rank at least one.")
    share, left_over = divmod(rows, world_size)
    first = rank * share + min(rank, left_over)
    return slice(first, first + share + (rank < left_over))


def sample_batch(
    step: int,
    *,
    global_batch: int,
    seq_len: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's sequences of one training step: int64 (local_batch, seq_len), windows of the English text.

    The global batch depends on `seed` and `step` alone; each rank gets its `rank_slice` of it. So the ranks' batches,
    one after another, are exactly the batch of a single rank. Where the split is uneven, the mean over ranks of their
    mean losses is not the global mean: weight each rank by its sequences. `tokens` (n,) takes the English text's place.
    Raises ValueError where `global_batch` is smaller than `world_size` or the text shorter than `seq_len`.
    """
    if step < 0:
        raise ValueError(f"step={step}: steps count from 0.")
    mine = rank_slice(global_batch, rank, world_size)
    tokens = _english_tokens() if tokens is None else tokens
    _check_lengths(tokens, seq_len)
    # Steps and seeds are mixed by a hash: with seed + step, step 1 of seed 0 would be step 0 of seed 1.
    mixed = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:7], "big"))
    starts = torch.randint(len(tokens) - seq_len + 1, (global_batch,), generator=generator)
    return torch.stack([tokens[start : start + seq_len] for start in starts[mine].tolist()])


class GlobalBatches(torch.utils.data.Dataset):
    """The rows of `steps` global batches, one after another: item step * global_batch + row is int64 (seq_len,).

    For frameworks that deal a loader's samples or batches out to the ranks themselves: whoever gets which row, the rows
    of a step are those of `sample_batch`. Raises ValueError as `sample_batch` does.
    """

    def __init__(self, steps: int, *, global_batch: int, seq_len: int) -> None:
        self.steps, self.global_batch, self.seq_len = steps, global_batch, seq_len
        self._batch = lru_cache(maxsize=2)(self._make_batch)

    def _make_batch(self, step: int) -> torch.Tensor:
        return sample_batch(step, global_batch=self.global_batch, seq_len=self.seq_len)

    def __getstate__(self) -> dict[str, int]:  # a cache cannot travel to a spawned rank
        return {key: value for key, value in self.__dict__.items() if key != "_batch"}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__.update(state)
        self._batch = lru_cache(maxsize=2)(self._make_batch)

    def __len__(self) -> int:
        return self.steps * self.global_batch

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        step, row = divmod(index, self.global_batch)
        return self._batch(step)[row]


def instructions(split: str = "train") -> list[dict[str, str]]:
    """Question/answer pairs about this course's subject, each a dict with "id", "topic", "question" and "answer".

    About one pair in ten is held out, chosen by a hash of its id: a pair stays on its side when others are added.
    Raises ValueError for another split, or naming the first bad line of the file.
    """
    if split not in ("train", "held_out", "all"):
        raise ValueError(f'split={split!r}: choose "train", "held_out" or "all".')
    pairs = _read_pairs(resources.files(__name__).joinpath("instructions.jsonl").read_text(encoding="utf-8"))
    return [pair for pair in pairs if split == "all" or _is_held_out(pair["id"]) == (split == "held_out")]


def _is_held_out(pair_id: str) -> bool:
    return int.from_bytes(hashlib.sha256(pair_id.encode()).digest()[:8], "big") % 10 == 0


def _read_pairs(text: str) -> list[dict[str, str]]:
    pairs, seen = [], set()
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: U+2028 may stand inside a string
        if not line.strip():
            continue
        try:
            pair = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"instructions.jsonl, line {number}: no JSON object ({error}).") from error
        if not isinstance(pair, dict) or set(pair) != set(_FIELDS):
            raise ValueError(f"instructions.jsonl, line {number}: give exactly the fields {', '.join(_FIELDS)}.")
        for field in _FIELDS:
            if not isinstance(pair[field], str) or not pair[field].strip():
                raise ValueError(f"instructions.jsonl, line {number}: {field!r} must be a text that is not empty.")
        if pair["id"] in seen:
            raise ValueError(f"instructions.jsonl, line {number}: the id {pair['id']!r} stands there already.")
        seen.add(pair["id"])
        pairs.append(pair)
    return pairs


def chat_examples(tokenizer: PreTrainedTokenizerBase, split: str, seq_len: int) -> list[dict[str, list[int]]]:
    """The split's pairs that fit in `seq_len` tokens whole: half an answer would teach to stop in the middle.

    Each has "input_ids" and "labels", lists of the same length. The chat template writes the conversation. Its prompt, up
    to where the assistant speaks, has the label -100; the answer and its end token (<|im_end|>) are trained. Raises
    ValueError for a tokenizer without a chat template, and where no pair fits.
    """
    if not tokenizer.chat_template:
        raise ValueError("This tokenizer has no chat template: set its chat_template, or take an instruction model's.")
    examples = []
    for pair in instructions(split):
        question = {"role": "user", "content": pair["question"].strip()}
        answer = {"role": "assistant", "content": pair["answer"].strip()}
        prompt = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([question, answer], tokenize=False)
        if not whole.startswith(prompt):
            raise ValueError("This chat template rewrites a prompt once it is answered: use one that only appends.")
        # Separately, as when generating: the model then meets exactly these prompt tokens.
        prompt_ids, answer_ids = (
            tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, whole[len(prompt) :])
        )
        if tokenizer.eos_token_id in answer_ids:  # what a template writes after the turn's end is never generated
            answer_ids = answer_ids[: answer_ids.index(tokenizer.eos_token_id) + 1]
        labels = [IGNORED] * len(prompt_ids) + answer_ids
        examples.append({"input_ids": prompt_ids + answer_ids, "labels": labels})
    fitting = [example for example in examples if len(example["labels"]) <= seq_len]
    if not fitting:
        shortest = min(len(example["labels"]) for example in examples)
        raise ValueError(
            f"seq_len={seq_len}: the shortest {split} pair has {shortest} tokens of this model; allow more."
        )
    return fitting


def padded(rows: Sequence[dict[str, list[int]]], seq_len: int) -> dict[str, torch.Tensor]:
    """Rows as one batch, int64 (rows, seq_len), padded on the right with token 0 and the label -100.

    No attention mask: a token sees only what stands before it, and padding stands behind.
    """

    def fill(key: str, value: int) -> torch.Tensor:
        return torch.tensor([row[key] + [value] * (seq_len - len(row[key])) for row in rows])

    return {"input_ids": fill("input_ids", 0), "labels": fill("labels", IGNORED)}


def shuffled(
    rows: Sequence[dict[str, list[int]]], micro_batch_size: int, seq_len: int, seed: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end, as `padded`, each epoch in an order of its own; an epoch's last rows go on in the next one."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[dict[str, list[int]]] = []
    while True:
        while len(waiting) < micro_batch_size:
            waiting += [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
        yield padded(waiting[:micro_batch_size], seq_len)
        waiting = waiting[micro_batch_size:]


def _check_lengths(tokens: torch.Tensor, seq_len: int) -> None:
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: give at least 1 token.")
    if len(tokens) < seq_len:
        raise ValueError(f"The text has {len(tokens)} tokens, too few for seq_len={seq_len}: shorten the sequences.")
