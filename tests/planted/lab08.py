"""Answers to lab 8. RIGHT: name of the exercise -> an answer unlike the shipped one. WRONG: (exercise, answer, words)."""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from course_lib.parallel.schedules import orders


# ------------------------------------------------------------------------------------------------------- parallel_mlp
class Part(nn.Module):
    """One layer's part: a weight and perhaps a bias."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)


class _Both(torch.autograd.Function):
    """f and g in one: an all-reduce forward, or backward, or both, or none."""

    @staticmethod
    def forward(ctx, x, group, forward, backward):
        ctx.group, ctx.backward_times = group, backward
        x = x.clone()
        for _ in range(forward):
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        for _ in range(ctx.backward_times):
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None, None


class RightMLP(nn.Module):
    """A tensor hook where the shipped answer has f; attributes change one thing each."""

    f, g, bias, world, view, first, up_dim = (0, 1), (1, 0), "after", False, False, False, 0

    def __init__(self, up, down, group):
        super().__init__()
        self.group = group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)

        def piece(tensor, dim):
            own = tensor.detach().chunk(ranks, dim)[0 if self.first else rank]
            return own if self.view else own.clone()

        self.up = Part(piece(up.weight, self.up_dim), piece(up.bias, 0))
        self.down = Part(piece(down.weight, 1), down.bias.detach().clone())

    def inner(self, x):
        return nn.functional.gelu(x @ self.up.weight.T + self.up.bias)

    def forward(self, x):
        group = dist.group.WORLD if self.world else self.group
        part = self.inner(_Both.apply(x, group, *self.f)) @ self.down.weight.T
        if self.bias == "each":
            part = part + self.down.bias
        whole = _Both.apply(part, group, *self.g)
        return whole + self.down.bias if self.bias == "after" else whole


class ByHook(RightMLP):
    def forward(self, x):
        x = x.view_as(x)
        x.register_hook(self.added)
        out = self.inner(x) @ self.down.weight.T
        total = self.added(out.detach())
        return out + (total - out).detach() + self.down.bias

    def added(self, tensor):
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=self.group)
        return tensor


def mlp_that(**changes):
    return type("WrongMLP", (RightMLP,), changes)


class WholeWeights(nn.Module):
    def __init__(self, up, down, group):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class OneRankSkips(RightMLP):
    """The last rank of the group thinks that it has nothing to add."""

    def forward(self, x):
        if dist.get_rank(self.group) == dist.get_world_size(self.group) - 1:
            return x
        return super().forward(x)


# ---------------------------------------------------------------------------------------------------- vocabulary_loss
def _summed(tensor, group, op=dist.ReduceOp.SUM):
    tensor = tensor.detach().clone()
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def right_loss(logits, targets, group, *, peak="all", sums="all", mask="zero", mean="counted", back="", gather=False):
    """Without an autograd.Function: the value is made of sums over ranks, the gradient of this rank's part of them."""
    rank, size = dist.get_rank(group), logits.shape[1]
    if gather:
        pieces = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, logits.detach(), group=group)
    top = logits.detach().amax(1)
    top = {"all": _summed(top, group, dist.ReduceOp.MAX), "own": top, "none": torch.zeros_like(top)}[peak]
    own = (logits - top[:, None]).exp().sum(1)
    total = _summed(own, group) if sums != "own" else own.detach()
    if sums == "mean":
        total = total / dist.get_world_size(group)
    here = (targets >= rank * size) & (targets < (rank + 1) * size)
    at = targets.clamp(min=0) % size
    hit = logits.gather(1, at[:, None])[:, 0]
    if mask in ("zero", "own"):
        hit = torch.where(here, hit, 0.0)
    whole_hit = hit.detach() if mask == "own" else _summed(hit, group)
    counted = targets != -100
    value = total.log() + (0 if mean == "shifted" else top) - whole_hit
    value = value * (1 if mean == "everything" else counted)
    flow = (own / total - (0 if back == "softmax" else hit)) * (1 if back == "ignored" else counted)
    flow = flow.sum() / (1 if back == "sum" else counted.sum())
    if back == "times":
        flow = flow * dist.get_world_size(group)
    rows = {"rows": len(targets), "sum": 1}.get(mean, counted.sum())
    return flow - flow.detach() + value.sum() / rows


