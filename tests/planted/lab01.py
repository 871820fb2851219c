"""Answers to lab 1. RIGHT: name of the exercise -> an answer unlike the shipped one. WRONG: (exercise, answer, words)."""

import math

from course_checks.lab01 import LADDER
from course_lib.memory import Shape, estimate


# ----------------------------------------------------------------------------------------------------------- counting
def right_count(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, tied):
    """By the shapes of the tensors, where the shipped answer writes a formula."""
    block = [(heads * head_dim, hidden), *[(kv_heads * head_dim, hidden)] * 2, (hidden, heads * head_dim)]
    block += [(intermediate, hidden)] * 2 + [(hidden, intermediate), (hidden,), (hidden,)]
    tensors = layers * block + [(vocab, hidden)] * (1 if tied else 2) + [(hidden,)]
    return sum(math.prod(shape) for shape in tensors)


def _count(**changed):
    def count(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, tied):
        c = dict(mlp=3, norms=2, last=1, out=1, bias=0, tied=tied, kv=kv_heads, d=head_dim, embedding=1) | changed
        kv = heads if c["kv"] == "heads" else c["kv"]
        d = hidden // heads if c["d"] == "split" else c["d"]
        block = hidden * d * (heads * (1 + c["out"]) + 2 * kv) + c["mlp"] * hidden * intermediate + c["norms"] * hidden
        block += c["bias"] * (d * (heads + 2 * kv) + 2 * hidden + 2 * intermediate)
        matrices = c["embedding"] + (not c["tied"])
        return layers * block + matrices * vocab * hidden + c["last"] * hidden

    return count


def gpt_blocks(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, tied):
    return 12 * layers * hidden**2 + vocab * hidden * (1 if tied else 2)


# ------------------------------------------------------------------------------------------------------------- states
def right_states(params, ranks, stage, bytes_per_parameter=(2, 2, 12)):
    """Backwards: from the last part on, as many are divided as the stage says."""
    divided, whole = bytes_per_parameter[3 - stage :], bytes_per_parameter[: 3 - stage]
    return params * sum(whole) + params * sum(divided) / ranks


def _states(starts=(3, 2, 1), scale=1.0, fixed=None, total=False):
    def state(params, ranks, stage, bytes_per_parameter=(2, 2, 12)):
        each = fixed or bytes_per_parameter
        parts = zip(each, starts, strict=True)
        share = sum(params * b / (ranks if stage >= start else 1) for b, start in parts)
        return share * scale * (ranks if total else 1)

    return state


def without_master(params, ranks, stage, bytes_per_parameter=(2, 2, 12)):
    weight, gradient, optimizer = bytes_per_parameter
    return right_states(params, ranks, stage, (weight, gradient, optimizer - 4))


# -------------------------------------------------------------------------------------------------------- activations
def right_activations(tokens, seq_len, hidden, heads, kv_heads, head_dim, intermediate, attention="flash"):
    """Tensor by tensor, with the width of each."""
    queries, keys = heads * head_dim, kv_heads * head_dim
    widths = [hidden, hidden, hidden, 1] * 2 + [intermediate] * 4
    widths += [queries, keys, keys, queries, heads] if attention == "flash" else [queries] * 4 + [heads * seq_len]
    return sum(4 * tokens * width for width in widths)


def _activations(
    norm=3, rstd=2, mlp=4, q_twice=False, lse=1, out=1, scores=0, kv="own", eager_kv="all", soft=1, wide="heads",
    each=4, residual=0,
):  # fmt: skip
    def activations(tokens, seq_len, hidden, heads, kv_heads, head_dim, intermediate, attention="flash"):
        flash = attention == "flash"
        queries = heads * head_dim if wide == "heads" else hidden
        keys = queries if (kv if flash else eager_kv) == "all" else kv_heads * head_dim
        total = 2 * norm * hidden + rstd + mlp * intermediate + residual * hidden + queries * (1 + out) + 2 * keys
        total += q_twice * (queries + kv_heads * head_dim)
        total += heads * lse + scores * heads * seq_len if flash else soft * heads * seq_len
        return each * tokens * total

    return activations


# ------------------------------------------------------------------------------------------------------------- logits
def right_logits(tokens, vocab, dtype_bytes, held):
    """The larger of the forward and of the backward pass."""
    one = tokens * vocab
    forward = {"logits": dtype_bytes * one, "fp32": 4 * one if dtype_bytes < 4 else 0, "log-probabilities": 4 * one}
    backward = {"log-probabilities": 4 * one, "their gradient": 4 * one, "the logits' gradient": 4 * one}
    if held:
        backward["logits"] = dtype_bytes * one
    return max(sum(forward.values()), sum(backward.values()))


