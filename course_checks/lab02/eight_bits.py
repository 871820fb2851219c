"""Lab 2, exercise 6: Adam's two moments in 8 bits, by a block code of the learner's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from course_checks.harness import Contract, NotYet, fresh_seed, named_seed, nothing, tensors_in
from course_checks.lab02.common import lab, tensor_like

BLOCK, BLOCKS = 256, 256
EPSILON = 1e-8
# Relative error of Adam's update: fourth-power levels 0.019, bitsandbytes' dynamic ones 0.028, linear for m alone 0.058
UPDATE_ERROR = 0.045
CODES = 2 * BLOCKS * (BLOCK + 4)  # bytes: a code each, a scale per block, of two moments
STORED, UPDATE = "what you store of two moments", "the error of Adam's update"
HINTS = {
    "a code of 8 bits is one byte: keep it as uint8": lambda f: f["clause"] == STORED and f[STORED] > 1.9 * CODES,
    "it takes at least a code per number and an fp32 scale per block": lambda f: (
        f["clause"] == STORED and f[STORED] < CODES
    ),
    "second moments come back as 0, for no level lies between 0 and them, and Adam divides by their root": lambda f: (
        f["clause"] == UPDATE and f["lost"]
    ),
    "its small numbers need levels closer to each other": lambda f: f["clause"] == UPDATE,
}


def moments(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, v) as after some steps of Adam, 256 blocks of 256: gradients of very different size stand side by side."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return torch.randn(BLOCKS * BLOCK, generator=generator).clamp(-3.3, 3.3)

    size = torch.exp(0.8 * noise()) * 1e-5
    return 0.25 * size * noise(), size**2 * 0.05 * (1 + 0.3 * noise()).clamp(min=0.2)


@lab.exercise("Stretch: a block code of your own", importance=3, difficulty=4, minutes=30)
def block_code(code: Callable[[], Any]) -> str:
    """A byte a number and a scale a block; outliers stay in their block; v never below 0; the update of fp32 Adam."""
    seed, quantize, dequantize = fresh_seed(), code().quantize, code().dequantize  # two objects: what is kept is stored
    with named_seed(seed):
        m, v = moments(seed)
        contract, stored = Contract(HINTS), [_kept(quantize, m, True), _kept(quantize, v, False)]
        contract.memory(STORED, sum(map(stored_bytes, stored)), at_least=CODES, at_most=CODES + 4096)  # two code books
        got_m, got_v = (_back(dequantize, one, m) for one in stored)
        told = f"{int((got_v < 0).sum())} second moments come back negative, and Adam takes their root"
        contract.holds(not bool((got_v < 0).any()), told)
        wild = v.clone()
        wild[3 * BLOCK + 17] *= 1e6
        got = _back(dequantize, _kept(quantize, wild, False), v)
        touched = (got != got_v).view(-1, BLOCK).any(1).nonzero().flatten().tolist()
        contract.holds(set(touched) <= {3}, f"an outlier in block 3 changes {len(touched)} of {BLOCKS} blocks")
        contract.values("a block's largest number", got[3 * BLOCK + 17], wild[3 * BLOCK + 17], rtol=1e-3)
        update = m / (v.sqrt() + EPSILON)
        error = float((got_m / (got_v.sqrt() + EPSILON) - update).norm() / update.norm())
        contract.facts["lost"] = int(((got_v == 0) & (v > 0)).sum())
        contract.holds(error <= UPDATE_ERROR, f"{UPDATE} is {error:.1%}, and {UPDATE_ERROR:.1%} is allowed", UPDATE)
        for shape in ((1000,), (30, 50)):  # they do not fill their last block
            small = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            back = _back(dequantize, _kept(quantize, small, True), small)
            contract.values(f"a state of shape {shape}", back, small, rtol=0.0, atol=0.1 * float(small.abs().max()))
        for signed in (True, False):
            for state in (torch.zeros(300), v[:300].masked_fill(torch.arange(300) % 3 > 0, 0.0)):
                back = _back(dequantize, _kept(quantize, state, signed), state)
                worst = float(back[state == 0].abs().max())
                told = f"a 0 comes back as {worst:.1e}, beside numbers up to {float(state.max()):.1e}"
                contract.holds(worst <= 1e-4 * float(state.max()), told)
    return f"{contract.evidence()}; Adam's update is off by {error:.1%}; an outlier stays in its block"


def _back(dequantize: Callable[..., Any], stored: Any, like: torch.Tensor) -> torch.Tensor:
    got = tensor_like(dequantize(stored), like, "what dequantize() returns").detach()
    if not bool(got.isfinite().all()):
        raise NotYet("a state comes back with nan or inf")
    return got


def _kept(quantize: Callable[..., Any], state: torch.Tensor, signed: bool) -> Any:
    """What is stored of a copy of the state, whose values are then gone: nothing can be peeked at later."""
    copy = state.clone()
    stored = quantize(copy, signed)
    if not torch.equal(copy, state):
        raise NotYet("quantize() changes the state that it is given")
    if stored is None or stored is ...:
        raise nothing("what you store")
    own = copy.untyped_storage()._cdata
    if any(t.untyped_storage()._cdata == own for t in tensors_in(stored)):
        raise NotYet("what you store holds the tensor itself: only codes and their scales may stay")
    copy.fill_(float("nan"))
    return stored


def stored_bytes(stored: Any) -> int:
    """Bytes of what a learner keeps: each storage once and whole, a Python number as one of fp32."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(stored)}

    def count(item: Any) -> int:
        if isinstance(item, torch.Tensor):
            return 0
        if isinstance(item, Mapping):
            return sum(map(count, item.values()))
        if isinstance(item, (list, tuple, set)):
            return sum(map(count, item))
        if isinstance(item, (bytes, bytearray)):
            return len(item)
        if isinstance(item, (int, float)):
            return 4
        return int(getattr(item, "nbytes", 0)) or sum(map(count, getattr(item, "__dict__", {}).values()))

    return count(stored) + sum(storages.values())
