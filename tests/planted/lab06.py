"""Lab 6. MUTANTS: (exercise, what the solution says, what is planted, a word of the verdict). RIGHT: written another way.

SCRIPT_MUTANTS: (what fully_sharded.py says, what is planted, a word of the verdict).
"""

_REDUCE = '    dist.all_reduce(total, group=mesh.get_group("shard"))'
_SAVE = """            dcp.save(state_of(model, optimizer, scheduler), checkpoint_id=f"{folder}/saving")
            if rank == 0:  # every rank has written its rows when save() returns
                os.rename(f"{folder}/saving", f"{folder}/step-{step + 1}")
"""
_UNITS = """    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
"""
_OPTIMIZER = "    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)\n"
_CLIP = "        nn.utils.clip_grad_norm_(model.parameters(), max_norm)\n"
_OWN_NORM = """        gradients = [p.grad.to_local() for p in model.parameters()]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient *= (max_norm / norm).clamp(max=1)
"""
MUTANTS = [
    ("own_unit", ".clone()  # a view would keep the whole", "", "clone()"),
    ("own_unit", "            dist.broadcast(p.data, 0)\n", "", "broadcast before"),
    ("own_unit", "p.data.chunk(self.ranks)[self.rank]", "p.data.flatten().chunk(self.ranks)[self.rank]", "shared evenly"),
    ("own_unit", ", requires_grad=p.requires_grad))", "))", "requires_grad"),
    ("own_unit", "        self.sizes = [shard.numel() for shard in self.shards]\n        self.free()\n", "        self.sizes = [shard.numel() for shard in self.shards]\n", "still there"),
    ("own_unit", "        for p in self.parameters:\n            p.untyped_storage().resize_(0)\n", "        raise NotImplementedError\n", "in __init__: free() is not"),
    ("own_unit", "            p.untyped_storage().resize_(p.nbytes)\n            p.data.copy_(rows.reshape(p.shape))\n", "            pass\n", "no memory"),
    ("own_unit", "        for p in self.parameters:\n            p.untyped_storage().resize_(0)\n", "        for p in [] if hasattr(self, 'done') else self.parameters:\n            p.untyped_storage().resize_(0)\n        self.done = True\n", "resize its storage"),
    ("own_unit", "        flat = torch.cat(", "        raise NotImplementedError\n        flat = torch.cat(", "step 1 of 3 is right: each of 3 ranks"),
    ("own_unit", "        flat = torch.cat(", "        self.parameters[0][0]\n        flat = torch.cat(", "only for its p[0]"),
    ("own_unit", "rows.reshape(p.shape)", "everyone[: p.numel()].reshape(p.shape)", "rank by rank"),
    ("own_unit", "        dist.all_gather_into_tensor(everyone, flat)\n", "        if not hasattr(self, 'kept'):\n            dist.all_gather_into_tensor(everyone, flat)\n            self.kept = everyone.tolist()\n        everyone = torch.tensor(self.kept)\n", "gathered once a step"),
    ("own_unit", "        dist.all_gather_into_tensor(everyone, flat)\n", """        parts = [flat.new_empty(self.ranks * size) for size in self.sizes]
        for part, piece in zip(parts, flat.split(self.sizes), strict=True):
            dist.all_gather_into_tensor(part, piece)
        everyone = torch.cat([part.view(self.ranks, -1) for part in parts], dim=1)
""", "parameter by parameter"),
    ("own_unit", "            p.data.copy_(", "            p.copy_(", "p.data"),
    ("own_unit", "            p.data.copy_(rows.reshape(p.shape))", "            p.data = rows.reshape(p.shape).clone()", "another storage"),
    ("own_unit", "        self.free()\n        lines", "        raise NotImplementedError\n        lines", "step 2 of 3 is right"),
    ("own_unit", "        self.free()\n        lines", "        lines", "still hold parameters or full gradients"),
    ("own_unit", "            p.grad = None\n", "            pass\n", "still hold parameters or full gradients"),
    ("own_unit", "        mean /= self.ranks\n", "", "FSDP averages"),
    ("own_unit", "[p.grad.reshape(self.ranks, -1) for p in self.parameters], dim=1)", "[p.grad.flatten() for p in self.parameters]).view(self.ranks, -1)", "line r"),
    ("own_unit", "gradient if shard.grad is None else shard.grad + gradient", "gradient", "add to .grad"),
    ("own_unit", "        dist.reduce_scatter_tensor(mean, lines.flatten())\n", "        dist.all_reduce(lines)\n        mean.copy_(lines[self.rank])\n", "all-reduced"),
    ("own_unit", "        dist.reduce_scatter_tensor(mean, lines.flatten())\n", "        mean.copy_(lines[self.rank] * self.ranks)\n", "never added up"),
    ("loaded","    fully_shard(model, mesh=mesh, mp_policy=policy)  # embedding and head in one unit: they stay one tensor\n","    for end in (model.model.embed_tokens, model.lm_head):\n        fully_shard(end, mesh=mesh, mp_policy=policy)\n    fully_shard(model, mesh=mesh, mp_policy=policy)\n","two tensors"),
    ("loaded","    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(config)  # it is in no file\n","","in no file"),
    ("loaded","param_dtype=torch.bfloat16, ","","gathered in torch.float32"),
    ("loaded","reduce_dtype=torch.float32","reduce_dtype=torch.bfloat16","summed in"),
    ("loaded","    for block in model.model.layers:\n        fully_shard(block, mesh=mesh, mp_policy=policy)\n","","blocks are units"),
    ("loaded",'    weights.pop("lm_head.weight")  # the file has it under the embedding\'s name\n',"","lm_head.weight"),
    ("loaded","    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(folder))\n","    model.init_weights()\n","the folder says"),
    ("loaded","        model = LlamaForCausalLM(config)\n    policy","        model = LlamaForCausalLM(config).bfloat16()\n    policy","rows stay"),
    ("loaded","    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(folder))\n","    whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()\n    for name, p in weights.items():\n        p.to_local().copy_(whole[name].tensor_split([c for c in range(-(-len(whole[name]) // dist.get_world_size()), len(whole[name]), -(-len(whole[name]) // dist.get_world_size()))])[dist.get_rank()])\n","whole model is there"),
    ("loaded","    dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(folder))\n","    import glob\n    from safetensors.torch import load_file\n    whole = {}\n    for file in glob.glob(folder + '/*.safetensors'):\n        whole |= load_file(file)\n    for name, p in weights.items():\n        each = -(-len(whole[name]) // dist.get_world_size())\n        p.to_local().copy_(whole[name][each * dist.get_rank() :][:each])\n","whole files"),
    ("loaded", "    fully_shard(model, mesh=mesh, mp_policy=policy)  # emb", "    fully_shard(model, mesh=mesh)  # emb", "takes the policy"),
    ("repaired", "torch.optim.AdamW(", "torch.optim.Adam(", "the loss"),
    ("repaired", "            model = super().build(weights)\n", "            with torch.device('meta'):\n                model = broken.tied_llama(layers=4, vocab=61)\n            model.to_empty(device='cpu').load_state_dict(weights)\n", "inv_freq"),
    ("repaired","            model.tie_weights()  # to_empty() made two tensors of one\n","","to_empty"),
    ("repaired","blocks = modeling_llama.LlamaDecoderLayer","blocks = nn.Linear","look at bytes"),
    ("repaired","blocks = modeling_llama.LlamaDecoderLayer","blocks = (modeling_llama.LlamaAttention, modeling_llama.LlamaMLP, modeling_llama.LlamaRMSNorm)","look at bytes"),
    ("repaired","            fully_shard(model, mesh=mesh)  # embedding, last norm, head\n","","raised RuntimeError"),
    ("repaired","            super().shard(model, mesh)\n","","gathered whole"),
    ("repaired","            self.shard(model, mesh)  # first: it puts new parameters into the model\n            return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)","            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)\n            self.shard(model, mesh)\n            return optimizer","which tensors"),
    ("repaired","nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor().item()","super().clip(model, max_norm)","squares add up"),
    ("repaired","nn.utils.clip_grad_norm_(model.parameters(), max_norm)","nn.utils.clip_grad_norm_(model.parameters(), 1e9)","after clipping"),
    ("repaired","lr=0.01, weight_decay=0.1)","lr=0.001, weight_decay=0.1)","the loss"),
    ("repaired","    return Repaired\n","    Repaired.share = lambda self, batch: batch.tensor_split(dist.get_world_size())[dist.get_rank()]\n    return Repaired\n","healthy"),
    ("clip_sharded", ".sum()\n    dist", ".sum()\n    if total == 0:\n        return 0.0\n    dist", "every rank must make"),
    ("clip_sharded", 'group=mesh.get_group("shard")', "group=None", "counted"),
    ("clip_sharded", "norm = total.sqrt().item()", "norm = total.item()", "square of the norm"),
    ("clip_sharded", _REDUCE, "    total = total.sqrt()\n" + _REDUCE + "\n    total = total.square()", "sum of the ranks"),
    ("clip_sharded", 'mesh.get_group("shard"))', 'mesh.get_group("shard"), op=dist.ReduceOp.MAX)', "with the largest"),
    ("clip_sharded", 'mesh.get_group("shard"))', 'mesh.get_group("shard"), op=dist.ReduceOp.AVG)', "averaged"),
    ("clip_sharded", _REDUCE, "    pass", "alone"),
    ("clip_sharded", _REDUCE, "    total = sum(gradient.norm() for gradient in gradients)\n" + _REDUCE + "\n    total = total.square()", "sum of the shards"),
    ("clip_sharded", "scale = min(1.0, max_norm / (norm + 1e-6))", "scale = max_norm / norm", "no more than 1"),
    ("clip_sharded", "gradient.mul_(scale)", "gradient = gradient * scale", "in place"),
    ("clip_sharded", "max_norm / (norm + 1e-6)", "max_norm / torch.cat([g.flatten() for g in gradients]).norm().item()", "alone now have"),
    ("clip_sharded", _REDUCE, _REDUCE + "\n    dist.all_reduce(total.clone())", "one all_reduce"),
    ("clip_sharded", _REDUCE, """    everyone = [torch.empty_like(total) for _ in range(mesh["shard"].size())]
    dist.all_gather(everyone, total, group=mesh.get_group("shard"))
    total = sum(everyone)""", "one all_reduce"),
    ("first_change", "if piece.begun:", "if True:", "waiting, and not transfer"),
    ("first_change", "if piece.begun:", "if piece.begun == piece.gathers:", "begun one of them"),
    ("first_change", "min(transfer, free)", "transfer", "no more compute than there is"),
    ("first_change", "0 if piece.gathers else piece.seconds", "piece.seconds", "is taken"),
    ("first_change", "    change = max(saves", "    saves = Counter({name: seconds * len(ranks) for name, seconds in saves.items()})\n    change = max(saves", "not the sum"),
    ("first_change", "exposed[piece.unit] += piece.seconds", "exposed[piece.unit] = max(exposed[piece.unit], piece.seconds)", "exposed seconds over all"),
    ("first_change", "transfer / 2 / len", "transfer / len", "'bf16' saves"),
    ("first_change", "    change = max(saves, key=saves.get)", "    change = 'prefetch'", "and 'balance'"),
    ("fully_sharded", "fully_sharded.py", "nowhere.py", "no file"),
    ("hybrid", "(shard - 1) / shard *", "(shard > 1) *", "n-1 of n"),
    ("hybrid", "2 * (replicate - 1)", "(replicate - 1)", "an all-reduce is"),
    ("hybrid", "* gradients / shard", "* gradients", "only its shard"),
    ("hybrid", "2 if reshard else 1", "1", "once more"),
    ("hybrid", "2 if reshard else 1", "2", "stay whole"),
    ("hybrid", "= 2 * parameters, 4", "= 4 * parameters, 4", "param_dtype"),
    ("hybrid", "= 2 * parameters, 4", "= 2 * parameters, 2", "reduce_dtype"),
    ("hybrid", "(gathers * weights + gradients)", "gathers * weights", "reduce-scattered inside"),
    ("hybrid", "mesh[row].tolist(), mesh[:, column].tolist()", "mesh[:, column].tolist(), mesh[row].tolist()", "shard group first"),
    ("hybrid", "    row, column = divmod(rank, shard)\n", "    mesh = mesh.view(shard, replicate).T\n    column, row = divmod(rank, replicate)\n", "are neighbours"),
    ("hybrid", "    weights, gradients", "    replicate, shard = shard, replicate\n    weights, gradients", "shard last"),
]  # fmt: skip
SCRIPT_MUTANTS = [
    ("    if saved:\n        state", "    state_of(model, optimizer, scheduler)\n    if saved:\n        state", "empty step"),
    ("states.get_state_dict(model, optimizer)", "states.get_state_dict(model, optimizer, options=states.StateDictOptions(full_state_dict=True))", "its own shards"),
    (_UNITS, "    fully_shard(model, mesh=mesh)\n", "1 units, not 3"),
    ("    fully_shard(model, mesh=mesh)\n", "", "stays whole"),
    (_UNITS + _OPTIMIZER, _OPTIMIZER + _UNITS, "after sharding"),
    (_CLIP, _OWN_NORM, "all ranks' rows"),
    ("labels=rows).loss\n", "labels=rows).loss / ranks\n", "the mean over the ranks already"),
    (".chunk(ranks)[rank]", ".chunk(ranks)[0]", "take its own"),
    ("        dist.all_reduce(mean_loss)\n", "", "mean over the ranks"),
    (_SAVE, _SAVE.splitlines()[0].replace("saving", "step-1") + "\n", "overwrote"),
    (_SAVE, _SAVE.splitlines()[0].replace("saving", "step-{step + 1}") + "\n", "killed run was writing"),
    (', key=lambda path: int(path.name.removeprefix("step-"))', "", "as text"),
    ('        scheduler.load_state_dict(state["scheduler"])\n', "", "scheduler"),
    (_SAVE, '            torch.save(state_of(model, optimizer, scheduler), f"{folder}/step-{step + 1}-{rank}")\n', "dcp.save()"),
]  # fmt: skip

