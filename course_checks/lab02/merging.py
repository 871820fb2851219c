"""Lab 2, exercise 4: the adapter goes into the weight, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course_checks.harness import NotYet, close, ratio_hint, returned
from course_checks.lab02.common import lab


class Adapted(nn.Module):
    """y = base(x) + scale x A^T B^T; ``base`` frozen, ``a`` (rank, in) and ``b`` (out, rank) of fp32."""

    def __init__(self, num_in: int, num_out: int, rank: int, scale: float, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(num_in, num_out, bias=bias, dtype=dtype).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, num_in) / 8)
        self.b = nn.Parameter(torch.randn(num_out, rank) / 8)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + ((x.float() @ self.a.T @ self.b.T) * self.scale).to(x.dtype)


@lab.exercise("The merge", importance=4, difficulty=2, minutes=15)
def merge(merge_layer: Callable[..., Any]) -> str:
    """A plain layer with the same outputs; the base as it was, its dtype kept, one rounding for a base in bf16."""
    for bias in (True, False):
        torch.manual_seed(0)
        _right_merge(merge_layer, Adapted(96, 64, 4, 3.0, bias, torch.float32))
    torch.manual_seed(0)
    excess = _right_merge(merge_layer, Adapted(192, 128, 8, 0.25, True, torch.bfloat16))
    if excess > 1.02:
        raise NotYet(
            f"with a base in bf16 your weight is on average {excess:.2f} times as far from W + scale B A as one rounding "
            "puts it: you round on the way. Multiply and add in fp32, and round the sum once"
        )
    return "outputs equal with and without bias; the base untouched; a base in bf16 is rounded once"


def _right_merge(merge_layer: Callable[..., Any], layer: Adapted) -> float:
    """Hold one merge against W + scale B A; returns its mean error over that of rounding the exact sum once."""
    base, before = layer.base, {name: p.detach().clone() for name, p in layer.base.named_parameters()}
    x = torch.randn(7, base.in_features).to(base.weight.dtype)
    expected = layer(x).detach()
    merged = merge_layer(layer)
    returned(merged, nn.Module, "what merge(layer) gives")
    if type(merged) is not nn.Linear:
        raise NotYet(f"merge(layer) should return a plain nn.Linear, and returns {type(merged).__name__}")
    changed = [name for name, p in before.items() if not torch.equal(getattr(base, name), p)]
    if changed:
        raise NotYet(
            f"merging changed the base's {changed[0]}: merged twice it would hold the update twice. Add into a copy"
        )
    if merged.weight.untyped_storage()._cdata == base.weight.untyped_storage()._cdata:
        raise NotYet(
            "the merged weight is the base's own memory: nothing was added, and training one would move the other"
        )
    if merged.weight.dtype != base.weight.dtype:
        raise NotYet(
            f"the base is {str(base.weight.dtype)[6:]} and the merged weight {str(merged.weight.dtype)[6:]}: a merged model "
            "should be as large as its base"
        )
    update = (layer.scale * layer.b.double() @ layer.a.double()).detach()
    exact = base.weight.double() + update
    if merged.weight.shape != exact.shape:
        raise NotYet(
            f"the merged weight has the shape {tuple(merged.weight.shape)}, the base's is {tuple(exact.shape)}"
        )
    table = {
        1 / layer.scale: "the update is added without its scale",
        2.0: "the update is added twice",
        -1.0: "the update is subtracted: that is the way back",
        0.0: "the merged weight is the base's: nothing was added",
    }
    hint = ratio_hint(merged.weight.double() - base.weight.double(), update, table, rtol=0.02)
    if hint:
        raise NotYet(hint)
    _right_bias(merged, base)
    rough = 1e-5 if base.weight.dtype == torch.float32 else 2e-2
    close(merged(x), expected, rtol=rough, atol=5 * rough, what="the merged layer's output")
    rounded = exact.to(base.weight.dtype).double()
    return float((merged.weight.detach().double() - exact).abs().mean() / (rounded - exact).abs().mean())


def _right_bias(merged: nn.Linear, base: nn.Linear) -> None:
    if base.bias is None:
        if merged.bias is not None:
            raise NotYet("the base has no bias and the merged layer has one: build it with bias=False")
        return
    if merged.bias is None:
        raise NotYet("the base's bias is lost: the adapter does not touch it, so copy it over")
    if merged.bias.dtype != base.bias.dtype:
        raise NotYet(f"the base's bias is {str(base.bias.dtype)[6:]} and the merged one {str(merged.bias.dtype)[6:]}")
    close(merged.bias, base.bias, rtol=0, what="the merged layer's bias")
