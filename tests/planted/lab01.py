"""Lab 1. MUTANTS: (exercise, what the solution says, what is planted, a word of the verdict). RIGHT: written another way."""

MUTANTS = [
    ("findings", '"B": (29, "update each weight inside backward")', '"B": (99, "update each weight inside backward")', "no line 99"),
    ('findings', '"A": (18, "compute the loss in chunks")', '"A": (28, "compute the loss in chunks")', 'asked last'),
    ('findings', '"A": (18, "compute the loss in chunks")', '"A": (27, "compute the loss in chunks")', 'only calls'),
    ('findings', '"A": (18, "compute the loss in chunks")', '"A": (18, "checkpoint every block")', 'in step 1'),
    ('findings', '"A": (18, "compute the loss in chunks")', '"A": (18, "empty_cache() after every step")', 'which row'),
    ('findings', '"B": (29, "update each weight inside backward")', '"B": (28, "update each weight inside backward")', '23.0'),
    ('findings', '"B": (29, "update each weight inside backward")', '"B": ("29", "update each weight inside backward")', 'type int'),
    ('findings', '"C": (33, "keep loss.item(), not the loss")', '"C": (19, "keep loss.item(), not the loss")', 'keeps it'),
    ('findings', '"C": (33, "keep loss.item(), not the loss")', '"C": (33, "checkpoint every block")', 'without it'),
    ('findings', '"C": (33, "keep loss.item(), not the loss")', '"C": (33, "compute the loss in chunks")', 'without it'),
    ('chunked_loss', 'reduction="sum")', 'reduction="mean")', ''),
    ('chunked_loss', '/ (labels != -100).sum()', '/ len(labels)', 'without a target count'),
    ('chunked_loss', 'if softcap is not None:', 'if False:', 'the loss'),
    ('chunked_loss', 'checkpoint(summed, some, head, targets, use_reentrant=False, preserve_rng_state=False)', 'summed(some, head, targets)', 'the graph keeps'),
    ('chunked_loss', 'head, targets, use_reentrant', 'head.detach(), targets, use_reentrant', 'head'),
    ('chunked_loss', 'hidden.split(chunk), labels.split(chunk)', 'hidden.split(len(labels)), labels.split(len(labels))', 'logits of'),
    ('corrected_estimate', 'return max(at_the_loss, at_the_step)', 'return 4 * weight_bytes', "the tool's own"),
    ('corrected_estimate', 'return max(at_the_loss, at_the_step)', 'return at_the_loss', ''),
    ('corrected_estimate', 'weight_bytes if micro_batches > 1 else 0', '0', 'second micro-batch on'),
    ('corrected_estimate', 'weight_bytes if micro_batches > 1 else 0', 'weight_bytes', 'not there at one time'),
    ('corrected_estimate', 'logits = 3 *', 'logits = 1 *', 'three tensors'),
    ('corrected_estimate', '(1 + moments) * weight_bytes + waiting', '3 * weight_bytes + waiting', ''),
    ('count_step', 'weights = [*model.parameters(), *model.buffers()]', 'weights = [*model.parameters()]', 'are the buffers in it'),
    ('count_step', '"weights": size(weights),', '"weights": sum(t.nbytes for t in model.state_dict().values()),', "'weights' of gpt2"),
    ('count_step', '    step()  # the optimizer makes its state in its first step\n', '', 'before the first step'),
    ('count_step', 'size(gradients())\n\n    hook', 'size(model.parameters())\n\n    hook', "'gradients' of unseen"),
    ('count_step', 'self.key = (storage.data_ptr(), storage.nbytes())', 'self.key = (tensor.data_ptr(), tensor.nbytes)', "'activations' of gpt2"),
    ('count_step', ' if address not in own)', ')', 'never a weight'),
    ('count_step', '        def __del__(self):  # autograd lets go\n            kept[self.key] -= 1\n', '', 'once, only while'),
    ('count_step', 'now = highest = before', 'now = highest = 0', 'before the step'),
    ('count_step', '[*weights, *state, *gradients()]', '[*weights, *state]', "'peak' of convolutional"),
    ('count_step', 'return found | {"peak": highest}', 'return found | {"peak": sum(found.values())}', "'peak' of gpt2"),
    ('count_step', 'return found | {"peak": highest}', 'from course_lib.observe import MemoryProbe\n    probe = MemoryProbe(model, optimizer)\n    with probe.measure():\n        step()\n    return found | {"peak": probe.bytes["peak"]}', 'own instruments'),
    ('cheapest', 'estimate(job.model, **settings).device', 'estimate(job.model, **settings).peak', 'compare `device`'),
    ('cheapest', '"num_microbatches": 2}', '"num_microbatches": 1}', 'set num_microbatches'),
    ('cheapest', 'if spare >= free * memory:', 'if spare >= 0:', 'without your margin'),
    ('cheapest', 'price, names, spare = min(found)', 'price, names, spare = max(found, key=lambda f: f[2])', 'fits'),
    ('cheapest', '                if job.sequences % 2:\n                    continue\n', '', 'ValueError'),
    ('cheapest', '"spare": spare}', '"spare": spare - free * memory}', "'spare'"),
    ('cheapest', 'free = 0.05\n', 'free = 0.05 if job.sequences == 2 else 0.1\n', 'for all jobs'),
    ('cheapest', ' cannot be made to fit on {job.card} with', ' cannot be made to fit with', 'does not name the card'),
    ('cheapest', '        raise ValueError(f"{job.model} cannot be made to fit on {job.card} with {free:.0%} free")\n', '        found = [(0, (), 0)]\n', 'raise ValueError'),
    ("cheapest", '{"method": job.method, ', '{"method": "full", ', ""),
    ("cheapest", '"precision": job.precision', '"precision": "bf16-mixed"', ""),
    ("corrected_estimate", "return max(at_the_loss, at_the_step)", 'return estimate(config, precision="fp32", seq_len=tokens).peak', "calculator"),
    ('cheapest', '"micro_batch_size": job.sequences // 2, "num_microbatches": 2', '"num_microbatches": 2', ""),
    ('most_answers', 'with_cache = [rollout] if step.sleeps else [rollout, training, sync]\n    if max(rollout, training, sync) > room:', 'with_cache = [rollout]\n    if rollout > room:', "must fit, too"),
    ('most_answers', 'max(rollout, training, sync)', 'max(rollout, training)', ""),
    ('most_answers', '(step.prompt + step.group * step.answer)', 'step.group * (step.prompt + step.answer)', 'share the keys'),
    ('most_answers', 'bf16 if full else 0\n', 'bf16\n', 'the reference'),
    ('most_answers', '0 if step.sleeps else bf16', 'bf16', ''),
    ('most_answers', '0.9 * on.memory', 'on.memory', '10 %'),
    ('most_answers', '* step.group\n', '\n', ''),
]  # fmt: skip

