"""Megatron's own model, save and load beside the conversion, on four CPU ranks: 2 of tensor parallelism × 2 stages."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_on_cpu import megatron_core, needs_megatron
from test_conversion import KINDS, SIZES, built
from transformers import AutoModelForCausalLM

from course_lib.launch import launch
from course_lib.models import no_progress_bars
from course_tools.conversion import merge, split
from course_tools.conversion.pieces import FUSED_NORMS

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not find the tests
LENGTH, VOCAB = 12, 60
WITH_MEGATRON = ["llama", "qwen2-tied", "qwen3"]


def ids() -> torch.Tensor:
    return torch.arange(2 * LENGTH).reshape(2, LENGTH) * 7 % VOCAB


def megatron_on_four_cpus():
    """Start Megatron on this rank. What it asks of CUDA: a device, a copy, and random numbers for a dropout of 0."""
    megatron_core()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_rng_state = torch.get_rng_state
    torch.Tensor.cuda = lambda tensor: tensor
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)


def stage_of(c, kind: str):
    """Build this rank's part of Megatron's GPT for a configuration of transformers'."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

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
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        attention_softmax_in_fp32=True,
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
        **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion"), False),
        **dict.fromkeys(("gradient_accumulation_fusion", "apply_rope_fusion", "persist_layer_norm"), False),
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm="qwen3" in kind, normalization="RMSNorm"),
        vocab_size=256,  # 60 padded to a multiple of 128 for each of two ranks
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        rotary_base=c.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=c.tie_word_embeddings,
        parallel_output=False,
        pre_process=dist.get_rank() < 2,
        post_process=dist.get_rank() >= 2,
    ).eval()


def logits_of(stage) -> np.ndarray | None:
    """Run both stages; the second one's ranks return the logits."""
    hidden = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    positions, rank = torch.arange(LENGTH).expand(2, LENGTH), dist.get_rank()
    with torch.no_grad():
        if rank < 2:
            dist.send(stage(ids(), positions, hidden).contiguous(), rank + 2)
            return None
        received = torch.empty(LENGTH, 2, SIZES["hidden_size"])
        dist.recv(received, rank - 2)
        stage.set_input_tensor(received)
        return stage(ids(), positions, hidden)[..., :VOCAB].numpy()  # Megatron changes how torch's tensors travel


def megatron_s_args(c, save: Path | None = None, load: Path | None = None):
    """All 800 of Megatron's arguments, as its command line would set them for this model."""
    from megatron.training.arguments import parse_args

    sys.argv = "pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    sys.argv += "--ckpt-format torch --no-save-optim --no-load-optim --no-load-rng --no-position-embedding".split()
    sys.argv += f"--num-layers {c.num_hidden_layers} --hidden-size {c.hidden_size}".split()
    sys.argv += f"--num-attention-heads {c.num_attention_heads}".split()
    args = parse_args()
    args.save, args.load, args.use_dist_ckpt = save, load, False
    return args


def save_and_load(folder: Path) -> dict[str, dict]:
    """On each rank, per kind: logits on the shards that were split, and on those that Megatron saves."""
    megatron_on_four_cpus()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training import checkpointing
    from megatron.training.global_vars import set_args

    init_num_microbatches_calculator(dist.get_rank(), None, 1, 1, 1)
    checkpointing.read_metadata = lambda tracker: (int(Path(tracker).read_text()), False)  # it asks all ranks by CUDA

    layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    results = {"with Transformer Engine": layer.sharded_state_dict_keys_map}
    for kind in WITH_MEGATRON:
        stage = stage_of(KINDS[kind], kind)
        strictly = partial(stage.load_state_dict, strict=True)
        stage.load_state_dict = lambda state, strict, load=strictly: load(state)  # it prints what does not fit, at most
        set_args(megatron_s_args(KINDS[kind], load=folder / kind / "split"))
        checkpointing.load_checkpoint([stage], None, None)
        results[kind] = {"split": logits_of(stage)}

        own = stage_of(KINDS[kind], kind)
        for parameter in own.parameters():  # norms of ones and biases of 0 would hide that they went to a wrong place
            if parameter.dim() == 1:
                whole = getattr(parameter, "tensor_model_parallel", False)
                parameter.data += torch.linspace(-0.3, 0.3, len(parameter)) * (1 + dist.get_rank() % 2 * whole)
        results[kind]["saved"] = logits_of(own)
        set_args(megatron_s_args(KINDS[kind], save=folder / kind / "saved"))
        checkpointing.save_checkpoint(7, [own], None, None, 0)
    return results


@pytest.fixture(scope="module")
def megatron_s_logits(private_tmp):
    folder = Path(private_tmp) / "megatron"
    with no_progress_bars():
        for kind in WITH_MEGATRON:
            built(kind).save_pretrained(folder / kind / "whole")
            split(folder / kind / "whole", folder / kind / "split", tp=2, pp=2, layout="megatron_local")
    results = launch(save_and_load, folder, ranks=4, quiet=True, timeout=300).results
    return folder, results[2:]  # of the last stage's ranks


def assert_close(logits: np.ndarray, expected: np.ndarray, kind: str) -> None:
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max(), kind


@needs_megatron
def test_megatron_loads_the_shards_strictly_and_gives_the_same_logits(megatron_s_logits):
    _, results = megatron_s_logits
    for kind in WITH_MEGATRON:
        with torch.no_grad():
            expected = built(kind)(ids()).logits.numpy()
        for result in results:
            assert_close(result[kind]["split"], expected, kind)


@needs_megatron
def test_what_megatron_saved_becomes_a_model_with_the_same_logits(megatron_s_logits):
    folder, results = megatron_s_logits
    for kind in WITH_MEGATRON:
        saved = folder / kind / "saved"
        KINDS[kind].save_pretrained(saved)
        with no_progress_bars(), torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(merge(saved, folder / kind / "merged"))(ids()).logits.numpy()
        for result in results:
            assert_close(logits, result[kind]["saved"], kind)


@needs_megatron
def test_norms_have_the_names_that_megatron_knows_them_by_with_transformer_engine(megatron_s_logits):
    """Its layers need CUDA; for its other checkpoints Megatron keeps a table of the two names, with a "." or "_" at the end."""
    _, results = megatron_s_logits
    for result in results:
        assert {f"{a}weight": f"{b}weight" for a, b in result["with Transformer Engine"].items()} == FUSED_NORMS
