"""Megatron-core's own model, built on two ranks, takes the shards as they are and gives transformers' logits."""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
import torch

from course_lib.launch import launch
from course_lib.training.tensor import megatron_linears

LENGTH = 12


def llama_or_qwen(kind: str) -> torch.nn.Module:
    """Grouped queries, a head width of its own; Qwen2 has biases on q, k, v and tied embeddings, Qwen3 norms of q and k."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48}
    more = {"num_hidden_layers": 2, "vocab_size": 60, "tie_word_embeddings": kind == "qwen2"}
    config = AutoConfig.for_model(kind, **sizes, **more, **({} if kind == "qwen2" else {"head_dim": 6}))
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + ("norm" in name)
    model.tie_weights()
    return model


def logits_by_megatron(kinds: list[str]) -> dict[str, tuple[float, float]]:
    """On each rank: per kind the largest difference between the logits, and the largest logit."""
    import torch.distributed as dist

    from course_tools.conversion import split_state

    megatron_linears.megatron_core()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    # All that it asks of CUDA here: where to put a buffer, and the random numbers of a dropout that is 0.
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    found = {}
    for kind in kinds:
        model = llama_or_qwen(kind)
        c, ids = model.config, torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % 60
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
            add_qkv_bias=kind == "qwen2",
            qk_layernorm=kind == "qwen3",
            use_cpu_initialization=True,
            tensor_model_parallel_size=2,
            attention_softmax_in_fp32=True,
            **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
            **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"), False),
            **dict.fromkeys(("gradient_accumulation_fusion", "apply_rope_fusion", "persist_layer_norm"), False),
        )
        theirs = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=kind == "qwen3", normalization="RMSNorm"),
            vocab_size=256,  # 60 padded to a multiple of 128 for each of two ranks
            max_sequence_length=LENGTH,
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
        hidden = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
        with torch.no_grad():
            wanted = model(ids).logits
            logits = theirs(ids, torch.arange(LENGTH).expand(2, LENGTH), hidden)[..., :60]
        found[kind] = ((logits - wanted).abs().max().item(), wanted.abs().max().item())
    return found


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason=megatron_linears.INSTALL)
def test_megatron_takes_the_shards_and_gives_the_same_logits(private_tmp):
    kinds = ["llama", "qwen2", "qwen3"]
    for found in launch(logits_by_megatron, kinds, ranks=2, quiet=True, timeout=150).results:
        assert list(found) == kinds
        for kind, (difference, largest) in found.items():
            assert difference < 2e-5 * largest, kind
