"""Whole models as tensors: split for TP×PP, put together again, and computed by Megatron-core's own model."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import product

import pytest
import torch
from megatron_on_cpu import megatron_core, needs_megatron
from refusals import assert_refused
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from course_lib.launch import launch
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
    for kind, padded in product(KINDS, [False, True] if layout == "megatron" else [False]):
        model = built(kind)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for tp, pp in product((1, 2, 4), (1, 2, 4)):
            case = (kind, padded, tp, pp)
            shards = split_state(model.state_dict(), model.config, tp=tp, pp=pp, layout=layout, pad_vocab=padded)
            assert set(shards) == set(product(range(tp), range(pp))), case
            merged = merge_state(shards, model.config, layout=layout)
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


def logits_by_megatron(kinds: list[str], length: int) -> dict[str, tuple[float, float]]:
    """On each rank: per kind the largest difference between the logits, and the largest logit."""
    import torch.distributed as dist

    megatron_core()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    # All that it asks of CUDA here: where to put a buffer, and the random numbers of a dropout that is 0.
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    results = {}
    for kind in kinds:
        model = built(kind)
        c, ids = model.config, torch.arange(2 * length).reshape(2, length) * 7 % 60
        config = TransformerConfig(
            num_layers=c.num_hidden_layers,
            hidden_size=c.hidden_size,
            num_attention_heads=c.num_attention_heads,
            num_query_groups=c.num_key_value_heads,
            kv_channels=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
            ffn_hidden_size=c.intermediate_size,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            normalization="RMSNorm",
            layernorm_epsilon=c.rms_norm_eps,
            add_bias_linear=False,
            add_qkv_bias="qwen2" in kind,
            qk_layernorm="qwen3" in kind,
            use_cpu_initialization=True,
            tensor_model_parallel_size=2,
            attention_softmax_in_fp32=True,
            **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
            **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"), False),
            **dict.fromkeys(("gradient_accumulation_fusion", "apply_rope_fusion", "persist_layer_norm"), False),
        )
        theirs = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm="qwen3" in kind, normalization="RMSNorm"),
            vocab_size=256,  # 60 padded to a multiple of 128 for each of two ranks
            max_sequence_length=length,
            position_embedding_type="rope",
            rotary_base=c.rope_parameters["rope_theta"],
            share_embeddings_and_output_weights=c.tie_word_embeddings,
            parallel_output=False,
        ).eval()
        state = split_state(model.state_dict(), c, tp=2, pp=1, layout="megatron", pad_vocab=True)[dist.get_rank(), 0]
        # our names are those of its layers for GPUs (Transformer Engine); on a CPU the norms are layers of their own
        for fused, apart in (
            ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
            ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
        ):
            state = {name.replace(fused, apart): tensor for name, tensor in state.items()}
        odd = theirs.load_state_dict(state, strict=False)
        assert not odd.unexpected_keys and all("_extra_state" in name for name in odd.missing_keys), odd
        hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        with torch.no_grad():
            wanted = model(ids).logits
            logits = theirs(ids, torch.arange(length).expand(2, length), hidden)[..., :60]
        results[kind] = ((logits - wanted).abs().max().item(), wanted.abs().max().item())
    return results


@needs_megatron
def test_megatron_takes_the_shards_and_gives_the_same_logits(private_tmp):
    kinds = ["llama", "qwen2-tied", "qwen3"]
    for results in launch(logits_by_megatron, kinds, 12, ranks=2, quiet=True, timeout=150).results:
        assert list(results) == kinds
        for kind, (difference, largest) in results.items():
            assert difference < 2e-5 * largest, kind


def test_what_cannot_be_split_is_refused():
    model = built("qwen2-tied")
    state, config = model.state_dict(), model.config
    norm, q = "model.norm.weight", "model.layers.2.self_attn.q_proj.weight"

    def split(tensors=state, config=config, *, tp=2, pp=2, layout="megatron", **more):
        return partial(split_state, tensors, config, tp=tp, pp=pp, layout=layout, **more)

    def resized(**sizes):
        return LlamaConfig(**{**SIZES, "head_dim": 4, **sizes})

    heads = resized(num_attention_heads=6, num_key_value_heads=3, hidden_size=36)
    lacking = {name: tensor for name, tensor in state.items() if name != norm}
    assert_refused(
        [
            (split({}, heads, tp=4), ValueError, "6 attention heads"),
            (split({}, resized(num_key_value_heads=2), tp=4), ValueError, "2 key/value heads"),
            (split({}, resized(vocab_size=61)), ValueError, "61 rows"),
            (split({}, resized(vocab_size=61), pad_vocab=True), ValueError, "embed_tokens"),  # past the grid
            (split(pp=3), ValueError, "pp=3"),
            (split(tp=0), ValueError, "tp=0"),
            (split(pad_vocab=True, layout="hugging_face"), ValueError, "pad_vocab"),
            (split(layout="nemo"), ValueError, "'nemo'"),
            (split(config=MistralConfig(**SIZES)), ValueError, "'mistral'"),
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
            (merge(lambda shards: shards.pop((1, 0))), ValueError, "(1, 0)"),
            (merge(layout="hugging_face"), ValueError, "layout hugging_face"),
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
