"""Lab 3. MUTANTS: (exercise, what the solution says, what is planted, a word of the verdict). RIGHT: written another way."""

MUTANTS = [
    ("ring", "self.order[(at + 1) % n]", "(dist.get_rank() + 1) % n", ""),
    ("ring", "summed = pieces[self.order[at - 1]].clone()", "x = x.clone()\n        pieces = x.split(sizes)\n        summed = pieces[self.order[at - 1]]", "the piece that goes out"),
    ("ring", "summed = pieces[self.order[at - 1]].clone()", "summed = pieces[dist.get_rank()].clone()", ""),
    ("ring", ".add_(mine)", "", "who adds"),
    ("ring", ".add_(mine)", ".half().add_(mine).float()", ""),
    ("ring", "summed = pieces[self.order[at - 1]].clone()", "summed = pieces[self.order[at - 1]]", "a part of x"),
    ("ring", "        for step in range(n - 1):\n            mine =", "        for step in range(n):\n            mine =", "where does it set out"),
    ("ring", "return whole\n", "return torch.cat([pieces[r] for r in self.order])\n", "order of the ring"),
    ("ring", "        for work in dist.batch_isend_irecv(both) if both else []:\n            work.wait()\n        return coming", "        dist.batch_isend_irecv(both) if both else []\n        return coming", "never waited for"),
    ("all_reduce", "if doubling <= halving:", "if False:", "fewer messages"),
    ("all_reduce", "if doubling <= halving:", "if True:", "fewer bytes"),
    ("all_reduce", "if doubling <= halving:", "if x.nbytes < 2**20:", ""),
    ("all_reduce", "2 * log2(n) * latency +", "log2(n) * latency +", ""),
    ("all_reduce", "2 * (n - 1) / n * x.nbytes / bandwidth", "x.nbytes / bandwidth", ""),
    ("all_reduce", "        swap(partner, kept, given)\n", "        pass\n", "tensor afterwards"),
    ("all_reduce", "in reversed(steps)", "in steps", "tensor afterwards"),
    ("all_reduce", "if rank & away else", "if rank & 1 else", ""),
    ("all_reduce", "        kept += received\n", "        kept += received.half()\n", "tensor afterwards"),
    ("all_reduce", "            x += other\n", "            x = x + other\n", "tensor afterwards"),
    ("hierarchical", "    dist.all_reduce(piece, group=across)\n", "", "your host alone"),
    ("hierarchical", "    dist.reduce_scatter_tensor(piece, padded, group=inside)\n    dist.all_reduce(piece, group=across)\n    dist.all_gather_into_tensor(padded, piece, group=inside)\n", "    dist.all_reduce(padded)\n", "which part"),
    ("hierarchical", "    dist.reduce_scatter_tensor(piece, padded, group=inside)\n    dist.all_reduce(piece, group=across)\n    dist.all_gather_into_tensor(padded, piece, group=inside)\n", "    dist.all_reduce(padded, group=inside)\n    dist.all_reduce(padded, group=across)\n", "which part"),
    ("hierarchical", "    dist.reduce_scatter_tensor(piece, padded, group=inside)\n", "    dist.all_reduce(padded, group=inside)\n    piece = padded.view(inside.size(), -1)[inside.rank()].clone()\n", "Half of the first"),
    ("hierarchical", "    x.copy_(padded[: len(x)])\n", "    return padded[: len(x)]\n", "the function's result"),
    ("hierarchical", "padded[: len(x)] = x", "padded[-len(x) :] = x", ""),
    ("hierarchical", "share = -(-len(x) // inside.size())", "share = -(-len(x) // inside.size()) + 4096", "should send"),
    ("hierarchical", "    x.copy_(padded[: len(x)])\n", "    x.data = padded[: len(x)]\n", "as it was"),
    ("hierarchical", "dist.all_reduce(piece, group=across)", "dist.all_reduce(piece, group=across, op=dist.ReduceOp.AVG)", ""),
    ("repaired", "dist.batch_isend_irecv([sending, receiving])", "[dist.irecv(received, (me - 1) % n), dist.isend(x, (me + 1) % n)]", "batch_isend_irecv"),
    ("repaired", "            dist.reduce(loss, dst=0)\n            return loss / dist.get_world_size() if dist.get_rank() == 0 else None", "            return loss if dist.get_rank() == 0 else None", ""),
    ("repaired", "            dist.broadcast(weights, src=0)\n            dist.all_reduce(rows)", "            dist.all_reduce(rows)", "weights"),
    ("repaired", "op=dist.ReduceOp.MAX", "op=dist.ReduceOp.MIN", "nothing to add"),
    ("repaired", "            fine = loss.isfinite().float()\n            dist.all_reduce(fine, op=dist.ReduceOp.MIN)\n", "            fine = loss.isfinite().float()\n", "the one to read"),
    ("repaired", "            if not fine:\n                return None\n", "", "talk before it"),
    ("repaired", "loss.isfinite()", "(~loss.isnan())", "talk before it"),
    ("repaired", "for work in dist.batch_isend_irecv([sending, receiving])", "for work in dist.batch_isend_irecv([sending]) + dist.batch_isend_irecv([receiving])", "one after the other"),
    ("repaired", "return gradient / dist.get_world_size()", "return gradient", ""),
    ("first_change", "job.nvlink * 1e9 / 2", "job.nvlink * 1e9", "both directions"),
    ("first_change", "job.network * 1e9 / 8", "job.network * 1e9", "Gbit/s"),
    ("first_change", " * job.cards / job.gpus  # a GPU's share", "", "share its cards"),
    ("first_change", "job.parameters * job.gradient_bytes", "job.parameters", "bytes per gradient"),
    ("first_change", "2 * (inside + between)", "(inside + between)", "all-gather"),
    ("first_change", "(latency + num_bytes / n / bandwidth)", "(num_bytes / n / bandwidth)", "latency"),
    ("first_change", "job.price + more", "job.price", "has its price"),
    ("first_change", "min(costs, key=costs.get)", "min(list(costs)[1:], key=costs.get)", "no change at all"),
    ("first_change", "min(costs, key=costs.get)", "max(costs, key=costs.get)", "and with"),
    ("all_to_all", "pieces[me] if other == me else", "", ""),
    ("all_to_all", "sizes[other][me]", "sizes[me][other]", ""),
    ("all_to_all", "range(1, n)", "range(n)", ""),
    ("all_to_all", "    for work in dist.batch_isend_irecv(messages) if messages else []:\n        work.wait()\n", "    dist.batch_isend_irecv(messages) if messages else []\n", "never waited for"),
    ("all_to_all", "    return received\n", "    pieces.clear()\n    return received\n", "have changed"),
    ("all_to_all", "    return received\n", "    return [piece.double() for piece in received]\n", "float32"),
]  # fmt: skip

