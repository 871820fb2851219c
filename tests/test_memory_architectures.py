"""Every architecture that is known by its config.json, against the model that the installed transformers builds from it."""

from __future__ import annotations

import json
import re
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from refusals import assert_refused
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from course_lib.memory import PRESETS, estimate, shape_of
from course_lib.memory.architectures import LEFT_OUT, block_class, read_config
from course_lib.memory.estimate import uncounted
from course_lib.memory.presets import HUB_NAMES
from course_lib.memory.settings import RunSettings
from course_lib.observe.fake import MOMENTS, count_step, fake_tensors
from course_lib.training.activation_checkpointing import set_checkpointing

WIDTHS = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 704,
    "vocab_size": 512,
}
GPT2 = {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": 1024, "n_inner": 704, "vocab_size": 512}
MIXTURES = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 256},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "mlp_only_layers": [1],
    },
    "llama4_text": {
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 1024,
        "moe_layers": [1, 3],
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 192,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 8,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    },
}
VARIANTS = [  # what else a configuration can say
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen3", {"attention_bias": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("deepseek_v3", {"attention_bias": True, "n_shared_experts": 2}),
    ("llama4_text", {"moe_layers": None, "interleave_moe_layer_step": 3}),
    ("gpt2", {"n_inner": None, "tie_word_embeddings": False}),
    ("starcoder2", {"use_bias": False}),
    ("glm4", {"attention_bias": False}),
    ("granite", {"mlp_bias": True, "attention_bias": True}),
    ("gemma3_text", {"attention_bias": True}),
]


def configuration(kind: str, **values) -> PreTrainedConfig:
    widths = GPT2 if kind == "gpt2" else WIDTHS | MIXTURES.get(kind, {})
    if kind == "deepseek_v3":
        widths = {name: value for name, value in widths.items() if name != "head_dim"}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    no_dropout = {f"{part}_pdrop": 0 for part in ("resid", "embd", "attn")} if kind == "gpt2" else {}
    return CONFIG_MAPPING[kind](**(widths | tokens | no_dropout | values))


@cache
def on_meta(kind: str, **values) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(configuration(kind, **dict(values)))


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_the_closed_form_is_the_model_s_number_of_parameters(kind) -> None:
    config = configuration(kind).to_dict()
    assert read_config(config).parameters == count(on_meta(kind))
    assert any(type(module).__name__ == block_class(kind) for module in on_meta(kind).modules())
    for name in set(LEFT_OUT[kind]) & set(config):  # a file that leaves something out
        less = {key: value for key, value in config.items() if key != name}
        if "heads" in name and 8 % (LEFT_OUT[kind][name] or 8):
            continue  # so many do not go with the 8 query heads here
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(less))
        assert read_config(less).parameters == count(model), name


@pytest.mark.parametrize(("kind", "values"), VARIANTS)
def test_so_it_is_of_every_variant(kind, values) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config := configuration(kind, **values))
    assert read_config(config.to_dict()).parameters == count(model)
    assert shape_of(model) == shape_of(config)


# Billions, all and those that a token goes through, as the models' cards on the hub print them.
CARDS = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "deepseek-v3": (671, 37),
    "llama-4-scout": (109, 17),
    "llama-4-maverick": (400, 17),
    "llama-3.1-8b": (8.03, None),
    "llama-3.1-405b": (406, None),
    "qwen2.5-7b": (7.62, None),
    "mistral-7b-v0.3": (7.25, None),
    "mistral-nemo-12b": (12.2, None),
    "gemma-2-9b": (9.24, None),
    "gemma-2-27b": (27.2, None),
    "gemma-3-1b": (1.0, None),
    "phi-3-mini": (3.82, None),
    "phi-4": (14.7, None),
    "glm-4-9b": (9.4, None),
    "olmo-2-7b": (7.3, None),
    "olmo-2-13b": (13.7, None),
    "granite-3.1-8b": (8.17, None),
    "smollm3-3b": (3.08, None),
    "starcoder2-7b": (7.17, None),
    "starcoder2-15b": (16.0, None),
}


