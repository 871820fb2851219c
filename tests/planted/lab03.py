"""Answers to lab 3. RIGHT: name of the exercise -> an answer unlike the shipped one. WRONG: (exercise, answer, words)."""

import math
import re

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def _here():
    return dist.get_rank(), dist.get_world_size()


def _swap(out, to, into, source):
    """Send and receive at once."""
    works = [dist.irecv(into, source), dist.isend(out, to)]
    for work in works:
        work.wait()


# ----------------------------------------------------------------------------------------------------- ring all-reduce
def right_ring(tensor):
    """To the left, padded to equal chunks, even ranks send first: no handle is needed. The shipped one does none of it."""
    rank, n = _here()
    if n == 1:
        return
    chunk = math.ceil(tensor.numel() / n)
    rows = torch.zeros(n, chunk, dtype=tensor.dtype)
    rows.view(-1)[: tensor.numel()] = tensor.flatten()
    left, right, box = (rank - 1) % n, (rank + 1) % n, torch.empty(chunk, dtype=tensor.dtype)
    for step in range(2 * (n - 1)):
        out, into = (rank + step + 1) % n, (rank + step + 2) % n
        if rank % 2 == 0 and rank != n - 1 or n == 2 and rank == 0:
            dist.send(rows[out].clone(), left)
            dist.recv(box, right)
        else:
            dist.recv(box, right)
            dist.send(rows[out].clone(), left)
        if step < n - 1:
            rows[into] += box
        else:
            rows[into] = box
    tensor.copy_(rows.view(-1)[: tensor.numel()].view_as(tensor))


def _ring(*, whole=False, send_first=False, mean=False, dropped=False, half=False, copy=False, fine=1, grown=False):
    def all_reduce(tensor):
        rank, n = _here()
        left, right = (rank - 1) % n, (rank + 1) % n
        if whole:
            passing, box = tensor.clone(), torch.empty_like(tensor)
            for _ in range(n - 1):
                _swap(passing, right, box, left)
                passing.copy_(box)
                tensor += box
            return None
        flat = tensor.clone().view(-1) if copy else tensor.view(-1)
        chunks = list(flat.tensor_split(n))
        if dropped:
            size = len(flat) // n
            chunks = [flat[i * size : (i + 1) * size] for i in range(n)]
        for step in range((n - 1) if half else 2 * (n - 1)):
            out, into = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
            box = torch.empty_like(into)
            if send_first:
                dist.send(out, right)
                dist.recv(box, left)
            else:
                for a, b in zip(out.tensor_split(fine), box.tensor_split(fine), strict=True):
                    _swap(a, right, b, left)
            if step < n - 1 or grown:
                into += box
            else:
                into.copy_(box)
        if mean:
            tensor /= n
        return flat.view_as(tensor) if copy else None

    return all_reduce


def library_all_reduce(tensor):
    dist.all_reduce(tensor)


def functional_all_reduce(tensor):
    tensor.copy_(funcol.all_reduce(tensor, "sum", dist.group.WORLD))


# ------------------------------------------------------------------------------------------------------ reduce-scatter
def right_reduce_scatter(output, inputs):
    """Every piece straight to its owner, where the shipped answer goes round the ring."""
    rank, n = _here()
    total = inputs[rank].clone()
    for step in range(1, n):
        box = torch.empty_like(total)
        _swap(inputs[(rank + step) % n], (rank + step) % n, box, (rank - step) % n)
        total += box
    output.copy_(total)


def _reduce_scatter(*, shift=-1, mean=False, in_place=False, all_reduce=False, own=False):
    def reduce_scatter(output, inputs):
        rank, n = _here()
        chunks = inputs if in_place else [piece.clone() for piece in inputs]
        if own:
            output.copy_(inputs[rank])
            return
        left, right = (rank - 1) % n, (rank + 1) % n
        for step in range(2 * (n - 1) if all_reduce else n - 1):
            out, into = chunks[(rank + shift - step) % n], chunks[(rank + shift - step - 1) % n]
            box = torch.empty_like(into)
            _swap(out, right, box, left)
            if step < n - 1:
                into += box
            else:
                into.copy_(box)
        output.copy_(chunks[rank if all_reduce else (rank + shift + 1) % n])
        if mean:
            output /= n

    return reduce_scatter


