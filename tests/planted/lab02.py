"""Answers to lab 2. RIGHT: name of the exercise -> its answer, unlike the shipped one. WRONG: (exercise, answer, words).

An answer is a tuple where its check takes two functions.
"""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from course_checks.lab02.nf4_reference import NF4


# ------------------------------------------------------------------------------------------------------- accumulation
def right_step(model, optimizer, micro_batches):
    """Sums first, and one division of the gradients at the end."""
    seen, total = 0, 0.0
    for tokens, labels in micro_batches:
        keep = labels != -100
        chosen = torch.log_softmax(model(tokens)[keep], -1).gather(1, labels[keep][:, None])
        (-chosen.sum()).backward()
        seen, total = seen + int(keep.sum()), total - chosen.detach().sum().item()
    for p in model.parameters():
        p.grad.div_(seen)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return total / seen


def _step(weigh, *, reduction="sum", at_once=False, mode="right"):
    def step(model, optimizer, micro_batches):
        every, parts, means = [int((labels != -100).sum()) for _, labels in micro_batches], [], []
        for (tokens, labels), count in zip(micro_batches, every, strict=True):
            if mode == "twice":
                with torch.no_grad():
                    model(tokens)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction=reduction)
            loss = loss * weigh(count, len(tokens), labels.numel(), every, micro_batches)
            parts.append(loss if at_once else loss.item())
            means.append(loss.item() * sum(every) / max(1, count) / len(every))
            if not at_once:
                loss.backward()
            if mode == "steps each time":
                optimizer.step()
        total = sum(parts)
        if at_once:
            total.backward()
            total = total.item()
        if mode not in ("steps each time", "never steps"):
            optimizer.step()
        if mode != "never zeroes":
            optimizer.zero_grad()
        return {"last loss": parts[-1], "mean of means": sum(means)}.get(mode, total)

    return step


def _share(count, rows, numel, every, batches):
    return 1 / sum(every)


def _all_positions(count, rows, numel, every, batches):
    return 1 / sum(labels.numel() for _, labels in batches)


def _row_share(count, rows, numel, every, batches):
    return rows / sum(len(tokens) for tokens, _ in batches)


# --------------------------------------------------------------------------------------------------------- checkpoint
def right_checkpoint(block, x):
    """With hooks instead of a Function: what autograd wants to save becomes a number, and is found again on demand."""
    state, count, again = torch.get_rng_state(), [0], []

    def pack(tensor):
        count[0] += 1
        return count[0] - 1

    def unpack(number):
        if not again:
            keep = torch.autograd.graph.saved_tensors_hooks(lambda t: again.append(t.detach()), lambda _: None)
            with torch.random.fork_rng(), torch.enable_grad(), keep:
                torch.set_rng_state(state)
                block(x.detach().requires_grad_(x.requires_grad))
        return again[number]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return block(x)


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mode, block, x, *parameters):
        ctx.mode, ctx.block, ctx.state = mode, block, torch.get_rng_state()
        ctx.save_for_backward(x, *parameters)
        if mode == "keeps the graph":
            with torch.enable_grad():
                ctx.first = block(x.detach().requires_grad_())
            return ctx.first.detach()
        y = block(x)
        if mode == "rewinds in forward":
            torch.set_rng_state(ctx.state)
        if mode == "runs twice":
            with torch.random.fork_rng():
                block(x)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        x = x.detach().requires_grad_(x.requires_grad)
        found_state = torch.get_rng_state()
        with torch.enable_grad():
            if ctx.mode != "forgets the state":
                torch.set_rng_state(ctx.state)
            y = ctx.block(x)
        if ctx.mode != "leaves the stream":
            torch.set_rng_state(found_state)
        if ctx.mode == "reentrant":
            torch.autograd.backward(y, gradient)
            return None, None, x.grad
        if ctx.mode == "only x":
            return None, None, torch.autograd.grad(y, x, gradient)[0]
        inputs = [t for t in (x, *parameters) if t.requires_grad]
        found = iter(torch.autograd.grad(y, inputs, gradient))
        gradients = [next(found) if t.requires_grad else None for t in (x, *parameters)]
        if ctx.mode == "ones":
            gradients = [g if g is None else torch.ones_like(g) for g in gradients]
        if ctx.mode == "loses x":
            gradients[0] = None
        return None, None, *gradients