def _logits(bytes_each):
    return lambda tokens, vocab, dtype_bytes, held: bytes_each(dtype_bytes, held) * tokens * vocab


# ------------------------------------------------------------------------------------------------------------ moments
def right_moments(resident, kept, forward, backward, gradients, step):
    """Walks through the step with a running sum, and uses up a copy of the list that it is given."""
    now, best, kept = resident, (-1, ""), list(kept)
    for i, size in enumerate(kept):
        now += size
        if now + forward[i] > best[0]:
            best = now + forward[i], f"forward {i}"
    for i in range(len(kept) - 1, -1, -1):
        now += gradients[i]
        if now + backward[i] > best[0]:
            best = now + backward[i], f"backward {i}"
        now -= kept.pop()
    return (now + step, "step") if now + step > best[0] else best


def _moments(how):
    def find(resident, kept, forward, backward, gradients, step):
        n, found = len(kept), []
        base = 0 if how == "no resident" else resident
        for i in range(n):
            found.append((base + sum(kept[: i if how == "own kept" else i + 1]) + forward[i], f"forward {i}"))
        for i in reversed(range(n)):
            left = {"never freed": kept, "wrong end": kept[i:], "freed before": kept[:i]}.get(how, kept[: i + 1])
            made = gradients[i : i + 1] if how == "gradients freed" else gradients[i + (how == "own gradient") :]
            found.append((base + sum(left) + sum(made) + backward[i], f"backward {i}"))
        if how != "no step":
            found.append((base + sum(gradients) + step + (sum(kept) if how == "step kept" else 0), "step"))
        peak = max(p for p, _ in found)
        names = [name for p, name in found if p == peak] or ["step"]
        if how == "from 1":
            kind, _, at = names[0].partition(" ")
            return peak, f"{kind} {int(at) + 1}" if at else kind
        return peak, names[-1] if how == "last" else "the peak" if how == "named" else names[0]

    return find


def sum_of_maxima(resident, kept, forward, backward, gradients, step):
    return resident + sum(kept) + sum(gradients) + max(*forward, *backward, step), "step"


# ---------------------------------------------------------------------------------------------------------- searching
def right_search(fits, limit):
    """Recursive, with steps that grow and shrink, where the shipped answer keeps two bounds."""
    best, step = 0, 1
    while step and best + step <= limit and fits(best + step):
        best += step
        step *= 2
    while step:
        step //= 2
        if step and best + step <= limit and fits(best + step):
            best += step
    return best


def linear(fits, limit):
    batch = 0
    while batch < limit and fits(batch + 1):
        batch += 1
    return batch


def bisects_from_limit(fits, limit):
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _search(low_bound=True, stop=1, answer="low"):
    def search(fits, limit):
        low, high = 0, 1
        while high <= limit and fits(high):
            low, high = high, 2 * high
        if answer == "doubling":
            return low
        high = min(high, limit + 1)
        while high - low > stop:
            middle = (low + high) // 2
            if fits(middle):
                low = middle if low_bound else low
            else:
                high = middle
        return low if answer == "low" else high

    return search


def beyond_the_limit(fits, limit):
    high = 1
    while fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def asks_zero(fits, limit):
    return 0 if not fits(0) else 1


# ----------------------------------------------------------------------------------------------------------- choosing
def right_choice(model, card, gpus, seq_len):
    """All rungs priced first, then the first under the bar."""
    precision = ("fp16-mixed", "bf16-mixed")[card.bf16]
    prices = []
    for rung in LADDER:
        strategy = "zero3" if rung.sharded else ("single" if gpus == 1 else "ddp")
        if strategy == "zero3" and gpus == 1:
            continue
        asked = {
            "method": rung.method,
            "activation_checkpointing": rung.activation_checkpointing,
            "strategy": strategy,
            "ranks": gpus,
            "precision": precision,
            "seq_len": seq_len,
        }
        prices.append((estimate(model, **asked).device, asked))
    cheap = [asked for price, asked in prices if price <= card.memory]
    if not cheap:
        raise ValueError(f"{model} does not fit on {gpus} {card.name}")
    return cheap[0]


def _choice(
    measure="device", order=1, bf16=None, ranks=None, pooled=False, single=False, invent=False, refuse=True, seq=None
):
    def choose(model, card, gpus, seq_len):
        for rung in LADDER[::order]:
            if rung.sharded and gpus == 1:
                continue
            strategy = "zero3" if rung.sharded else "single" if gpus == 1 or single else "ddp"
            asked = {
                "method": rung.method,
                "activation_checkpointing": "selective" if invent else rung.activation_checkpointing,
                "strategy": strategy,
                "ranks": ranks or gpus,
                "seq_len": seq or seq_len,
                "precision": "bf16-mixed" if (card.bf16 if bf16 is None else bf16) else "fp16-mixed",
            }
            need = estimate(model, **asked | ({"ranks": 1} if strategy == "single" else {}))
            if getattr(need, measure) <= card.memory * (gpus if pooled else 1):
                return asked
        if refuse:
            raise ValueError("nothing fits")
        return asked

    return choose


