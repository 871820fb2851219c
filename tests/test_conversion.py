"""Whole models as tensors: split for TP×PP, put together again. tests/test_conversion_megatron.py asks Megatron itself."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from refusals import assert_refused
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

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
    "llama": LlamaConfig(**SIZES),
    "llama-biases": LlamaConfig(**SIZES, head_dim=6, attention_bias=True, mlp_bias=True),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=6),
    "qwen3-tied": Qwen3Config(**SIZES, head_dim=10, tie_word_embeddings=True, attention_bias=True),
}


def built(kind: str) -> torch.nn.Module:
    """Every tensor random: a norm of ones or a bias of zeros would hide that it went to the wrong place."""
    model = AutoModelForCausalLM.from_config(KINDS[kind]).eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + ("norm" in name)
    model.tie_weights()
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_every_grid_come_back_byte_for_byte(layout):
    for kind in KINDS:
        model = built(kind)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for tp, pp in product((1, 2, 4), (1, 2, 4)):
            case = (kind, tp, pp)
            shards = split_state(model.state_dict(), model.config, tp=tp, pp=pp, layout=layout)
            assert set(shards) == set(product(range(tp), range(pp))), case
            merged = merge_state(shards, model.config, layout=layout.removesuffix("_local"))
            for shard in shards.values():  # what is trained on a shard is nobody else's
                for tensor in shard.values():
                    tensor.fill_(torch.nan)
            assert set(merged) == set(before), case
            for name, tensor in before.items():
                assert torch.equal(merged[name], tensor) and torch.equal(model.state_dict()[name], tensor), (name, case)


def test_a_rank_holds_its_rows_or_columns_and_a_stage_its_layers():
    """Megatron-LM's cut: rows of what goes into the block, columns of what comes out of it; norms on every rank."""
    model, rows = (
        built("llama-biases"),
        ("embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    )
    shards = split_state(model.state_dict(), model.config, tp=2, pp=2)
    for name, whole in model.state_dict().items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        stage = layer // 2 if layer is not None else int("embed" not in name)
        local = name if layer is None else name.replace(f".{layer}.", f".{layer % 2}.")
        first, second = (shards[rank, stage].pop(local) for rank in range(2))
        columns = name.endswith(("o_proj.weight", "down_proj.weight"))
        if columns or any(part in name for part in rows):
            assert torch.equal(torch.cat([first, second], dim=1 if columns else 0), whole), name
        else:
            assert torch.equal(first, whole) and torch.equal(second, whole), name
    assert not any(shards.values())  # nothing else is in them


def test_any_padding_of_the_vocabulary_is_cut_off():
    model = built("llama")
    for rows in (60, 64, 1024):  # Megatron pads 60 to 256 here, and to others with --make-vocab-size-divisible-by
        shards = split_state(model.state_dict(), model.config, tp=2, pp=1, layout="megatron")
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            padded = torch.cat([shards[rank, 0][name] for rank in range(2)] + [torch.ones(1024 - 256, 32)])
            assert len(padded) == 1024 and not padded[60:256].any()
            for rank, share in enumerate(padded[:rows].chunk(2)):
                shards[rank, 0][name] = share
        merged = merge_state(shards, model.config, layout="megatron")
        assert all(torch.equal(merged[name], tensor) for name, tensor in model.state_dict().items()), rows


def test_what_cannot_be_split_is_refused():
    model = built("qwen2-tied")
    state, config = model.state_dict(), model.config
    norm, q = "model.norm.weight", "model.layers.2.self_attn.q_proj.weight"

    def split(tensors=state, config=config, *, tp=2, pp=2, layout="megatron"):
        return partial(split_state, tensors, config, tp=tp, pp=pp, layout=layout)

    def resized(**sizes):
        return LlamaConfig(**{**SIZES, "head_dim": 4, **sizes})

    heads = resized(num_attention_heads=6, num_key_value_heads=3, hidden_size=36)
    lacking = {name: tensor for name, tensor in state.items() if name != norm}
    assert_refused(
        [
            (split({}, heads, tp=4), ValueError, "6 attention heads"),
            (split({}, resized(num_key_value_heads=2), tp=4), ValueError, "2 key/value heads"),
            (split({}, resized(vocab_size=61), layout="hugging_face"), ValueError, "61 rows"),
            (split({}, resized(vocab_size=61)), ValueError, "embed_tokens"),  # past the grid: Megatron pads it
            (split(pp=3), ValueError, "pp=3"),
            (split(tp=0), ValueError, "tp=0"),
            (split(layout="nemo"), ValueError, "'nemo'"),
            (split(lacking), ValueError, norm),
            (split(state | {q: state[q][:-1]}), ValueError, "[31, 32]"),
            (split(state | {"lm_head.weight": state["lm_head.weight"] + 1}), ValueError, "lm_head.weight"),
            (split(state | {q: state[q].bfloat16()}), ValueError, "dtypes"),
        ]
    )
    old = state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}  # computed, not learned
    split({name: tensor for name, tensor in old.items() if name != "lm_head.weight"})()


def test_shards_that_do_not_fit_are_refused():
    model = built("qwen2-tied")
    norm, output = "decoder.final_layernorm.weight", "output_layer.weight"

    def merge(change=lambda shards: None, layout="megatron"):
        shards = split_state(model.state_dict(), model.config, tp=2, pp=2, layout=layout)
        change(shards)
        return lambda: merge_state(shards, model.config, layout="megatron")

    assert_refused(
        [
            (merge(dict.clear), ValueError, "no shards"),
            (merge(lambda shards: shards.pop((1, 0))), ValueError, "rank 1 and stage 0"),
            (merge(layout="hugging_face"), ValueError, "embedding.word_embeddings.weight"),
            (merge(lambda shards: shards[0, 1].update({norm: shards[0, 1][norm].double()})), ValueError, "dtype"),
            # what happens where a training forgets to add up the gradients of what several ranks hold
            (merge(lambda shards: shards[1, 1][norm].add_(1)), ValueError, norm),
            (merge(lambda shards: shards[1, 1][output].add_(1)), ValueError, output),
        ]
    )

    def with_a_nan(shards):  # as good a value as any other
        for rank in range(2):
            shards[rank, 1][norm][3] = torch.nan

    assert merge(with_a_nan)()["model.norm.weight"].isnan().sum() == 1