def _checkpoint(mode):
    def checkpointed(block, x):
        return Recompute.apply(mode, block, x, *(() if mode in ("reentrant", "only x") else block.parameters()))

    return checkpointed


def without_graph(block, x):
    with torch.no_grad():
        return block(x)


# --------------------------------------------------------------------------------------------------------------- lora
class RightLoRA(nn.Module):
    """Two linear layers in a row, where the shipped answer has two parameters; the switches plant what is wrong."""

    freeze_weight = freeze_bias = zero_up = True
    copied = zero_down = full = detach = cut = ignore = False
    power = staticmethod(lambda alpha, rank: alpha / rank)

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.inner = copy.deepcopy(base) if self.copied else base
        self.inner.weight.requires_grad = not self.freeze_weight
        if base.bias is not None:
            self.inner.bias.requires_grad = not self.freeze_bias
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        if self.zero_up:
            nn.init.zeros_(self.up.weight)
        if self.zero_down:
            nn.init.zeros_(self.down.weight)
        self.factor = self.power(alpha, rank)

    def forward(self, x):
        y = self.inner(x.detach() if self.detach else x)
        if self.ignore:
            return y
        if self.full:
            return y + F.linear(x, self.factor * self.up.weight @ self.down.weight)
        if self.cut:
            return y + self.factor * self.up(F.linear(x, self.down.weight.detach()))
        return torch.add(y, self.up(self.down(x)), alpha=self.factor)


def lora_that(**switches):
    return type("WrongLoRA", (RightLoRA,), switches)


# -------------------------------------------------------------------------------------------------------------- merge
def right_merge(layer):
    merged = copy.deepcopy(layer.base)
    both = torch.addmm(merged.weight.data.float(), layer.b, layer.a, alpha=layer.scale)
    merged.weight.data = both.detach().to(merged.weight.dtype)
    return merged


def _merge(*, scale=None, in_place=False, bias="kept", dtype=None, rounded=False):
    def merge(layer):
        base = layer.base
        update = (layer.scale if scale is None else scale(layer.scale)) * (layer.b @ layer.a).detach()
        merged = base if in_place else copy.deepcopy(base)
        if rounded:
            merged.weight.data += layer.scale * layer.b.data.to(base.weight.dtype) @ layer.a.data.to(base.weight.dtype)
        else:
            merged.weight.data = (merged.weight.data.float() + update).to(merged.weight.dtype)
        if bias == "lost":
            merged.bias = None
        if bias == "scaled" and merged.bias is not None:
            merged.bias.data *= 1 + layer.scale
        if bias == "added" and merged.bias is None:
            merged.bias = nn.Parameter(torch.zeros(merged.out_features))
        return merged.to(dtype) if dtype else merged

    return merge


