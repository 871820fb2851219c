"""The operations of one Llama-shaped block and of the head, as transformers runs them, on a tape.

Symbols of sizes, in elements: ``N`` tokens; ``Nh`` tokens x hidden, ``Na`` x (heads x head_dim), ``Nk`` x (kv_heads x
head_dim), ``Nqkv`` those of queries, keys and values, ``Nav`` x (heads x features of a value), ``Nm`` x intermediate, ``NH`` x heads, ``NK`` x kv_heads, ``NV`` x
vocabulary, ``Nr`` x LoRA's rank, ``NS`` tokens x heads x sequence (the scores of eager attention). Of latent attention
``Nqr`` and ``Nkn`` tokens x the rank of queries and of keys and values, ``Nkr`` that and the turning features, ``Nkb`` tokens
x (heads x unturned keys and values). Of experts ``NE`` tokens x experts, ``Ns`` the tokens' copies for their experts,
``Nsh`` copies x hidden, ``Nsm`` copies x the width of an expert, ``Nz`` tokens x the width of the shared one.
``Wq …`` the weights, ``Wh`` the head's (vocabulary x hidden), ``Lq …`` the two LoRA factors beside them; ``h`` and ``d`` a
norm's weight over the hidden features and over those of one head; ``one`` a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from course_lib.memory.tape import Size, Tape, Tensor

WIDTH = {  # matrix: the symbols of what goes into it and of what comes out
    "q": ("Nh", "Na"),
    "qkv": ("Nh", "Nqkv"),
    "k": ("Nh", "Nk"),
    "v": ("Nh", "Nk"),
    "o": ("Nav", "Nh"),
    "g": ("Nh", "Nm"),
    "u": ("Nh", "Nm"),
    "d": ("Nm", "Nh"),
    "qa": ("Nh", "Nqr"),
    "qb": ("Nqr", "Na"),
    "kva": ("Nh", "Nkr"),
    "kvb": ("Nkn", "Nkb"),
    "sg": ("Nh", "Nz"),
    "su": ("Nh", "Nz"),
    "sd": ("Nz", "Nh"),
}
CHUNK = 1 / 8  # of the tokens, as torchtune's and Axolotl's chunked loss has them
EXPERTS = ("router", "gate_up", "down")
SYMBOLS = (
    *"N Nh Na Nk Nqkv Nav Nm NH NK NV Nr NS Nqr Nkn Nkr Nkb NE Ns Nsh Nsm Nz Wh h d one".split(),
    *(f"{kind}{which}" for which in WIDTH for kind in "WL"),
    *(f"W{which}" for which in EXPERTS),
)


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
        qk_norm: queries and keys are normalised a head at a time (Qwen3); wide_qk_norm: all heads together (OLMo 2).
        grouped: the attention kernel reads grouped keys and values as they are; False: they are repeated first.
        mlp: "gated" is SwiGLU; "plain" one matrix up, GELU, one down. A mixture of experts: "grouped", one product over all
            experts; "clamped", the same with gpt-oss's activation; "every", all experts compute every token (Llama 4).
        shared: one more expert for all tokens.
        wide_router: the router computes in fp32. wide_shares: a token's shares are in fp32, and so what the experts give back.
        dispatch: experts lie on other ranks, and tokens travel there and back.
        latent: keys and values come out of a latent, "kv"; queries too, "qkv"; "" neither.
        layer_norm: LayerNorm in the place of RMSNorm. norms, wide_norms, gelu_in_parts, sinks, softcap: as of `Shape`.
        rotary: queries and keys turn with the position. fused: they are one matrix's output, with the values.
        train_embeddings: embedding and output layer are trained beside LoRA's factors.
        loss: "eager"; "half", in the dtype of the logits; "compiled", in one kernel; "chunked", the cross-entropy of an eighth
            of the tokens at a time; "fused", with the output layer.
        lora_targets: the matrices with adapters. selective_keeps: what selective checkpointing keeps.
        compiled: by torch.compile: what is element-wise runs in one kernel, whose inputs are kept; matrix products keep theirs.
        split_vocab: ranks share the vocabulary, by torch's loss_parallel.
        shifted_logits: the loss copies the logits without their last row (transformers 4).
    """

    method: str = "full"
    compute: int = 4
    stored: int = 4
    factors: int = 4
    autocast: bool = False
    eager: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    grouped: bool = True
    mlp: str = "gated"
    shared: bool = False
    wide_router: bool = False
    wide_shares: bool = False
    dispatch: bool = False
    latent: str = ""
    layer_norm: bool = False
    norms: str = "before"
    wide_norms: bool = False
    rotary: bool = True
    fused: bool = False
    gelu_in_parts: bool = False
    sinks: bool = False
    softcap: bool = False
    train_embeddings: bool = False
    loss: str = "eager"
    lora_targets: str = "all"
    selective_keeps: str = "products"
    compiled: bool = False
    shifted_logits: bool = False
    split_vocab: bool = False


