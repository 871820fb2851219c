"""Lab 5. MUTANTS: (exercise, what the solution says, what is planted, a word of the verdict). RIGHT: written another way.

SCRIPT_MUTANTS: (what sharded.py says, what is planted, a word of the verdict).
"""

MUTANTS = [
    ("sharded_step", "        gradient /= self.ranks\n", "", "mean"),
    ("sharded_step", "gradient if share.grad is None else share.grad + gradient", "gradient", "several add up"),
    ("sharded_step", "dist.reduce_scatter_tensor(gradient, self.padded(p.grad))", "gradient.copy_(self.padded(p.grad).chunk(self.ranks)[self.rank] * self.ranks)", ""),
    ("sharded_step", "dist.reduce_scatter_tensor(gradient, self.padded(p.grad))", "summed = self.padded(p.grad)\n        dist.all_reduce(summed)\n        gradient.copy_(summed.chunk(self.ranks)[self.rank])", "all-reduce"),
    ("sharded_step", ".chunk(self.ranks)[self.rank].clone())", ".chunk(self.ranks)[self.rank])", "view"),
    ("sharded_step", "        p.grad = None\n", "", ".grad left"),
    ("sharded_step", "            p.register_post_accumulate_grad_hook(self.reduce)", "            pass", ".grad left"),
    ("sharded_step", "            dist.all_gather_into_tensor(whole, share.detach())", "            whole.copy_(self.padded(p)).chunk(self.ranks)[self.rank].copy_(share.detach())", "gather them"),
    ("sharded_step", "        self.optimizer.zero_grad()\n", "", "earlier steps"),
    ("sharded_step", "for p in params if p.requires_grad\n", "for p in params\n", "raised"),
    ("reshard", "size = -(-numel // ranks)", "size = -(-len(shards) * len(shards[0]['weights']) // ranks)", "padding"),
    ("reshard", "for shard in shards])[:numel]", "for shard in sorted(shards, key=lambda shard: str(shard['rank']))])[:numel]", "order of the list"),
    ("reshard", "torch.cat([shard[name] for shard in shards])", "torch.cat([shard[name] * (name == 'weights') for shard in shards])", "anew"),
    ("reshard", ".clone()  # torch", "  # torch", "view"),
    ("reshard", 'for name in ("weights", "exp_avg", "exp_avg_sq")', 'for name in ("weights", "exp_avg")', "exp_avg_sq"),
    ("reshard", "zeros(size * ranks - numel)])", "zeros(size * ranks - numel, dtype=torch.float64)])", "float64"),
    ("reshard", "if any(shard[\"step\"] != step for shard in shards):", "if False:", "ValueError"),
    ("reshard", "!= list(range(shards[0][\"ranks\"])):", "!= sorted({shard[\"rank\"] for shard in shards}):", "ValueError"),
    ("choose", " + 28 * parameters / machine.host_bandwidth", "", "Adam takes time"),
    ("choose", "28 * parameters / machine", "28 * parameters / gpus / machine", "all P"),
    ("choose", "2: a + 1, 3: 3 * a}", "2: 2, 3: 3}", "every micro-batch"),
    ("choose", "3: 3 * a}", "3: 2 * a}", "again for backward"),
    ("choose", "4 * a + 2 if", "2 * a + 3 if", "from there"),
    ("choose", "(gpus - 1)", "gpus", "N - 1"),
    ("choose", "{1: 3, 2", "{1: 3 * a, 2", "once per step"),
    ("choose", "copies * share", "copies * share * gpus", "its share"),
    ("choose", "    return best, seconds(best)", "    return best, seconds((3, \"none\"))", "your seconds"),
    ("choose", "    best = min(filter(fits, SETTINGS), key=seconds, default=None)", "    best = next(filter(fits, SETTINGS), None)", "another setting"),
    ("choose", "return on_gpus and host_bytes(machine, setting) <= machine.host_memory", "return on_gpus", "of the host's"),
    ("choose", "        return on_gpus and", "        return", "of a GPU's"),
    ("choose", "        raise ValueError(f\"nothing fits {machine}\")", "        best = SETTINGS[-1]", "of the host's"),
    ("repaired", '"stage": 3', '"stage": "auto"', "auto"),
    ("repaired", '"stage": 3', '"stage": 2', "stage is 2"),
    ("repaired", '                "gradient_clipping": 0.0,\n', "", "clipped"),
    ("repaired", '                    "stage3_param_persistence_threshold": 0,  # else up to 100,000 elements stay whole\n', "", "small"),
    ("repaired", "next_token_loss(engine, rows)", "next_token_loss(engine.module, rows)", "forward"),
    ("repaired", "engine.backward(loss)", "engine.backward(loss / 2)", "divides"),
    ("repaired", "engine.step()", "engine.step() if micro_batch else None", "counts"),
    ("repaired", "    return Repaired\n", "    Repaired.share = lambda self, batch: batch.chunk(dist.get_world_size())[dist.get_rank()]\n    return Repaired\n", "healthy"),
    ("sharded", "sharded.py", "nowhere.py", "no file"),
    ("mended", "= 16  # 4", "= 32  # 4", "DeepSpeed raised"),
    ("mended", 'config["gradient_clipping"] = config.pop("gradient_cliping")', "pass", "spelling"),
    ("mended", 'config["bf16"] = {"enabled": True}', "pass", "Trainer"),
    ("mended", 'zero["offload_optimizer"] = zero.pop("offload_param")', "pass", "stage 2 ignores"),
    ("mended", 'config.pop("gradient_cliping")', 'config["gradient_cliping"]', "still there"),
    ("mended", "2: 2 * parameters", "2: 2 * parameters / ranks", "this rank holds"),
    ("mended", "12 * parameters / ranks", "8 * parameters / ranks", "master copy"),
    ("muon", "self.momenta[i].mul_(self.momentum)", "self.momenta[i].zero_()", ""),
    ("muon", "add_(mine, alpha=1 / ranks)", "add_(group[self.rank].grad)", "own gradients"),
    ("muon", "        self.momenta = [torch.zeros_like(group[self.rank]) for group in self.groups if self.rank < len(group)]", "        self.momenta = [torch.zeros_like(group[self.rank % len(group)]) for group in self.groups]\n        self.more = [torch.zeros_like(p) for p in params]", "its own matrices"),
    ("muon", "            dist.reduce_scatter_tensor(mine, gradients)", "            dist.all_reduce(gradients)\n            mine = gradients.chunk(ranks)[self.rank]", "twice a matrix"),
]  # fmt: skip
SCRIPT_MUTANTS = [
    ('            "stage": 3,\n', '            "stage": 2,\n', "stage is 2"),
    ('            "stage3_param_persistence_threshold": 0,\n', "", "100,000"),
    ("lr_scheduler=scheduler, ", "", "scheduler"),
    ('        "gradient_clipping": max_norm,\n', '        "gradient_clipping": 0.0,\n', "gradient_clipping"),
    ("engine.backward(loss)", "engine.backward(loss / accumulate)", "divides"),
    ("part.chunk(ranks)[rank]", "part[: batch_size // ranks]", "each once"),
    ("        dist.all_reduce(loss_of_step)\n", "", "all ranks"),
    ('        "checkpoint": {"load_universal": os.path.exists(f"{folder}/state/latest_universal")},\n', "", "Universal Checkpoint"),
    ('            engine.step()  # steps', '            if len(rows) == 0:\n                engine.step()  # steps', "times, not"),
    ("losses.jsonl", "loss.jsonl", "losses.jsonl"),
    ("cross_entropy(engine(rows), labels)", "cross_entropy(model(rows), labels)", "not the model"),
    ('    if os.path.exists(f"{folder}/state/latest"):', '    if os.path.exists(f"{folder}/state/latest_universal"):', "resumed"),
    ("    deepspeed.init_distributed()\n", "    deepspeed.init_distributed()\n    batch_size = 24\n", "rows"),
    ("    engine.save_16bit_model(folder)\n", "", "pytorch_model.bin"),
]  # fmt: skip

