"""Answers to lab 6. RIGHT: name of the exercise -> an answer unlike the shipped one. WRONG: (exercise, answer, words)."""

import itertools
import math

import torch
import torch.distributed as dist
from torch import nn


# ----------------------------------------------------------------------------------------------------------- own_unit
class _Recomputed(torch.autograd.Function):
    """Keeps nothing for backward: gathers the parameters again there, and computes forward again."""

    @staticmethod
    def forward(ctx, shard, unit, *inputs):
        ctx.unit, ctx.inputs = unit, inputs
        ctx.save_for_backward(shard)
        with torch.no_grad():
            return unit.compute(unit.gather(), inputs)

    @staticmethod
    def backward(ctx, gradient):
        (shard,), unit = ctx.saved_tensors, ctx.unit
        with torch.enable_grad():
            inputs = tuple(x.detach().requires_grad_(x.requires_grad) for x in ctx.inputs)
            full = unit.gather().requires_grad_(shard.requires_grad)
            wanted = [t for t in (full, *inputs) if t.requires_grad]
            got = iter(torch.autograd.grad(unit.compute(full, inputs), wanted, gradient))
        mine = unit.reduce(next(got)) if shard.requires_grad else None
        return mine, None, *(next(got) if x.requires_grad else None for x in inputs)


class RightUnit(nn.Module):
    """By recomputation, where the shipped answer lets autograd keep views of a storage that is emptied and filled."""

    broadcast, view, divide, reduce_by, pad, frozen_trains = True, False, 1, "scatter", True, False

    def __init__(self, module):
        super().__init__()
        self.named = [(name, p.shape) for name, p in module.named_parameters()]
        rank, ranks = dist.get_rank(), dist.get_world_size()
        trained = next(module.parameters()).requires_grad
        flat = nn.utils.parameters_to_vector(module.parameters()).detach()
        if self.broadcast:
            dist.broadcast(flat, 0)
        self.numel = flat.numel()
        size = math.ceil(self.numel / ranks) if self.pad else self.numel // ranks
        flat = torch.cat([flat, flat.new_zeros(max(0, size * ranks - self.numel))])
        mine = flat[rank * size : (rank + 1) * size]
        self.shard = nn.Parameter(mine if self.view else mine.clone(), requires_grad=trained or self.frozen_trains)
        for owner in module.modules():
            for name, p in list(owner.named_parameters(recurse=False)):
                owner._parameters[name] = torch.empty_like(p, device="meta")
        self.inner = (module,)

    def gather(self):
        pieces = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, self.shard.detach())
        return torch.cat(pieces)

    def compute(self, full, inputs):
        params = {}
        for name, shape in self.named:
            params[name], full = full[: shape.numel()].view(shape), full[shape.numel() :]
        return torch.func.functional_call(self.inner[0], params, inputs)

    def reduce(self, gradient):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        size = self.shard.numel()
        if self.reduce_by == "all":
            dist.all_reduce(gradient)
            mine = gradient[rank * size : (rank + 1) * size].clone()
        elif self.reduce_by == "nobody":
            return gradient[rank * size : (rank + 1) * size].clone()
        else:
            mine = torch.empty_like(self.shard)
            dist.reduce_scatter(mine, [g.contiguous() for g in gradient.split(size)])
        return mine / ranks**self.divide

    def forward(self, *inputs):
        return _Recomputed.apply(self.shard, self, *inputs)


def unit_that(**changes):
    return type("WrongUnit", (RightUnit,), changes)


class _Gather(torch.autograd.Function):
    """The whole parameters once; autograd keeps them until backward."""

    @staticmethod
    def forward(ctx, shard, unit):
        ctx.unit = unit
        return unit.gather()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.unit.reduce(gradient.contiguous()), None


class NeverFreed(RightUnit):
    def forward(self, *inputs):
        return self.compute(_Gather.apply(self.shard, self), inputs)