_LISTS = """
class RowUnit(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.inner, self.shapes, self.shards = [module], [], []
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for p in module.parameters():
            dist.broadcast(p.detach(), src=0)
            chunks = list(p.detach().chunk(ranks))
            chunks += [p.detach()[:0]] * (ranks - len(chunks))
            self.shapes.append([chunk.shape for chunk in chunks])
            self.shards.append(nn.Parameter(chunks[rank].clone(), p.requires_grad))
        self.length = max(sum(shapes[r].numel() for shapes in self.shapes) for r in range(ranks))
        self.free()

    def pack(self, tensors):
        flat = torch.cat([t.reshape(-1) for t in tensors])
        return torch.cat([flat, flat.new_zeros(self.length - len(flat))])

    def gather(self):
        parts = [torch.empty(self.length) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, self.pack([shard.detach() for shard in self.shards]))
        at = [0] * len(parts)
        for p, shapes in zip(self.inner[0].parameters(), self.shapes):
            pieces = []
            for r, part in enumerate(parts):
                pieces.append(part[at[r] : at[r] + shapes[r].numel()].view(shapes[r]))
                at[r] += shapes[r].numel()
            p.untyped_storage().resize_(p.numel() * p.element_size())
            torch.cat(pieces, out=p.data)

    def free(self):
        for p in self.inner[0].parameters():
            p.data.untyped_storage().resize_(0)

    def reduce(self):
        ranks, params = dist.get_world_size(), list(self.inner[0].parameters())
        lines = []
        for r in range(ranks):
            lines.append(self.pack([p.grad.split([s[0] for s in shapes])[r] for p, shapes in zip(params, self.shapes)]))
        mine = torch.empty(self.length)
        dist.reduce_scatter(mine, lines)
        mine.div_(ranks)
        at = 0
        for p, shard in zip(params, self.shards):
            p.grad = None
            piece = mine[at : at + shard.numel()].view(shard.shape)
            at += shard.numel()
            if shard.grad is None:
                shard.grad = piece.clone()
            else:
                shard.grad.add_(piece)
        self.free()
        return mine
"""
_DOUBLE = """
def clip_sharded(gradients, max_norm, mesh):
    squares = torch.zeros(1, dtype=torch.float64)
    for gradient in gradients:
        if gradient.numel():
            squares += gradient.double().norm() ** 2
    dist.all_reduce(squares, group=mesh["shard"].get_group())
    norm = squares.sqrt()[0]
    if norm > max_norm:
        torch._foreach_mul_(gradients, float(max_norm / norm))
    return norm
"""
_OTHER = """
def repaired():
    class Other(broken.Program):
        def build(self, weights):
            model = broken.tied_llama(layers=4, vocab=61)
            model.load_state_dict(weights)
            return model

        def recompute(self, model):
            model.gradient_checkpointing_enable()
            model.train()

        def shard(self, model, mesh):
            fully_shard([model.model.embed_tokens, model.lm_head], mesh=mesh)
            for block in model.model.layers:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)

        def prepare(self, model, mesh):
            self.shard(model, mesh)
            return torch.optim.AdamW([{"params": list(model.parameters())}], lr=0.01, weight_decay=0.1)

        def clip(self, model, max_norm):
            squares = torch.stack([p.grad.to_local().square().sum() for p in model.parameters()]).sum()
            dist.all_reduce(squares)
            norm = squares.sqrt().item()
            for p in model.parameters():
                p.grad.mul_(min(1.0, max_norm / norm))
            return norm

    return Other
"""
_ARRAYS = """
def first_change(ranks):
    import numpy as np

    totals, saved = {}, []
    for pieces in ranks:
        seconds = np.array([piece.seconds for piece in pieces])
        gathers, begun, computes = (np.array([bool(getattr(p, n)) for p in pieces]) for n in ("gathers", "begun", "computes"))
        exposed = gathers & ~computes
        transfer = seconds[exposed & begun].sum()
        saved.append([seconds[exposed & ~begun].sum(), min(transfer, seconds[computes & ~gathers].sum()), transfer / 2])
        for piece, out in zip(pieces, exposed):
            totals[piece.unit] = totals.get(piece.unit, 0) + piece.seconds * bool(out)
    best = np.mean(saved, 0)
    return [sorted(totals, key=totals.get)[-1], ["balance", "prefetch", "bf16"][best.argmax()], best.max()]
"""
_RANGES = """
import numpy as np

def hybrid(rank, replicate, shard, parameters, reshard):
    first = rank // shard * shard
    across = torch.tensor(2 * (replicate - 1) * (parameters * 4 // shard // replicate))
    return range(first, first + shard), np.arange(rank % shard, replicate * shard, shard), np.int64((shard - 1) * (parameters // shard) * (8 if reshard else 6)), across
"""
_ROW_BY_ROW = """
def load(folder, mesh):
    import json, os
    from safetensors import safe_open

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fully_shard([model.model.embed_tokens, model.lm_head], mesh=mesh, mp_policy=policy)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    index = folder + "/model.safetensors.index.json"
    for name, p in model.named_parameters():
        file = json.load(open(index))["weight_map"][name] if os.path.exists(index) else "model.safetensors"
        first = -(-len(p) // mesh.size()) * mesh.get_local_rank()
        with torch.no_grad(), safe_open(f"{folder}/{file}", "pt") as tensors:
            p.to_local().copy_(tensors.get_slice(name)[first : first + len(p.to_local())])
    model.model.rotary_emb = modeling_llama.LlamaRotaryEmbedding(model.config)
    return model
"""
RIGHT = {
    "own_unit": [_LISTS],
    "loaded": [_ROW_BY_ROW],
    "repaired": [_OTHER],
    "clip_sharded": [_DOUBLE],
    "first_change": [_ARRAYS],
    "hybrid": [_RANGES],
}
