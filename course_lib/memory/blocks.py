"""The operations of one Llama-shaped block and of the head, as transformers runs them, on a tape.

Symbols of sizes, in elements: ``N`` tokens; ``Nh`` tokens x hidden, ``Na`` x (heads x head_dim), ``Nk`` x (kv_heads x
head_dim), ``Nm`` x intermediate, ``NH`` x heads, ``NK`` x kv_heads, ``NV`` x vocabulary, ``Nr`` x LoRA's
rank, ``NS`` tokens x heads x sequence (the scores of eager attention); ``Wq Wk Wv Wo Wg Wu Wd`` the weights and ``Wh`` the
head's (vocabulary x hidden), ``Lq … Ld`` the two LoRA factors beside them; ``h`` and ``d`` a norm's weight over the hidden
features and over those of one head; ``one`` a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from course_lib.memory.tape import Size, Tape, Tensor

SYMBOLS = tuple("N Nh Na Nk Nm NH NK NV Nr NS Wq Wk Wv Wo Wg Wu Wd Wh Lq Lk Lv Lo Lg Lu Ld h d one".split())
WIDTH = {
    "q": ("Nh", "Na"),
    "k": ("Nh", "Nk"),
    "v": ("Nh", "Nk"),
    "o": ("Na", "Nh"),
    "g": ("Nh", "Nm"),
    "u": ("Nh", "Nm"),
    "d": ("Nm", "Nh"),
}


@dataclass(frozen=True)
class Numerics:
    """What decides the size of each tensor of a block, apart from the model's widths.

    Attributes:
        method: "full", "lora" or "qlora".
        compute: bytes an element in matrix products, 2 or 4.
        stored: bytes an element of the weights that are neither quantized nor LoRA's, and so of the residual stream.
        factors: bytes an element of LoRA's factors.
        autocast: torch.autocast casts at each operation.
        eager: attention's scores are written out, (tokens x heads x sequence).
        qk_norm: queries and keys are normalised a head at a time (Qwen3).
        grouped: the attention kernel reads grouped keys and values as they are; False: they are repeated first.
        gated: SwiGLU; False: one matrix up, GELU, one down.
        layer_norm: LayerNorm in the place of RMSNorm.
        fused_loss: output layer and loss are computed together, a chunk of the tokens at a time.
    """

    method: str = "full"
    compute: int = 4
    stored: int = 4
    factors: int = 4
    autocast: bool = False
    eager: bool = False
    qk_norm: bool = False
    grouped: bool = True
    gated: bool = True
    layer_norm: bool = False
    fused_loss: bool = False


class _Writer:
    """Writes operations of a transformers model onto a tape."""

    def __init__(self, numerics: Numerics) -> None:
        self.n = numerics
        self.tape = Tape()
        self.bytes: dict[Tensor, int] = {}

    def op(self, name: str, inputs: list[Tensor], symbol: str, each: int, **options) -> Tensor:
        out = self.tape.op(name, inputs, {symbol: each}, **options)
        self.bytes[out] = each
        return out

    def cast(self, x: Tensor, symbol: str, each: int) -> Tensor:
        return x if self.bytes[x] == each else self.op("to", [x], symbol, each)

    def rms_norm(self, x: Tensor, symbol: str = "Nh", rows: str = "N", weight: str = "h") -> Tensor:
        """In fp32 inside, whatever comes in; the result has the input's dtype. (LayerNorm: one kernel.)"""
        each, train = self.bytes[x], self.n.method == "full"
        if self.n.layer_norm and rows == "N":
            grad = {weight: 2 * self.n.stored} if train else {}
            rstd = self.tape.op("mean, rstd", [], {rows: 8})
            return self.op("layer norm", [x], symbol, each, saved=[x, rstd], weight_grad=grad)
        wide = self.cast(x, symbol, 4)
        square = self.op("pow", [wide], symbol, 4, saved=[wide], backward_temporary={symbol: 8})
        rstd = self.op("rsqrt", [square], rows, 4, saves_out=True)
        normed = self.op("normalise", [wide, rstd], symbol, 4, saved=[wide, rstd], backward_temporary={symbol: 4})
        normed = self.cast(normed, symbol, each)
        return self.op(
            "scale",
            [normed],
            symbol,
            each,
            saved=[normed] if train else [],
            weight_grad={weight: self.n.stored} if train else {},
            backward_temporary={symbol: each} if train else {},
        )

    def linear(self, x: Tensor, which: str) -> Tensor:
        n, (wide_in, wide_out) = self.n, WIDTH[which]
        if n.method == "full":
            y = self.cast(x, wide_in, n.compute)  # autocast: a copy of its own for every linear
            return self.product(which, y, wide_out, f"W{which}")
        return self.with_lora(x, which, wide_in, wide_out)

    def product(self, name: str, x: Tensor, wide_out: str, weight: str) -> Tensor:
        """With a trained weight. Under autocast its gradient comes in 16 bits and is cast, when the product's own
        gradients are gone; the copies of the weights themselves are counted once for all, by `resident`."""
        n = self.n
        if not n.autocast:
            return self.op(name, [x], wide_out, n.compute, saved=[x], weight_grad={weight: n.stored}, kept=True)
        copy = self.tape.op(f"{name}'s weight in 16 bits", [], {}, weight_grad={weight: n.stored})
        copy.gradient = {weight: n.compute}
        return self.op(name, [x, copy], wide_out, n.compute, saved=[x], kept=True)

    def with_lora(self, x: Tensor, which: str, wide_in: str, wide_out: str) -> Tensor:
        n = self.n
        y = self.cast(x, wide_in, n.compute)
        unpacked: Size = {f"W{which}": n.compute} if n.method == "qlora" else {}  # NF4 is unpacked for each product
        base = self.op(which, [y], wide_out, n.compute, temporary=unpacked, backward_temporary=unpacked, kept=True)
        wide = self.cast(x, wide_in, n.factors)  # by PEFT, to its factors' dtype; autocast then casts that
        z = self.cast(wide, wide_in, n.compute) if n.autocast else wide
        down = self.op(f"{which}.A", [z], "Nr", n.compute, saved=[z], weight_grad={f"L{which}": n.factors}, kept=True)
        up = self.op(f"{which}.B", [down], wide_out, n.compute, saved=[down])
        scaled = self.op("x alpha / r", [up], wide_out, n.compute)
        return self.op("+ lora", [base, scaled], wide_out, n.compute, passes_through=True, holds=[x, wide])

    def rotary(self, x: Tensor, symbol: str) -> Tensor:
        """x * cos + rotate_half(x) * sin; cos and sin have the residual stream's dtype, and the wider one wins."""
        each = max(self.bytes[x], self.n.stored)
        turned = self.op("x cos", [x], symbol, each)
        half = self.op("rotate half", [x], symbol, self.bytes[x])
        half = self.op("x sin", [half], symbol, each)
        return self.op("rotated", [turned, half], symbol, each, passes_through=True)

    def attention(self, x: Tensor) -> Tensor:
        n = self.n
        q, k, v = (self.linear(x, which) for which in "qkv")
        if n.qk_norm:
            q, k = self.rms_norm(q, "Na", "NH", "d"), self.rms_norm(k, "Nk", "NK", "d")
        q, k = self.rotary(q, "Na"), self.rotary(k, "Nk")
        q, k, v = self.cast(q, "Na", n.compute), self.cast(k, "Nk", n.compute), self.cast(v, "Nk", n.compute)
        if n.eager or not n.grouped:
            k, v = self.op("repeat k", [k], "Na", n.compute), self.op("repeat v", [v], "Na", n.compute)
        if not n.eager:
            rows = self.tape.op("log-sum-exp", [], {"NH": 4})
            rows.wants_grad = False
            out = self.op("attention", [q, k, v], "Na", n.compute, saved=[q, k, v, rows], saves_out=True, kept=True)
            return self.held_until_here(self.linear(out, "o"), [x, q, k, v])
        scores = self.op("scores", [q, k], "NS", n.compute, saved=[q, k])
        scores = self.op("x scale", [scores], "NS", n.compute)
        scores = self.op("+ mask", [scores], "NS", max(n.compute, n.stored), passes_through=True)
        shares = self.op(
            "softmax", [scores], "NS", 4, saves_out=True, temporary={"NS": 4} if self.bytes[scores] < 4 else {}
        )
        shares = self.cast(shares, "NS", n.compute)
        out = self.op("shares x v", [shares, v], "Na", n.compute, saved=[shares, v])
        out = self.op("to (tokens, heads)", [out], "Na", n.compute)
        return self.held_until_here(self.linear(out, "o"), [x, q, k, v, shares])

    def mlp(self, x: Tensor) -> Tensor:
        c = self.n.compute
        if not self.n.gated:
            up = self.linear(x, "u")
            return self.held_until_here(self.linear(self.op("gelu", [up], "Nm", c, saved=[up]), "d"), [x])
        gate = self.linear(x, "g")
        active = self.op("silu", [gate], "Nm", c, saved=[gate])
        up = self.linear(x, "u")
        product = self.op("gate x up", [active, up], "Nm", c, saved=[active, up])
        return self.held_until_here(self.linear(product, "d"), [x])

    def held_until_here(self, out: Tensor, tensors: list[Tensor]) -> Tensor:
        """A method that returns `out` has held its arguments and variables up to its last operation."""
        self.tape.ops[-1].holds = [*self.tape.ops[-1].holds, *tensors]
        return out