def test_presets_have_as_many_parameters_as_their_cards_say() -> None:
    for name, (total, active) in CARDS.items():
        # Llama 4's cards count the part that sees, 0.9 billion, with the rest
        assert PRESETS[name].parameters / 1e9 == pytest.approx(total, rel=0.012 if "llama-4" in name else 0.005), name
        assert active is None or PRESETS[name].active_parameters / 1e9 == pytest.approx(active, rel=0.02), name
    # OpenAI's count of active parameters leaves the embedding out
    small = PRESETS["gpt-oss-20b"]
    assert (small.parameters / 1e9, 1) == (pytest.approx(20.9, abs=0.05), 1)
    assert (small.active_parameters - small.embedding_parameters) / 1e9 == pytest.approx(3.6, abs=0.05)


@pytest.mark.parametrize("kind", ["llama", "phi3", "glm4", "gpt2", "starcoder2", *MIXTURES])
def test_lora_s_factors_are_those_that_peft_makes(kind) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config := configuration(kind))
        linear = {n: m for n, m in model.named_modules() if type(m) in (nn.Linear, Conv1D) and n != "lm_head"}
        counted = estimate(config, method="lora", lora_rank=8, seq_len=64).num_trainable
        assert counted == 8 * sum(sum(module.weight.shape) for module in linear.values())
        if kind in ("qwen3_moe", "deepseek_v3"):
            return  # here PEFT 0.21 adapts the experts as well wherever a plain MLP's matrices are named
        inject_adapter_in_model(LoraConfig(r=8, target_modules="|".join(map(re.escape, linear))), model)
    trained = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    assert counted == trained


def test_bitsandbytes_leaves_experts_in_16_bits() -> None:
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    config = configuration("qwen3_moe")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        replace_with_bnb_linear(model, ["lm_head"], BitsAndBytesConfig(load_in_4bit=True))
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    assert experts and all(p.dtype is torch.bfloat16 for p in experts)
    in_16_bits = sum(2 * p.numel() for p in experts)
    as_they_are, too = (estimate(config, method="qlora", quantize_experts=each).weights for each in (False, True))
    assert as_they_are > in_16_bits and as_they_are - too > 0.7 * in_16_bits


# Held against a step that is run on fake tensors. Where it is more than 2 %, tensors of one name in the code live longer than is
# counted: what the products of several matrices in one give (phi3, glm4, gpt2), slices of keys and values (deepseek_v3). And the
# gradient of a sum over all experts is counted in full, and is a view (llama4).
WIDER = {"phi3": 0.035, "glm4": 0.035, "gpt2": 0.035, "deepseek_v3": 0.05, "llama4_text": 0.06}
EAGER = ("gemma2", "gpt_oss")  # transformers has no other attention for their caps and sinks, but for flash kernels


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("kind", LEFT_OUT)
def test_a_step_needs_what_was_estimated(kind, checkpointing) -> None:
    config = configuration(kind)
    attention = "eager" if kind in EAGER else "flash"
    with fake_tensors():
        how = {"attn_implementation": {"flash": "sdpa"}.get(attention, attention), "dtype": torch.bfloat16}
        model = AutoModelForCausalLM.from_config(config, **how).train()
        set_checkpointing(model, checkpointing)
        first = (model.transformer.h if kind == "gpt2" else model.model.layers)[0]
        batch = torch.zeros(2, 512, dtype=torch.long)
        counted = count_step(model, torch.optim.AdamW(model.parameters(), fused=True), batch, first)
    executed = max(counted.moments[moment] for moment in MOMENTS[:3])
    settings = {"activation_checkpointing": checkpointing, "micro_batch_size": 2, "seq_len": 512}
    need = estimate(config, precision="bf16", attention=attention, **settings)
    assert need.gradients == counted.gradients
    assert need.weights == pytest.approx(counted.parameters, abs=64)  # buffers of a few numbers
    peak = max(size for phase, size in need.phases.items() if phase != "optimizer step")
    assert peak == pytest.approx(executed, rel=WIDER.get(kind, 0.02))


def test_adapters_on_experts_are_not_counted_and_are_said_not_to_be() -> None:
    """PEFT 0.21 adapts the experts of this architecture where all linear layers are named, and not those of gpt-oss."""
    for kind, adapted in (("qwen3_moe", True), ("gpt_oss", False)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config := configuration(kind))
            inject_adapter_in_model(LoraConfig(r=8, target_modules="all-linear"), model)
        names = [name for name, parameter in model.named_parameters() if "lora_" in name]
        assert any("experts" in name for name in names) is adapted
        shape = shape_of(config)
        assert bool(uncounted(shape, RunSettings(method="lora"))) is adapted
        assert not uncounted(shape, RunSettings(method="lora", lora_targets="attention"))