def has_adapter(which: str, targets: str) -> bool:
    """Whether LoRA adapts this matrix: attention's are those that are neither an MLP's nor a shared expert's."""
    return targets == "all" or which not in ("g", "u", "d", "sg", "su", "sd")


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
        if self.n.compiled:
            rstd = self.tape.op("rstd", [], {rows: 4})
            grad = {weight: self.n.stored} if train else {}
            return self.op("norm", [x], symbol, each, saved=[x, rstd], weight_grad=grad)
        wide = self.cast(x, symbol, 4)
        square = self.op("pow", [wide], symbol, 4, saved=[wide], backward_temporary={symbol: 8})
        rstd = self.op("rsqrt", [square], rows, 4, saves_out=True)
        normed = self.op("normalise", [wide, rstd], symbol, 4, saved=[wide, rstd], backward_temporary={symbol: 4})
        within = 4 if self.n.wide_norms else each
        normed = self.cast(normed, symbol, within)
        scaled = self.op(
            "scale",
            [normed],
            symbol,
            within,
            saved=[normed] if train else [],
            weight_grad={weight: self.n.stored} if train else {},
            backward_temporary={symbol: within} if train else {},
        )
        return self.cast(scaled, symbol, each)

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
        if not has_adapter(which, n.lora_targets):
            return base
        wide = self.cast(x, wide_in, n.factors)  # by PEFT, to its factors' dtype; autocast then casts that
        z = self.cast(wide, wide_in, n.compute) if n.autocast else wide
        down = self.op(f"{which}.A", [z], "Nr", n.compute, saved=[z], weight_grad={f"L{which}": n.factors}, kept=True)
        up = self.op(f"{which}.B", [down], wide_out, n.compute, saved=[down])
        scaled = self.op("x alpha / r", [up], wide_out, n.compute)
        return self.op("+ lora", [base, scaled], wide_out, n.compute, passes_through=True, holds=[x, wide])

    def rotary(self, x: Tensor, symbol: str) -> Tensor:
        """x * cos + rotate_half(x) * sin; cos and sin have the residual stream's dtype, and the wider one wins."""
        each = max(self.bytes[x], self.n.stored)
        if self.n.compiled:
            return self.op("rotated", [x], symbol, each)
        turned = self.op("x cos", [x], symbol, each)
        half = self.op("rotate half", [x], symbol, self.bytes[x])
        half = self.op("x sin", [half], symbol, each)
        return self.op("rotated", [turned, half], symbol, each, passes_through=True)

    def attention(self, x: Tensor) -> Tensor:
        n = self.n
        q, k, v, values = self.latent_queries_keys_values(x) if n.latent else self.queries_keys_values(x)
        if n.eager or not n.grouped:
            k, v = self.op("repeat k", [k], "Na", n.compute), self.op("repeat v", [v], "Na", n.compute)
        if not n.eager:
            rows = self.tape.op("log-sum-exp", [], {"NH": 4})
            rows.wants_grad = False
            out = self.op("attention", [q, k, v], "Nav", n.compute, saved=[q, k, v, rows], saves_out=True, kept=True)
            return self.held_until_here(self.linear(out, "o"), [x, q, k, values])
        scores = self.op("scores", [q, k], "NS", n.compute, saved=[q, k])
        scores = self.op("x scale", [scores], "NS", n.compute)
        if n.softcap:
            tanh = self.op("tanh", [self.op("/ cap", [scores], "NS", n.compute)], "NS", n.compute, saves_out=True)
            scores = self.op("x cap", [tanh], "NS", n.compute)
        scores = self.op("+ mask", [scores], "NS", max(n.compute, n.stored), passes_through=True)
        if n.sinks:
            scores = self.op("- largest", [self.op("and sink", [scores], "NS", n.compute)], "NS", n.compute)
            shares = self.op("softmax", [scores], "NS", n.compute, saves_out=True)
        else:
            shares = self.op("softmax", [self.cast(scores, "NS", 4)], "NS", 4, saves_out=True)
            shares = self.cast(shares, "NS", n.compute)
        out = self.op("shares x v", [shares, v], "Nav", n.compute, saved=[shares, v])
        out = self.op("to (tokens, heads)", [out], "Nav", n.compute)
        return self.held_until_here(self.linear(out, "o"), [x, q, k, v, shares])

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values; and the tensor of the values as they were before any cast."""
        c = self.n.compute
        if self.n.fused:
            q = k = v = self.linear(x, "qkv")
        else:
            q, k, v = (self.linear(x, which) for which in "qkv")
        if self.n.qk_norm:
            q, k = self.rms_norm(q, "Na", "NH", "d"), self.rms_norm(k, "Nk", "NK", "d")
        if self.n.wide_qk_norm:
            q, k = self.rms_norm(q, "Na", weight="h"), self.rms_norm(k, "Nk", weight="h")
        if self.n.rotary:
            q, k = self.rotary(q, "Na"), self.rotary(k, "Nk")
        q, k, v = self.cast(q, "Na", c), self.cast(k, "Nk", c), self.cast(v, "Nk", c)
        return q, k, v, v

    def latent_queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As above. Queries and keys are put together from a part that turns with the position and one that does not."""
        c = self.n.compute
        if self.n.latent == "qkv":
            q = self.linear(self.rms_norm(self.linear(x, "qa"), "Nqr", weight="d"), "qb")
        else:
            q = self.linear(x, "q")
        latent = self.linear(x, "kva")
        values = self.linear(self.rms_norm(latent, "Nkn", weight="d"), "kvb")
        q = self.cast(self.op("turned and not", [q], "Na", self.bytes[q]), "Na", c)
        k = self.cast(self.op("keys from both", [values, latent], "Na", c), "Na", c)
        return q, k, self.cast(values, "Nkb", c), values

    def gelu_in_parts(self, x: Tensor) -> Tensor:
        """0.5 x (1 + tanh(c (x + 0.044715 x^3))), a tensor an operation."""
        c = self.n.compute
        half = self.op("0.5 x", [x], "Nm", c)
        cube = self.op("x^3", [x], "Nm", c, saved=[x], backward_temporary={"Nm": c})
        inner = self.op("x + ...", [x, self.op("0.044715 x^3", [cube], "Nm", c)], "Nm", c)
        tanh = self.op("tanh", [self.op("x c", [inner], "Nm", c)], "Nm", c, saves_out=True)
        other = self.op("1 + tanh", [tanh], "Nm", c, passes_through=True)
        return self.op("product", [half, other], "Nm", c, saved=[half, other])

    def mlp(self, x: Tensor) -> Tensor:
        c = self.n.compute
        if self.n.mlp == "plain":
            up = self.linear(x, "u")
            act = self.gelu_in_parts(up) if self.n.gelu_in_parts else self.op("gelu", [up], "Nm", c, saved=[up])
            return self.held_until_here(self.linear(act, "d"), [x])
        if self.n.mlp == "gated":
            return self.gated_mlp(x, "g", "u", "d")
        out = self.all_experts(x) if self.n.mlp == "every" else self.routed_experts(x)
        if not self.n.shared:
            return out
        return self.op("+ shared expert", [out, self.gated_mlp(x, "sg", "su", "sd")], "Nh", self.n.stored, holds=[x])

    def gated_mlp(self, x: Tensor, gate: str, up: str, down: str) -> Tensor:
        c, width = self.n.compute, WIDTH[gate][1]
        gated = self.linear(x, gate)
        if self.n.compiled:
            upper = self.linear(x, up)
            product = self.op("silu(gate) x up", [gated, upper], width, c, saved=[gated, upper])
            return self.held_until_here(self.linear(product, down), [x])
        active = self.op("silu", [gated], width, c, saved=[gated])
        upper = self.linear(x, up)
        product = self.op("gate x up", [active, upper], width, c, saved=[active, upper])
        return self.held_until_here(self.linear(product, down), [x])

    def router(self, x: Tensor) -> Tensor:
        """The logits of a token's experts; which it takes, and their shares, are small beside them."""
        c, train = 4 if self.n.wide_router else self.n.compute, self.n.method == "full"
        y = self.cast(x, "Nh", c)
        grad = {"Wrouter": self.n.stored} if train else {}
        logits = self.op("router", [y], "NE", c, saved=[y] if train else [], weight_grad=grad)
        return self.op("softmax of the router", [logits], "NE", 4, saves_out=True)

    def experts_product(self, x: Tensor, which: str, symbol: str, each: int, bias: str = "") -> Tensor:
        """With all experts' matrices at once, in the dtype of the weights: autocast does not know this product."""
        train = self.n.method == "full"
        grad = {f"W{which}": self.n.stored} if train else {}
        temporary = {bias: each} if self.n.mlp == "clamped" else {}  # the biases, a row a copy
        return self.op(which, [x], symbol, each, saved=[x] if train else [], weight_grad=grad, temporary=temporary)

    def routed_experts(self, x: Tensor) -> Tensor:
        """transformers' grouped product: the tokens' copies in the order of their experts, and back."""
        e, wide = self.n.stored, 4 if self.n.wide_shares else self.n.stored
        shares = self.router(x)
        order = self.tape.op("order of the copies", [], {"Ns": 2 * 8})
        order.wants_grad = False
        y = self.op("copies for the experts", [x, shares], "Nsh", e, saved=[order])
        if self.n.dispatch:
            y = self.op("sent to the experts", [y], "Nsh", e)
        both = self.experts_product(y, "gate_up", "Nsm", 2 * e, "Nsm")
        if self.n.mlp == "clamped":
            gate, up = (self.op("clamped", [both], "Nsm", e, saved=[both]) for _ in range(2))
            sigmoid = self.op("sigmoid", [self.op("x alpha", [gate], "Nsm", e)], "Nsm", e, saves_out=True)
            active = self.op("gate x sigmoid", [gate, sigmoid], "Nsm", e, saved=[gate, sigmoid])
            up = self.op("up + 1", [up], "Nsm", e)
            product = self.op("gate x up", [active, up], "Nsm", e, saved=[active, up], holds=[gate])
        else:
            active = self.op("silu", [both], "Nsm", e, saved=[both])
            product = self.op("gate x up", [active, both], "Nsm", e, saved=[active, both])
        down = self.experts_product(product, "down", "Nsh", e, "Nsh")
        if self.n.dispatch:
            down = self.op("sent back", [down], "Nsh", e)
        weighted = self.op("x share", [down, shares], "Nsh", wide, saved=[down])
        back = self.op("in the tokens' order", [weighted], "Nsh", wide, saved=[order], holds=[y, down])
        out = self.op("sum over a token's experts", [back], "Nh", wide, holds=[x, y, weighted])
        return self.cast(out, "Nh", e)

    def all_experts(self, x: Tensor) -> Tensor:
        """Llama 4 in transformers: every expert gets every token, times its share, which is 0 for most."""
        e = self.n.stored
        shares = self.router(x)
        copies = self.op("a copy for each expert", [x], "Nsh", e)
        y = self.op("x share", [copies, shares], "Nsh", e, saved=[copies, shares])
        both = self.experts_product(y, "gate_up", "Nsm", 2 * e)
        active = self.op("silu", [both], "Nsm", e, saved=[both])
        product = self.op("up x gate", [active, both], "Nsm", e, saved=[active, both])
        down = self.experts_product(product, "down", "Nsh", e)
        return self.op("sum over the experts", [down], "Nh", e, holds=[x, y])

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
    before = w.rms_norm if numerics.norms != "behind" else lambda x: x
    behind = w.rms_norm if numerics.norms != "before" else lambda x: x
    y = w.op("+ attention", [x, behind(w.attention(before(x)))], "Nh", numerics.stored, passes_through=True)
    w.op("+ mlp", [y, behind(w.mlp(before(y)))], "Nh", numerics.stored, passes_through=True)
    return w.tape, x