def loss_that(**changes):
    return partial(right_loss, **changes)


def loss_with_backward(gradient_of):
    """By hand, with one slip in backward."""

    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, targets, group):
            rank, size = dist.get_rank(group), logits.shape[1]
            top = _summed(logits.amax(1), group, dist.ReduceOp.MAX)
            soft = (logits - top[:, None]).exp()
            total = _summed(soft.sum(1), group)
            here = (targets >= rank * size) & (targets < (rank + 1) * size)
            at = (targets - rank * size).clamp(0, size - 1)
            hit = _summed(torch.where(here, logits.gather(1, at[:, None])[:, 0], 0.0), group)
            counted = targets != -100
            ctx.save_for_backward(soft / total[:, None], here, at, counted)
            return ((total.log() + top - hit) * counted).sum() / counted.sum()

        @staticmethod
        def backward(ctx, gradient):
            return gradient_of(gradient, *ctx.saved_tensors), None, None

    return Loss.apply


def _one_hot_everywhere(gradient, soft, here, at, counted):
    ones = torch.zeros_like(soft).scatter(1, at[:, None], 1.0)
    return (soft - ones) * counted[:, None] * gradient / counted.sum()


def _forgets_gradient(gradient, soft, here, at, counted):
    ones = torch.zeros_like(soft).scatter(1, at[:, None], here[:, None].float())
    return (soft - ones) * counted[:, None] / counted.sum()


# -------------------------------------------------------------------------------------------------------- one_f_one_b
def right_schedule(stages, micro_batches, *, warm=lambda rank, stages: stages - rank):
    """Step by step, with a budget of micro-batches in flight, where the shipped answer writes three phases."""
    ranks = []
    for rank in range(stages):
        order, forward, backward = [], 0, 0
        while backward < micro_batches:
            if forward < micro_batches and forward - backward < max(1, warm(rank, stages)):
                order.append(("F", forward))
                forward += 1
            else:
                order.append(("B", backward))
                backward += 1
        ranks.append(order)
    return ranks


def _drops_the_last(stages, micro_batches):
    return [order[:-1] for order in orders("1f1b", stages, micro_batches)]


# ---------------------------------------------------------------------------------------------------------- rank_grid
def _digits(order):
    def coordinates(rank, pp, dp, tp):
        widths, at = {"pp": pp, "dp": dp, "tp": tp}, {}
        for axis in order:  # fastest first
            at[axis] = rank % widths[axis]
            rank //= widths[axis]
        return at["pp"], at["dp"], at["tp"]

    return coordinates


right_coordinates = _digits(("tp", "dp", "pp"))


def right_groups(axis, pp, dp, tp, coordinates=right_coordinates):
    """By sorting the ranks by what they have in common, where the shipped answer turns a grid."""
    index, found = ("pp", "dp", "tp").index(axis), {}
    for rank in range(pp * dp * tp):
        place = coordinates(rank, pp, dp, tp)
        found.setdefault(place[:index] + place[index + 1 :], []).append(rank)
    return list(found.values())