def test_experts_go_to_ranks_of_their_own() -> None:
    how = {"strategy": "ddp", "ranks": 8, "precision": "bf16", "activation_checkpointing": "full"}
    alone, apart = (estimate("mixtral-8x7b", expert_parallel=ep, **how) for ep in (1, 8))
    block = PRESETS["mixtral-8x7b"].block()
    experts = 32 * 2 * sum(n * rows * columns for name, (n, rows, columns) in block.experts.items() if name != "router")
    assert alone.weights - apart.weights == experts * 7 // 8
    assert apart.num_parameters == alone.num_parameters
    sharded = how | {"strategy": "fsdp"}
    alone, apart = (estimate("mixtral-8x7b", expert_parallel=ep, **sharded) for ep in (1, 8))
    assert alone.weights == apart.weights and alone.optimizer == apart.optimizer  # a shard is a shard
    assert alone.buffers > 2 * apart.buffers  # but a block that is gathered has an eighth of its experts


def test_a_model_is_read_from_wherever_it_lies(tmp_path, monkeypatch) -> None:
    config = configuration("qwen3_moe")
    config.save_pretrained(tmp_path / "mine")
    expected = shape_of(config)
    for text in (tmp_path / "mine", str(tmp_path / "mine" / "config.json")):
        found = shape_of(text)
        assert found.name == "mine" and found.parameters == expected.parameters
    monkeypatch.chdir(tmp_path)
    assert shape_of("./mine").parameters == expected.parameters
    wrapped = {"model_type": "llama4", "text_config": configuration("llama4_text").to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(wrapped))
    assert shape_of("config.json") == read_config(wrapped, tmp_path.name)


def test_hub_names_in_any_writing_and_from_the_cache(tmp_path, monkeypatch) -> None:
    import huggingface_hub.constants

    for name, hubs in HUB_NAMES.items():
        for hub in hubs:
            assert shape_of(hub) is shape_of(hub.upper()) is PRESETS[name], hub
    assert shape_of("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit") is PRESETS["llama-3.1-8b"]
    snapshot = tmp_path / "models--me--mine" / "snapshots" / "1"
    configuration("olmo2").save_pretrained(snapshot)
    (tmp_path / "models--me--mine" / "refs").mkdir()
    (tmp_path / "models--me--mine" / "refs" / "main").write_text("1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert shape_of("me/mine").parameters == read_config(configuration("olmo2").to_dict()).parameters


def test_a_model_that_is_on_the_hub_alone_is_read_from_there(tmp_path, monkeypatch) -> None:
    import huggingface_hub.constants

    there = tmp_path / "me" / "other" / "resolve" / "main"
    configuration("granite").save_pretrained(there)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as hub:
        thread = Thread(target=hub.serve_forever)
        thread.start()
        template = f"http://127.0.0.1:{hub.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        try:
            assert shape_of("me/other").parameters == count(on_meta("granite"))
            assert_refused([(lambda: shape_of("me/nothing"), ValueError, "me/nothing")])
        finally:
            hub.shutdown()
            thread.join()


def test_what_is_no_model_is_refused(tmp_path) -> None:
    files = {"no.json": "{", "list.json": "[1]", "none.json": "{}", "rwkv.json": '{"model_type": "rwkv"}'}
    files["half.json"] = '{"model_type": "llama", "hidden_size": 64}'
    files["word.json"] = json.dumps(configuration("llama").to_dict() | {"head_dim": None, "num_attention_heads": "8"})
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    expected = {
        "no.json": "JSON",
        "list.json": "object",
        "none.json": "''",
        "rwkv.json": "'rwkv'",
        "half.json": "num_",
        "word.json": "no number",
    }
    cases = [(tmp_path / name, fragment) for name, fragment in expected.items()]
    cases += [(tmp_path, "config.json"), (tmp_path / "gone", "gone"), ("org/no-such-model", "org/no-such-model")]
    cases += [("me/tiny", "me/tiny"), ("qwen3-30b", "qwen3-30b-a3b"), ("llama-3.1-9b", "llama-3.1-8b")]
    assert_refused((lambda model=model: shape_of(model), ValueError, fragment) for model, fragment in cases)
