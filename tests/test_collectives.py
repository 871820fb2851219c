"""Each hand-written collective against the library's call: result, bytes a rank sent, number of messages."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import RanksHung, launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")

RANKS = [1, 2, 3, 4, 5, 8]
DTYPES = [torch.int64, torch.float64, torch.bfloat16, torch.float32]
NUMELS = [0, 3, 120, 43]  # nothing; less than the ranks; divisible by each of RANKS; by none
Case = tuple[str, int, torch.dtype]  # algorithm, elements, dtype


def balanced(numel: int, parts: int) -> list[int]:
    return [numel // parts + (i < numel % parts) for i in range(parts)]


def shards(numel: int, parts: int) -> list[int]:
    """Equal sizes where ``parts`` divides ``numel``; else sizes that differ, one of them 0 from three parts on."""
    sizes = balanced(numel, parts)
    if parts > 2 and numel % parts:
        sizes[-1], sizes[0] = 0, sizes[0] + sizes[-1]
    return sizes


# ------------------------------------------------------------------------- both calls, on the ranks
def number(*where: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers from -4 to 4, so that a sum over 8 ranks is exact in any order and in bfloat16 too."""
    seed = sum(7919**i * (w + 1) for i, w in enumerate(where))
    return torch.randint(-4, 5, (numel,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(name: str, numel: int, dtype: torch.dtype, group: Any) -> tuple[Any, Any, Callable[[], None]]:
    """(what ours leaves, what the library's leaves, call ours) for this rank; the library has been called."""
    from course_lib.collectives import by_hand

    members = dist.get_process_group_ranks(group)
    rank, n = dist.get_rank(group), len(members)
    root = members[n // 2]
    algorithm, kind = name.split(".")
    call = getattr(getattr(by_hand, algorithm), kind)

    def value(*where: int, size: int = numel) -> torch.Tensor:
        return number(*where, numel=size, dtype=dtype)

    def empty(sizes: list[int]) -> list[torch.Tensor]:
        return [torch.full((size,), 77).to(dtype) for size in sizes]

    if kind in ("all_reduce", "broadcast", "reduce"):
        ours, theirs = value(rank).view(1, -1), value(rank)
        arguments = {} if kind == "all_reduce" else {"root": root}
        if kind == "all_reduce":
            dist.all_reduce(theirs, group=group)
        elif kind == "broadcast":
            dist.broadcast(theirs, root, group)
        else:
            dist.reduce(theirs, root, group=group)  # gloo's leaves partial sums on the others, ours what was there
            theirs = theirs if members[rank] == root else value(rank)
        return ours, theirs.view(1, -1), lambda: call(ours, group=group, **arguments)
    sizes = shards(numel, n)
    equal = numel % n == 0  # most of gloo's calls refuse other sizes
    if kind == "all_gather":
        mine, ours, theirs = value(rank, size=sizes[rank]), empty(sizes), [value(i, size=sizes[i]) for i in range(n)]
        if equal:
            dist.all_gather(theirs := empty(sizes), mine, group=group)
        return ours, theirs, lambda: call(ours, mine, group)
    if kind == "reduce_scatter":
        inputs = [value(rank, i, size=sizes[i]) for i in range(n)]
        ours, whole = empty(sizes)[rank], torch.cat(inputs)
        dist.all_reduce(whole, group=group)
        theirs = whole.split(sizes)[rank]
        if equal:
            dist.reduce_scatter(theirs := empty(sizes)[rank], [t.clone() for t in inputs], group=group)
        return ours, theirs, lambda: call(ours, inputs, group)
    at_root = members[rank] == root
    if kind == "gather":
        mine, ours = value(rank, size=sizes[rank]), empty(sizes) if at_root else None
        theirs = [value(i, size=sizes[i]) for i in range(n)] if at_root else None
        if equal:
            dist.gather(mine, theirs := empty(sizes) if at_root else None, root, group)
        return ours, theirs, lambda: call(mine, ours, root, group)
    assert kind == "scatter"
    inputs = [value(root, i, size=sizes[i]) for i in range(n)] if at_root else None
    ours, theirs = empty(sizes)[rank], value(root, rank, size=sizes[rank])
    if equal:
        dist.scatter(theirs := empty(sizes)[rank], inputs, root, group)
    return ours, theirs, lambda: call(ours, inputs, root, group)
    there = [[numel // n if algorithm == "naive" else (i + 2 * j) % 4 for j in range(n)] for i in range(n)]
    inputs = [value(rank, j, size=there[rank][j]) for j in range(n)]
    ours, theirs = empty([there[i][rank] for i in range(n)]), empty([there[i][rank] for i in range(n)])
    flat = torch.empty(sum(len(t) for t in theirs), dtype=dtype)
    dist.all_to_all_single(flat, torch.cat(inputs), [len(t) for t in theirs], [len(t) for t in inputs], group=group)
    return ours, list(flat.split([len(t) for t in theirs])), lambda: call(ours, inputs, group)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(same(a, b) for a, b in zip(ours, theirs, strict=True))
    return ours is theirs is None or torch.equal(ours, theirs)


def try_all(cases: list[Case], members: list[int] | None = None) -> list[tuple[Case, bool, dict[str, Any]]]:
    """On each rank: (case, equal to the library's, traffic) for each case, in the group of ``members``."""
    from course_lib.collectives.by_hand import Traffic

    group = None if members is None else dist.new_group(members)
    found = []
    for case in cases if members is None or dist.get_rank() in members else []:
        ours, theirs, call = both(*case, group)
        with Traffic() as sent:
            call()
        found.append((case, same(ours, theirs), vars(sent)))
    return found


# ------------------------------------------------------------------- what a rank should have sent
def expected(name: str, numel: int, n: int, rank: int) -> list[int]:
    """Elements of each message that member ``rank`` of ``n`` sends, by what the algorithm's text says."""
    algorithm, kind = name.split(".")
    root, core = n // 2, 1 << n.bit_length() - 1
    place = (rank - root) % n
    sizes = shards(numel, n)
    if algorithm == "ring":
        chunks = balanced(numel, n) if kind == "all_reduce" else sizes
        phases = {"reduce_scatter": [rank], "all_gather": [(rank + 1) % n], "all_reduce": [rank, (rank + 1) % n]}
        return [size for left_out in phases[kind] for i, size in enumerate(chunks) if i != left_out]
    if algorithm == "tree":
        onward = {0: [2**i for i in range(4) if 2**i < n]}
        spread = {p: [k for k in (1, 2, 4) if p < k and p + k < n] for p in range(1, n)} | onward
        if kind == "all_reduce":
            return [numel] * (len(spread[rank]) + (rank > 0))
        return [numel] * (len(spread[place]) if kind == "broadcast" else int(place > 0))
    if algorithm == "recursive_doubling":
        if rank >= core:
            return [numel]
        return [numel] * (core.bit_length() - 1) + [numel] * (rank + core < n)
    return {
        "broadcast": [numel] * (n - 1) * (place == 0),
        "reduce": [numel] * (place > 0),
        "all_reduce": [numel] * (n - 1 if rank == 0 else 1),
        "gather": [sizes[rank]] * (place > 0),
        "scatter": [size for i, size in enumerate(sizes) if i != root] if place == 0 else [],
    }[kind]


NAMES = [
    *(f"naive.{kind}" for kind in ("broadcast", "reduce", "all_reduce", "gather", "scatter")),
    *("tree.broadcast", "tree.reduce", "tree.all_reduce", "recursive_doubling.all_reduce"),
    *("ring.all_reduce", "ring.reduce_scatter", "ring.all_gather"),
]


def hold(found: list[tuple[Case, bool, dict[str, Any]]], n: int, rank: int) -> None:
    """What one rank found against arithmetic."""
    for case, equal, sent in found:
        name, numel, dtype = case
        assert equal, f"{case}: member {rank} of {n} got another result than the library"
        messages = [m for m in expected(name, numel, n, rank) if m]
        actual = (sent["messages"], sent["bytes"], sent["largest"])
        size = dtype.itemsize
        assert actual == (len(messages), sum(messages) * size, max(messages, default=0) * size), (case, n, rank)
        assert sum(sent["to"].values()) == sent["bytes"]


@pytest.mark.parametrize("n", RANKS)
def test_every_algorithm_gives_what_the_library_gives_and_sends_what_its_text_says(n):
    each = (
        zip(NUMELS, DTYPES, strict=True)
        if n > 4
        else itertools.product(NUMELS, DTYPES if n == 3 else DTYPES[n % 2 :: 2])
    )
    cases = [(name, numel, dtype) for numel, dtype in each for name in NAMES]
    run = launch(try_all, cases, ranks=n, threads=1, quiet=True)
    for rank, found in enumerate(run.results):
        assert [case for case, *_ in found] == cases
        hold(found, n, rank)
        # the launch's recorder sees the same messages
        recorded = [c.bytes for c in run.collectives if c.rank == rank and c.kind == "send"]
        assert len(recorded) == sum(sent["messages"] for *_, sent in found)
        assert sum(recorded) == sum(sent["bytes"] for *_, sent in found)


@pytest.mark.parametrize("members", [[1, 3], [1, 2, 4], [4, 2, 3, 1]])
def test_groups_that_do_not_begin_with_rank_0(members):
    cases = [(name, 43, torch.float32) for name in NAMES]
    run = launch(try_all, cases, members, ranks=5, threads=1, quiet=True)
    ordered = sorted(members)  # new_group numbers its members by their global rank
    for rank, found in enumerate(run.results):
        assert len(found) == (len(NAMES) if rank in members else 0)
        hold(found, len(members), ordered.index(rank) if rank in members else 0)
        assert all(set(sent["to"]) <= set(members) - {rank} for *_, sent in found)


# ------------------------------------------------------------------------------------ the ring itself
def big_ring(sizes: list[int]) -> list[tuple[float, dict[str, Any], int | None]]:
    """(largest difference to the library's sum over its largest value, traffic, bytes on the wire) for each size."""
    from course_lib.collectives.by_hand import Traffic, ring
    from course_lib.observe import WireMeter

    found = []
    for numel in sizes:
        value = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
        theirs = value.clone()
        dist.all_reduce(theirs)
        with WireMeter() as wire, Traffic() as sent:
            ring.all_reduce(value)
        dist.barrier()
        found.append(((value - theirs).abs().max().item() / theirs.abs().max().item(), vars(sent), wire.bytes))
    return found


def test_ring_all_reduce_sends_twice_n_minus_1_nths_of_the_bytes_and_never_the_whole_tensor():
    n, sizes = 4, [2**18, 2**18 + 3]
    run = launch(big_ring, sizes, ranks=n, threads=1, quiet=True)
    for rank, found in enumerate(run.results):
        for numel, (difference, sent, wire) in zip(sizes, found, strict=True):
            assert difference < 1e-6
            assert sent["messages"] == 2 * (n - 1) and sent["largest"] == -(-numel // n) * 4
            assert set(sent["to"]) == {(rank + 1) % n}
            chunks = balanced(numel, n)
            assert sent["bytes"] == 4 * (2 * numel - chunks[rank] - chunks[(rank + 1) % n])
            if numel % n == 0:
                assert sent["bytes"] == 2 * (n - 1) / n * 4 * numel
            assert wire is None or sent["bytes"] <= wire <= 1.01 * sent["bytes"]


def blocking_sends() -> None:
    """From here on ``isend`` returns only when the message has been received, as a send may."""
    from torch.distributed import distributed_c10d

    original = dist.isend

    def isend(*args, **kwargs):
        original(*args, **kwargs).wait()
        return SimpleNamespace(wait=lambda: True)

    dist.isend = distributed_c10d.isend = isend


def everything_with_blocking_sends(numel: int) -> list[bool]:
    blocking_sends()
    found = []
    for name in NAMES:
        ours, theirs, call = both(name, numel, torch.float32, None)
        call()
        found.append(same(ours, theirs))
    return found


def test_no_deadlock_where_a_send_blocks_until_it_is_received():
    assert launch(everything_with_blocking_sends, 2**18, ranks=3, threads=1, timeout=20, quiet=True).results == 3 * [
        [True] * len(NAMES)
    ]


def test_blocking_sends_do_block():
    """The simulation would be worth nothing if a ring that sends first got through."""

    def send_first():
        blocking_sends()
        value, left, right = torch.ones(2**18), (dist.get_rank() - 1) % 3, (dist.get_rank() + 1) % 3
        dist.isend(value, right)
        dist.recv(value, left)

    with pytest.raises(RanksHung, match="wait in send"):
        launch(send_first, ranks=3, timeout=1, threads=1, quiet=True)