# ---------------------------------------------------------------------------------------------------------------- nf4
def _nf4(mode="right", levels=NF4):
    """Nearest level by distance, low half-byte first, groups of 256 one by one: unlike the shipped answer."""

    def quantize(weight):
        if mode == "keeps all":
            return {"weight": weight.clone()}
        if mode == "keeps it":
            return {"weight": weight}
        weight = weight.abs() if mode == "sign" else weight
        blocks = weight.reshape(-1, 64)
        absmax = blocks.abs().max(1).values
        if mode == "per tensor":
            absmax = absmax.max()[None].expand(len(blocks)).clone()
        if mode == "largest":
            absmax = blocks.max(1).values
        relative = blocks / absmax[:, None]
        if mode != "zeros":
            relative = relative.nan_to_num(0)
        distance = (relative[..., None] - levels).abs()
        codes = (relative[..., None] >= levels).sum(-1).sub(1).clamp(min=0) if mode == "floor" else distance.argmin(-1)
        codes[relative.isnan()] = 0
        codes = codes.flatten()
        stored = {"codes": (codes[0::2] + 16 * codes[1::2]).to(torch.uint8)}
        if mode == "a byte each":
            stored["codes"] = codes.to(torch.uint8)
        if mode in ("fp32", "per tensor"):
            return stored | {"absmax": absmax[:1].clone() if mode == "per tensor" else absmax}
        mean = torch.zeros(()) if mode == "not centred" else absmax.mean()
        parts = [absmax - mean] if mode == "one group" else list((absmax - mean).split(256))
        scale = torch.stack([part.abs().max() for part in parts]) / 127
        stored["absmax"] = torch.cat([(part / s).round().to(torch.int8) for part, s in zip(parts, scale, strict=True)])
        if mode == "tail":
            stored["absmax"][len(absmax) // 256 * 256 :] = 0
        return stored | {"scale": scale, "mean": mean}

    def dequantize(stored, shape):
        if "weight" in stored:
            return stored["weight"]
        codes = stored["codes"]
        if mode != "a byte each":
            order = [codes >> 4, codes & 15] if mode == "swapped" else [codes & 15, codes >> 4]
            codes = torch.stack(order, 1).flatten()
        absmax = stored["absmax"].float()
        if "scale" in stored:
            group = len(absmax) if mode == "one group" else 256
            absmax = absmax * stored["scale"].repeat_interleave(group)[: len(absmax)] + stored["mean"]
        if mode == "per tensor":
            absmax = absmax.expand(codes.numel() // 64)
        got = levels[codes.long()].view(-1, 64) * absmax[:, None]
        if mode == "negated":
            got = -got
        return got.view(tuple(shape))

    return quantize, dequantize


_OUTSIDE: dict = {}


def _scales_outside():
    """Only the codes are stored; the scales lie in a dictionary of their own."""
    scales = {}
    quantize, dequantize = _nf4()

    def only_codes(weight):
        stored = quantize(weight)
        scales[int(stored["codes"].sum())] = stored
        return {"codes": stored["codes"]}

    return only_codes, lambda stored, shape: dequantize(scales[int(stored["codes"].sum())], shape)


# --------------------------------------------------------------------------------------------------------- eight bits
def _logarithmic(signed):
    steps = 127 if signed else 255
    above = 10 ** (-7 * (steps - 1 - torch.arange(steps)) / (steps - 1))
    return torch.cat([-above.flip(0), torch.zeros(1), above]) if signed else torch.cat([torch.zeros(1), above])


def _linear(signed):
    return torch.linspace(-1, 1, 255) if signed else torch.linspace(0, 1, 256)


def _state(levels=_logarithmic, mode="right"):
    def quantize(state, signed):
        flat = state.reshape(-1)
        if mode == "fp16":
            return {"values": state.half()}
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 256)])
        blocks = flat.view(1, -1) if mode == "per tensor" else flat.view(-1, 16 if mode == "blocks of 16" else 256)
        middle = blocks.mean(1) if mode == "centred" else torch.zeros(len(blocks))
        blocks = blocks - middle[:, None]
        top = blocks.abs().amax(1)
        table = levels(mode == "centred" or signed)
        if mode == "sign lost":
            blocks, table = blocks.abs(), levels(False)
        relative = blocks / (top if mode == "zeros" else top.clamp(min=1e-30))[:, None]
        codes = torch.searchsorted((table[1:] + table[:-1]) / 2, relative.contiguous())
        return {
            "c": codes.to(torch.uint8),
            "t": top,
            "m": middle if mode == "centred" else 0.0,
            "v": table,
            "shape": state.shape,
        }

    def dequantize(stored):
        if mode == "fp16":
            return stored["values"].float()
        middle = stored["m"][:, None] if mode == "centred" else 0.0
        values = stored["v"][stored["c"].long()] * stored["t"][:, None] + middle
        if mode == "zeros":
            values = values / stored["t"][:, None] * stored["t"][:, None]
        return values.flatten()[: math.prod(stored["shape"])].view(stored["shape"])

    return quantize, dequantize