def right_machines(axis, pp, dp, tp, per_node):
    step = {"tp": 1, "dp": tp, "pp": tp * dp}[axis]
    width = {"tp": tp, "dp": dp, "pp": pp}[axis]
    starts = [group[0] for group in right_groups(axis, pp, dp, tp)]
    return max(len({(start + i * step) // per_node for i in range(width)}) for start in starts)


def _grid(coordinates=right_coordinates, groups=right_groups, machines=right_machines):
    return coordinates, groups, machines


def _machines(count):
    """`count(first group, per_node)` in the place of right_machines."""
    return _grid(machines=lambda axis, pp, dp, tp, per_node: count(right_groups(axis, pp, dp, tp)[0], per_node))


def _planes(axis, pp, dp, tp):
    index, found = ("pp", "dp", "tp").index(axis), {}
    for rank in range(pp * dp * tp):
        found.setdefault(right_coordinates(rank, pp, dp, tp)[index], []).append(rank)
    return list(found.values())


# ------------------------------------------------------------------------------------------------------------- bubble
def right_bubble(stages, micro_batches, chunks=1):
    return 1 - chunks * micro_batches / (chunks * micro_batches + stages - 1)


def right_fewest(stages, bound, chunks=1):
    """By the formula turned round, where the shipped answer counts up."""
    exact = (stages - 1) * (1 - bound) / (bound * chunks)
    step = stages if chunks > 1 else 1
    return max(1, math.ceil(exact / step)) * step


def _groups_of(stages, count, interleaved=True):
    return -(-count // stages) * stages if interleaved else count


def _bubble(share=right_bubble, fewest=right_fewest):
    return share, fewest


# -------------------------------------------------------------------------------------------------------------- merge
def right_merge(
    shards, config, *, qkv="groups", gate="each", rows=0, norm="one", vocab="cut", order=1, drop="", dtype=None, turn=0
):
    """By index, row after row, where the shipped answer reshapes; keywords make one mistake each."""
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    dim, each, shards = config.hidden_size // heads, heads // groups, shards[::order]
    state = {}

    def whole(name, dim_=0):
        return torch.cat([shard[name] for shard in shards], dim_)

    def norms(name):
        tensors = [shard[name] for shard in shards]
        return {"one": tensors[0], "cat": torch.cat(tensors), "sum": sum(tensors)}[norm]

    for theirs, ours in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
        rows_each = config.vocab_size // len(shards) if vocab == "each" else None
        tensor = torch.cat([shard[f"{theirs}.weight"][:rows_each] for shard in shards])
        state[f"{ours}.weight"] = tensor[: config.vocab_size] if vocab == "cut" else tensor
    state["model.norm.weight"] = norms("decoder.final_layernorm.weight")
    for i in range(config.num_hidden_layers):
        theirs, ours = f"decoder.layers.{i}", f"model.layers.{i}"
        fused = whole(f"{theirs}.self_attention.linear_qkv.weight")
        block, found = (each + 2) * dim, {"q": [], "k": [], "v": []}
        for g in range(groups):
            start = g * block
            found["q"].append(fused[start : start + each * dim])
            found["k"].append(fused[start + each * dim : start + (each + 1) * dim])
            found["v"].append(fused[start + (each + 1) * dim : start + block])
        tensors = {which: torch.cat(pieces) for which, pieces in found.items()}
        if qkv == "blocks":
            tensors = dict(zip("qkv", fused.split([heads * dim, groups * dim, groups * dim]), strict=True))
        if qkv == "blocks a rank":
            sizes = [n * dim // len(shards) for n in (heads, groups, groups)]
            cut = [s[f"{theirs}.self_attention.linear_qkv.weight"].split(sizes) for s in shards]
            tensors = {w: torch.cat([c[n] for c in cut]) for n, w in enumerate("qkv")}
        if qkv == "kv swapped":
            tensors["k"], tensors["v"] = tensors["v"], tensors["k"]
        for which, tensor in tensors.items():
            state[f"{ours}.self_attn.{which}_proj.weight"] = tensor
        state[f"{ours}.self_attn.o_proj.weight"] = whole(f"{theirs}.self_attention.linear_proj.weight", 1 - rows)
        halves = [s[f"{theirs}.mlp.linear_fc1.weight"].chunk(2) for s in shards]
        pair = [torch.cat([h[n] for h in halves]) for n in (0, 1)]
        if gate == "together":
            pair = list(whole(f"{theirs}.mlp.linear_fc1.weight").chunk(2))
        if gate == "swapped":
            pair = pair[::-1]
        if gate == "alternate":
            pair = [whole(f"{theirs}.mlp.linear_fc1.weight")[n::2] for n in (0, 1)]
        state[f"{ours}.mlp.gate_proj.weight"], state[f"{ours}.mlp.up_proj.weight"] = pair
        state[f"{ours}.mlp.down_proj.weight"] = whole(f"{theirs}.mlp.linear_fc2.weight", 1)
        first, second = ("self_attention.linear_qkv", "mlp.linear_fc1")[:: -1 if turn else 1]
        state[f"{ours}.input_layernorm.weight"] = norms(f"{theirs}.{first}.layer_norm_weight")
        state[f"{ours}.post_attention_layernorm.weight"] = norms(f"{theirs}.{second}.layer_norm_weight")
    state.pop(drop, None)
    return state if dtype is None else {name: tensor.to(dtype) for name, tensor in state.items()}


def _ties_the_ends(shards, config):
    merged = right_merge(shards, config)
    return merged | {"lm_head.weight": merged["model.embed_tokens.weight"]}


def merge_that(**changes):
    return (partial(right_merge, **changes),)


# -------------------------------------------------------------------------------------------------------- choose_plan
KEYS = ("method", "strategy", "dp", "tp", "pp", "micro_batch", "checkpointing")
HOME, ONE, EIGHT = (
    dict(zip(KEYS, values, strict=True))
    for values in (
        ("lora", "fsdp", 2, 1, 1, 1, "selective"),
        ("full", "zero2", 8, 1, 1, 1, "none"),
        ("full", "zero1", 4, 2, 8, 1, "selective"),
    )
)


def right_plan(task):
    """Asks the planner, where the shipped answer was thought out."""
    from course_tools.planning import plan

    best = plan(task.model, task.machines, **task.asked).best
    named = {"micro_batch": best.micro_batch_size, "checkpointing": best.activation_checkpointing}
    return {name: named[name] if name in named else getattr(best, name) for name in KEYS}


def plans_that(home=None, one=None, eight=None):
    """Three plans, with some settings of one of them changed."""

    def choose(task):
        changed = {"two cards at home": (HOME, home), "one machine": (ONE, one)}.get(task.name, (EIGHT, eight))
        return changed[0] | (changed[1] or {})

    return (choose,)


RIGHT = {
    "parallel_mlp": (ByHook,),
    "vocabulary_loss": (right_loss,),
    "one_f_one_b": (right_schedule,),
    "rank_grid": _grid(),
    "bubble": _bubble(),
    "merge": (right_merge,),
    "choose_plan": (right_plan,),
}
WRONG = [
    ("parallel_mlp", (mlp_that(f=(0, 0)),), "the input gradient is only this rank's part"),
    ("parallel_mlp", (mlp_that(g=(1, 1)),), "exactly 4 times too large"),
    ("parallel_mlp", (mlp_that(g=(0, 0)),), "is this rank's part of the sum"),
    ("parallel_mlp", (mlp_that(f=(1, 1)),), "every rank has the whole input already"),
    ("parallel_mlp", (mlp_that(bias="each"),), "has the bias of down 4 times"),
    ("parallel_mlp", (mlp_that(bias="none"),), "has no bias of down"),
    ("parallel_mlp", (mlp_that(first=True),), "dist.get_rank(group)"),
    ("parallel_mlp", (mlp_that(up_dim=1),), "up.weight is cut along its rows"),
    ("parallel_mlp", (mlp_that(view=True),), "a view keeps the whole weight"),
    ("parallel_mlp", (mlp_that(world=True),), "pass group=… to every collective"),
    ("parallel_mlp", (WholeWeights,), "1/4 of them is meant"),
    ("vocabulary_loss", (loss_that(peak="none"),), "Subtract the largest logit of the row"),
    ("vocabulary_loss", (loss_that(peak="own"),), "ReduceOp.MAX"),
    ("vocabulary_loss", (loss_that(sums="own"),), "over this rank's columns alone: add"),
    ("vocabulary_loss", (loss_that(mask="modulo"),), "a mask makes it 0 there"),
    ("vocabulary_loss", (loss_that(mask="own"),), "on the others it is missing"),
    ("vocabulary_loss", (loss_that(sums="mean"),), "averaged over the ranks"),
    ("vocabulary_loss", (loss_that(mean="shifted"),), "not from the target's logit"),
    ("vocabulary_loss", (loss_that(mean="sum"),), "their mean is meant"),
    ("vocabulary_loss", (loss_that(back="softmax"),), "it is the softmax alone"),
    ("vocabulary_loss", (loss_that(mean="rows"),), "the mean divides by all rows"),
    ("vocabulary_loss", (loss_that(mean="everything"),), "still have a loss"),
    ("vocabulary_loss", (loss_that(gather=True),), "the logits travel"),
    ("vocabulary_loss", (loss_that(back="ignored"),), "they do not count"),
    ("vocabulary_loss", (loss_that(back="sum"),), "it is that of the sum over the rows"),
    ("vocabulary_loss", (loss_that(back="times"),), "not n losses"),
    ("vocabulary_loss", (loss_with_backward(_one_hot_everywhere),), "only the rank that has the target's column may"),
    ("vocabulary_loss", (loss_with_backward(_forgets_gradient),), "backward forgets the gradient that it is given"),
    ("one_f_one_b", (lambda p, m: orders("gpipe", p, m),), "that is GPipe"),
    ("one_f_one_b", (lambda p, m: orders("naive", p, m),), "one rank works at a time"),
    ("one_f_one_b", (partial(right_schedule, warm=lambda rank, stages: stages),), "every rank begins with 4 forwards"),
    ("one_f_one_b", (partial(right_schedule, warm=lambda rank, stages: stages - rank - 1),), "forwards fill that time"),
    ("one_f_one_b", (lambda p, m: orders("1f1b", p, m)[::-1],), "the ranks are in reverse"),
    ("one_f_one_b", (_drops_the_last,), "never runs the backward of micro-batch 7"),
    ("one_f_one_b", (lambda p, m: orders("1f1b", p, m)[0],), "one list of actions for each rank"),
    ("one_f_one_b", (lambda p, m: orders("zero_bubble", p, m),), "F and B only"),
    ("rank_grid", _grid(_digits(("pp", "dp", "tp"))), "so tp counts up first"),
    ("rank_grid", _grid(_digits(("dp", "tp", "pp"))), "lie along dp"),
    ("rank_grid", _grid(_digits(("tp", "pp", "dp"))), "dp and pp are exchanged"),
    ("rank_grid", _grid(lambda *a: right_coordinates(*a)[::-1]), "return them as (pp, dp, tp)"),
    ("rank_grid", _grid(lambda r, pp, dp, tp: (r // (dp * tp), r // tp, r % tp)), "take the remainder"),
    ("rank_grid", _grid(groups=lambda axis, *s: right_groups("dp" if axis == "tp" else axis, *s)), "lie along dp"),
    ("rank_grid", _grid(groups=_planes), "have pp in common"),
    ("rank_grid", _grid(groups=lambda *a: [g[::-1] for g in right_groups(*a)]), "in another order"),
    ("rank_grid", _machines(lambda group, n: -(-len(group) // n)), "they are no neighbours"),
    ("rank_grid", _machines(lambda group, n: len(group)), "you count its"),
    ("rank_grid", _machines(lambda group, n: len({r // n for r in group})), "The widest group counts"),
    ("bubble", _bubble(lambda p, m, v: (p - 1) / (v * m)), "divides the idle time by the busy time"),
    ("bubble", _bubble(lambda p, m, v: p / (v * m + p)), "counts p stages to wait for"),
    ("bubble", _bubble(lambda p, m, v: (p - 1) / (v * m + p)), "or counts one too many"),
    ("bubble", _bubble(lambda p, m, v: v * m / (v * m + p - 1)), "the bubble is the rest"),
    ("bubble", _bubble(lambda p, m, v: (p - 1) / (m + p - 1)), "leaves the chunks out"),
    ("bubble", _bubble(lambda p, m, v: (p - 1) / m), "and it "),
    ("bubble", _bubble(lambda p, m, v: (p * v - 1) / (m + p * v - 1)), "takes the chunks for more stages"),
    ("bubble", _bubble(lambda p, m, v: 2 * (p - 1) / (v * m + 2 * (p - 1))), "counts the bubble twice"),
    ("bubble", _bubble(fewest=lambda p, b, v: right_fewest(p, b, v) + 1), "'at most' includes the bound"),
    ("bubble", _bubble(fewest=lambda p, b, v: max(1, math.ceil((p - 1) * (1 - b) / (b * v)))), "in groups of `stages`"),
    ("bubble", _bubble(fewest=lambda p, b, v: _groups_of(p, right_fewest(p, b, 1), v > 1)), "leaves the chunks out"),
    ("bubble", _bubble(fewest=lambda p, b, v: _groups_of(p, right_fewest(p, b, v))), "only interleaved schedules"),
    ("merge", merge_that(qkv="blocks"), "it is cut into query groups"),
    ("merge", merge_that(qkv="blocks a rank"), "reads each rank's linear_qkv as all q"),
    ("merge", merge_that(qkv="kv swapped"), "stand q, then k, then v"),
    ("merge", merge_that(gate="together"), "each rank has its own gate above its own up"),
    ("merge", merge_that(gate="swapped"), "gate stands above up"),
    ("merge", merge_that(gate="alternate"), "they do not alternate"),
    ("merge", merge_that(rows=1), "is row-parallel"),
    ("merge", merge_that(norm="cat"), "take one, do not concatenate"),
    ("merge", merge_that(norm="sum"), "take one, do not add them up"),
    ("merge", merge_that(turn=1), "has other numbers"),
    ("merge", merge_that(vocab="padded"), "still has the padding"),
    ("merge", merge_that(vocab="each"), "has lost rows"),
    ("merge", merge_that(order=-1), "wrong order"),
    ("merge", merge_that(drop="lm_head.weight"), "lacks lm_head.weight"),
    ("merge", merge_that(dtype=torch.bfloat16), "merging computes nothing"),
    ("merge", (_ties_the_ends,), "lm_head.weight is the other end of the model"),
    ("choose_plan", plans_that(home={"dp": 4}), "there are 2 GPUs"),
    ("choose_plan", plans_that(home={"method": "full"}), "is not what is asked for"),
    ("choose_plan", plans_that(home={"strategy": "ddp", "checkpointing": "none"}), "or keep them in 4 bits"),
    ("choose_plan", plans_that(home={"micro_batch": 16}), "do not divide the batch"),
    ("choose_plan", plans_that(home={"strategy": "single"}), "strategy='single'"),
    ("choose_plan", plans_that(home={"checkpointing": "full"}), "computes what there is room to keep"),
    ("choose_plan", plans_that(one={"strategy": "ddp"}), "share them out over the data-parallel ranks"),
    ("choose_plan", plans_that(one={"micro_batch": 8}), "a smaller micro-batch"),
    ("choose_plan", plans_that(one={"dp": 1, "tp": 8}), "tp=8 sends activations several times in each layer"),
    ("choose_plan", plans_that(eight=dict(zip(KEYS, ("full", "fsdp", 64, 1, 1, 4, "full"), strict=True))), "over RoCE"),
    ("choose_plan", plans_that(eight={"dp": 4, "tp": 16, "pp": 1}), "leaves the machine of 8 GPUs"),
    ("choose_plan", plans_that(eight={"dp": 64, "tp": 1, "pp": 1}), "the most are the weights"),
    ("choose_plan", plans_that(eight={"dp": 1, "tp": 1, "pp": 64}), "the most are the activations"),
    ("choose_plan", plans_that(eight={"dp": 1, "tp": 1, "pp": 81}), "there are 64 GPUs"),
]
