"""Answers to lab 5. RIGHT: name of the exercise -> an answer unlike the shipped one. WRONG: (exercise, answer, words)."""

import json
import math

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from course_lib.memory import card, shape_of


# ----------------------------------------------------------------------------------------------------- bytes_per_rank
def right_bytes(parameters, trainable, ranks, stage, weights=2, gradients=2, states=12):
    """By a table of who is whole at which stage, where the shipped answer asks stage by stage."""
    table = {0: "WGS", 1: "WG", 2: "W", 3: ""}
    if stage not in table:
        raise ValueError("stages are 0 to 3")
    parts = {"W": (weights, parameters), "G": (gradients, trainable), "S": (states, trainable)}
    total = 0
    for name, (each, count) in parts.items():
        total += each * (count if name in table[stage] else (count + ranks - 1) // ranks)
    return total


def rounded_up(each, count, ranks):
    return each * -(-count // ranks)


def bytes_with(*, whole=None, share=rounded_up, frozen=False, fixed=False, scale=1, stay=False, refuse=True):
    whole = whole or {0: "WGS", 1: "WG", 2: "W", 3: ""}

    def answer(parameters, trainable, ranks, stage, weights=2, gradients=2, states=12):
        if refuse and stage not in whole:
            raise ValueError
        if fixed:
            weights, gradients, states = 2, 2, 12
        trained = parameters if frozen else trainable
        total = 0
        for name, each, count in (("W", weights, parameters), ("G", gradients, trained), ("S", states, trained)):
            if name in whole.get(stage, ""):
                total += each * count
            elif name == "W" and stay:
                total += share(each, trainable, ranks) + each * (parameters - trainable)
            else:
                total += share(each, count, ranks)
        return total / scale

    return answer


# ---------------------------------------------------------------------------------------------------------- partition
def right_partition(shapes, ranks):
    """Walks along the tensors once with a cursor, where the shipped answer intersects intervals."""
    counts = [int(np.prod(shape)) for shape in shapes]
    size = math.ceil(sum(counts) / ranks)
    parts, rank, room = [[] for _ in range(ranks)], 0, size
    for tensor, count in enumerate(counts):
        start = 0
        while start < count:
            if room == 0:
                rank, room = rank + 1, size
            take = min(room, count - start)
            parts[rank].append((tensor, start, start + take))
            start, room = start + take, room - take
    return parts


def _changed(change):
    return lambda shapes, ranks: change(right_partition(shapes, ranks), [math.prod(s) for s in shapes], ranks)


def flat_coordinates(parts, counts, ranks):
    begins = [sum(counts[:i]) for i in range(len(counts))]
    return [[(i, begins[i] + a, begins[i] + b) for i, a, b in mine] for mine in parts]


def with_padding(parts, counts, ranks):
    size = -(-sum(counts) // ranks)
    last = max(r for r in range(ranks) if parts[r])
    i, a, b = parts[last][-1]
    parts[last][-1] = (i, a, b + size - sum(y - x for _, x, y in parts[last]))
    return parts


def slices_by(bounds_of):
    def answer(shapes, ranks):
        counts = [math.prod(shape) for shape in shapes]
        bounds = bounds_of(sum(counts), ranks)
        parts = []
        for low, high in zip(bounds, bounds[1:], strict=False):
            mine, at = [], 0
            for i, count in enumerate(counts):
                if max(low, at) < min(high, at + count):
                    mine.append((i, max(low, at) - at, min(high, at + count) - at))
                at += count
            parts.append(mine)
        return parts

    return answer


def each_tensor(shapes, ranks):
    parts = [[] for _ in range(ranks)]
    for i, shape in enumerate(shapes):
        count = math.prod(shape)
        size = -(-count // ranks)
        for rank in range(ranks):
            if rank * size < min(count, (rank + 1) * size):
                parts[rank].append((i, rank * size, min(count, (rank + 1) * size)))
    return parts


def whole_tensors(shapes, ranks):
    parts = [[] for _ in range(ranks)]
    for i, shape in enumerate(shapes):
        if math.prod(shape):
            parts[i % ranks].append((i, 0, math.prod(shape)))
    return parts


# -------------------------------------------------------------------------------------------------- sharded_optimizer
class RightOptimizer:
    """AdamW by hand on a padded flat vector that the parameters are views of; the slice is updated where it lies."""

    frozen = always_first = False

    def __init__(self, params, lr, weight_decay):
        self.params = [p for p in params if p.requires_grad or self.frozen]
        self.lr, self.decay, self.steps = lr, weight_decay, 0
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.numel = sum(p.numel() for p in self.params)
        self.size = -(-self.numel // self.ranks)
        self.flat = torch.zeros(self.size * self.ranks)
        at = 0
        for p in self.params:
            view = self.flat[at : at + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data = view
            at += p.numel()
        self.mine = slice(self.rank * self.size, (self.rank + 1) * self.size)
        self.mean, self.square = torch.zeros(self.size), torch.zeros(self.size)

    def gradient(self):
        pieces = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in self.params]
        return torch.cat([*pieces, torch.zeros(self.size * self.ranks - self.numel)])

    def update(self, weights, gradient):
        self.steps += 1
        t = 1 if self.always_first else self.steps
        self.mean.mul_(0.9).add_(gradient, alpha=0.1)
        self.square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        weights.mul_(1 - self.lr * self.decay)
        denominator = (self.square / (1 - 0.999**t)).sqrt().add_(1e-8)
        weights.addcdiv_(self.mean, denominator, value=-self.lr / (1 - 0.9**t))

    def step(self):
        self.update(self.flat[self.mine], self.gradient()[self.mine])
        self.share()

    def share(self):
        dist.all_gather(list(self.flat.split(self.size)), self.flat[self.mine].clone())


def optimizer_that(**changes):
    return type("WrongOptimizer", (RightOptimizer,), changes)


class Unsharded:
    """PyTorch's own on every rank: right numbers, nothing sharded."""

    kind = torch.optim.AdamW

    def __init__(self, params, lr, weight_decay):
        trained = [p for p in params if p.requires_grad]
        self.step = self.kind(trained, lr=lr, weight_decay=weight_decay).step


class CoupledDecay(RightOptimizer):
    def step(self):
        gradient = self.gradient()[self.mine] + self.decay * self.flat[self.mine]
        kept, self.decay = self.decay, 0.0
        self.update(self.flat[self.mine], gradient)
        self.decay = kept
        self.share()


class NoDecay(RightOptimizer):
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, lr, 0.0)


class MomentsOfAll(RightOptimizer):
    """Updates its slice only, with moments for everybody's."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, lr, weight_decay)
        self.means, self.squares = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        self.mean, self.square = self.means, self.squares

    def step(self):
        weights = self.flat.clone()
        self.update(weights, self.gradient())
        self.flat[self.mine] = weights[self.mine]
        self.share()


class MomentsAsViews(RightOptimizer):
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, lr, weight_decay)
        self.mean, self.square = torch.zeros_like(self.flat)[self.mine], torch.zeros_like(self.flat)[self.mine]


class NotGathered(RightOptimizer):
    def share(self):
        pass


class RestDropped(RightOptimizer):
    def __init__(self, params, lr, weight_decay):
        super().__init__(params, lr, weight_decay)
        self.size = self.numel // self.ranks
        self.mine = slice(self.rank * self.size, (self.rank + 1) * self.size)
        self.mean, self.square = torch.zeros(self.size), torch.zeros(self.size)

    def gradient(self):
        return torch.cat([p.grad.flatten() for p in self.params])

    def share(self):
        dist.all_gather(list(self.flat[: self.size * self.ranks].split(self.size)), self.flat[self.mine].clone())


class WrongOrder(RightOptimizer):
    def share(self):
        dist.all_gather(list(self.flat.split(self.size))[::-1], self.flat[self.mine].clone())


class SummedWeights(RightOptimizer):
    def share(self):
        mine = self.flat[self.mine].clone()
        self.flat.zero_()
        self.flat[self.mine] = mine
        dist.all_reduce(self.flat)


# ----------------------------------------------------------------------------------------------------- gradient_slice
def gradients_by(how="all_to_all", *, average=True, pad=True, free=True, clone=True, frozen=False, skip=False):
    def answer(params):
        rank, n = dist.get_rank(), dist.get_world_size()
        used = [p for p in params if p.requires_grad or frozen]
        used = [p for p in used if p.grad is not None] if skip else used
        flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in used])
        size = -(-len(flat) // n) if pad else len(flat) // n
        flat = torch.cat([flat, torch.zeros(max(0, size * n - len(flat)))])[: size * n]
        if how == "nothing":
            return flat.split(size)[rank].clone()
        if how == "all_to_all":
            theirs = torch.empty_like(flat)
            dist.all_to_all_single(theirs, flat)
            mine = theirs.view(n, size).sum(0)
        elif how == "all_reduce":
            dist.all_reduce(flat)
            mine = flat.split(size)[rank]
        else:
            mine = torch.empty(size)
            for _ in range(2 if how == "two scatters" else 1):
                dist.reduce_scatter(mine, list(flat.split(size)))
        mine = mine.clone() if clone else mine
        if average:
            mine /= n
        if free:
            for p in params:
                p.grad = None
        return mine

    return answer


# ------------------------------------------------------------------------------------------------------------ reshard
NAMES = ("weights", "exp_avg", "exp_avg_sq")


def right_reshard(shards, ranks):
    """Takes each new slot from the old rank that holds it, where the shipped answer glues and cuts."""
    by_rank = {shard["rank"]: shard for shard in shards}
    old, numel = shards[0]["ranks"], shards[0]["numel"]
    if len(shards) != old or set(by_rank) != set(range(old)) or len({shard["step"] for shard in shards}) > 1:
        raise ValueError("this checkpoint is not whole")
    before, after, made = -(-numel // old), -(-numel // ranks), []
    for rank in range(ranks):
        new = {"rank": rank, "ranks": ranks, "numel": numel, "step": shards[0]["step"]}
        for name in NAMES:
            new[name] = torch.zeros(after)
            for slot in range(after):
                at = rank * after + slot
                if at < numel:
                    new[name][slot] = by_rank[at // before][name][at % before]
        made.append(new)
    return made


def reshard_by(
    order="rank", *, cut=True, moments="kept", pad=True, clone=True, step=True, refuse=True, ranks_new=True, drop=None
):
    def answer(shards, ranks):
        if refuse and (len({s["rank"] for s in shards}) < shards[0]["ranks"] or len({s["step"] for s in shards}) > 1):
            raise ValueError("this checkpoint is not whole")
        numel = shards[0]["numel"]
        if order == "rank":
            shards = sorted(shards, key=lambda s: s["rank"])
        elif order == "backwards":
            shards = sorted(shards, key=lambda s: -s["rank"])
        whole = {name: torch.cat([s[name] for s in shards]) for name in NAMES}
        if cut:
            whole = {name: values[:numel] for name, values in whole.items()}
        if moments == "swapped":
            whole["exp_avg"], whole["exp_avg_sq"] = whole["exp_avg_sq"], whole["exp_avg"]
        size = -(-len(whole["weights"]) // ranks)
        made = []
        for rank in range(ranks):
            new = {"rank": rank, "ranks": ranks if ranks_new else shards[0]["ranks"], "numel": numel}
            new["step"] = shards[0]["step"] if step else 0
            for name in NAMES:
                filler = torch.zeros(size * ranks - len(whole[name]))
                values = torch.cat([whole[name], filler]) if pad else whole[name]
                piece = values[rank * size : (rank + 1) * size]
                new[name] = piece.clone() if clone else piece
                if moments == "zero" and name != "weights":
                    new[name] = torch.zeros_like(new[name])
                if moments == "old" and name != "weights":
                    new[name] = nn.functional.pad(shards[rank % len(shards)][name], (0, size))[:size]
            new.pop(drop, None)
            made.append(new)
        return made

    return answer


# ------------------------------------------------------------------------------------------------------- choose_stage
def choose_by(
    order=None, *, once=False, passes=3, host=True, whole=False, one_link=False, memory="all", refuse=True, gpu=True
):
    """Right by default: a table of seconds, sorted, where the shipped answer keeps a running best."""
    from course_checks.lab05.machines import SETTINGS, gpu_bytes

    def answer(machine):
        count, n = shape_of(machine.model).parameters, machine.gpus
        a = 1 if once else machine.micro_batches
        table = []
        for place, (stage, offload) in enumerate(SETTINGS):
            on_host = {"none": 0, "optimizer": 16, "all": 18}[offload] * count
            on_host = {"all": on_host, "each": on_host * n, "slice": on_host // n, "none": 0}[memory]
            too_much = gpu and gpu_bytes(machine, (stage, offload)) > card(machine.card).memory
            if too_much or on_host > machine.host_memory:
                continue
            between = 2 * count * (n - 1) / n * (2 if stage == 1 else a + 1 if stage == 2 else passes * a)
            moved = 2 * count / (1 if whole else n) * {"none": 0, "optimizer": a + 1, "all": 3 * a}[offload]
            seconds = between / machine.gpu_link
            seconds += host * moved / (machine.gpu_link if one_link else machine.host_link)
            rank = {"ladder": (offload != "none", place), "last": -place}.get(order, (round(seconds, 9), place))
            table.append((rank, (stage, offload)))
        if not table:
            if refuse:
                raise ValueError("nothing fits")
            return SETTINGS[-1]
        return min(table)[1]

    return answer


# ------------------------------------------------------------------------------------------------------ mended_config
def mended(*, zero=None, without=(), **changes):
    def mend(config):
        config = json.loads(json.dumps(config)) | {"train_batch_size": 8, "gradient_clipping": 0.0}
        config.pop("gradient_cliping")
        config["zero_optimization"] |= {"stage": 2} | (zero or {})
        if not zero or "offload_param" not in zero:
            config["zero_optimization"].pop("offload_param")
        config |= changes
        for name in without:
            config.pop(name, None)
            config.get("zero_optimization", {}).pop(name, None)
        return config

    return mend


def right_mend(config):
    """Written anew, with the accumulation left to DeepSpeed."""
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "reduce_bucket_size": 50_000,
            "allgather_bucket_size": 50_000,
        },
    }


RIGHT = {
    "bytes_per_rank": right_bytes,
    "partition": right_partition,
    "sharded_optimizer": RightOptimizer,
    "gradient_slice": gradients_by(),
    "reshard": right_reshard,
    "choose_stage": choose_by(),
    "mended_config": right_mend,
}
ALL_STAGE_1 = {0: "WGS", 1: "", 2: "", 3: ""}
WRONG = [
    ("bytes_per_rank", bytes_with(whole=ALL_STAGE_1), "you divide everything from stage 1 on"),
    ("bytes_per_rank", bytes_with(whole={0: "WGS", 1: "W", 2: "W", 3: ""}), "sharing them is what stage 2 adds"),
    ("bytes_per_rank", bytes_with(whole={0: "WGS", 1: "WG", 2: "WG", 3: ""}), "its slice of the gradients only"),
    ("bytes_per_rank", bytes_with(whole={0: "WGS", 1: "WG", 2: "W", 3: "W"}), "at stage 3 the weights are shared out"),
    ("bytes_per_rank", bytes_with(whole={0: "WGS", 1: "WGS", 2: "WS", 3: "S"}), "states are shared out"),
    ("bytes_per_rank", bytes_with(share=lambda e, c, n: e * (c // n)), "the rest of the division is dropped"),
    ("bytes_per_rank", bytes_with(share=lambda e, c, n: e * c / n), "no rank holds a fraction of a parameter"),
    ("bytes_per_rank", bytes_with(share=lambda e, c, n: -(-e * c // n)), "you round bytes up"),
    ("bytes_per_rank", bytes_with(frozen=True), "frozen parameters have neither gradients nor states"),
    ("bytes_per_rank", bytes_with(stay=True), "stage 3 shares out all weights, the frozen ones too"),
    ("bytes_per_rank", bytes_with(fixed=True), "take the function's own arguments"),
    ("bytes_per_rank", bytes_with(scale=1e9), "that is in GB: give bytes"),
    ("bytes_per_rank", bytes_with(scale=2**30), "that is in GiB: give bytes"),
    ("bytes_per_rank", bytes_with(refuse=False), "there is no stage 4"),
    ("partition", _changed(flat_coordinates), "give them within the tensor"),
    ("partition", _changed(lambda parts, *_: [[(i, a, b - 1) for i, a, b in m] for m in parts]), "the one after"),
    ("partition", _changed(with_padding), "padding belongs to no tensor"),
    ("partition", _changed(lambda parts, *_: parts[::-1]), "rank 0 has the beginning"),
    ("partition", _changed(lambda parts, *_: [m for m in parts if m]), "also an empty one for a rank that has nothing"),
    ("partition", _changed(lambda parts, *_: [[(a, b) for _, a, b in m] for m in parts]), "three whole numbers"),
    ("partition", slices_by(lambda t, n: [r * (t // n) for r in range(n + 1)]), "those elements are nobody's"),
    ("partition", slices_by(lambda t, n: [*(r * (t // n) for r in range(n)), t]), "longer than the others'"),
    ("partition", slices_by(lambda t, n: [r * (t // n) + min(r, t % n) for r in range(n + 1)]), "that is array_split"),
    ("partition", each_tensor, "every tensor is cut by itself"),
    ("partition", whole_tensors, "whole tensors are dealt out"),
    ("sharded_optimizer", Unsharded, "nothing is sharded"),
    ("sharded_optimizer", MomentsOfAll, "nothing is sharded"),
    ("sharded_optimizer", MomentsAsViews, "a view keeps the whole tensor behind it alive"),
    ("sharded_optimizer", NotGathered, "gather the other ranks' slices"),
    ("sharded_optimizer", RestDropped, "so pad"),
    ("sharded_optimizer", WrongOrder, "holds what belongs into slice"),
    ("sharded_optimizer", SummedWeights, "half of what an all_reduce does"),
    ("sharded_optimizer", CoupledDecay, "AdamW shrinks the weights themselves"),
    ("sharded_optimizer", NoDecay, "weight_decay never reached the update"),
    ("sharded_optimizer", type("SGD", (Unsharded,), {"kind": torch.optim.SGD}), "those of plain SGD"),
    ("sharded_optimizer", optimizer_that(always_first=True), "the step counter must go on"),
    ("sharded_optimizer", optimizer_that(frozen=True), "the frozen layer moved"),
    ("gradient_slice", gradients_by("all_reduce"), "an all_reduce of which a rank keeps 1/2"),
    ("gradient_slice", gradients_by("two scatters"), "once is enough"),
    ("gradient_slice", gradients_by(average=False), "2 times too large: reduce_scatter sums"),
    ("gradient_slice", gradients_by("nothing"), "nothing was added up over the ranks"),
    ("gradient_slice", gradients_by(pad=False), "fill the flat vector up with zeros first"),
    ("gradient_slice", gradients_by(free=False), "set every p.grad to None"),
    ("gradient_slice", gradients_by("all_reduce", clone=False), "the slice is a view"),
    ("gradient_slice", gradients_by(frozen=True), "the frozen layer has no gradient"),
    ("gradient_slice", gradients_by("reduce_scatter", skip=True), "also one that has no .grad there"),
    ("reshard", reshard_by(cut=False), "the old shards' padding is still in there"),
    ("reshard", reshard_by("list"), "rank 10 comes before rank 2"),
    ("reshard", reshard_by("backwards"), "rank 0 has the beginning"),
    ("reshard", reshard_by(moments="swapped"), "have changed places"),
    ("reshard", reshard_by(moments="zero"), "a new start of Adam"),
    ("reshard", reshard_by(moments="old"), "those of the old slices"),
    ("reshard", reshard_by(pad=False), "the last slices are padded with zeros"),
    ("reshard", reshard_by(clone=False), "torch.save writes the whole tensor behind a view"),
    ("reshard", reshard_by(step=False), "says step 0, and that should be 3"),
    ("reshard", reshard_by(ranks_new=False), "says ranks 4, and that should be 3"),
    ("reshard", reshard_by(drop="exp_avg_sq"), "lacks 'exp_avg_sq'"),
    ("reshard", reshard_by(refuse=False), "raise ValueError"),
    ("choose_stage", choose_by("last"), "the most sharded setting that fits"),
    ("choose_stage", choose_by("ladder"), "you offload only when no stage fits without"),
    ("choose_stage", choose_by(once=True), "micro_batches is missing"),
    ("choose_stage", choose_by(passes=2), "gathered again for backward"),
    ("choose_stage", choose_by(host=False), "as if the way to the host and back took no time"),
    ("choose_stage", choose_by(whole=True), "one part in `gpus`"),
    ("choose_stage", choose_by(one_link=True), "all of it over host_link"),
    ("choose_stage", choose_by(memory="none"), "the host's memory is not looked at"),
    ("choose_stage", choose_by(memory="each"), "in all, not each"),
    ("choose_stage", choose_by(memory="slice"), "in all, not over `gpus`"),
    ("choose_stage", choose_by(refuse=False), "nothing fits: raise ValueError"),
    ("choose_stage", choose_by(gpu=False), "does not fit on the GPUs"),
    ("choose_stage", lambda machine: (0, "none"), "is none of SETTINGS"),
    ("mended_config", lambda config: config, "no error will ever tell"),
    ("mended_config", mended(train_batch_size=16), "The batch sizes disagree"),
    ("mended_config", mended(zero={"stage": 4}), "stages 0, 1, 2 and 3"),
    ("mended_config", mended(zero={"offload_param": {"device": "cpu"}}), "offload_param"),
    ("mended_config", mended(zero={"stage": 3, "offload_param": {"device": "cpu"}}), "stage 3 is not what was asked"),
    ("mended_config", mended(zero={"stage": 1}), "gradients stay whole"),
    ("mended_config", mended(without=["gradient_clipping"]), "DeepSpeed's own default is 1.0"),
    ("mended_config", mended(without=["offload_optimizer"]), "offload_param was the slip"),
    ("mended_config", mended(without=["zero_optimization"]), "plain data parallelism"),
    ("mended_config", mended(gradient_accumulation_steps=4, train_batch_size=16), "are another training's"),
    ("mended_config", mended(optimizer={"type": "AdamW", "params": {"lr": 0.01}}), "the recipe has AdamW with 0.001"),
    ("mended_config", mended(steps_per_prnt=10), "did you mean 'steps_per_print'"),
]