# ------------------------------------------------------------------------------------------------------- loss scaling
def right_scaled(model, optimizer, compute_loss, scale, max_norm):
    """Unscales and clips with one factor; a norm that is not finite tells of inf and nan alike."""
    optimizer.zero_grad()
    compute_loss().mul(scale.value).backward()
    mine = [p for p in model.parameters() if p.grad is not None]
    norm = torch.cat([p.grad.double().flatten() for p in mine]).norm() / scale.value
    stepped = math.isfinite(norm)
    if stepped:
        for p in mine:
            p.grad.mul_(min(1.0, max_norm / float(norm)) / scale.value)
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    scale.good_steps = scale.good_steps + 1 if stepped else 0
    grown = scale.good_steps >= scale.growth_interval
    scale.value *= (2 if grown else 1) if stepped else 0.5
    scale.good_steps = 0 if grown else scale.good_steps
    return stepped


def _scaled(mode):
    def step(model, optimizer, compute_loss, scale, max_norm):
        (compute_loss() * (1.0 if mode == "never scaled" else scale.value)).backward()
        mine = [p for p in model.parameters() if p.grad is not None]
        good = mode == "never looks" or all(bool(p.grad.isfinite().all()) for p in mine)
        if mode == "never steps":
            good = False
        if mode == "tries again" and not good:
            optimizer.zero_grad()
            scale.value /= 2
            (compute_loss() * scale.value).backward()
        if good:
            if mode == "clips first":
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if mode not in ("still scaled", "never scaled"):
                for p in mine:
                    p.grad /= scale.value
            if mode not in ("clips first", "never clips"):
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scale.good_steps += 1
            if scale.good_steps == scale.growth_interval and mode != "never grows":
                scale.value, scale.good_steps = scale.value * 2, 0
        else:
            scale.value = scale.value if mode == "keeps the scale" else scale.value / 2
            scale.good_steps = scale.good_steps if mode == "keeps the count" else 0
        if mode != "keeps gradients" and (good or mode != "keeps inf"):
            optimizer.zero_grad()
        return {"says nothing": None, "says yes": True}.get(mode, good)

    return step


# ----------------------------------------------------------------------------------------------------------- choosing
def _peak(inputs, inner, chosen):
    ends, held = [], 0
    for i, bytes_ in enumerate(inner):
        held += inputs[i]
        ends.append(held + bytes_)
        held += 0 if i in chosen else bytes_
    return max([held, *ends])


def right_choice(inputs, inner, seconds, budget):
    """Branch and bound over the blocks, cheapest so far kept."""
    best = [math.inf, None]

    def go(i, chosen, cost):
        if cost >= best[0]:
            return
        if i == len(seconds):
            if _peak(inputs, inner, chosen) <= budget:
                best[:] = [cost, chosen]
            return
        go(i + 1, chosen, cost)
        go(i + 1, (*chosen, i), cost + seconds[i])

    go(0, (), 0.0)
    if best[1] is None:
        raise ValueError("nothing fits")
    return list(best[1])


def _greedy(key, *, skip_last=True):
    def choose(inputs, inner, seconds, budget):
        order = sorted(range(len(inner) - skip_last), key=lambda i: key(i, inner, seconds))
        chosen = set()
        for i in [None, *order]:
            chosen |= {i} - {None}
            if _peak(inputs, inner, chosen) <= budget:
                return chosen
        raise ValueError("nothing fits")

    return choose


def _exact_at_end(inputs, inner, seconds, budget):
    """The best choice by a count that forgets the recomputed block."""
    n, best = len(inner), (math.inf, None)
    for bits in range(2**n):
        chosen = {i for i in range(n) if bits >> i & 1}
        if sum(inputs) + sum(b for j, b in enumerate(inner) if j not in chosen) <= budget:
            best = min(best, (sum(seconds[i] for i in chosen), sorted(chosen)))
    return best[1]


def refuses(inputs, inner, seconds, budget):
    raise ValueError("no")


def all_of_them(inputs, inner, seconds, budget):
    return set(range(len(inner)))


