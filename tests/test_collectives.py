"""Each hand-written collective: result, bytes a rank sent, number of messages; the parameter server against plain training;
and what they refuse, on every rank, before anything hangs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import refusals
import torch
import torch.distributed as dist
from refusals import assert_refused

from course_lib.collectives import by_hand
from course_lib.collectives.by_hand import Traffic, naive, parameter_server, ring
from course_lib.launch import launch

for module in (sys.modules[__name__], refusals):  # ranks need not import pytest
    cloudpickle.register_pickle_by_value(module)
pytestmark = pytest.mark.usefixtures("no_leftovers")

NAMES = [
    *(f"naive.{kind}" for kind in ("broadcast", "reduce", "all_reduce", "gather", "scatter")),
    *(f"ring.{kind}" for kind in ("all_reduce", "reduce_scatter", "all_gather")),
]
# nothing; less than the ranks; divisible by each number of ranks; by none
TENSORS = [(0, torch.int64), (3, torch.float64), (120, torch.bfloat16), (43, torch.float32)]
Case = tuple[str, int, torch.dtype]  # algorithm, elements, dtype


def balanced(numel: int, parts: int) -> list[int]:
    return [numel // parts + (i < numel % parts) for i in range(parts)]


def shards(numel: int, parts: int) -> list[int]:
    """Equal sizes where ``parts`` divides ``numel``; else sizes that differ, one of them 0 from three parts on."""
    sizes = balanced(numel, parts)
    if parts > 2 and numel % parts:
        sizes[-1], sizes[0] = 0, sizes[0] + sizes[-1]
    return sizes


# ------------------------------------------------------------------------------------------ on the ranks
def number(*where: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers from -4 to 4, so that a sum over 8 ranks is exact in any order and in bfloat16 too."""
    seed = sum(7919**i * (w + 1) for i, w in enumerate(where))
    return torch.randint(-4, 5, (numel,), generator=torch.Generator().manual_seed(seed)).to(dtype)


def play(name: str, numel: int, dtype: torch.dtype, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the call leaves on this rank, what it should leave there)."""
    members = dist.get_process_group_ranks(group)
    rank, n, root, sizes = dist.get_rank(group), len(members), len(members) // 2, shards(numel, len(members))
    algorithm, kind = name.split(".")
    call = getattr(getattr(by_hand, algorithm), kind)
    if kind in ("all_reduce", "reduce", "broadcast"):
        tensors = [number(i, numel=numel, dtype=dtype).view(1, -1) for i in range(n)]
        tensor = tensors[rank].clone()
        call(tensor, group=group, **({} if kind == "all_reduce" else {"root": members[root]}))
        if kind == "broadcast":
            return tensor, tensors[root]
        return tensor, tensors[rank] if kind == "reduce" and rank != root else sum(tensors)
    # a row for each rank, with a piece for each rank
    rows = [[number(i, j, numel=sizes[j], dtype=dtype) for j in range(n)] for i in range(n)]
    outputs = [torch.full((size,), 77).to(dtype) for size in sizes]
    if kind == "reduce_scatter":
        call(outputs[rank], rows[rank], group)
        return outputs[rank], sum(row[rank] for row in rows)
    if kind == "scatter":
        call(outputs[rank], rows[root] if rank == root else None, members[root], group)
        return outputs[rank], rows[root][rank]
    if kind == "all_gather":
        call(outputs, rows[0][rank], group)
    else:
        call(rows[0][rank], outputs if rank == root else None, members[root], group)
    untouched = kind == "gather" and rank != root
    return torch.cat(outputs), torch.full((numel,), 77).to(dtype) if untouched else torch.cat(rows[0])


def try_all(cases: list[Case], members: list[int] | None = None) -> list[tuple[Case, bool, dict[str, Any]]]:
    """On each rank: (case, is the result right, traffic) for each case, in the group of ``members``."""
    group = None if members is None else dist.new_group(members)
    results = []
    for case in cases if members is None or dist.get_rank() in members else []:
        with Traffic() as sent:
            result, expected = play(*case, group)
        results.append((case, torch.equal(result, expected), vars(sent)))
    return results


# ------------------------------------------------------------------- what a rank should have sent
def messages_of(name: str, numel: int, n: int, rank: int) -> list[int]:
    """Elements of each message that member ``rank`` of ``n`` sends, by what the algorithm's text says."""
    algorithm, kind = name.split(".")
    root, sizes = n // 2, shards(numel, n)
    if algorithm == "ring":
        chunks = balanced(numel, n) if kind == "all_reduce" else sizes
        left_out = {"reduce_scatter": [rank], "all_gather": [(rank + 1) % n], "all_reduce": [rank, (rank + 1) % n]}
        return [size for chunk in left_out[kind] for i, size in enumerate(chunks) if i != chunk]
    return {
        "broadcast": [numel] * (n - 1) * (rank == root),
        "reduce": [numel] * (rank != root),
        "all_reduce": [numel] * (n - 1 if rank == 0 else 1),
        "gather": [sizes[rank]] * (rank != root),
        "scatter": [size for i, size in enumerate(sizes) if i != root] if rank == root else [],
    }[kind]


