"""Whole models as tensors: cut for TP×PP, computed on the shards, put together again. No file and no rank is needed."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from shard_forward import forward
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from course_tools.conversion import LAYOUTS, merge_state, split_state

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "vocab_size": 60,
    "max_position_embeddings": 32,
}
KINDS = {  # heads of other widths than hidden / heads, biases wherever the model can have them, tied and not
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=6, attention_bias=True, mlp_bias=True)),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=6)),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=10, tie_word_embeddings=True, attention_bias=True)),
}
GRIDS = list(product((1, 2, 4), (1, 2, 4)))
IDS = torch.arange(24).reshape(2, 12) * 7 % 60


def built(kind: str) -> torch.nn.Module:
    """Every tensor random: a norm of ones or a bias of zeros would hide that it went to the wrong place."""
    make, config = KINDS[kind]
    model = make(config).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + ("norm" in name)
    model.tie_weights()
    return model


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return built(request.param)


def grown(config, **changed):
    return type(config)(**{**SIZES, **changed})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_shards_compute_the_same_logits_and_come_back_byte_for_byte(model, layout):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(IDS).logits
        for tp, pp in GRIDS:
            shards = split_state(model.state_dict(), model.config, tp=tp, pp=pp, layout=layout)
            assert set(shards) == set(product(range(tp), range(pp)))
            found = forward(shards, model.config, IDS, tp=tp, pp=pp, layout=layout)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=lambda m: f"{tp=} {pp=}: {m}")  # noqa: B023

            merged = merge_state(shards, model.config, layout=layout)
            assert set(merged) == set(before)
            assert all(torch.equal(merged[name], tensor) for name, tensor in before.items()), (tp, pp)
            for shard in shards.values():  # what is trained on a shard is nobody else's
                for tensor in shard.values():
                    tensor.fill_(torch.nan)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(torch.equal(merged[name], tensor) for name, tensor in before.items())
        again = type(model)(model.config).eval()
        again.load_state_dict(merged)
        assert torch.equal(again(IDS).logits, wanted)


def test_a_shard_holds_its_share_and_no_more():
    model = built("llama")
    whole = sum(tensor.numel() for tensor in model.state_dict().values())
    norms = sum(tensor.numel() for name, tensor in model.state_dict().items() if "norm" in name)
    for layout in LAYOUTS:
        shards = split_state(model.state_dict(), model.config, tp=4, pp=2, layout=layout)
        assert sum(t.numel() for shard in shards.values() for t in shard.values()) == whole + 3 * norms
        assert all(t.is_contiguous() for shard in shards.values() for t in shard.values())


@pytest.mark.parametrize("kind", ["llama-biases", "qwen3-tied"])
def test_megatrons_fused_matrices_row_by_row(kind):
    """The layout written out by head: [query groups, (heads a group + 2) * width, hidden], whole groups on each rank."""
    model = built(kind)
    state, config = model.state_dict(), model.config
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shards = split_state(state, config, tp=2, pp=2, layout="megatron")
    for what in ("weight", "bias"):
        for rank in range(2):
            expected = []
            for group in range(rank * groups // 2, (rank + 1) * groups // 2):
                blocks = [("q", head) for head in range(heads) if head * groups // heads == group]
                for which, block in [*blocks, ("k", group), ("v", group)]:
                    source = state[f"model.layers.3.self_attn.{which}_proj.{what}"]
                    expected += [source[block * width + row] for row in range(width)]
            fused = shards[rank, 1][f"decoder.layers.1.self_attention.linear_qkv.{what}"]
            assert torch.equal(fused, torch.stack(expected)), (what, rank)
    gate, up = (state[f"model.layers.3.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    fused = shards[1, 1]["decoder.layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(fused, torch.stack([*gate[24:48], *up[24:48]]))


def test_megatrons_names():
    shards = split_state(built("qwen3-tied").state_dict(), KINDS["qwen3-tied"][1], tp=1, pp=4, layout="megatron")
    layer = {
        f"decoder.layers.0.{name}"
        for name in (
            "self_attention.linear_qkv.layer_norm_weight",
            "self_attention.linear_qkv.weight",
            "self_attention.linear_qkv.bias",
            "self_attention.q_layernorm.weight",
            "self_attention.k_layernorm.weight",
            "self_attention.linear_proj.weight",
            "self_attention.linear_proj.bias",
            "mlp.linear_fc1.layer_norm_weight",
            "mlp.linear_fc1.weight",
            "mlp.linear_fc2.weight",
        )
    }
    assert set(shards[0, 0]) == layer | {"embedding.word_embeddings.weight"}
    assert set(shards[0, 1]) == set(shards[0, 2]) == layer
    assert set(shards[0, 3]) == layer | {"decoder.final_layernorm.weight", "output_layer.weight"}


def test_concatenating_fused_shards_as_one_matrix_is_not_a_merge():
    """The classic mistake: [q k v] of rank 0 above [q k v] of rank 1 is not [q k v] of the model."""
    model = built("llama")
    state, config = model.state_dict(), model.config
    halves = split_state(state, config, tp=2, pp=1)
    name = "model.layers.0.self_attn.{}_proj.weight"
    fused = [torch.cat([halves[rank, 0][name.format(which)] for which in "qkv"]) for rank in range(2)]
    wrong = dict(zip("qkv", torch.cat(fused).split([32, 16, 16]), strict=True))
    with torch.no_grad():
        wanted = model(IDS).logits
        model.load_state_dict(state | {name.format(which): tensor for which, tensor in wrong.items()})
        assert (model(IDS).logits - wanted).abs().max() > 0.1  # no error, no warning, other logits


@pytest.mark.parametrize("kind", ["llama", "qwen2-tied"])
def test_a_padded_vocabulary_is_a_multiple_of_128_for_each_rank(kind):
    model = built(kind)
    with torch.no_grad():
        shards = split_state(model.state_dict(), model.config, tp=2, pp=2, layout="megatron", pad_vocab=True)
        assert shards[1, 0]["embedding.word_embeddings.weight"].shape == (128, 32)
        assert not shards[1, 1]["output_layer.weight"].any()  # all 60 tokens are rank 0's
        found = forward(shards, model.config, IDS, tp=2, pp=2, layout="megatron")
        torch.testing.assert_close(found, model(IDS).logits, rtol=1e-4, atol=1e-5)
    merged = merge_state(shards, model.config, layout="megatron")
    assert all(torch.equal(merged[name], tensor) for name, tensor in model.state_dict().items())
    odd = grown(model.config, vocab_size=61)  # a prime: cannot be cut, and padding helps
    with pytest.raises(
        ValueError, match=r"tp=2 does not divide the model's 61 rows of the vocabulary \(layout megatron"
    ):
        split_state({}, odd, tp=2, pp=1)
    with pytest.raises(ValueError, match="lacks the tensor model.embed_tokens"):  # past the grid
        split_state({}, odd, tp=2, pp=1, layout="megatron", pad_vocab=True)
    with pytest.raises(ValueError, match="pad_vocab goes with layout='megatron'"):
        split_state(model.state_dict(), model.config, tp=2, pp=1, pad_vocab=True)


@pytest.mark.parametrize(
    ("changed", "grid", "sentence"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 36},
            (4, 1),
            "6 attention heads: it may be 1 or 3.",
        ),
        (
            {"num_key_value_heads": 2},
            (4, 1),
            "2 key/value heads (each rank needs whole ones of its own): it may be 1 or 2.",
        ),
        ({"intermediate_size": 50}, (4, 1), "50 columns of the MLP: it may be 1 or 2."),
        ({}, (1, 3), "pp=3 does not divide the model's 4 layers: it may be 1, 2 or 4."),
        ({}, (1, 8), "pp=8 does not divide the model's 4 layers"),
        ({}, (0, 1), "tp=0: give a whole number of at least 1."),
        ({}, (True, 1), "tp=True: give a whole number"),
        ({}, (1, 2.0), "pp=2.0: give a whole number"),
    ],
)
def test_a_grid_that_does_not_divide_the_model_is_refused(changed, grid, sentence):
    config = grown(LlamaConfig(), **{"head_dim": 4, **changed})
    for layout, pad in (("hugging_face", False), ("megatron", True)):
        with pytest.raises(ValueError) as refused:
            split_state({}, config, tp=grid[0], pp=grid[1], layout=layout, pad_vocab=pad)
        assert sentence in str(refused.value)


def test_tensors_that_are_not_the_models_are_refused():
    model = built("qwen2-tied")
    state = model.state_dict()
    norm, q = "model.norm.weight", "model.layers.2.self_attn.q_proj.weight"
    for wrong, sentence in (
        ({k: v for k, v in state.items() if k != norm}, f"The model lacks the tensor {norm}."),
        (state | {q: state[q][:-1]}, rf"The model has {q} of shape \[31, 32\] instead of \[32, 32\]."),
        (state | {"extra": state[norm]}, "a tensor extra that the model's configuration does not know"),
        (state | {"lm_head.weight": state["lm_head.weight"] + 1}, "config ties them"),
        (state | {q: state[q].bfloat16()}, "different dtypes and cannot be fused"),
    ):
        with pytest.raises(ValueError, match=sentence):
            split_state(wrong, model.config, tp=2, pp=2, layout="megatron")
    with pytest.raises(ValueError, match="type 'mistral' is not one"):
        split_state(state, MistralConfig(**SIZES), tp=1, pp=1)
    with pytest.raises(ValueError, match="layout='nemo' is not one of hugging_face, megatron"):
        split_state(state, model.config, tp=1, pp=1, layout="nemo")
    old = state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}  # computed, not learned
    split_state({k: v for k, v in old.items() if k != "lm_head.weight"}, model.config, tp=1, pp=1)


def test_shards_that_do_not_fit_are_refused():
    model = built("qwen2-tied")
    config = model.config

    def fresh(layout: str = "megatron"):
        return split_state(model.state_dict(), config, tp=2, pp=2, layout=layout)

    def refused(shards, sentence, layout="megatron"):
        with pytest.raises(ValueError, match=sentence):
            merge_state(shards, config, layout=layout)

    qkv, norm = "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.final_layernorm.weight"
    refused({}, "There are no shards")
    refused({k: v for k, v in fresh().items() if k != (1, 0)}, r"The shard \(1, 0\) is missing")
    refused(fresh("hugging_face"), "of layout hugging_face")
    refused(fresh(), "of layout megatron", "hugging_face")
    shards = fresh()
    shards[1, 1][qkv] = shards[1, 1][qkv][:-2]
    refused(shards, rf"tp rank 1 and stage 1 has {qkv} of shape \[30, 32\] instead of \[32, 32\]")
    shards = fresh()
    shards[0, 1][qkv] = shards[0, 1][qkv].double()
    refused(shards, "another dtype on one tp rank")
    shards = fresh()  # what happens where a training forgets to add up these gradients
    shards[1, 1][norm] += 1
    refused(shards, f"{norm} of tp rank 1 differs from tp rank 0's")
    shards = fresh()
    shards[1, 1]["output_layer.weight"] += 1
    refused(
        shards, "output_layer.weight of stage 1 differs from embedding.word_embeddings.weight of stage 0 on tp rank 1"
    )
    for place, shard in (shards := fresh()).items():  # a NaN is as good a value as any other
        if place[1] == 1:
            shard[norm][3] = torch.nan
    assert merge_state(shards, config, layout="megatron")["model.norm.weight"].isnan().sum() == 1