class WholeParameters(nn.Module):
    """Data parallelism under another name."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for p in module.parameters():
            dist.broadcast(p.detach(), 0)
            if p.requires_grad:
                p.register_hook(self.average)

    def average(self, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()

    def forward(self, *inputs):
        return self.module(*inputs)


class NotAdded(RightUnit):
    """Writes .grad by hand: right for one backward, wrong for the second."""

    def reduce(self, gradient):
        self.shard.grad = None
        return super().reduce(gradient)


class Stale(RightUnit):
    """Gathers again and again what it gathered first."""

    def gather(self):
        super().gather()
        if not hasattr(self, "first"):
            self.first = super().gather()
        return self.first.clone()


# ----------------------------------------------------------------------------------------------------------- wrapping
def _peak(units, root, shards, prefetch, *, with_root=True, root_rests=True, rest=True):
    largest = max(units)
    if prefetch and len(units) > 1:
        largest = max(units[i] + units[i + 1] for i in range(len(units) - 1))
    lying = (sum(units) + (root if root_rests else 0)) / shards if rest else 0
    return lying + largest + (root if with_root else 0)


def _cuts(layers, root, shards, limit):
    """All plans that fit, fewest units first; dynamic in nothing, unlike the shipped answer."""
    plans = []
    for marks in itertools.product((0, 1), repeat=len(layers) - 1):
        counts = [len(list(run)) for run in "".join("," * m + "x" for m in (0, *marks)).split(",")]
        it = iter(layers)
        units = [sum(itertools.islice(it, n)) for n in counts]
        if _peak(units, root, shards, True) <= limit:
            plans.append(counts)
    return sorted(plans, key=len)


def right_plan(layers, root, shards, limit):
    plans = _cuts(layers, root, shards, limit)
    if not plans:
        raise ValueError("nothing fits")
    return plans[0]


def one_layer_each(layers, root, shards, limit):
    right_plan(layers, root, shards, limit)
    return [1] * len(layers)


def _wrapping(peak=_peak, plan=right_plan):
    return peak, plan


# ------------------------------------------------------------------------------------------------------------- hybrid
def right_groups(rank, replicate, shard):
    """By counting, where the shipped answer lays out a grid."""
    machine = rank // shard
    return list(range(machine * shard, (machine + 1) * shard)), list(range(rank % shard, replicate * shard, shard))


def right_traffic(parameters, replicate, shard, reshard):
    model = 4 * parameters
    one = model - model / shard
    return one * (3 if reshard else 2), 2 * (model / shard - model / shard / replicate)


def _traffic(change_inside=lambda x, r, s, again: x, change_across=lambda x, r, s: x):
    def traffic(parameters, replicate, shard, reshard):
        inside, across = right_traffic(parameters, replicate, shard, reshard)
        return change_inside(inside, replicate, shard, reshard), change_across(across, replicate, shard)

    return traffic


def _swapped_groups(rank, replicate, shard):
    return right_groups(rank, shard, replicate)


# -------------------------------------------------------------------------------------------------------- mesh_choice
def _choose(need, key, refuse=True):
    def choose(cluster):
        ranks, fitting = cluster.machines * cluster.gpus, []
        for shard in range(1, ranks + 1):
            whole = shard % cluster.gpus == 0 or cluster.gpus % shard == 0
            if ranks % shard or not whole:
                continue
            for reshard in (True, False):
                inside, across = right_traffic(cluster.parameters, ranks // shard, shard, reshard)
                slow = (inside if shard > cluster.gpus else 0) + (across if cluster.machines > 1 else 0)
                if need(cluster, shard, reshard) <= cluster.memory:
                    place = key(slow, inside + across - slow, shard, reshard)
                    fitting.append((place, (ranks // shard, shard, reshard)))
        if not fitting:
            if refuse:
                raise ValueError("too large")
            return 1, ranks, True
        return min(fitting)[1]

    return choose


def _need(cluster, shard, reshard):
    gathered = 4 * (cluster.largest if reshard else cluster.parameters)
    return 16 * cluster.parameters / shard + gathered * (shard > 1)


right_choice = _choose(_need, lambda slow, fast, shard, reshard: (slow, fast))
always_everybody = _choose(_need, lambda slow, fast, shard, reshard: (shard != 32, not reshard))
always_reshards = _choose(_need, lambda slow, fast, shard, reshard: (slow, not reshard, fast))
forgets_gathered = _choose(lambda c, s, r: 16 * c.parameters / s, lambda slow, fast, shard, reshard: (slow, fast))
always_by_one_rank = _choose(_need, lambda slow, fast, shard, reshard: (shard, slow, fast))


# --------------------------------------------------------------------------------------------------------- load_shard
def right_load(reader, name, rank, ranks):
    """Row by row, where the shipped answer intersects ranges."""
    rows, *rest = reader.shapes[name]
    each, saved = math.ceil(rows / ranks), math.ceil(rows / reader.ranks)
    own = range(rank * each, min(rows, rank * each + each))
    got = [reader.read(name, i // saved, i % saved, i % saved + 1) for i in own]
    return torch.cat([torch.empty(0, *rest), *got])


def _load(mine, saved=None, whole=False, canvas=False, pad=False, flat_empty=False):
    """``mine(rows, ranks)``: (first row, end) of each rank by the learner's rule; ``saved`` the same for who saved."""

    def load(reader, name, rank, ranks):
        rows, *rest = reader.shapes[name]
        start, stop = mine(rows, ranks)[rank]
        pieces = [torch.empty(0, *rest)]
        for saved_rank, (a, b) in enumerate((saved or _chunks)(rows, reader.ranks)):
            low, high = max(a, start), min(b, stop)
            if whole and b > a:
                pieces.append(reader.read(name, saved_rank, 0, b - a))
            elif high > low:
                pieces.append(reader.read(name, saved_rank, low - a, high - a))
        got = torch.cat(pieces)
        if whole:
            got = got[start:stop].clone()
        if canvas:
            everything = torch.zeros(rows, *rest)
            everything[start:stop] = got
            got = everything[start:stop].clone()
        if flat_empty and not len(got):
            return torch.empty(0)
        if pad:
            size = math.ceil(rows / ranks)
            got = torch.cat([got, torch.zeros(size - len(got), *rest)])
        return got

    return load