_RING = """
class Ring:
    def __init__(self, order):
        at = order.index(dist.get_rank())
        self.walk = order[at:] + order[:at]

    def message(self, out, numbers):
        box = torch.zeros(numbers)
        turns = [(len(out), dist.send, out, self.walk[1]), (numbers, dist.recv, box, self.walk[-1])]
        for wanted, go, tensor, peer in turns if dist.get_rank() == min(self.walk) else turns[::-1]:
            if wanted:
                go(tensor, peer)
        return box

    def reduce_scatter(self, x, sizes):
        starts = [sum(sizes[:r]) for r in range(len(sizes))]
        cut = lambda r: x[starts[r] : starts[r] + sizes[r]]
        if len(sizes) == 1:
            return x.clone()
        out = cut(self.walk[-1]).contiguous()
        for r in self.walk[-2::-1]:
            out = self.message(out, sizes[r]) + cut(r)
        return out

    def all_gather(self, piece, sizes):
        have = {self.walk[0]: piece}
        out = piece
        for r in self.walk[:0:-1]:
            out = have[r] = self.message(out, sizes[r])
        return torch.cat([have[r] for r in sorted(have)])
"""
_RECURSIVE = """
def all_reduce(x, latency, bandwidth):
    me, n = dist.get_rank(), dist.get_world_size()
    steps = n.bit_length() - 1

    def exchange(out, partner):
        box = torch.empty_like(out)
        if me < partner:
            dist.send(out.clone(), partner)
            dist.recv(box, partner)
        else:
            dist.recv(box, partner)
            dist.send(out.clone(), partner)
        return box

    def halve(part, bit):
        if bit < 0:
            return
        half = len(part) // 2
        mine, other = (part[half:], part[:half]) if me >> bit & 1 else (part[:half], part[half:])
        mine.add_(exchange(other, me ^ 1 << bit))
        halve(mine, bit - 1)
        other.copy_(exchange(mine, me ^ 1 << bit))

    bytes = x.numel() * x.element_size()
    if n == 1:
        return
    if steps * latency >= (steps - 2 * (n - 1) / n) * bytes / bandwidth:
        for bit in range(steps):
            x.add_(exchange(x, me ^ 1 << bit))
    else:
        halve(x, steps - 1)
"""
_LISTS = """
def hierarchical(x, mesh):
    group, gpus = mesh["gpu"].get_group(), mesh["gpu"].size()
    sizes = [len(part) for part in x.tensor_split(gpus)]
    longest = max(sizes)
    rows = [torch.cat([part, part.new_zeros(longest - len(part))]) for part in x.tensor_split(gpus)]
    mine = torch.empty(longest)
    dist.reduce_scatter(mine, rows, group=group)
    if mesh["host"].size() > 1:
        both = [torch.empty(-(-longest // mesh["host"].size())) for _ in range(mesh["host"].size())]
        chunk = len(both[0])
        padded = torch.cat([mine, mine.new_zeros(chunk * len(both) - longest)])
        part = torch.empty(chunk)
        dist.reduce_scatter(part, list(padded.split(chunk)), group=mesh["host"].get_group())
        dist.all_gather(both, part, group=mesh["host"].get_group())
        mine = torch.cat(both)[:longest].contiguous()
    whole = [torch.empty(longest) for _ in range(gpus)]
    dist.all_gather(whole, mine, group=group)
    x[:] = torch.cat([part[:size] for part, size in zip(whole, sizes)])
"""
_OTHERWISE = """
def repaired():
    class Other:
        def shift(self, x):
            n, me, box = dist.get_world_size(), dist.get_rank(), torch.empty_like(x)
            if me == 0:
                dist.send(x, 1)
                dist.recv(box, n - 1)
            else:
                dist.recv(box, me - 1)
                dist.send(x, (me + 1) % n)
            return box

        def logged(self, loss):
            boxes = [torch.empty_like(loss) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
            dist.gather(loss, boxes)
            return torch.stack(boxes).mean(0) if boxes else None

        def loaded(self, weights, rows):
            dist.all_reduce(rows)
            if dist.get_rank():
                weights.zero_()
            dist.all_reduce(weights)
            return {"weights": weights, "rows": rows}

        def trained(self, batches):
            left, sums = list(batches), []
            while True:
                pair = torch.stack([left[0].sum() if left else torch.tensor(0.0), torch.tensor(float(bool(left)))])
                dist.all_reduce(pair)
                if not pair[1]:
                    return torch.stack(sums)
                left = left[1:]
                sums.append(pair[0])

        def guarded(self, loss, gradient):
            both = torch.cat([gradient, (~loss.isfinite()).float().view(1)])
            dist.all_reduce(both)
            return None if both[-1] else both[:-1] / dist.get_world_size()

    return Other
"""
_TWO_LOOPS = """
def all_to_all(pieces, sizes):
    me = dist.get_rank()
    received = [torch.zeros(row[me]) for row in sizes]
    received[me].copy_(pieces[me])
    for source in range(len(sizes)):  # one speaks, the others listen
        for to in range(len(sizes)):
            if source != to and sizes[source][to]:
                if me == source:
                    dist.send(pieces[to], to)
                elif me == to:
                    dist.recv(received[source], source)
    return tuple(received)
"""
RIGHT = {
    "ring": [_RING],
    "all_reduce": [_RECURSIVE],
    "hierarchical": [_LISTS],
    "repaired": [_OTHERWISE],
    "all_to_all": [_TWO_LOOPS],
}