RIGHT = {
    "findings": [
        """
def findings():
    return {"A": (19, "compute the loss in chunks"), "B": [29, "update each weight inside backward"], "C": (33.0, "validate under no_grad")}
""",
    ],
    "chunked_loss": [
        '''
class OnTheWay(torch.autograd.Function):
    """Gradients chunk by chunk in forward, by the softmax's own formula."""

    @staticmethod
    def forward(ctx, hidden, head, labels, chunk, softcap):
        into_hidden, into_head, total, targets = torch.zeros_like(hidden), torch.zeros_like(head), 0.0, labels != -100
        for at in range(0, len(hidden), chunk):
            rows, right = torch.arange(at, min(at + chunk, len(hidden))), labels[at : at + chunk].clamp(min=0)
            logits = hidden[rows] @ head.T
            squashed = logits if softcap is None else softcap * torch.tanh(logits / softcap)
            shares = squashed.log_softmax(-1)
            total = total - (shares[rows - at, right] * targets[rows]).sum()
            slope = shares.exp()
            slope[rows - at, right] -= 1
            slope *= targets[rows, None] / targets.sum()
            if softcap is not None:
                slope *= 1 - (squashed / softcap) ** 2
            into_hidden[rows] = slope @ head
            into_head += slope.T @ hidden[rows]
        ctx.save_for_backward(into_hidden, into_head)
        return total / targets.sum()

    @staticmethod
    def backward(ctx, gradient):
        into_hidden, into_head = ctx.saved_tensors
        return gradient * into_hidden, gradient * into_head, None, None, None


def chunked_loss(hidden, head, labels, chunk, softcap=None):
    return OnTheWay.apply(hidden, head, labels, chunk, softcap)
''',
        '''
class Targets(torch.autograd.Function):
    """Drops the rows without a target first, and works in place."""

    @staticmethod
    def forward(ctx, hidden, head, labels, chunk, softcap):
        keep = (labels != -100).nonzero().flatten()
        into_hidden, into_head, total = torch.zeros_like(hidden), torch.zeros_like(head), hidden.new_zeros(())
        for rows in keep.split(chunk):
            logits, right = hidden[rows] @ head.T, torch.arange(len(rows))
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(softcap)
                slope = 1 - (logits / softcap).square_()
            total += (logits.logsumexp(-1) - logits[right, labels[rows]]).sum()
            logits.sub_(logits.logsumexp(-1, keepdim=True)).exp_()
            logits[right, labels[rows]] -= 1
            if softcap is not None:
                logits.mul_(slope)
            into_hidden[rows] = logits @ head / len(keep)
            into_head.addmm_(logits.T, hidden[rows], alpha=1 / len(keep))
        ctx.save_for_backward(into_hidden, into_head)
        return total / len(keep)

    @staticmethod
    def backward(ctx, gradient):
        into_hidden, into_head = ctx.saved_tensors
        return gradient * into_hidden, gradient * into_head, None, None, None


def chunked_loss(hidden, head, labels, chunk, softcap=None):
    return Targets.apply(hidden, head, labels, chunk, softcap)
''',
    ],
    "corrected_estimate": [
        """
import numpy as np


def corrected_estimate(weight_bytes, config, tokens, moments, micro_batches):
    resting = [weight_bytes] * (1 + moments)
    batch = [block_bytes(config, tokens)] * config.num_hidden_layers + [12 * tokens * config.hidden_size]
    batch += 3 * [4 * tokens * config.vocab_size] + [weight_bytes] * (micro_batches > 1)
    return np.int64(sum(resting) + max(sum(batch), weight_bytes))
""",
    ],
    "count_step": [
        '''
def count_step(model, optimizer, step):
    """Living storages, a hook on tensors, and the profiler's operations instead of its trace."""
    import weakref
    step()
    def total(tensors):
        return sum(s.nbytes() for s in {id(t.untyped_storage()): t.untyped_storage() for t in tensors}.values())
    weights = list(dict(model.named_parameters()).values()) + [b for _, b in model.named_buffers()]
    mine = {t.untyped_storage().data_ptr() for t in weights}
    state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    grads = lambda: [p.grad for p in model.parameters() if p.grad is not None]
    seen, most, of_grads = weakref.WeakSet(), [0], [0]
    def pack(t):
        if t.untyped_storage().data_ptr() not in mine:
            seen.add(t.untyped_storage())
            most.append(sum(s.nbytes() for s in seen))
        return t
    handle = optimizer.register_step_pre_hook(lambda *_: of_grads.append(total(grads())))
    resident = total(weights + state + grads())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step()
    handle.remove()
    now = top = resident
    for event in sorted(prof.events(), key=lambda e: e.time_range.end):
        now += event.cpu_memory_usage if event.name == "[memory]" else event.self_cpu_memory_usage
        top = max(top, now)
    return {"weights": total(weights), "optimizer": total(state), "gradients": max(of_grads), "activations": max(most), "peak": top}
''',
    ],
    "cheapest": [
        '''
def cheapest(job):
    """By bit masks, the cheapest first, another margin, and only what fits is kept."""
    share, names = 0.12, list(CHANGES)
    room = card(job.card).memory
    def settings(chosen):
        run = dict(method=job.method, precision=job.precision, seq_len=job.seq_len, micro_batch_size=job.sequences)
        for name in chosen:
            run.update(CHANGES[name][1])
        if "two micro-batches" in chosen:
            run.update(micro_batch_size=job.sequences // 2, num_microbatches=2)
        return run
    masks = [[n for i, n in enumerate(names) if mask >> i & 1] for mask in range(2 ** len(names))]
    for chosen in sorted(masks, key=lambda c: sum(CHANGES[n][0] for n in c)):
        if sum("optimizer" in CHANGES[n][1] for n in chosen) == 2 or "two micro-batches" in chosen and job.sequences % 2:
            continue
        device = estimate(job.model, **settings(chosen)).device
        if device <= room * (1 - share):
            return dict(changes=set(chosen), free=share, spare=room - device)
    raise ValueError("get a larger card than " + job.card)
''',
    ],
    "most_answers": [
        """
def most_answers(step):
    shape, memory = shape_of(step.model), card(step.card).memory
    need = estimate(
        shape, method=step.method, precision=step.precision, micro_batch_size=1, seq_len=step.prompt + step.answer, num_microbatches=2,
        activation_checkpointing="full",
    )
    weights = 2 * shape.parameters

    def fits(groups):
        cache = 4 * shape.layers * shape.kv_width * groups * (step.prompt + step.group * step.answer)
        full, awake = step.method == "full", not step.sleeps
        moments = (
            need.resident + weights + cache,
            need.peak + awake * (weights + cache),
            need.resident + weights + awake * cache + full * weights,
        )
        return max(moments) + full * weights + need.cuda_context + memory / 10 <= memory

    groups = 0
    while fits(groups + 1):
        groups += 1
    return groups * step.group
""",
    ],
}
