"""Answers to lab 4. RIGHT: name of the exercise -> an answer unlike the shipped one. WRONG: (exercise, answer, words)."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn

# ------------------------------------------------------------------------------------------------------------ own_ddp


class RightDDP(nn.Module):
    """One flat buffer a bucket, allocated once, gradients as views of it; Tensor hooks on the accumulators."""

    broadcast, blocking, average, reset, skip_frozen, in_finish = True, False, True, True, True, False

    def __init__(self, module, bucket_bytes):
        super().__init__()
        self.module = module
        if self.broadcast:
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(tensor.detach(), 0)
        params = [p for p in module.parameters() if p.requires_grad or not self.skip_frozen]
        self.buckets, self.where, size = [[]], {}, 0
        for p in reversed(params):
            if size and size + p.numel() * 4 > bucket_bytes:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            self.where[p] = len(self.buckets) - 1
            size += p.numel() * 4
        self.ready = [0] * len(self.buckets)
        self.flying = []
        for p in params:
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.on_grad)

    def on_grad(self, p):
        if self.in_finish:
            return
        at = self.where[p]
        self.ready[at] += 1
        if self.ready[at] == sum(q.requires_grad for q in self.buckets[at]):
            self.send(at)

    def send(self, at):
        params = self.buckets[at]
        flat = torch.cat([(q.grad if q.grad is not None else torch.zeros_like(q)).flatten() for q in params])
        work = dist.all_reduce(flat, async_op=True)
        if self.blocking:
            work.wait()
        self.flying.append((flat, work, params))

    def forward(self, *args):
        return self.module(*args)

    def finish(self):
        if self.in_finish:
            for at in range(len(self.buckets)):
                self.send(at)
        for flat, work, params in self.flying:
            work.wait()
            if self.average:
                flat /= dist.get_world_size()
            for q, piece in zip(params, flat.split([q.numel() for q in params]), strict=True):
                q.grad = piece.view_as(q).clone()
        if self.reset:
            self.ready, self.flying = [0] * len(self.buckets), []


def ddp_that(**changes):
    return type("WrongDDP", (RightDDP,), changes)


class DividedTwice(RightDDP):
    def finish(self):
        super().finish()
        for p in self.module.parameters():
            if p.grad is not None:
                p.grad /= dist.get_world_size()


class NothingAveraged(RightDDP):
    def finish(self):
        for _, work, _ in self.flying:
            work.wait()
        self.ready, self.flying = [0] * len(self.buckets), []


def only_on_rank_zero(module, bucket_bytes):
    wrapped = RightDDP(module, bucket_bytes)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    return wrapped


# ------------------------------------------------------------------------------------------------------- accumulation
def right_step(model, optimizer, micro_batches, loss_fn):
    rows = sum(len(m) for m in micro_batches)
    total = 0.0
    for i, micro_batch in enumerate(micro_batches):
        model.require_backward_grad_sync = i == len(micro_batches) - 1
        loss = loss_fn(model, micro_batch) * (len(micro_batch) / rows)
        loss.backward()
        total = total + float(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return total


def _step(*, divide=True, weigh=False, no_sync="both", step_each=False, zero=True):
    def step(model, optimizer, micro_batches, loss_fn):
        total, n = 0.0, len(micro_batches)
        rows = sum(len(m) for m in micro_batches)
        for i, micro_batch in enumerate(micro_batches):
            share = len(micro_batch) / rows if weigh else 1 / n if divide else 1.0
            last = i == n - 1
            quiet = model.no_sync if not last else contextlib.nullcontext
            with quiet() if no_sync == "both" else contextlib.nullcontext():
                loss = loss_fn(model, micro_batch) * share
                with quiet() if no_sync == "backward" else contextlib.nullcontext():
                    loss.backward()
            total += loss.item()
            if step_each:
                optimizer.step()
        if not step_each:
            optimizer.step()
        if zero:
            optimizer.zero_grad()
        return total

    return step


def keeps_every_graph(model, optimizer, micro_batches, loss_fn):
    rows = sum(map(len, micro_batches))
    loss = sum(loss_fn(model, micro_batch) * (len(micro_batch) / rows) for micro_batch in micro_batches)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def zeroes_first(model, optimizer, micro_batches, loss_fn):
    optimizer.zero_grad()
    return _step(weigh=True, zero=False)(model, optimizer, micro_batches, loss_fn)


# ------------------------------------------------------------------------------------------------------------ batches
class RightSampler(torch.utils.data.Sampler):
    """Contiguous pieces of one permutation, where the shipped answer deals it out in turn."""

    mode = "right"

    def __init__(self, num_samples, rank, world_size, seed=0):
        self.num_samples, self.rank, self.world_size, self.seed, self.epoch = num_samples, rank, world_size, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def indices(self):
        seed = self.seed + (0 if self.mode == "same epoch" else self.epoch)
        seed += 1000 * self.rank if self.mode == "seed by rank" else 0
        order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
        if self.mode == "padded":
            order += order[: -self.num_samples % self.world_size]
        if self.mode == "dropped":
            order = order[: self.num_samples // self.world_size * self.world_size]
        if self.mode == "lumpy":
            size = self.num_samples // self.world_size
            end = None if self.rank == self.world_size - 1 else (self.rank + 1) * size
            return order[self.rank * size : end]
        if self.mode == "shards first":
            mine = list(range(self.num_samples))[self.rank :: self.world_size]
            keep = torch.randperm(len(mine), generator=torch.Generator().manual_seed(seed)).tolist()
            return [mine[i] for i in keep]
        size, more = divmod(len(order), self.world_size)
        start = self.rank * size + min(self.rank, more)
        return order[start : start + size + (self.rank < more)]

    def __iter__(self):
        return iter(self.indices())

    def __len__(self):
        return len(self.indices()) + (self.mode == "length")


def sampler_that(mode):
    return type("WrongSampler", (RightSampler,), {"mode": mode})


def right_plan(global_batch, machines, gpus_per_machine, max_micro_batch):
    share, rest = divmod(global_batch, machines * gpus_per_machine)
    if rest or not share:
        raise ValueError("no plan")
    return next((m, share // m) for m in range(min(share, max_micro_batch), 0, -1) if share % m == 0)


def forgets_machines(global_batch, machines, gpus_per_machine, max_micro_batch):
    return right_plan(global_batch, 1, gpus_per_machine, max_micro_batch)


def one_at_a_time(global_batch, machines, gpus_per_machine, max_micro_batch):
    _, share = right_plan(global_batch, machines, gpus_per_machine, 1)
    return 1, share


def ignores_memory(global_batch, machines, gpus_per_machine, max_micro_batch):
    return right_plan(global_batch, machines, gpus_per_machine, 10**9)


def rounds(global_batch, machines, gpus_per_machine, max_micro_batch):
    share = global_batch / (machines * gpus_per_machine)
    micro_batch = min(max_micro_batch, max(1, int(share)))
    return micro_batch, max(1, round(share / micro_batch))


# ------------------------------------------------------------------------------------------------------- planted bugs
def _train(*, broadcast=True, own_rows=True, average="gradients"):
    def train(make_model, samples, targets, *, steps, micro_batch, lr):
        model = make_model()
        if broadcast:
            for p in model.parameters():
                dist.broadcast(p.data, 0)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for step in range(steps):
            order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(step))
            at = rank * micro_batch if own_rows else 0
            rows = order[at : at + micro_batch]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(samples[rows]), targets[rows]).backward()
            if average in ("gradients", "both"):
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= world_size
            optimizer.step()
            if average in ("parameters", "both"):
                for p in model.parameters():
                    dist.all_reduce(p.data)
                    p.data /= world_size
        return model

    return train


def right_training(make_model, samples, targets, *, steps, micro_batch, lr):
    """With PyTorch's own DDP, where the shipped answer averages by hand."""
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(step))
        mine = order.split(micro_batch)[dist.get_rank()]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(samples[mine]), targets[mine]).backward()
        optimizer.step()
    return model