def library_reduce_scatter(output, inputs):
    dist.reduce_scatter(output, inputs)


# ---------------------------------------------------------------------------------------------------------- all-gather
def right_all_gather(outputs, tensor):
    """The own shard straight to everybody, where the shipped answer goes round the ring."""
    rank, n = _here()
    outputs[rank].copy_(tensor)
    works = [dist.irecv(outputs[i], i) for i in range(n) if i != rank and len(outputs[i])]
    works += [dist.isend(tensor, i) for i in range(n) if i != rank and len(tensor)]
    for work in works:
        work.wait()


def _all_gather(*, padded=False, own=True, shift=0, swap=True, first_size=False):
    def all_gather(outputs, tensor):
        rank, n = _here()
        size = max(len(output) for output in outputs)
        boxes = [torch.zeros(size) if padded else torch.empty_like(output) for output in outputs]
        if first_size:
            boxes = [torch.empty_like(tensor) for _ in outputs]
        boxes[rank][: len(tensor)] = tensor
        for step in range(n - 1):
            out, into = boxes[(rank - step) % n], boxes[(rank - step - 1) % n]
            _swap(out, (rank + 1) % n, into, (rank - 1) % n)
        for i, output in enumerate(outputs):
            at = (i + shift) % n
            if i != rank or own:
                if swap and len(boxes[at]) >= len(output):
                    output.copy_(boxes[at][: len(output)])
                elif not swap:
                    outputs[i] = boxes[at]

    return all_gather


def library_all_gather(outputs, tensor):
    for i, output in enumerate(outputs):
        if i == dist.get_rank():
            output.copy_(tensor)
        dist.broadcast(output, i)


# ------------------------------------------------------------------------------------------------------ broadcast tree
def right_tree(tensor, root):
    """By halves of the remaining ranks, largest distance first; the shipped answer doubles from distance 1."""
    rank, n = _here()
    place = (rank - root) % n
    step = 1 << max(n - 1, 0).bit_length()
    while step > 1:
        half = step // 2
        if place % step == 0 and place + half < n:
            dist.send(tensor, (rank + half) % n)
        elif place % step == half:
            dist.recv(tensor, (rank - half) % n)
        step = half


def star(tensor, root):
    rank, n = _here()
    if rank == root:
        for other in range(n):
            if other != root:
                dist.send(tensor, other)
    else:
        dist.recv(tensor, root)


def chain(tensor, root):
    rank, n = _here()
    place = (rank - root) % n
    if place:
        dist.recv(tensor, (rank - 1) % n)
    if place < n - 1:
        dist.send(tensor, (rank + 1) % n)


def tree_of_zero(tensor, root):
    right_tree(tensor, 0)


def tree_to_power(tensor, root):
    """Gives up where the ranks are no power of two."""
    rank, n = _here()
    place, step = (rank - root) % n, 1
    while 2 * step <= n:
        if place < step:
            dist.send(tensor, (rank + step) % n)
        elif place < 2 * step:
            dist.recv(tensor, (rank - step) % n)
        step *= 2


def tree_result(tensor, root):
    copy = tensor.clone()
    right_tree(copy, root)
    return copy


def library_broadcast(tensor, root):
    dist.broadcast(tensor, root)


# ---------------------------------------------------------------------------------------------------------------- grid
def right_grid(rank, dp, tp):
    """By arithmetic and new_subgroups_by_enumeration, where the shipped answer loops over a grid."""
    rows = [[d * tp + t for t in range(tp)] for d in range(dp)]
    columns = [list(each) for each in zip(*rows, strict=True)]
    return tuple(dist.new_subgroups_by_enumeration(lines)[0] for lines in (rows, columns))