def hold(results: list[tuple[Case, bool, dict[str, Any]]], n: int, rank: int) -> None:
    """What one rank found against arithmetic."""
    for case, right, sent in results:
        name, numel, dtype = case
        assert right, f"{case}: member {rank} of {n} got a wrong result"
        messages = [m for m in messages_of(name, numel, n, rank) if m]
        actual = (sent["messages"], sent["bytes"], sent["largest"])
        size = dtype.itemsize
        assert actual == (len(messages), sum(messages) * size, max(messages, default=0) * size), (case, n, rank)
        assert sum(sent["to"].values()) == sent["bytes"]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_each_gives_the_right_result_and_sends_what_its_text_says(n):
    cases = [(name, *tensor) for tensor in TENSORS for name in NAMES]
    run = launch(try_all, cases, ranks=n, threads=1, quiet=True)
    for rank, results in enumerate(run.results):
        assert [case for case, *_ in results] == cases
        hold(results, n, rank)
        # the launch's recorder sees the same messages
        recorded = [c.bytes for c in run.collectives if c.rank == rank and c.kind == "send"]
        assert len(recorded) == sum(sent["messages"] for *_, sent in results)
        assert sum(recorded) == sum(sent["bytes"] for *_, sent in results)


def test_groups_that_do_not_begin_with_rank_0():
    members = [4, 2, 3, 1]
    run = launch(try_all, [(name, 43, torch.float32) for name in NAMES], members, ranks=5, threads=1, quiet=True)
    for rank, results in enumerate(run.results):
        assert len(results) == (len(NAMES) if rank in members else 0)
        hold(results, 4, rank - 1)  # new_group numbers its members by their global rank
        assert all(set(sent["to"]) <= set(members) - {rank} for *_, sent in results)


def try_all_with_blocking_sends(cases: list[Case]) -> list[tuple[Case, bool, dict[str, Any]]]:
    """``isend`` returns only when the message has been received, as a send may."""
    from torch.distributed import distributed_c10d

    original = dist.isend

    def isend(*args, **kwargs):
        original(*args, **kwargs).wait()
        return SimpleNamespace(wait=lambda: True)

    dist.isend = distributed_c10d.isend = isend
    return try_all(cases)


def test_no_deadlock_where_a_send_blocks_until_it_is_received():
    cases = [(name, 2**18, torch.float32) for name in NAMES]
    for results in launch(try_all_with_blocking_sends, cases, ranks=3, threads=1, quiet=True).results:
        assert [(case, True) for case in cases] == [(case, right) for case, right, _ in results]


# ----------------------------------------------------------------------------------- the parameter server
STEPS, NUMEL = 12, 5 * 4 + 4 + 4 + 1


def small_net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1), torch.nn.Linear(1, 1))
    torch.nn.init.constant_(net[3].requires_grad_(False).weight, 1.5)  # frozen: does not travel
    torch.nn.init.constant_(net[3].bias, 0.1)
    return net.double()


def loss_of(net: torch.nn.Module, worker: int, step: int) -> torch.Tensor:
    """Squared error on a batch of its own for each worker and step."""
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1000 * worker + step), dtype=torch.float64)
    return (net(x) - torch.tanh(x.sum(1, keepdim=True))).square().mean()


def make_adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.03)


def served(staleness: int, server: int, members: list[int]):
    """(report, final parameters, traffic) of each rank."""
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    net = small_net(seed=dist.get_rank() - server)  # only the server's own parameters count
    how = dict(steps=STEPS, staleness=staleness, server=server, group=group)
    with Traffic() as sent:
        report = parameter_server.train(net, loss_of, make_adam, **how)
    return vars(report), [p.detach() for p in net.parameters()], vars(sent)


def averaged(workers: int) -> list[torch.Tensor]:
    """One process that does what all-reduce would: average the workers' gradients, then step."""
    net = small_net()
    optimizer = make_adam([p for p in net.parameters() if p.requires_grad])
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss_of(net, worker, step) for worker in range(workers)) / workers).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def test_the_synchronous_server_averages_gradients_through_one_link():
    server, workers, size = 3, 3, NUMEL * 8
    run = launch(served, 0, server, [1, 2, 3, 4], ranks=5, threads=1, quiet=True)
    for rank, (report, parameters, sent) in enumerate(run.results[1:], start=1):
        torch.testing.assert_close(parameters, averaged(workers), rtol=1e-12, atol=1e-14)
        if rank == server:  # the bottleneck: all that the others send goes in, as much goes out
            assert (sent["messages"], sent["bytes"]) == ((STEPS + 1) * workers, (STEPS + 1) * workers * size)
            assert report["missed"] == [0] * STEPS * workers and report["order"] == STEPS * list(range(workers))
        else:
            assert (sent["messages"], sent["to"]) == (STEPS, {server: STEPS * size})
            assert len(report["losses"]) == STEPS