RIGHT = {
    "own_ddp": RightDDP,
    "accumulated_step": right_step,
    "sampler": RightSampler,
    "loss_weight": lambda local_rows, global_rows, world_size: world_size * (local_rows / global_rows),
    "batch_plan": right_plan,
    "repaired": right_training,
}
WRONG = [
    ("own_ddp", ddp_that(broadcast=False), "starts from other weights than rank 0"),
    ("own_ddp", ddp_that(average=False), "times too large: you summed where DDP averages"),
    ("own_ddp", DividedTwice, "times too small: you divided twice"),
    ("own_ddp", NothingAveraged, "still holds its own gradients"),
    ("own_ddp", ddp_that(blocking=True), "your hook waits for the all-reduce"),
    ("own_ddp", ddp_that(reset=False), "finish() must leave every bucket empty"),
    ("own_ddp", ddp_that(in_finish=True), "no all-reduce starts before backward() is over"),
    ("own_ddp", ddp_that(skip_frozen=False), "the frozen layer's zeros travel too"),
    (
        "own_ddp",
        lambda module, bucket_bytes: RightDDP(module, 1 << 30),
        "a bucket that holds everything is full only when backward is over",
    ),
    ("own_ddp", lambda module, bucket_bytes: RightDDP(module, 1), "one each pays the latency"),
    ("accumulated_step", _step(divide=False), "times too large"),
    ("accumulated_step", _step(), "a mean of means"),
    ("accumulated_step", _step(weigh=True, no_sync="none"), "crossed the wire 3 times"),
    ("accumulated_step", _step(weigh=True, no_sync="backward"), "around forward and backward both"),
    ("accumulated_step", _step(weigh=True, step_each=True), "stepped 2 times"),
    ("accumulated_step", _step(weigh=True, zero=False), "gradients are left over"),
    ("accumulated_step", keeps_every_graph, "backward() for each micro-batch"),
    ("sampler", sampler_that("same epoch"), "has the order of epoch 0"),
    ("sampler", sampler_that("seed by rank"), "seed it alike on all ranks"),
    ("sampler", sampler_that("padded"), "DistributedSampler's padding"),
    ("sampler", sampler_that("dropped"), "the rest of the division is dropped"),
    ("sampler", sampler_that("lumpy"), "they may differ by one"),
    ("sampler", sampler_that("shards first"), "the same samples every epoch"),
    ("sampler", sampler_that("length"), "len() says"),
    ("loss_weight", lambda local_rows, global_rows, world_size: 1.0, "every weight 1"),
    ("loss_weight", lambda local_rows, global_rows, world_size: local_rows / global_rows, "multiply by it"),
    ("loss_weight", lambda local_rows, global_rows, world_size: local_rows, "off by"),
    ("batch_plan", forgets_machines, "forgets the machines"),
    ("batch_plan", one_at_a_time, "needs fewer passes"),
    ("batch_plan", ignores_memory, "does not fit"),
    ("batch_plan", rounds, "not 96"),
    ("repaired", _train(broadcast=False), "the models were not equal at the start"),
    ("repaired", _train(own_rows=False), "every rank trains on the same rows: the work is repeated"),
    ("repaired", _train(average="parameters"), "parameters are averaged after the step"),
    ("repaired", _train(average="nothing"), "nothing is averaged between them"),
    ("repaired", _train(average="both"), "once is enough"),
]
