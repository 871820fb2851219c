"""Lab 8. MUTANTS: (exercise, what the solution says, what is planted, a word of the verdict). RIGHT: written another way."""

MUTANTS = [
    ("half_block", "self.group) + self.down.bias", "self.group) + self.group.size() * self.down.bias", "belongs to the sum"),
    ("half_block", "        return scattered(inner @ weight.T, group)\n", "        return scattered(inner @ weight.T + 0.1, group)\n", "the output"),
    ("half_block", "[self.norm.weight, self.norm.bias, self.down.bias]", "[self.norm.weight, self.norm.bias]", "partial sums"),
    ("half_block", "[self.norm.weight, self.norm.bias, self.down.bias]", "[self.norm.weight, self.down.bias]", "partial sums"),
    ("half_block", "        summed = torch.stack", "        self.up.bias.grad *= self.group.size()\n        summed = torch.stack", "is whole"),
    ("half_block", "            parameter.grad.copy_(gradient)", "            parameter.grad.copy_(gradient / self.group.size())", "not averaged"),
    ("half_block", "        dist.all_reduce(summed, group=self.group)", "        dist.all_reduce(summed)", "another group"),
    ("half_block", "        summed = torch.stack([parameter.grad for parameter in partial])\n        dist.all_reduce(summed, group=self.group)\n        for parameter, gradient in zip(partial, summed, strict=True):\n            parameter.grad.copy_(gradient)", "        for parameter in partial:\n            dist.all_reduce(parameter.grad, group=self.group)", "should call"),
    ("half_block", "        ctx.save_for_backward(part, weight)\n        return gathered(part, group) @ weight.T", "        ctx.whole = gathered(part, group)\n        ctx.save_for_backward(part, weight)\n        return ctx.whole @ weight.T", "gather them once more"),
    ("half_block", "return scattered(gradient @ weight, ctx.group), gradient.T @ whole, None", "return (gradient @ weight).chunk(ctx.group.size())[ctx.group.rank()], gradient.T @ whole, None", "the gradient of the input"),
    ("half_block", "self.group = norm, up, down, group\n", "self.group = norm, up, down, group\n        self.all = (up.weight.data, down.weight.data)\n", "still holds"),
    ("half_block", "[group.rank()].clone())", "[group.rank()])", "clone it"),
    ("half_block", "[group.rank()]", "[dist.get_rank() % group.size()]", "parameter"),
    ("half_block", "self.norm, self.up, self.down, self.group = norm,", "self.norm, self.up, self.down, self.group = nn.LayerNorm(norm.normalized_shape),", ""),
    ("beat_1f1b", "ahead = min(stages - 1 - rank, micro_batches)", "ahead = stages - 1 - rank", ""),
    ("beat_1f1b", "            order.append(Action(\"B\", i))\n            if i >= late:\n                order.append(Action(\"W\", i - late))\n        order += [Action(\"W\", i) for i in range(max(micro_batches - late, 0), micro_batches)]\n", "            order.append(Action(\"B\", i))\n", "that is 1F1B"),
    ("beat_1f1b", "ahead = min(stages - 1 - rank, micro_batches)", "ahead = micro_batches", "that is GPipe"),
    ("beat_1f1b", "ahead = min(stages - 1 - rank, micro_batches)", "ahead = 0", "one rank works at a time"),
    ("beat_1f1b", "ahead = min(stages - 1 - rank, micro_batches)", "ahead = min(rank, micro_batches)", "later stage"),
    ("beat_1f1b", "late = min(room[rank] - (stages - rank), rank)", "late = rank", "one more micro-batch held"),
    ("beat_1f1b", "late = min(room[rank] - (stages - rank), rank)", "late = 0", "which W"),
    ("beat_1f1b", "        ranks.append(order)", "        ranks.insert(0, order)", ""),
    ("beat_1f1b", "range(max(micro_batches - late, 0), micro_batches)", "range(micro_batches - late + 1, micro_batches)", "never runs"),
    ("on_a_mesh", "rows = batch.chunk(dp)[grid.get_local_rank(\"dp\")]", "rows = batch", "every rank trains on all rows"),
    ("on_a_mesh", "rows = batch.chunk(dp)[grid.get_local_rank(\"dp\")]", "rows = batch.chunk(dp)[0]", "before any step"),
    ("on_a_mesh", "    for unit in (*model.model.layers, model):\n        fully_shard(unit, mesh=grid[\"dp\"])\n", "    fully_shard(model, mesh=grid[\"dp\"])\n", "shard each layer"),
    ("on_a_mesh", "(*model.model.layers, model)", "([*model.model.layers], model)", "should be 3"),
    ("on_a_mesh", "init_device_mesh(\"cpu\", (dp, tp), mesh", "dist.device_mesh.DeviceMesh(\"cpu\", torch.arange(dp * tp).view(tp, dp).T, mesh", "neighbours"),
    ("on_a_mesh", "    plan[\"self_attn\"] = PrepareModuleInput(input_kwarg_layouts=keyword, desired_input_kwarg_layouts=keyword)\n", "", "PrepareModuleInput"),
    ("on_a_mesh", "            logits = model(input_ids=rows).logits\n", "            cut = model(input_ids=rows).logits\n            logits = cut.redistribute(placements=[whole]).redistribute(placements=cut.placements)\n", "leave the logits cut"),
    ("on_a_mesh", "\"model.embed_tokens\": RowwiseParallel(input_layouts=whole), ", "", "embedding and head"),
    ("on_a_mesh", "losses.append(mean.item() / dp)", "losses.append(mean.item())", "the loss"),
    ("on_a_mesh", "rows[:, 1:].flatten())", "rows[:, :-1].flatten())", "the loss"),
    ("on_a_mesh", "        for parameter in model.parameters():\n            parameter.grad.mul_((max_norm / total).clamp(max=1))\n", "", "whole model"),
    ("on_a_mesh", "total = torch.stack([norm.full_tensor() for norm in norms]).norm()", "total = torch.stack([norm.to_local() for norm in norms]).norm()", "whole model"),
    ("mended", "            dist.all_reduce(norm, group=self.tp)  # along each axis all ranks call in the same order\n            for", "            for", "added up along tp"),
    ("mended", "            dist.all_reduce(square, group=self.tp)\n            return (square + norm.square().sum()).sqrt()  # norm is the same on all tp ranks: count it once", "            square += norm.square().sum()\n            dist.all_reduce(square, group=self.tp)\n            return square.sqrt()", "counted by each"),
    ("mended", "            square = matrix.square().sum()\n            dist.all_reduce(square, group=self.tp)\n", "            square = matrix.square().sum()\n", "all tp ranks"),
    ("mended", "for group in (self.tp, self.dp):", "for group in (self.tp,):", "all r"),
    ("mended", "for group in (self.tp, self.dp):", "for group in (self.dp,):", "all r"),
    ("mended", "torch.stack([matrix.isfinite().all(), norm.isfinite().all()])", "torch.stack([~matrix.isnan().any(), ~norm.isnan().any()])", "all replicas count"),
    ("mended", "            dist.all_reduce(total, group=self.dp)\n            return bool(total / self.dp.size() < goal)", "            below = (total < goal).float()\n            dist.all_reduce(below, group=self.dp)\n            return bool(below > self.dp.size() / 2)", "all replicas count"),
    ("mended", "            dist.all_reduce(total, group=self.dp)\n", "            dist.broadcast(total, src=dist.get_process_group_ranks(self.dp)[0], group=self.dp)\n            total *= self.dp.size()\n", "their mean loss"),
    ("mended", "            dist.all_reduce(total, group=self.dp)\n", "            total *= self.dp.size()\n", "a number that all of them have"),
    ("mended", "    class Mended(Trainer):\n", "    class Mended(Trainer):\n        def train(self, steps, goal, lr):\n            return super().train(steps, goal, lr)\n\n", "healthy"),
    ("choose_plan", "\"strategy\": \"zero2\"", "\"strategy\": \"ddp\"", "does not fit"),
    ("choose_plan", "{\"offer\": \"A100-40\", \"machines\": 4", "{\"offer\": \"H100\", \"machines\": 4", "dollars"),
    ("choose_plan", "\"machines\": 4, \"strategy\": \"zero2\"}\n    small |= {\"dp\": 16, \"tp\": 2, \"pp\": 1, \"micro_batch\": 1, \"checkpointing\": \"selective\"", "\"machines\": 2, \"strategy\": \"zero2\"}\n    small |= {\"dp\": 8, \"tp\": 2, \"pp\": 1, \"micro_batch\": 1, \"checkpointing\": \"full\"", "are yours"),
    ("choose_plan", "small |= {\"dp\": 16,", "small |= {\"dp\": 8,", "nothing to do"),
    ("choose_plan", "large |= {\"dp\": 2, \"tp\": 4, \"pp\": 4", "large |= {\"dp\": 4, \"tp\": 8, \"pp\": 1", ""),
    ("choose_plan", "large |= {\"dp\": 2, \"tp\": 4, \"pp\": 4", "large |= {\"dp\": 1, \"tp\": 32, \"pp\": 1", ""),
    ("switch_layer", "order = gate.argsort(descending=True)", "order = torch.arange(len(x))", "came first"),
    ("switch_layer", "order = gate.argsort(descending=True)", "order = gate.argsort()", "the output"),
    ("switch_layer", "home[slot] * gate[token, None]", "home[slot]", "multiply each result"),
    ("switch_layer", "home[slot] * gate[token, None]", "home[slot] * gate[token, None] ** 2", "multiplied in twice"),
    ("switch_layer", "torch.zeros_like(x).index_copy", "x.index_copy", "its residual"),
    ("switch_layer", "    by_expert = rows.view(-1, own, capacity, hidden).transpose(0, 1)  # they come by rank, and by expert within it\n    results = (by_expert.flatten(1, 2) @ up).relu() @ down\n    by_rank = results.view(by_expert.shape).transpose(0, 1).flatten(0, 2)\n", "    by_rank = ((rows.view(own, -1, hidden) @ up).relu() @ down).flatten(0, 1)\n", "each other's rows"),
    ("switch_layer", "return torch.zeros_like(x).index_copy(0, token, home[slot] * gate[token, None])", "return torch.zeros_like(x).index_copy(0, token.sort()[0], home[slot] * gate[token, None])", "wrong tokens"),
    ("switch_layer", "    slots = x.new_zeros", "    dist.all_to_all_single(torch.empty(gates.shape[1]), torch.ones(gates.shape[1]))\n    slots = x.new_zeros", "needs counts"),
    ("switch_layer", "home = all_to_all_single_autograd(by_rank, None, None, dist.group.WORLD)", "home = torch.empty_like(by_rank)\n    dist.all_to_all_single(home, by_rank.contiguous())", "has no backward"),
    ("ring_step", "weights[..., :1] * out", "out", "what was there"),
    ("ring_step", "weights[..., 1:] @ v", "scores[..., 1:].softmax(-1) @ v", "the new block counts"),
    ("ring_step", "scores.logsumexp(-1, keepdim=True)", "scores[..., 1:].logsumexp(-1, keepdim=True)", "lse is that of the new block"),
    ("ring_step", "seen = k_at <= q_at[:, None]", "seen = torch.ones(len(q_at), len(k_at), dtype=torch.bool).tril()", "places in the block"),
    ("ring_step", "seen = k_at <= q_at[:, None]", "seen = k_at < q_at[:, None]", "own position"),
    ("ring_step", " / q.shape[-1] ** 0.5", "", "root of the width"),
    ("ring_step", "masked_fill(some & ~seen, -torch.inf)", "masked_fill(~seen, -torch.inf)", "-inf minus -inf"),
    ("ring_step", "scores.logsumexp(-1, keepdim=True)", "scores.exp().sum(-1, keepdim=True).log()", "subtract the largest"),
    ("ring_step", "weights = scores.softmax(-1)", "weights = scores.exp() / scores.exp().sum(-1, keepdim=True)", "subtract the largest"),
]  # fmt: skip