def _grid(*, swapped=False, turned=False, own_only=False, last=False, order=False):
    def groups(rank, dp, tp):
        grid = torch.arange(dp * tp).view(tp, dp) if turned else torch.arange(dp * tp).view(dp, tp)
        made = []
        for lines in (grid.tolist(), grid.T.tolist()):
            mine = None
            for line in lines[::-1] if order and rank % 2 else lines:
                if own_only and rank not in line:
                    continue
                group = dist.new_group(line)
                if rank in line or last:
                    mine = group
            made.append(mine)
        return tuple(made[::-1] if swapped else made)

    return groups


def grid_of_some(rank, dp, tp):
    """The last rank believes that it is in no group, and makes none."""
    return (None, None) if rank == dp * tp - 1 else _grid()(rank, dp, tp)


# ---------------------------------------------------------------------------------------------------------------- cost
def _cost(
    *,
    factor=True,
    bits=False,
    both=False,
    latency="steps",
    inner_only=False,
    size_of=True,
    share=True,
    cut=True,
    halves=2,
):
    def step_cost(parameters, bytes_each, nodes, gpus, nvlink_both_ways, nvlink_latency, network, network_latency):
        size = parameters * (bytes_each if size_of else 1)
        near = (nvlink_latency, nvlink_both_ways * 1e9 / (1 if both else 2))
        far = (network_latency, network * 1e9 / (1 if bits else 8))
        if inner_only:
            far = near

        def ring(n, amount, link, sharing=1):
            steps = halves * (n - 1)
            if n == 1:
                return 0.0
            paid = {"steps": steps, "none": 0, "once": halves / 2}[latency]
            moved = halves * amount * (n - 1) / n if factor else amount
            return paid * link[0] + moved * sharing / link[1]

        flat = ring(nodes * gpus, size, far if nodes > 1 else near)
        sharing = gpus if share and not inner_only else 1
        return flat, ring(gpus, size, near) + ring(nodes, size / (gpus if cut else 1), far, sharing)

    return step_cost


# ----------------------------------------------------------------------------------------------------------- diagnosis
def right_diagnosis(stacks):
    """By counting, where the shipped answer asks for one cause after the other."""
    where = [re.sub(r"\(.*", "", line).strip() for line in stacks]
    rank = min(range(len(stacks)), key=lambda r: where.count(where[r]))
    found = {"has": "left", "is": "branch"}.get(where[rank].split()[0])
    return rank, found or ("shapes" if where[rank].endswith(("recv", "send")) else "order")


def _diagnosis(*, rank=None, cause=None):
    def diagnose(stacks):
        at, why = right_diagnosis(stacks)
        if rank == "other":
            at = (at + 1) % len(stacks)
        elif rank is not None:
            at = rank
        return at, (cause or {}).get(why, why)

    return diagnose


