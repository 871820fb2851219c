"""Lab 4. MUTANTS: (exercise, what the solution says, what is planted, a word of the verdict). RIGHT: written another way.

SCRIPT_MUTANTS: (what many_gpus.py says, what is planted, a word of the verdict).
"""

_ACCUMULATION = [
    ("with nullcontext() if number == len(micro_batches) else model.no_sync():", "with nullcontext():", "no_sync()"),
    (
        "with nullcontext() if number == len(micro_batches) else model.no_sync():",
        "with model.no_sync():",
        "only this rank",
    ),
    (
        "summed = cross_entropy(model(tokens)",
        "micro_batches = micro_batches[:1]\n            summed = cross_entropy(model(tokens)",
        "",
    ),
    ("    optimizer.zero_grad()\n", "", "still there"),
    ("    optimizer.step()\n", "    optimizer.step()\n    optimizer.step()\n", "2 times"),
    ("model(tokens)", "model.module(tokens)", "only this rank"),
]
MUTANTS = [
    *(("accumulated_step", *mutant) for mutant in _ACCUMULATION),
    ("accumulated_step", "(labels != -100).sum()", "labels.numel()", ""),
    ("accumulated_step", "return loss.item() / dist.get_world_size()", "return loss.item()", "the loss"),
    ("accumulated_step", 'reduction="sum")\n            (summed / counted)', 'reduction="mean").nan_to_num()\n            (summed / len(micro_batches))', "means"),
    ("accumulated_step", 'reduction="sum")\n            (summed / counted)', 'reduction="mean").nan_to_num()\n            (summed)', ""),
    ("accumulated_step", "            (summed / counted).backward()", "            loss = loss + summed / counted\n        if number == len(micro_batches):\n            loss.backward()", "followed by"),
    ("accumulated_step", "(summed / counted).backward()", "(summed / counted * dist.get_world_size()).backward()", "multiple"),
    *(("uneven_step", *mutant) for mutant in _ACCUMULATION[:2]),
    ("uneven_step", "    dist.all_reduce(counted)\n", "", ""),
    ("uneven_step", "dist.get_world_size() / counted.item()", "1 / counted.item()", "multiple"),
    ("uneven_step", "(loss / counted).item()", "(loss / counted / dist.get_world_size()).item()", "the loss"),
    ("sixteen_bit_hook", "(ranks, -1).float().mean(0)", "(ranks, -1)\n    mean = sum(mean) / ranks", "rounded, too"),
    ("sixteen_bit_hook", "(ranks, -1).float().mean(0)", "(ranks, -1).float().sum(0)", "sum"),
    ("sixteen_bit_hook", "dist.all_gather_into_tensor(sent, mean.bfloat16())", "sent = torch.empty(len(sent))\n    dist.all_gather_into_tensor(sent, mean)", "should take"),
    ("sixteen_bit_hook", "future.set_result(gradients.copy_(sent[: len(gradients)]))", "future.set_result(gradients)", "own"),
    ("sixteen_bit_hook", "    return future\n", "    return gradients\n", "Future"),
    ("sixteen_bit_hook", "    dist.all_to_all_single(received, sent)\n    mean = received.view(ranks, -1).float().mean(0)", "    dist.all_reduce(sent)\n    mean = sent.float().view(ranks, -1)[dist.get_rank()] / ranks", ""),
    ("best_bucket", "held >= bucket or", "held + layer.gradient_bytes > bucket or", ""),
    ("best_bucket", "2 * (ranks - 1) * link.latency +", "", "latency"),
    ("best_bucket", "2 * (ranks - 1) * link.latency +", "link.latency +", "you predict"),
    ("best_bucket", "2 * (ranks - 1) / ranks * held", "held", "2(n-1)/n"),
    ("best_bucket", "max(now, free) + travels", "now + travels", "still carries"),
    ("best_bucket", "sum(layer.forward for layer in layers), 0.0, 0", "0.0, 0.0, 0", "you predict"),
    ("best_bucket", "best = min(closing, key=predicted)", "best = 25 * 2**20", "make a step"),
    ("repaired", "list(model.state_dict().values())", "list(model.parameters())", "rank 0's"),
    ("repaired", "[dist.get_rank()]\n", "[0]\n", ""),
    ("repaired", "batch.tensor_split(dist.get_world_size())[dist.get_rank()]", "batch", "rows"),
    ("repaired", "[p.grad for p in model.parameters()]", "[p.grad for p in model.parameters() if p.dim() > 1]", "which gradients"),
    ("repaired", "            return dist.get_world_size()\n", "            return 1\n", "sum"),
    ("repaired", "            optimizer.zero_grad()\n", "", "earlier steps"),
    ("repaired", "            optimizer.step()\n", "            optimizer.step()\n            optimizer.step()\n", "2 times"),
    ("repaired", "    return Repaired\n", "    Repaired.learning_rate = lambda self, step: 0.02\n    return Repaired\n", ""),
    ("repaired", "    return Repaired\n", "    Repaired.weight = lambda self, rows, batch: len(rows) * dist.get_world_size() / len(batch)\n    return Repaired\n", "healthy"),
    ("repaired", "return list(model.state_dict().values())", "return 2 * list(model.state_dict().values())", "should take"),
    ("many_gpus", "many_gpus.py", "nowhere.py", "no file"),
]  # fmt: skip
SCRIPT_MUTANTS = [
    ("accelerator.prepare(model, optimizer, loader, DataLoader(test, 8))", "(model, optimizer, *accelerator.prepare(loader, DataLoader(test, 8)))", "DistributedDataParallel"),
    ("total_iters=len(train) // batch_size", "total_iters=len(train) // batch_size // accelerator.num_processes", "learning rate"),
    ("    accelerator.register_for_checkpointing(scheduler)\n", "", ""),
    ("accelerator.backward(loss)", "accelerator.backward(loss / accumulate)", "divides"),
    ("accelerator.gather_for_metrics(", "accelerator.gather(", "gather_for_metrics"),
    ("            if accelerator.sync_gradients:\n                accelerator.clip", "            if True:\n                accelerator.clip", "clipped once"),
]  # fmt: skip

