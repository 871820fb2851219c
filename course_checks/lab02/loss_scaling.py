"""Lab 2, exercise 7: a training step in fp16 with dynamic loss scaling."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from course_checks.harness import NotYet, close, ratio_hint
from course_checks.lab02.common import lab

WIDTH = 16


@dataclass
class LossScale:
    """What a training loop remembers of its loss scale from one step to the next."""

    value: float = 65536.0
    good_steps: int = 0  # steps since the scale last changed
    growth_interval: int = 2000  # so many good steps double it


class Half(nn.Module):
    """fp32 weights whose products and gradients pass through fp16; ``frozen`` never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = torch.tanh(x.to(dtype) @ self.first.weight.T.to(dtype) + self.first.bias.to(dtype))
        return (x @ self.second.weight.T.to(dtype) + self.second.bias.to(dtype)) * self.frozen.to(dtype)


class Batch:
    """A batch whose loss can be computed once; ``size`` is how large the gradients at the output are."""

    def __init__(self, model: Half, size: float) -> None:
        self.model, self.size, self.runs = model, size, 0
        self.x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))

    def loss(self, model: Half, dtype: torch.dtype) -> torch.Tensor:
        weights = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH) * self.size
        return (model(self.x, dtype).float() * weights).sum()

    def __call__(self) -> torch.Tensor:
        self.runs += 1
        return self.loss(self.model, torch.float16)

    def gradients(self) -> dict[str, torch.Tensor]:
        """In fp32, by a copy of the model."""
        twin = copy.deepcopy(self.model)
        twin.zero_grad()
        self.loss(twin, torch.float32).backward()
        return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


@lab.exercise("An fp16 step with loss scaling", importance=4, difficulty=3, minutes=25)
def scaled_step(step: Callable[..., Any]) -> str:
    """Small gradients survive, overflow is skipped and halves the scale, good steps double it, clipping comes last."""
    small = _one_step(step, size=1e-8, max_norm=1e9)
    _right_gradients(small, "with a loss whose gradients are below fp16's smallest number")
    for size in (1e-3, 1e-1):  # a norm below and one above the limit
        _right_gradients(_one_step(step, size=size, max_norm=0.5), "with clipping")
    for bad in (4.0, float("nan")):
        _skips(_one_step(step, size=bad, max_norm=1.0), "nan" if bad != bad else "inf")
    values = _history(step)
    return f"gradients of 1e-8 arrive, inf and nan are skipped; scale over nine steps: {', '.join(values)}"


def _one_step(step: Callable[..., Any], *, size: float, max_norm: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model, scale = Half(), LossScale()
    optimizer, kept = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    optimizer.register_step_pre_hook(
        lambda *_: kept.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    batch = Batch(model, size)
    expected, weights = batch.gradients(), copy.deepcopy(model.state_dict())
    stepped = step(model, optimizer, batch, scale, max_norm)
    if batch.runs != 1:
        raise NotYet(
            f"compute_loss() ran {batch.runs} times in one step: once; what overflows is skipped, not repeated"
        )
    left = any(p.grad is not None and bool((p.grad != 0).any()) for p in model.parameters())
    changed = any(not torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    return {
        "stepped": stepped,
        "kept": kept,
        "expected": expected,
        "left": left,
        "changed": changed,
        "scale": scale,
        "max_norm": max_norm,
    }


def _norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in gradients.values()]).norm())


def _right_gradients(told: dict[str, Any], case: str) -> None:
    if not told["kept"]:
        raise NotYet(f"{case} the optimizer did not step, and every gradient was finite at a scale of 65,536")
    got, expected = told["kept"][0], told["expected"]
    norm, limit, start = _norm(expected), told["max_norm"], 65536.0
    zeros = sum(int((g == 0).sum()) for g in got.values()) / sum(g.numel() for g in got.values())
    if zeros > 0.2:
        raise NotYet(
            f"{case} {zeros:.0%} of them are 0: they underflow; multiply the loss by the scale before backward()"
        )
    clipped = {name: g * min(1.0, limit / norm) for name, g in expected.items()}
    table = {
        start: "the optimizer sees gradients that are still scaled: divide them by scale.value before the step",
        1
        / start: "the gradients are 65,536 times too small: they were divided and the loss was never multiplied, or twice",
    }
    late = {name: g * (limit / norm / start) for name, g in expected.items()}
    if ratio_hint(got, late, {0.999: "", 1.001: ""}, rtol=0.03) is not None:
        raise NotYet(
            f"the gradients were clipped while still scaled: their norm is {_norm(got):.1e} now. Unscale first, then clip"
        )
    hint = ratio_hint(got, clipped, table, rtol=0.03)
    if hint is None and limit < norm:
        hint = ratio_hint(
            got, clipped, {norm / limit: f"gradients of norm {norm:.2f} were not clipped to {limit}"}, rtol=0.03
        )
    if hint:
        raise NotYet(hint)
    largest = max(float(g.abs().max()) for g in clipped.values())
    close(got, clipped, rtol=0.03, atol=0.02 * largest, what=f"{case} the gradient")
    if told["left"]:
        raise NotYet("gradients are left over after the step: the next step would add to them; zero_grad() at the end")
    if told["stepped"] is not True:
        raise NotYet(f"return True when the optimizer stepped; you return {told['stepped']!r}")


def _skips(told: dict[str, Any], what: str) -> None:
    if told["kept"] or told["changed"]:
        raise NotYet(
            f"a gradient held {what} and the {'optimizer stepped' if told['kept'] else 'weights changed'}: look at every "
            "gradient before the step, and skip it if one is not finite"
        )
    if told["left"]:
        raise NotYet(
            f"a skipped step leaves its {what} in the gradients, and the next one adds to it: zero_grad() there too"
        )
    value = told["scale"].value
    if value != 32768.0:
        raise NotYet(f"after a step with {what} the scale is {value:,.0f}: halve it, from 65,536 to 32,768")
    if told["stepped"] is not False:
        raise NotYet(f"return False when the step was skipped; you return {told['stepped']!r}")


def _history(step: Callable[..., Any]) -> list[str]:
    """Nine steps with a growth interval of 3; the one after two good ones overflows."""
    torch.manual_seed(0)
    model, scale = Half(), LossScale(value=1024.0, growth_interval=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    value, good, seen = 1024.0, 0, []
    for number, bad in enumerate((False, False, True, False, False, False, True, False, False), 1):
        step(model, optimizer, Batch(model, 1e6 if bad else 1e-3), scale, 1e9)
        value, good = (value / 2, 0) if bad else (value, good + 1)
        if good == scale.growth_interval:
            value, good = value * 2, 0
        seen.append(f"{scale.value:,.0f}")
        if scale.value != value:
            raise NotYet(_why(number, value, scale.value, seen))
    return seen


def _why(number: int, value: float, yours: float, seen: list[str]) -> str:
    story = f"growth_interval 3, steps 3 and 7 overflow: after step {number} the scale is {yours:,.0f}, expected {value:,.0f}"
    if number == 4:
        return f"{story}: a skipped step sets good_steps back to 0, the good steps must follow each other"
    if number == 6:
        return f"{story}: growth_interval good steps in a row double it"
    return f"{story} (so far {', '.join(seen)})"
