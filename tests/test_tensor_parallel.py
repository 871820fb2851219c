"""The blocks' matrices cut over two ranks by DTensor: one rank's losses, half of the blocks, the formula's all-reduces."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from megatron_on_cpu import megatron_core, needs_megatron
from parity import Runs, assert_same_training, one_rank

from course_lib.choices import why_not_tensor_parallel
from course_lib.launch import RankFailed, launch
from course_lib.memory import shape_of
from course_lib.models import tiny_llama
from course_lib.observe import record_collectives
from course_lib.parallel.traffic import tensor_parallel as formula
from course_lib.training.tensor_parallel import split, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=4, global_batch=4, seq_len=32)
SETTINGS = {"one f": {}, "SGD": dict(optimizer="sgd"), "an f each": dict(split=partial(split, one_f=False))}


@pytest.fixture(scope="module")
def runs(private_tmp):
    return Runs(train, {2: SETTINGS}, SIZES)


def test_ranks_train_as_one_does(runs):
    for _, name, how, outcomes in runs.every():
        losses, _ = one_rank(tiny_llama(), **SIZES, optimizer=how.get("optimizer", "adamw"))
        assert_same_training(outcomes, losses, name)
        assert losses[-1] < losses[0]


def test_a_rank_holds_half_of_the_blocks_matrices(runs):
    model = tiny_llama(device="meta")
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)
    whole = sum(p.numel() for p in model.parameters())
    assert {o.extra["local_elements"] for o in runs.outcomes(2, "one f")} == {whole - matrices // 2}


def test_more_ranks_than_kv_heads_are_refused_by_the_tools_own_sentence(runs, private_tmp):
    shape = shape_of(tiny_llama(device="meta").config)
    assert shape.kv_heads == 2 == len(runs.outcomes(2, "one f"))  # as many ranks as kv heads train
    with pytest.raises(RankFailed) as failed:
        launch(train, **SIZES, ranks=4, quiet=True, timeout=120)
    refusal = (failed.value.cause_type, failed.value.cause_message)
    assert refusal == ("ValueError", why_not_tensor_parallel(shape, 4))


def test_all_reduces_are_those_of_the_formula_and_more_where_each_matrix_has_its_own_f(runs):
    calls = [c for c in runs[2].collectives if c.rank == 0 and c.kind == "all_reduce"]
    shape = shape_of(tiny_llama(device="meta").config)
    message = formula(shape, tp=2, micro_batch_size=4, seq_len=32, element=4)[0]
    in_blocks = message.count - 2  # the formula also cuts the embedding and the head
    expected = 4 * (in_blocks + in_blocks + in_blocks + 4 * 3)  # steps, three settings; 4 layers: q, k, v and gate, up
    assert Counter(c.bytes for c in calls) == {message.num_bytes: expected}


def megatron_s_layers():
    """One pass through Megatron's column- and row-parallel layers: what was sent, and the largest gap to uncut products."""
    core = megatron_core()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = core.ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
    options = dict(config=config, init_method=torch.nn.init.xavier_normal_, bias=False, skip_bias_add=False)
    column = tensor_parallel.ColumnParallelLinear(16, 32, gather_output=False, **options)
    row = tensor_parallel.RowParallelLinear(32, 16, input_is_parallel=True, **options)
    x = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with record_collectives() as calls:
        y = row(column(x)[0])[0]
        y.square().sum().backward()
    wholes = [[torch.empty_like(layer.weight) for _ in range(2)] for layer in (column, row)]
    for whole, layer in zip(wholes, (column, row), strict=True):
        dist.all_gather(whole, layer.weight.detach())
    expected = x.detach().requires_grad_()
    uncut = expected @ torch.cat(wholes[0]).T @ torch.cat(wholes[1], 1).T
    uncut.square().sum().backward()
    gap = max((y - uncut).abs().max().item(), (x.grad - expected.grad).abs().max().item())
    return [(call.kind, call.bytes) for call in calls], gap / y.abs().max().item()


@needs_megatron
def test_megatron_sends_what_f_and_g_send(private_tmp):
    for calls, gap in launch(megatron_s_layers, ranks=2, quiet=True, timeout=120).results:
        assert calls == 2 * [("all_reduce", 4 * 2 * 16 * 4)] and gap < 1e-5