def _chunks(rows, ranks):
    each = math.ceil(rows / ranks)
    return [(min(r * each, rows), min((r + 1) * each, rows)) for r in range(ranks)]


def _array_split(rows, ranks):
    each, more = divmod(rows, ranks)
    starts = [r * each + min(r, more) for r in range(ranks + 1)]
    return list(itertools.pairwise(starts))


def _floor(rows, ranks):
    each = rows // ranks
    return [(r * each, (r + 1) * each) for r in range(ranks)]


# ------------------------------------------------------------------------------------------------------- clip_sharded
def right_clip(gradients, max_norm, mesh):
    """torch.linalg's norms and a list of them, where the shipped answer sums squares."""
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients])
    square = torch.dot(norms, norms)
    dist.all_reduce(square, group=mesh["shard"].get_group() if mesh.ndim > 1 else mesh.get_group())
    norm = square.sqrt()
    torch._foreach_mul_(list(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _clip(group="shard", square=True, each=False, clamp=True, reduce=True, apply=True, mean=False):
    def clip(gradients, max_norm, mesh):
        where = mesh.get_group("shard") if group == "shard" else None
        parts = [g.square().sum() for g in gradients]
        if each:
            for part in parts:
                dist.all_reduce(part, group=where)
        total = torch.stack(parts).sum()
        total = total if square else total.sqrt()
        if reduce and not each:
            dist.all_reduce(total, group=where)
            if mean:
                total /= mesh.size(-1)
        norm = float(total.sqrt() if square else total)
        factor = max_norm / (norm + 1e-6)
        for g in gradients if apply else ():
            g.mul_(min(factor, 1.0) if clamp else factor)
        return norm

    return clip


# ------------------------------------------------------------------------------------------------------ trace_reading
COMPUTE = ("forward", "backward", "optimizer")


def right_exposed(spans, since=0.0, until=math.inf):
    """By a sweep over starts and ends, where the shipped answer tests each piece of time."""
    gloo = {s.thread for s in spans if s.kind == "collective"}
    changes = []
    for s in spans:
        start, end = max(s.start, since), min(s.end, until)
        which = 0 if s.kind == "collective" else 1 if s.kind in COMPUTE and s.thread not in gloo else None
        if which is not None and start < end:
            changes += [(start, which, 1), (end, which, -1)]
    running, total, before = [0, 0], 0.0, 0.0
    for now, which, step in sorted(changes):
        total += (now - before) * (running[0] > 0 and running[1] == 0)
        running[which] += step
        before = now
    return total


def right_waiting(traces):
    best, totals = (0.0, ""), [right_exposed(trace) for trace in traces]
    for trace in traces:
        for s in trace:
            if s.name.startswith("layers."):
                best = max(best, (right_exposed(trace, s.start, s.end), s.name))
    return best[1], min(range(len(traces)), key=totals.__getitem__)


def _seconds(spans, kinds):
    return sum(s.end - s.start for s in spans if s.kind in kinds)


def _union(intervals):
    total, until = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _exposed(kinds=COMPUTE, own=False, each=False, twice=False):
    def exposed(spans):
        gloo = {s.thread for s in spans if s.kind == "collective"}
        moving = [(s.start, s.end) for s in spans if s.kind == "collective"]
        computing = [(s.start, s.end) for s in spans if s.kind in kinds and (own or s.thread not in gloo)]
        if twice:
            hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in moving for c, d in computing)
            return _union(moving) - hidden
        if each:
            return sum(_union([m, *computing]) - _union(computing) for m in moving)
        return _union(moving + computing) - _union(computing)

    return exposed


def _difference_of_sums(spans):
    return max(0.0, _seconds(spans, ("collective",)) - _seconds(spans, COMPUTE))


def _longest_label(traces):
    labels = [s for trace in traces for s in trace if s.name.startswith("layers.")]
    return max(labels, key=lambda s: s.end - s.start).name, right_waiting(traces)[1]


def _who_waits_longest(traces):
    totals = [right_exposed(trace) for trace in traces]
    return right_waiting(traces)[0], totals.index(max(totals))


RIGHT = {
    "own_unit": (RightUnit,),
    "wrapping": (_peak, right_plan),
    "hybrid": (right_groups, right_traffic),
    "mesh_choice": (right_choice,),
    "load_shard": (right_load,),
    "clip_sharded": (right_clip,),
    "trace_reading": (right_exposed, right_waiting),
}
WRONG = [
    ("own_unit", (WholeParameters,), "the optimizer would keep states"),
    ("own_unit", (unit_that(view=True),), "a view keeps the whole flattened storage alive"),
    ("own_unit", (unit_that(broadcast=False),), "broadcast rank 0's before you cut"),
    ("own_unit", (unit_that(pad=False),), "Pad with zeros"),
    ("own_unit", (unit_that(frozen_trains=True),), "take requires_grad over"),
    ("own_unit", (unit_that(divide=0),), "reduce_scatter sums, and FSDP averages"),
    ("own_unit", (unit_that(reduce_by="nobody"),), "gradients of its own rows alone"),
    ("own_unit", (unit_that(reduce_by="all"),), "reduce_scatter gives each rank its shard's part alone"),
    ("own_unit", (NeverFreed,), "what forward gathered was kept for backward"),
    ("own_unit", (NotAdded,), "the second must add to .grad"),
    ("own_unit", (Stale,), "forward must gather them anew"),
    ("wrapping", _wrapping(lambda u, r, s, p: _peak(u, r, s, p, with_root=False)), "forgets the root unit"),
    ("wrapping", _wrapping(lambda u, r, s, p: _peak(u, r, s, p, root_rests=False)), "shards it as well"),
    ("wrapping", _wrapping(lambda u, r, s, p: (sum(u) + r) / s + sum(u) + r), "gathers all units at once"),
    ("wrapping", _wrapping(lambda u, r, s, p: _peak(u, r, 1, p)), "does not divide"),
    ("wrapping", _wrapping(lambda u, r, s, p: _peak(u, r, s, p, rest=False)), "counts what is gathered alone"),
    ("wrapping", _wrapping(lambda u, r, s, p: _peak(u, r, s, False)), "leaves the prefetch out"),
    ("wrapping", _wrapping(lambda u, r, s, p: (sum(u) + r) / s + r + sum(sorted(u)[-1 - p :])), "two neighbours"),
    ("wrapping", _wrapping(plan=one_layer_each), "take as few as fit"),
    ("wrapping", _wrapping(plan=lambda la, r, s, li: [len(la)]), "too much"),
    ("wrapping", _wrapping(plan=lambda la, r, s, li: (_cuts(la, r, s, li) or [[1] * len(la)])[0]), "raise ValueError"),
    ("hybrid", (_swapped_groups, right_traffic), "ranks of one machine are neighbours"),
    ("hybrid", (lambda k, r, s: right_groups(k, r, s)[::-1], right_traffic), "give the shard group first"),
    ("hybrid", (lambda k, r, s: right_groups(0, r, s), right_traffic), "does not have rank"),
    ("hybrid", (right_groups, _traffic(lambda x, r, s, again: x * 2 / 3 if again else x)), "gathers once"),
    ("hybrid", (right_groups, _traffic(lambda x, r, s, again: x if again else x * 1.5)), "gathers twice"),
    ("hybrid", (right_groups, _traffic(lambda x, r, s, k: x * (1 + k) / (2 + k))), "leaves out the gradients"),
    ("hybrid", (right_groups, _traffic(change_across=lambda x, r, s: x * s)), "all-reduces all gradients"),
    ("hybrid", (right_groups, _traffic(change_across=lambda x, r, s: x / 2)), "forgets that an all-reduce"),
    ("hybrid", (right_groups, lambda p, r, s, again: right_traffic(p / 4, r, s, again)), "counts parameters"),
    ("mesh_choice", (always_everybody,), "shard no wider than the memory asks for"),
    ("mesh_choice", (always_by_one_rank,), "so shard over the whole machine"),
    ("mesh_choice", (always_reshards,), "room to keep the parameters for backward"),
    ("mesh_choice", (forgets_gathered,), "what is gathered comes on top"),
    ("mesh_choice", (lambda cluster: (1, cluster.gpus, True),), "ranks of 32"),
    ("mesh_choice", (_choose(_need, lambda slow, fast, *_: (slow, fast), refuse=False),), "needs"),
    ("load_shard", (_load(_array_split),), "array_split's rule"),
    ("load_shard", (_load(_floor),), "leaves"),
    ("load_shard", (_load(_chunks, saved=_array_split),), "the ranks that saved hold"),
    ("load_shard", (_load(_chunks, whole=True),), "the whole tensor"),
    ("load_shard", (_load(_chunks, pad=True),), "padded to the size of the others"),
    ("load_shard", (_load(_chunks, flat_empty=True),), "an empty shard keeps its other dimensions"),
    ("load_shard", (_load(_chunks, canvas=True),), "more than its own rows at a time"),
    ("clip_sharded", (_clip(reduce=False),), "the norm of its own shards"),
    ("clip_sharded", (_clip(square=False),), "sum of the ranks' norms"),
    ("clip_sharded", (_clip(group="world"),), "Reduce over the shard group alone"),
    ("clip_sharded", (_clip(each=True),), "Add up this rank's squares first"),
    ("clip_sharded", (_clip(mean=True),), "you averaged the squares"),
    ("clip_sharded", (_clip(clamp=False),), "multiply by no more than 1"),
    ("clip_sharded", (_clip(apply=False),), "the gradients are as they were"),
    ("trace_reading", (lambda spans: _seconds(spans, ("collective",)), right_waiting), "a part of it can be hidden"),
    ("trace_reading", (_difference_of_sums, right_waiting), "sums do not tell"),
    ("trace_reading", (_exposed(("forward", "backward")), right_waiting), "all three are compute"),
    ("trace_reading", (_exposed(own=True), right_waiting), "gloo's thread copies"),
    ("trace_reading", (_exposed((*COMPUTE, "other")), right_waiting), "a label is a name"),
    ("trace_reading", (_exposed(each=True), right_waiting), "a second in which two run is one second"),
    ("trace_reading", (_exposed(twice=True), right_waiting), "that hides one second, not two"),
    ("trace_reading", (right_exposed, _longest_label), "the longest wait is in"),
    ("trace_reading", (right_exposed, _who_waits_longest), "Who waits longest is not who is late"),
]
