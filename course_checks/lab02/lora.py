"""Lab 2, exercise 3: a low-rank adapter around a frozen layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from course_checks.harness import LiveTensors, NotYet, close, ratio_hint, returned
from course_checks.lab02.common import backward, lab, tensor_like

# (in, out, rank, alpha, bias)
CASES = ((192, 256, 4, 24.0, True), (256, 128, 8, 8.0 * math.pi, False))


@lab.exercise("A LoRA layer", importance=5, difficulty=2, minutes=20)
def lora_linear(make_layer: Callable[..., Any]) -> str:
    """Starts as the base, trains rank x (in + out) numbers and no more, never makes a matrix of the base's size."""
    evidence = ""
    for case in CASES:
        torch.manual_seed(0)
        num_in, num_out, rank, alpha, bias = case
        base = nn.Linear(num_in, num_out, bias=bias)
        layer = make_layer(base, rank, alpha)
        returned(layer, nn.Module, "LoRALinear(base, rank, alpha)")
        down, up = _factors(layer, base, rank)
        _starts_as_base(layer, base, down, up)
        evidence = _right_update(layer, base, down, up, rank, alpha)
    return f"starts equal to its base; {evidence}"


def _factors(layer: nn.Module, base: nn.Linear, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """The two factors (rank, in) and (out, rank), known by their shapes; nothing else is trained."""
    num_out, num_in = base.weight.shape
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    if not any(p is base.weight for p in layer.parameters()):
        raise NotYet(
            "the base's weight is not among the layer's parameters: keep the base itself, not a copy beside it"
        )
    count, wanted = sum(p.numel() for p in trained.values()), rank * (num_in + num_out)
    if any(p is base.weight for p in trained.values()):
        raise NotYet(f"the base still trains: {count:,} trainable numbers where LoRA has {wanted:,}. Freeze its weight")
    if any(p is base.bias for p in trained.values()):
        raise NotYet(
            f"the base's bias still trains: {count:,} trainable numbers where LoRA has {wanted:,}. Freeze it too"
        )
    by_shape = {tuple(p.shape): p for p in trained.values()}
    if len(trained) != 2 or set(by_shape) != {(rank, num_in), (num_out, rank)}:
        shapes = {name: tuple(p.shape) for name, p in trained.items()}
        raise NotYet(
            f"trainable are {shapes or 'no parameters'}: there should be two, A of shape {(rank, num_in)} and B of shape "
            f"{(num_out, rank)}"
        )
    return by_shape[rank, num_in], by_shape[num_out, rank]


def _starts_as_base(layer: nn.Module, base: nn.Linear, down: nn.Parameter, up: nn.Parameter) -> None:
    x = torch.randn(2, 5, base.in_features)
    y = tensor_like(layer(x), base(x), "layer(x)")
    if not down.any() and not up.any():
        raise NotYet(
            "A and B both start at zero: each one's gradient is a product with the other, so neither ever moves"
        )
    if not torch.allclose(y, base(x), rtol=1e-5, atol=1e-6):
        raise NotYet("the new layer does not start equal to its base: let B start at zero, and do not touch the rest")
    random = down if down.any() else up
    if int(torch.linalg.matrix_rank(random.detach())) < min(random.shape):
        raise NotYet(
            f"the factor that is not zero starts with rank {int(torch.linalg.matrix_rank(random.detach()))}: its rows get "
            "the same gradient for ever. Draw it at random"
        )


def _right_update(
    layer: nn.Module, base: nn.Linear, down: nn.Parameter, up: nn.Parameter, rank: int, alpha: float
) -> str:
    with torch.no_grad():
        down.normal_(std=0.1)
        up.normal_(std=0.1)
    x, weights = torch.randn(2, 5, base.in_features), torch.randn(2, 5, base.out_features)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with LiveTensors() as made:
        y = layer(mine)
    a, b, w = (t.detach().clone().requires_grad_() for t in (down, up, base.weight))
    update = (theirs @ a.T @ b.T) * (alpha / rank)
    frozen = nn.functional.linear(theirs, w.detach(), base.bias.detach() if base.bias is not None else None)
    tensor_like(y, frozen.detach(), "layer(x)")
    scale = alpha / rank
    table = {
        1 / scale: "the update is not scaled: multiply it by alpha / rank",
        rank: "the update is scaled with alpha: LoRA's factor is alpha / rank",
        1 / alpha: "the update is scaled with 1 / rank: LoRA's factor is alpha / rank",
        math.sqrt(rank): "the update is scaled with alpha / sqrt(rank): that is rsLoRA; LoRA's factor is alpha / rank",
        1 / scale**2: "the update is scaled with rank / alpha: LoRA's factor is alpha / rank",
        0.0: "the update never reaches the output: y is still the base's",
    }
    hint = ratio_hint(y - frozen, update, table)
    if hint:
        raise NotYet(hint)
    close(y, frozen + update, rtol=1e-4, atol=1e-5, what="layer(x)")
    full = base.weight.numel()
    large = next((new for new in made.made if math.prod(new.shape) >= full), None)
    if large:
        raise NotYet(
            f"right, and your forward makes a matrix of shape {large.shape}, as large as the frozen weight: B A is never "
            "needed. Go through the small side: first x to the rank, then up"
        )
    with LiveTensors() as made:
        backward((y * weights).sum(), "layer(x) requires no gradient: A and B can not learn")
    ((frozen + update) * weights).sum().backward()
    for name, yours, wanted in (("A", down.grad, a.grad), ("B", up.grad, b.grad), ("x", mine.grad, theirs.grad)):
        if yours is None:
            raise NotYet(f"{name} gets no gradient: something detaches it on its way to y")
        if name == "x" and torch.allclose(yours, ((weights * scale) @ b @ a).detach(), rtol=1e-3, atol=1e-4):
            raise NotYet(
                "x gets its gradient through A and B alone: freeze the base's weight, but do not detach its output"
            )
        close(yours, wanted, rtol=1e-3, atol=1e-4, what=f"the gradient of {name}")
    largest = max(math.prod(new.shape) for new in made.made)
    if largest >= full:
        raise NotYet("backward makes a matrix as large as the frozen weight: its gradient is never needed")
    return (
        f"{down.numel() + up.numel():,} of {full:,} numbers trained; nothing larger than {largest:,} numbers was made"
    )
