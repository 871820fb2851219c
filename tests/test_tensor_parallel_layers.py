"""The layers and the loss by themselves, on three ranks; Megatron-core's own beside them on two."""

from __future__ import annotations

import importlib.util
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from course_lib.launch import launch
from course_lib.models.data import IGNORED
from course_lib.training.data_parallel.gradients import all_reduce_gradients
from course_lib.training.tensor import megatron_linears
from course_lib.training.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from course_lib.training.tensor.loss import vocab_parallel_cross_entropy

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

RANKS = 3


def whole_layers():
    """Embedding, column and row layer with biases, and ids and labels, two of them not counted."""
    generator = torch.Generator().manual_seed(1)
    layers = nn.Embedding(12, 8), nn.Linear(8, 9), nn.Linear(9, 6)
    with torch.no_grad():
        for layer in layers:
            for weight in layer.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator))
    ids, labels = torch.randint(12, (2, 2, 6), generator=generator)
    labels[0, 3] = labels[1, 5] = IGNORED
    return layers, ids, labels


def on_three():
    torch.set_num_threads(1)
    group, out = dist.group.WORLD, {}
    for cut in (False, True):
        (embedding, columns, rows), ids, _ = whole_layers()
        layers = (
            VocabParallelEmbedding(embedding, group, sequence_parallel=cut),
            ColumnParallelLinear(columns, group, sequence_parallel=cut),
            RowParallelLinear(rows, group, sequence_parallel=cut),
        )
        x = layers[0](ids)
        y = layers[2](layers[1](x).tanh())
        whole_y = y.detach()
        if cut:
            parts = [torch.empty_like(whole_y) for _ in range(group.size())]
            dist.all_gather(parts, whole_y)
            whole_y = torch.cat(parts, 1)
        y.square().sum().backward()
        partial = [p for layer in layers for p in layer.parameters() if getattr(p, "partial_gradient", False)]
        all_reduce_gradients(partial, group)
        out[cut] = whole_y, [p.grad for layer in layers for p in layer.parameters()], len(partial), tuple(x.shape)
    for scale in (1.0, 1e4):
        logits, labels = logits_and_labels(scale)
        mine = logits.chunk(group.size(), -1)[group.rank()].clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, labels, group)
        (3 * loss).backward()
        out[f"loss of {scale}"] = loss.item(), mine.grad
    out["refused"] = []
    for layer, whole in (
        (ColumnParallelLinear, nn.Linear(3, 4)),
        (RowParallelLinear, nn.Linear(4, 3)),
        (VocabParallelEmbedding, nn.Embedding(4, 3)),
    ):
        with pytest_raises() as caught:
            layer(whole, group)
        out["refused"].append(caught[0])
    with pytest_raises() as caught:
        vocab_parallel_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.long), group)
    out["refused"].append(caught[0])
    return out


class pytest_raises:
    """pytest.raises(ValueError) for ranks, which do without pytest."""

    def __enter__(self):
        self.caught = []
        return self.caught

    def __exit__(self, kind, error, _):
        assert kind is ValueError
        self.caught.append(str(error))
        return True


def logits_and_labels(scale):
    """At 1e4 a sum of exponentials overflows in fp32 unless the largest logit of all ranks was taken off."""
    _, _, labels = whole_layers()
    return scale * torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(2)), labels


@pytest.fixture(scope="module")
def run(private_tmp):
    return launch(on_three, ranks=RANKS, quiet=True, timeout=120)


@pytest.mark.parametrize("cut", [False, True])
def test_layers_are_parts_of_whole_ones(cut, run):
    layers, ids, _ = whole_layers()
    x = layers[0](ids)
    y = layers[2](layers[1](x).tanh())
    y.square().sum().backward()
    gradients = [p.grad for layer in layers for p in layer.parameters()]
    split_by = [0, 0, 0, 1, None]  # table, columns and their bias, rows; the rows' bias is whole
    for rank, out in enumerate(run.results):
        found, ours, partial, shape = out[cut]
        assert torch.allclose(found, y, rtol=1e-5, atol=1e-5)
        for mine, theirs, dim in zip(ours, gradients, split_by, strict=True):
            part = theirs if dim is None else theirs.chunk(RANKS, dim)[rank]
            assert torch.allclose(mine, part, rtol=1e-4, atol=1e-4)
        assert shape == ((2, 2, 8) if cut else (2, 6, 8)) and partial == int(cut)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_loss_is_that_of_whole_logits(scale, run):
    logits, labels = logits_and_labels(scale)
    logits.requires_grad_()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    (3 * loss).backward()
    for rank, out in enumerate(run.results):
        ours, gradient = out[f"loss of {scale}"]
        assert ours == pytest.approx(loss.item(), rel=1e-6)
        assert torch.allclose(gradient, logits.grad.chunk(RANKS, -1)[rank], rtol=1e-5, atol=1e-7)
        assert not gradient[labels == IGNORED].any()


def test_no_rank_sends_logits(run):
    """Of a loss of 12 tokens: three all-reduces of 12 numbers, forward and backward together, and nothing else."""
    log = [(c.kind, c.bytes) for c in run.collectives if c.rank == 0]
    assert log[-6:] == 6 * [("all_reduce", 12 * 4)]


def test_what_does_not_divide_is_refused(run):
    words = ["4 outputs do not divide over 3 ranks", "4 inputs", "4 tokens of the vocabulary", "need labels of (2, 3)"]
    for word, message in zip(words, run.results[0]["refused"], strict=True):
        assert word in message


def beside_megatron():
    torch.set_num_threads(1)
    return megatron_linears.compare()


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason=megatron_linears.INSTALL)
def test_megatrons_layers_give_the_same(private_tmp):
    """The same operations in the same order: to the bit here; another version may round elsewhere."""
    for comparison in launch(beside_megatron, ranks=2, quiet=True, timeout=120).results:
        assert {
            "output",
            "loss",
            "gradient of x",
            "gradient of the rows",
            "whole: output",
        } <= comparison.differences.keys()
        assert all(difference < 2e-6 for difference in comparison.differences.values()), comparison.differences
        assert comparison.ours == comparison.theirs
        assert comparison.ours == 2 * [("all_reduce", 65_536)] + 3 * [("all_reduce", 512)] + 2 * [
            ("all_reduce", 65_536)
        ]


def test_without_megatron_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps --ignore-requires-python megatron-core"):
        megatron_linears.megatron_core()