@lru_cache(maxsize=256)
def block(numerics: Numerics, *, grad_in: bool = True) -> tuple[Tape, Tensor]:
    """The tape of one decoder block, and the tensor that comes in (the residual stream).

    `grad_in` False: nothing before the block is trained, as in the first block over a frozen embedding.
    """
    w = _Writer(numerics)
    x = Tensor("residual stream", {"Nh": numerics.stored}, grad_in)
    w.bytes[x] = numerics.stored
    y = w.op("+ attention", [x, w.attention(w.rms_norm(x))], "Nh", numerics.stored, passes_through=True)
    w.op("+ mlp", [y, w.mlp(w.rms_norm(y))], "Nh", numerics.stored, passes_through=True)
    return w.tape, x


@lru_cache(maxsize=256)
def head(numerics: Numerics) -> tuple[Tape, Tensor]:
    """The tape of the last norm, the output layer and the cross-entropy in fp32; and the tensor that comes in."""
    n, w = numerics, _Writer(numerics)
    train = n.method == "full"
    x = Tensor("residual stream", {"Nh": n.stored})
    w.bytes[x] = n.stored
    y = w.cast(w.rms_norm(x), "Nh", n.compute)
    if n.fused_loss:
        # The input's gradient is there after forward, and is kept. (So is the matrix's, which is counted from the loss's
        # backward on, with all other gradients.) A chunk has about as many logits as the whole input has elements, which is
        # Liger's choice, in the compute type and once more in fp32.
        grad = {"Wh": n.stored} if train else {}
        chunk = {"Nh": n.compute + 4}
        done = w.op("gradient of the input", [y], "Nh", n.compute, weight_grad=grad, temporary=chunk)
        w.op("loss", [done], "one", 4, saved=[done])
        return w.tape, x
    logits = w.product("logits", y, "NV", "Wh") if train else w.op("logits", [y], "NV", n.compute)
    wide = w.cast(logits, "NV", 4)
    shares = w.op("log-softmax", [wide], "NV", 4, saves_out=True)
    w.op("negative log-likelihood", [shares], "one", 4)
    return w.tape, x