@lru_cache(maxsize=256)
def head(numerics: Numerics) -> tuple[Tape, Tensor]:
    """The tape of the last norm, the output layer and the cross-entropy in fp32; and the tensor that comes in."""
    n, w = numerics, _Writer(numerics)
    train = n.method == "full" or n.train_embeddings
    x = Tensor("residual stream", {"Nh": n.stored})
    w.bytes[x] = n.stored
    y = w.cast(w.rms_norm(x), "Nh", n.compute)
    if n.loss == "fused":
        # The input's gradient is there after forward, and is kept. (So is the matrix's, which is counted from the loss's
        # backward on, with all other gradients.) A chunk has about as many logits as the whole input has elements, which is
        # Liger's choice, in the compute type and once more in fp32.
        grad = {"Wh": n.stored} if train else {}
        chunk = {"Nh": n.compute + 4}
        done = w.op("gradient of the input", [y], "Nh", n.compute, weight_grad=grad, temporary=chunk)
        w.op("loss", [done], "one", 4, saved=[done])
        return w.tape, x
    logits = w.product("logits", y, "NV", "Wh") if train else w.op("logits", [y], "NV", n.compute)
    if n.softcap:
        tanh = w.op("tanh", [w.op("/ cap", [logits], "NV", n.compute)], "NV", n.compute, saves_out=True)
        logits = w.op("x cap", [tanh], "NV", n.compute)
    part = CHUNK if n.loss == "chunked" else 1
    if part < 1:  # each chunk of the logits is an output of its own, and so is its gradient
        logits.gradient = {"NV": n.compute * part}
    if n.loss == "compiled" or (n.compiled and part < 1):
        w.op("cross-entropy", [logits], "one", 4, saved=[logits])
        return w.tape, x
    before = [logits]
    wide = (
        w.op("to fp32", [logits], "NV", 4 * part)
        if part < 1
        else w.cast(logits, "NV", n.compute if n.loss == "half" else 4)
    )
    if n.shifted_logits and part == 1:
        before = [logits, wide]
        wide = w.op("without the last row", [wide], "NV", 4)
    each: Size = {"NV": 4} if n.split_vocab else {}  # torch's loss_parallel takes the steps one by one
    if n.split_vocab:
        before = [*before, wide]
        wide = w.op("less the largest", [wide], "NV", 4, holds=before)
    shares = w.op(
        "log-softmax",
        [wide],
        "NV",
        n.compute if n.loss == "half" else 4,
        saves_out=True,
        holds=before,
        backward_temporary=each,
    )
    if part < 1:
        shares.gradient = {"NV": 4 * part}
    w.op("negative log-likelihood", [shares], "one", 4, holds=before)
    return w.tape, x