RIGHT = {
    "ring_all_reduce": right_ring,
    "reduce_scatter": right_reduce_scatter,
    "all_gather": right_all_gather,
    "broadcast_tree": right_tree,
    "grid_groups": right_grid,
    "step_cost": _cost(),
    "diagnose": right_diagnosis,
}
WRONG = [
    ("ring_all_reduce", _ring(whole=True), "sends the whole tensor in one message"),
    ("ring_all_reduce", _ring(send_first=True), "every rank sends first"),
    ("ring_all_reduce", _ring(mean=True), "that is the mean"),
    ("ring_all_reduce", _ring(dropped=True), "the chunks differ in size, and is off by"),
    ("ring_all_reduce", _ring(half=True), "that was the reduce-scatter, the first half"),
    ("ring_all_reduce", _ring(copy=True), "all-reduce works in place"),
    ("ring_all_reduce", _ring(fine=3), "each message pays the latency"),
    ("ring_all_reduce", _ring(grown=True), "the second round adds again"),
    ("ring_all_reduce", library_all_reduce, "calls the library's all_reduce"),
    ("ring_all_reduce", functional_all_reduce, "calls the library's all_reduce"),
    ("reduce_scatter", _reduce_scatter(shift=0), "ends with the sum of the pieces for rank 1"),
    ("reduce_scatter", _reduce_scatter(mean=True), "that is the mean"),
    ("reduce_scatter", _reduce_scatter(in_place=True), "changes its inputs"),
    ("reduce_scatter", _reduce_scatter(all_reduce=True), "that is an all-reduce, of which you keep one piece"),
    ("reduce_scatter", _reduce_scatter(own=True), "nothing was added to it"),
    ("reduce_scatter", library_reduce_scatter, "calls the library's reduce_scatter"),
    ("all_gather", _all_gather(padded=True), "you pad every shard to the largest"),
    ("all_gather", _all_gather(own=False), "lacks its own shard"),
    ("all_gather", _all_gather(shift=1), "holds the shard of rank 1"),
    ("all_gather", _all_gather(swap=False), "leaves the tensors of `outputs` untouched"),
    ("all_gather", _all_gather(first_size=True), "a message came that is longer than the tensor"),
    ("all_gather", library_all_gather, "calls the library's broadcast"),
    ("broadcast_tree", star, "the root sends 3 messages, one after the other"),
    ("broadcast_tree", chain, "it takes 3 rounds, and 2 are enough"),
    ("broadcast_tree", tree_of_zero, "count the ranks from the root"),
    ("broadcast_tree", tree_to_power, "with root 0 on 5 ranks the tensor never reaches rank 4"),
    ("broadcast_tree", tree_result, "broadcast works in place"),
    ("broadcast_tree", library_broadcast, "calls the library's broadcast"),
    ("grid_groups", _grid(swapped=True), "row and column are swapped"),
    ("grid_groups", _grid(turned=True), "as view(tp, dp) does"),
    ("grid_groups", _grid(own_only=True), "every rank must make every group, in the same order"),
    ("grid_groups", _grid(order=True), "every rank must make every group, in the same order"),
    ("grid_groups", grid_of_some, "and rank 5 never does: new_group waits for ALL ranks"),
    ("grid_groups", _grid(last=True), "a rank keeps the two that hold it"),
    ("step_cost", _cost(factor=False), "leaves out 2(n-1)/n"),
    ("step_cost", _cost(bits=True), "takes the network's Gbit/s for GB/s"),
    ("step_cost", _cost(both=True), "counts both directions of NVLink for one"),
    ("step_cost", _cost(latency="none"), "has no latency"),
    ("step_cost", _cost(latency="once"), "pays the latency once"),
    ("step_cost", _cost(inner_only=True), "lets the inner link carry everything"),
    ("step_cost", _cost(size_of=False), "counts parameters where bytes are wanted"),
    ("step_cost", _cost(halves=1), "has the reduce-scatter alone"),
    ("step_cost", _cost(share=False), "gives every GPU the whole network link"),
    ("step_cost", _cost(cut=False), "sends all gradients of every GPU over the network"),
    ("step_cost", _cost(bits=True, latency="none"), "; and it has no latency"),
    ("diagnose", _diagnosis(rank="other"), "look for the rank whose line differs"),
    ("diagnose", _diagnosis(rank=7), "there is no rank 7"),
    ("diagnose", _diagnosis(cause={"left": "branch"}), "it made fewer calls than the others"),
    ("diagnose", _diagnosis(cause={"shapes": "order"}), "waits for a message that nobody sends"),
    ("diagnose", _diagnosis(cause={"branch": "left"}), "is at work in a line of its own"),
    ("diagnose", _diagnosis(cause={"order": "shapes"}), "the same calls in another order"),
    ("diagnose", _diagnosis(cause={"order": "a bug"}), "is none of the causes"),
]