def never_chooses(model, card, gpus, seq_len):
    raise ValueError("too large")


# ------------------------------------------------------------------------------------------------------------ mending
def right_mended(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, tokens):
    """By the course's own arithmetic, where the shipped answer adds up its own functions."""
    shape = Shape(layers, hidden, heads, vocab, kv_heads=kv_heads, head_dim=head_dim, intermediate=intermediate)
    return estimate(shape, precision="fp32", seq_len=tokens, step="fused").peak


def _mended(states=12, blocks=True, logits=12, step=16, add=0, scale=1.0):
    def mended(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, tokens):
        params = right_count(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, False)
        block = right_activations(tokens, 0, hidden, heads, kv_heads, head_dim, intermediate)
        times = layers if blocks is True else blocks
        loss = (states + add) * params + times * block + logits * tokens * vocab + 12 * tokens * hidden
        return scale * max(loss, step * params)

    return mended


def the_tools_own(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, tokens):
    return 16 * right_count(layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, False)


RIGHT = {
    "count_parameters": right_count,
    "state_bytes": right_states,
    "block_activations": right_activations,
    "logit_peak": right_logits,
    "worst_moment": right_moments,
    "largest_micro_batch": right_search,
    "choose_method": right_choice,
    "mended_estimate": right_mended,
}
WRONG = [
    ("count_parameters", _count(kv="heads"), "keys and values have kv_heads heads"),
    ("count_parameters", _count(d="split"), "heads x head_dim wide, which need not be hidden"),
    ("count_parameters", _count(mlp=2), "three matrices, not two"),
    ("count_parameters", _count(norms=0, last=0), "the norms are missing: two a block and one at the end"),
    ("count_parameters", _count(norms=1), "a block has two norms"),
    ("count_parameters", _count(last=0), "the last norm, after all blocks"),
    ("count_parameters", _count(tied=False), "count it once"),
    ("count_parameters", _count(tied=True), "the output layer is missing"),
    ("count_parameters", _count(out=0), "o_proj"),
    ("count_parameters", _count(bias=1), "a Llama has no biases"),
    ("count_parameters", _count(embedding=0), "the embedding is missing"),
    ("count_parameters", gpt_blocks, "12 x layers x hidden^2"),
    ("count_parameters", _count(kv="heads", mlp=2), "three matrices, not two"),
    ("state_bytes", _states(starts=(1, 1, 1)), "stage 1 divides the optimizer's state only"),
    ("state_bytes", _states(starts=(3, 1, 1)), "stage 1 does not divide the gradients yet"),
    ("state_bytes", _states(starts=(2, 3, 1)), "the other way round"),
    ("state_bytes", _states(starts=(2, 2, 1)), "only stage 3 divides them"),
    ("state_bytes", _states(starts=(3, 9, 1)), "the gradients are divided over the ranks, too"),
    ("state_bytes", _states(starts=(9, 2, 1)), "stage 3 divides the weights as well"),
    ("state_bytes", _states(starts=(9, 9, 9)), "nothing is divided, whatever the stage"),
    ("state_bytes", _states(starts=(3, 2, 0)), "stage 0 is plain data parallelism"),
    ("state_bytes", _states(fixed=(2, 2, 12)), "bytes_per_parameter changes nothing"),
    ("state_bytes", without_master, "Adam's two moments, 4 each"),
    ("state_bytes", _states(total=True), "one rank's share"),
    ("state_bytes", _states(scale=1e-9), "right in GB"),
    ("state_bytes", _states(scale=2.0**-30), "right in GiB"),
    ("state_bytes", _states(scale=2.0**30 / 1e9), "you took a GB for 2**30 bytes"),
    ("block_activations", _activations(mlp=3), "four tensors of tokens x intermediate, and you have three"),
    ("block_activations", _activations(mlp=2), "and you have two: gate"),
    ("block_activations", _activations(q_twice=True), "kept once, after the rotary embedding"),
    ("block_activations", _activations(norm=2), "each norm keeps three tensors of tokens x hidden, and you have two"),
    ("block_activations", _activations(norm=1), "each norm keeps three tensors of tokens x hidden, and you have one"),
    ("block_activations", _activations(rstd=0), "1/rms"),
    ("block_activations", _activations(lse=0), "log-sum-exp"),
    ("block_activations", _activations(scores=1), "flash attention never writes the scores out"),
    ("block_activations", _activations(kv="all"), "not repeated to all heads"),
    ("block_activations", _activations(eager_kv="own"), "eager attention repeats keys and values"),
    ("block_activations", _activations(soft=0), "eager attention keeps the softmax's output"),
    ("block_activations", _activations(soft=2), "not the scores before it"),
    ("block_activations", _activations(out=0), "o_proj's input"),
    ("block_activations", _activations(residual=1), "counted by the next block"),
    ("block_activations", _activations(wide="hidden"), "which need not be hidden"),
    ("block_activations", _activations(each=1), "an element of fp32 has 4 bytes"),
    ("block_activations", _activations(each=2), "the bytes of bf16"),
    ("logit_peak", _logits(lambda each, held: each), "that is the logits alone"),
    ("logit_peak", _logits(lambda each, held: 8 if each == 4 else 10), "the most of the forward pass"),
    ("logit_peak", _logits(lambda each, held: 8 + each * held), "two tensors beside"),
    ("logit_peak", _logits(lambda each, held: (3 + held) * each), "computes in fp32"),
    ("logit_peak", _logits(lambda each, held: 12), "with held=True somebody still has"),
    ("logit_peak", _logits(lambda each, held: 12 + each), "with held=False nobody has"),
    ("logit_peak", _logits(lambda each, held: 12 + 4 * held), "in their own type"),
    ("worst_moment", sum_of_maxima, "these things are not there at one time"),
    ("worst_moment", _moments("own kept"), "what it keeps is there already"),
    ("worst_moment", _moments("freed before"), "freed after it"),
    ("worst_moment", _moments("own gradient"), "made during its own backward"),
    ("worst_moment", _moments("gradients freed"), "gradients stay until the optimizer's step"),
    ("worst_moment", _moments("never freed"), "freed layer by layer"),
    ("worst_moment", _moments("wrong end"), "backward goes from the last layer to the first"),
    ("worst_moment", _moments("no resident"), "are there at every moment"),
    ("worst_moment", _moments("no step"), "the optimizer's step is a moment of its own"),
    ("worst_moment", _moments("step kept"), "when the optimizer steps, backward is over"),
    ("worst_moment", _moments("last"), "the first of them counts"),
    ("worst_moment", _moments("from 1"), "layers are counted from 0"),
    ("worst_moment", _moments("named"), "moments are called"),
    ("largest_micro_batch", linear, "one batch after the other"),
    ("largest_micro_batch", bisects_from_limit, "bisecting from the limit"),
    ("largest_micro_batch", _search(answer="high"), "the first that does not fit"),
    ("largest_micro_batch", _search(answer="doubling"), "the largest power of two that fits"),
    ("largest_micro_batch", _search(stop=2), "one too few"),
    ("largest_micro_batch", _search(low_bound=False), "there is no end"),
    ("largest_micro_batch", beyond_the_limit, "the largest worth trying"),
    ("largest_micro_batch", asks_zero, "the smallest is 1"),
    ("largest_micro_batch", lambda fits, limit: limit, "which does not fit"),
    ("largest_micro_batch", lambda fits, limit: fits(limit / 2), "a batch is a whole number"),
    ("choose_method", _choice(measure="peak"), "the allocator's waste and CUDA's context"),
    ("choose_method", _choice(order=-1), "gives up more than it must"),
    ("choose_method", _choice(bf16=True), "has no bf16"),
    ("choose_method", _choice(bf16=False), "take bf16-mixed where the card has bf16"),
    ("choose_method", _choice(pooled=True), "each of them must hold it all"),
    ("choose_method", _choice(ranks=1), "one rank a GPU"),
    ("choose_method", _choice(single=True), "the ladder has 'ddp'"),
    ("choose_method", _choice(invent=True), "is no rung of the ladder"),
    ("choose_method", _choice(refuse=False), "nothing fits, and you give"),
    ("choose_method", _choice(seq=1024), "you estimate for 1024 tokens"),
    ("choose_method", _choice(measure="weights"), "does not fit"),
    ("choose_method", never_chooses, "you refuse (too large)"),
    ("mended_estimate", the_tools_own, "the tool's own number"),
    ("mended_estimate", _mended(blocks=0), "what autograd keeps of the blocks is still missing"),
    ("mended_estimate", _mended(blocks=1), "`layers` times one block's"),
    ("mended_estimate", _mended(logits=0), "the logits are still missing"),
    ("mended_estimate", _mended(logits=4), "the logits count once"),
    ("mended_estimate", _mended(logits=8), "that is the forward pass"),
    ("mended_estimate", _mended(add=4), "there are no gradients yet"),
    ("mended_estimate", _mended(step=0), "the larger of the two"),
    ("mended_estimate", _mended(states=4), "Adam's two moments are still missing"),
    ("mended_estimate", _mended(scale=0.8), "something is still missing"),
    ("mended_estimate", _mended(scale=1.2), "something is there that should not be"),
]