_FLAT = """
class ShardedOptimizer:
    def __init__(self, params, optimizer_class, **settings):
        world, rank = dist.get_world_size(), dist.get_rank()
        self.trained = [p for p in params if p.requires_grad]
        sizes = [p.numel() for p in self.trained]
        self.size = -(-sum(sizes) // world)
        cuts = [self.size * (r + 1) for r in range(world)]
        self.begin = dict(zip(self.trained, [sum(sizes[:i]) for i in range(len(sizes))]))
        flat = torch.cat([p.detach().flatten() for p in self.trained] + [torch.zeros(self.size * world - sum(sizes))])
        self.mine = flat[rank * self.size : (rank + 1) * self.size].clone().requires_grad_()
        self.inner = optimizer_class([self.mine], **settings)
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.leave)

    def leave(self, p):
        flat, p.grad = p.grad.flatten() / dist.get_world_size(), None
        for owner in range(dist.get_world_size()):
            first = max(self.begin[p], owner * self.size)
            last = min(self.begin[p] + len(flat), (owner + 1) * self.size)
            if first < last:
                piece = flat[first - self.begin[p] : last - self.begin[p]]
                dist.reduce(piece, owner)
                if owner == dist.get_rank():
                    if self.mine.grad is None:
                        self.mine.grad = torch.zeros_like(self.mine)
                    self.mine.grad[first - owner * self.size : last - owner * self.size] += piece

    def step(self):
        self.inner.step()
        self.mine.grad = None
        pieces = [torch.empty(self.size) for _ in range(dist.get_world_size())]
        dist.all_gather(pieces, self.mine.detach())
        whole = torch.cat(pieces)
        for p in self.trained:
            p.data.copy_(whole[self.begin[p] : self.begin[p] + p.numel()].view_as(p))
"""
_OWNERS = """
class WholeMatrixMuon:
    def __init__(self, params, lr, momentum):
        self.params, self.lr, self.mu, self.state = params, lr, momentum, {}

    @torch.no_grad()
    def step(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        for i, p in enumerate(self.params):
            gradient = p.grad / world
            dist.reduce(gradient, i % world)
            if i % world == rank:
                self.state[i] = self.mu * self.state[i] + gradient if i in self.state else gradient.clone()
                p -= self.lr * newton_schulz(self.state[i])
            dist.broadcast(p.data, i % world)
"""
_PLAIN = """
def repaired():
    class Repaired(silent.Program):
        def config(self, ranks):
            zero = {"stage": 3, "param_persistence_threshold": 0, "overlap_comm": False, "stage3_max_reuse_distance": 0}
            micro_batch = {"train_micro_batch_size_per_gpu": 6 // ranks, "gradient_accumulation_steps": 2}
            return micro_batch | {"gradient_clipping": 0, "zero_optimization": zero}

        def loss(self, engine, rows):
            return torch.nn.functional.cross_entropy(engine(rows[:, :-1]).transpose(1, 2), rows[:, 1:])

        def backward(self, engine, loss):
            loss.backward()

        def step(self, engine, micro_batch):
            engine.step()

    return Repaired
"""
RIGHT = {"sharded_step": [_FLAT], "repaired": [_PLAIN], "muon": [_OWNERS]}