RIGHT = {
    "accumulated_step": right_step,
    "checkpointed": right_checkpoint,
    "lora_linear": RightLoRA,
    "merge": right_merge,
    "nf4": _nf4(),
    "eight_bit_state": _state(),
    "scaled_step": right_scaled,
    "choose_checkpointing": right_choice,
}
WRONG = [
    (
        "accumulated_step",
        _step(lambda count, rows, numel, every, batches: 1 / len(every), reduction="mean"),
        "a mean of means",
    ),
    ("accumulated_step", _step(lambda *_: 1.0, reduction="mean"), "their weights are missing"),
    ("accumulated_step", _step(_row_share, reduction="mean"), "weighed by their rows"),
    (
        "accumulated_step",
        _step(lambda count, rows, numel, every, batches: count / sum(every), reduction="mean"),
        "the mean over no labels is 0 / 0",
    ),
    ("accumulated_step", _step(_all_positions), "a label of -100 is no token of the loss"),
    ("accumulated_step", _step(lambda *_: 1.0), "never divided by the number of labels"),
    ("accumulated_step", _step(_share, at_once=True), "Call backward() for each micro-batch"),
    ("accumulated_step", _step(_share, mode="steps each time"), "stepped 2 times"),
    ("accumulated_step", _step(_share, mode="never steps"), "never stepped"),
    ("accumulated_step", _step(_share, mode="never zeroes"), "gradients are left over"),
    ("accumulated_step", _step(_share, mode="mean of means"), "the loss that you return is a mean of means"),
    ("accumulated_step", _step(_share, mode="twice"), "the model ran 4 times for 2 micro-batches"),
    ("accumulated_step", _step(_share, mode="last loss"), "the loss that your step returns is off"),
    ("checkpointed", lambda block, x: block(x), "nothing is recomputed"),
    ("checkpointed", without_graph, "computed under no_grad it is cut off"),
    ("checkpointed", _checkpoint("forgets the state"), "the recomputation draws another mask"),
    ("checkpointed", _checkpoint("leaves the stream"), "after backward() the random stream is not where it was"),
    ("checkpointed", _checkpoint("rewinds in forward"), "after your forward the random stream is not where"),
    ("checkpointed", _checkpoint("only x"), "the recomputation must reach the block's parameters"),
    ("checkpointed", _checkpoint("reentrant"), "hand the parameters to the Function as inputs too"),
    ("checkpointed", _checkpoint("loses x"), "or the blocks before learn nothing"),
    ("checkpointed", _checkpoint("keeps the graph"), "its intermediates are kept as well"),
    ("checkpointed", _checkpoint("runs twice"), "ran 2 times in forward"),
    ("checkpointed", _checkpoint("ones"), "the gradient of block 0"),
    ("lora_linear", lora_that(power=staticmethod(lambda alpha, rank: 1.0)), "the update is not scaled"),
    ("lora_linear", lora_that(power=staticmethod(lambda alpha, rank: alpha)), "is scaled with alpha:"),
    ("lora_linear", lora_that(power=staticmethod(lambda alpha, rank: alpha / rank**0.5)), "that is rsLoRA"),
    ("lora_linear", lora_that(zero_up=False), "does not start equal to its base"),
    ("lora_linear", lora_that(zero_down=True), "neither ever moves"),
    ("lora_linear", lora_that(freeze_weight=False), "the base still trains"),
    ("lora_linear", lora_that(freeze_bias=False), "the base's bias still trains"),
    ("lora_linear", lora_that(copied=True), "not a copy beside it"),
    ("lora_linear", lora_that(full=True), "your forward makes a matrix"),
    ("lora_linear", lora_that(detach=True), "x gets its gradient through A and B alone"),
    ("lora_linear", lora_that(ignore=True), "the update never reaches the output"),
    ("lora_linear", lora_that(cut=True), "A gets no gradient"),
    ("merge", _merge(in_place=True), "merged twice it would hold the update twice"),
    ("merge", _merge(scale=lambda scale: 1.0), "without its scale"),
    ("merge", _merge(scale=lambda scale: -scale), "subtracted"),
    ("merge", lambda layer: copy.deepcopy(layer.base), "nothing was added"),
    ("merge", lambda layer: layer.base, "the base's own memory"),
    ("merge", lambda layer: layer, "a plain nn.Linear"),
    ("merge", _merge(bias="lost"), "the base's bias is lost"),
    ("merge", _merge(bias="scaled"), "the merged layer's bias"),
    ("merge", _merge(bias="added"), "build it with bias=False"),
    ("merge", _merge(dtype=torch.float32), "as large as its base"),
    ("merge", _merge(rounded=True), "round the sum once"),
    ("nf4", _nf4("per tensor"), "one outlier would push every weight to 0"),
    ("nf4", _nf4(levels=torch.linspace(-1, 1, 15)), "evenly: most weights are near 0"),
    ("nf4", _nf4("a byte each"), "pack two into each byte"),
    ("nf4", _nf4("sign"), "the sign is lost"),
    ("nf4", _nf4("negated"), "with the other sign"),
    ("nf4", _nf4("fp32"), "absmax in fp32"),
    ("nf4", _nf4("not centred"), "subtract the mean"),
    ("nf4", _nf4("one group"), "subtract the mean"),
    ("nf4", _nf4("floor"), "the nearest level"),
    ("nf4", _nf4("swapped"), "in each other's place"),
    ("nf4", _nf4("largest"), "the most negative weight may be the one"),
    ("nf4", _nf4("keeps all"), "you store 32.00 bits"),
    ("nf4", _nf4("keeps it"), "holds the tensor itself"),
    ("nf4", _nf4("zeros"), "a block of zeros comes back with"),
    ("nf4", _nf4("tail"), "100 blocks fill no group"),
    ("nf4", _scales_outside(), "something is kept elsewhere"),
    ("eight_bit_state", _state(_linear), "Linear levels leave nothing between"),
    ("eight_bit_state", _state(mode="per tensor"), "scale each block of 256"),
    ("eight_bit_state", _state(mode="fp16"), "you store 2.00 bytes a number"),
    ("eight_bit_state", _state(mode="centred"), "second moments come back negative"),
    ("eight_bit_state", _state(mode="sign lost"), "no first moment comes back negative"),
    ("eight_bit_state", _state(mode="zeros"), "a state of zeros"),
    ("eight_bit_state", _state(mode="blocks of 16"), "one fp32 scale a block of 256"),
    ("scaled_step", _scaled("never scaled"), "they underflow"),
    ("scaled_step", _scaled("still scaled"), "still scaled: divide them"),
    ("scaled_step", _scaled("clips first"), "Unscale first, then clip"),
    ("scaled_step", _scaled("never clips"), "were not clipped to 0.5"),
    ("scaled_step", _scaled("never looks"), "a gradient held inf and the optimizer stepped"),
    ("scaled_step", _scaled("tries again"), "what overflows is skipped, not repeated"),
    ("scaled_step", _scaled("keeps the scale"), "halve it"),
    ("scaled_step", _scaled("keeps the count"), "a skipped step sets good_steps back to 0"),
    ("scaled_step", _scaled("never grows"), "good steps in a row double it"),
    ("scaled_step", _scaled("keeps gradients"), "gradients are left over"),
    ("scaled_step", _scaled("keeps inf"), "a skipped step leaves its inf"),
    ("scaled_step", _scaled("says nothing"), "return True when the optimizer stepped"),
    ("scaled_step", _scaled("never steps"), "the optimizer did not step"),
    ("scaled_step", _scaled("says yes"), "return False when the step was skipped"),
    ("choose_checkpointing", refuses, "you refuse"),
    ("choose_checkpointing", all_of_them, "checkpoint only as many as it takes"),
    ("choose_checkpointing", lambda *case: set(), "at the end of forward"),
    ("choose_checkpointing", _exact_at_end, "is there in full again"),
    ("choose_checkpointing", _greedy(lambda i, inner, seconds: seconds[i] / inner[i]), "a greedy one misses the best"),
    ("choose_checkpointing", _greedy(lambda i, *_: -i, skip_last=False), "the last block is recomputed before"),
    ("choose_checkpointing", lambda *case: right_choice(*case[:3], max(case[3], 90 * 2**20)), "raise ValueError"),
]
