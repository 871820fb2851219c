"""A model, data and a YAML without a mistake in them, for the tests of `course_tools.axolotl.check`: nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

WIDTHS = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}
NUM_ROWS = 100
GOOD = """\
base_model: ./tiny
datasets:
  - path: ./alpaca.jsonl
    ds_type: json
    type: alpaca
val_set_size: 0.1
sequence_len: 128
sample_packing: false
micro_batch_size: 2
gradient_accumulation_steps: 3
num_epochs: 2
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
attn_implementation: sdpa
saves_per_epoch: 2
output_dir: ./out
"""
FSDP = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT"}}
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
QLORA = LORA | {"adapter": "qlora", "load_in_4bit": True}
NO_KERNELS = {f"lora_{name}_kernel": False for name in ("mlp", "qkv", "o", "embedding")}
ZERO3 = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
}
AUTO = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


def make_folder(folder: Path) -> Path:
    """`tiny/` with widths and a tokenizer of words, alpaca.jsonl, texts.jsonl, chat.jsonl, zero3.json, and good.yml."""
    tiny = folder / "tiny"
    tiny.mkdir(parents=True)
    (tiny / "config.json").write_text(json.dumps(WIDTHS), encoding="utf-8")
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tiny / "tokenizer.json"))
    write_rows(
        folder / "alpaca.jsonl", [{"instruction": f"Say {i}", "input": "", "output": str(i)} for i in range(NUM_ROWS)]
    )
    write_rows(folder / "texts.jsonl", [{"text": "one two three four five six seven"} for _ in range(NUM_ROWS)])
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    write_rows(folder / "chat.jsonl", [{"messages": chat}] * 9)
    write_rows(folder / "sharegpt.jsonl", [{"messages": [{"from": "human", "value": "Hi"}]}] * 9)
    (folder / "empty.jsonl").touch()
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n', encoding="utf-8")
    (folder / "zero3.json").write_text(json.dumps(ZERO3), encoding="utf-8")
    (folder / "bad.json").write_text('{"zero_optimization": {\n"stage": 3,}}', encoding="utf-8")
    (folder / "good.yml").write_text(GOOD, encoding="utf-8")
    return folder


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def changed(**changes: object) -> dict:
    """The good YAML's values with some others; None takes a key away."""
    return {key: value for key, value in (yaml.safe_load(GOOD) | changes).items() if value is not None}