def test_the_stale_server_lets_no_worker_run_further_ahead_than_its_bound():
    run = launch(served, 1, 0, [0, 1, 2, 3], ranks=4, threads=1, quiet=True)
    report, parameters, _ = run.results[0]
    for _, others, _ in run.results:
        torch.testing.assert_close(parameters, others, rtol=0, atol=0)
    assert sorted(report["order"]) == sorted(STEPS * [0, 1, 2]) and max(report["missed"]) > 0
    done = [0, 0, 0]
    for worker in report["order"]:
        done[worker] += 1
        assert done[worker] - min(done) <= 1 + 1  # that far ahead a gradient may come; then its worker waits
    # with one worker nothing is stale: plain training
    (_, parameters, _), _ = launch(served, 2, 0, [0, 1], ranks=2, threads=1, quiet=True).results
    torch.testing.assert_close(parameters, averaged(1), rtol=1e-12, atol=1e-14)


# ----------------------------------------------------------------------------------------- what is refused
def refuse() -> None:
    rank, n, t = dist.get_rank(), dist.get_world_size(), torch.ones
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    own, alone = odd if rank % 2 else even, [dist.new_group([r]) for r in range(n)][rank]
    server = parameter_server.train
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    other = small_net() if rank else torch.nn.Linear(3, 1).double()
    calls = [
        ("shape", lambda: ring.all_reduce(t(4 + (rank == 1)))),
        ("shape", lambda: naive.all_reduce(t(2, 3) if rank else t(3, 2))),
        ("dtype", lambda: ring.all_reduce(t(4, dtype=torch.float64 if rank == 3 else torch.float32))),
        ("root", lambda: naive.broadcast(t(4), root=int(rank == 2))),
        ("root=4", lambda: naive.reduce(t(4), root=n)),
        (f"root={1 - rank % 2}", lambda: naive.reduce(t(4), root=1 - rank % 2, group=own)),
        ("naive.all_reduce on 0", lambda: ring.all_reduce(t(4)) if rank else naive.all_reduce(t(4))),
        ("contiguous", lambda: ring.all_reduce(t(4, 4).t()[:, :2])),
        ("float", lambda: naive.all_reduce(1.0)),
        ("list of 3", lambda: ring.all_gather([t(2)] * (n - 1), t(2))),
        ("torch.int64", lambda: ring.all_gather([t(2)] * n, t(2).long())),
        ("3 elements", lambda: ring.all_gather([t(2)] * n, t(2 + (rank == 1)))),
        ("3 elements", lambda: ring.reduce_scatter(t(2), [t(3 if i == rank == 2 else 2) for i in range(n)])),
        ("2 elements", lambda: naive.scatter(t(1), [t(1 + i // 3) for i in range(n)] if rank == 0 else None)),
        ("3 elements", lambda: naive.gather(t(3), [t(2)] * n if rank == 0 else None)),
        ("2 ranks", lambda: server(small_net(), loss_of, make_adam, steps=2, server=rank, group=alone)),
        ("root=7", lambda: server(small_net(), loss_of, make_adam, steps=2, server=7)),
        ("steps=-1", lambda: server(small_net(), loss_of, make_adam, steps=-1)),
        ("staleness=-1", lambda: server(small_net(), loss_of, make_adam, steps=2, staleness=-1)),
        ("steps", lambda: server(small_net(), loss_of, make_adam, steps=2 + rank)),
        ("shape", lambda: server(other, loss_of, make_adam, steps=2)),
        ("dtype", lambda: server(mixed, loss_of, make_adam, steps=2)),
    ]
    if rank == 0:
        calls += [("rank 0", lambda: ring.all_reduce(t(4), group=odd)), ("NoneType", lambda: naive.scatter(t(2)))]
    assert_refused([(call, ValueError, word) for word, call in calls])
    naive.broadcast(t(4), root=dist.get_process_group_ranks(own)[1], group=own)  # a global rank, as in the library
    ring.all_reduce(last := torch.nn.Parameter(t(5)))  # nothing of a refused call is left in the connections
    assert last.tolist() == [n] * 5 and last.requires_grad


def test_bad_input_is_refused_on_every_rank_before_it_hangs():
    launch(refuse, ranks=4, threads=1, quiet=True)