_PIECES = """
def sixteen_bit_hook(state, bucket):
    world, rank, flat = dist.get_world_size(), dist.get_rank(), bucket.buffer()
    size = -(-len(flat) // world)
    mine = torch.zeros(size * world)
    mine[: len(flat)] = flat / world
    mine = mine.to(torch.bfloat16).view(world, size)
    got = torch.zeros_like(mine)
    got[rank] = mine[rank]
    others = [other for other in range(world) if other != rank]
    sends = [dist.P2POp(dist.isend, mine[other].clone(), other) for other in others]
    for work in dist.batch_isend_irecv(sends + [dist.P2POp(dist.irecv, got[other], other) for other in others]):
        work.wait()
    pieces = [torch.empty(size, dtype=torch.bfloat16) for _ in range(world)]
    dist.all_gather(pieces, got.double().sum(0).to(torch.bfloat16))
    future = torch.futures.Future()
    future.set_result(torch.cat(pieces)[: len(flat)].float())
    return future
"""
_BY_HAND = """
def {name}(model, optimizer, micro_batches):
    total = torch.tensor(float(sum((labels >= 0).sum() for _, labels in micro_batches)))
    dist.all_reduce(total)
    loss = 0.0
    for tokens, labels in micro_batches:
        part = cross_entropy(model.module(tokens).transpose(1, 2), labels, reduction="sum") / total
        part.backward()
        loss += part.detach()
    trained = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.grad.flatten() for p in trained] + [loss.view(1)])
    dist.all_reduce(flat)
    for p, piece in zip(trained, flat[:-1].split([p.numel() for p in trained])):
        p.grad = piece.view_as(p)
    optimizer.step()
    model.zero_grad()
    return flat[-1].item()
"""
RIGHT = {
    "accumulated_step": [_BY_HAND.format(name="accumulated_step")],
    "sixteen_bit_hook": [_PIECES],
    "uneven_step": [_BY_HAND.format(name="uneven_step")],
}