_BLOCK = """
class Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, weight, group):
        ctx.kept = part, weight, group
        return F.linear(gathered(part, group), weight)

    @staticmethod
    def backward(ctx, gradient):
        part, weight, group = ctx.kept
        return scattered(gradient.mm(weight), group), torch.einsum("to,ti->oi", gradient, gathered(part, group)), None


class Row(torch.autograd.Function):
    forward = staticmethod(lambda ctx, partial, group: (setattr(ctx, "group", group), scattered(partial, group))[1])
    backward = staticmethod(lambda ctx, gradient: (gathered(gradient, ctx.group), None))


class HalfBlock(nn.Module):
    def __init__(self, norm, up, down, group):
        super().__init__()
        self.norm, self.up, self.down, self.group = norm, up, down, group
        n, r = dist.get_world_size(group), dist.get_rank(group)
        self.width = down.in_features // n
        up.weight = nn.Parameter(up.weight.detach()[r * self.width : (r + 1) * self.width].clone())
        up.bias = nn.Parameter(up.bias.detach()[r * self.width : (r + 1) * self.width].clone())
        down.weight = nn.Parameter(down.weight.detach()[:, r * self.width : (r + 1) * self.width].clone())

    def forward(self, part):
        inner = F.gelu(Column.apply(self.norm(part), self.up.weight, self.group).add(self.up.bias))
        return Row.apply(inner @ self.down.weight.t(), self.group) + part + self.down.bias

    def finish_gradients(self):
        partial = [p for name, p in self.named_parameters() if name in ("norm.weight", "norm.bias", "down.bias")]
        flat = torch.cat([p.grad for p in partial])
        dist.all_reduce(flat, group=self.group)
        for p, grad in zip(partial, flat.chunk(3)):
            p.grad = grad.clone()
"""
_SORTED = """
def schedule(stages, micro_batches, room):
    ranks = []
    for r in range(stages):
        turn = {"F": r + 1 - stages, "B": 0, "W": min(r, room[r] + r - stages)}
        when = [(i + turn[kind], "FBW".index(kind), kind, i) for i in range(micro_batches) for kind in "FBW"]
        ranks.append(tuple((kind, torch.tensor(i)) for *_, kind, i in sorted(when)))
    return tuple(ranks)
"""
_TRAINER = """
def mended():
    class Other(Trainer):
        def average(self, matrix, norm):
            dist.all_reduce(norm, group=self.tp)
            both = torch.cat([matrix, norm])
            dist.all_reduce(both, group=self.dp, op=dist.ReduceOp.SUM)
            matrix.copy_(both[:6] / self.dp.size())
            norm.copy_(both[6:] / self.dp.size())

        def norm_of(self, matrix, norm):
            square = matrix.square().sum() + norm.square().sum() / self.tp.size()
            dist.all_reduce(square, group=self.tp)
            return square**0.5

        def usable(self, matrix, norm):
            bad = (~torch.cat([matrix, norm]).isfinite()).sum()
            dist.all_reduce(bad)
            return bad.item() == 0

        def finished(self, loss, goal):
            losses = [torch.empty_like(loss) for _ in range(self.dp.size())]
            dist.all_gather(losses, loss, group=self.dp)
            return torch.cat(losses).mean().item() < goal

    return Other
"""
_PLANS = """
def choose(task):
    keys = ("offer", "machines", "strategy", "dp", "tp", "pp", "micro_batch", "checkpointing")
    chosen = {
        "all of 8B": ("H100", 1, "zero2", 8, 1, 1, 1, "selective"),
        "all of 70B": ("H100", 4, "zero1", 2, 4, 4, 1, "selective"),
    }
    return dict(zip(keys, chosen[task.name]))
"""
_EXPERTS = """
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        received = torch.empty(x.shape)
        dist.all_to_all_single(received, x.contiguous())
        return received

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient)


def switch_layer(x, gates, up, down, capacity):
    experts = gates.shape[1]
    best = F.one_hot(gates.argmax(1), experts).bool()
    mine = torch.where(best, gates, 0)
    ahead = (mine[None, :, :] > mine[:, None, :]).sum(1)  # how many larger ones each token finds at its expert
    to = best[:, :, None] & (ahead[:, :, None] == torch.arange(capacity))
    there = Exchange.apply(torch.einsum("tec,th->ech", to.float(), x))
    pieces = there.chunk(dist.get_world_size())
    done = torch.stack([torch.cat([((p @ a).relu() @ b)[None] for p, a, b in zip(piece, up, down)]) for piece in pieces])
    home = Exchange.apply(done.flatten(0, 1))
    return torch.einsum("tec,te,ech->th", to.float(), mine, home)
"""
_RING = """
def ring_step(out, lse, q, k, v, q_at, k_at):
    scores = torch.einsum("hqd,hkd->hqk", q, k) * q.shape[2] ** -0.5
    scores = scores - torch.where(q_at.view(-1, 1) < k_at.view(1, -1), torch.inf, 0.0)
    top = torch.maximum(lse, scores.max(-1, keepdim=True).values).detach()
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    old, new = torch.exp(lse - top), torch.exp(scores - top)
    total = old + new.sum(-1, keepdim=True)
    none = total == 0
    total = torch.where(none, torch.ones_like(total), total)
    return (out * old + new @ v) / total, torch.where(none, -torch.inf, top + total.log())
"""
RIGHT = {
    "half_block": [_BLOCK],
    "beat_1f1b": [_SORTED],
    "mended": [_TRAINER],
    "choose_plan": [_PLANS],
    "switch_layer": [_EXPERTS],
    "ring_step": [_RING],
}
