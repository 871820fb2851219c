"""The hand-written all-reduces: sums, bytes, messages; the parameter server against plain training; what they refuse."""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import pytest
import refusals
import torch
import torch.distributed as dist
from refusals import assert_refused

from course_lib.collectives.by_hand import Traffic, naive, parameter_server, ring
from course_lib.launch import launch

for module in (sys.modules[__name__], refusals):  # ranks need not import pytest
    cloudpickle.register_pickle_by_value(module)
pytestmark = pytest.mark.usefixtures("no_leftovers")

ALL_REDUCES = {"naive": naive.all_reduce, "ring": ring.all_reduce}
# nothing; less than the ranks; divisible by each number of ranks; by none
TENSORS = [(0, torch.int64), (3, torch.float64), (120, torch.bfloat16), (43, torch.float32)]
Result = tuple[str, int, torch.dtype, bool, dict[str, Any]]  # algorithm, elements, dtype, is the sum right, traffic


# ------------------------------------------------------------------------------------------ on the ranks
def numbers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers from -4 to 4, so that a sum over 8 ranks is exact in any order and in bfloat16 too."""
    return torch.randint(-4, 5, (1, numel), generator=torch.Generator().manual_seed(rank)).to(dtype)


def add_up(tensors: list[tuple[int, torch.dtype]], members: list[int] | None = None) -> list[Result]:
    """Each tensor by each algorithm, in the group of ``members``."""
    group = None if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return []
    rank, size, results = dist.get_rank(group), dist.get_world_size(group), []
    for numel, dtype in tensors:
        expected = sum(numbers(i, numel, dtype) for i in range(size))
        for name, all_reduce in ALL_REDUCES.items():
            tensor = numbers(rank, numel, dtype)
            with Traffic() as sent:
                all_reduce(tensor, group)
            results.append((name, numel, dtype, torch.equal(tensor, expected), vars(sent)))
    return results


# ------------------------------------------------------------------- what a rank should have sent
def messages_of(name: str, numel: int, n: int, rank: int) -> list[int]:
    """Elements of each message that member ``rank`` of ``n`` sends, by what the algorithm's text says."""
    if name == "naive":
        return [numel] * (n - 1 if rank == 0 else 1)
    chunks = [numel // n + (i < numel % n) for i in range(n)]
    left_out = (rank, (rank + 1) % n)  # one in each round
    return [size for chunk in left_out for i, size in enumerate(chunks) if i != chunk]


def hold(results: list[Result], n: int, rank: int) -> None:
    """What one rank found against arithmetic."""
    for name, numel, dtype, right, sent in results:
        case = (name, numel, dtype, n, rank)
        assert right, case
        messages = [dtype.itemsize * m for m in messages_of(name, numel, n, rank) if m and n > 1]
        actual = (sent["messages"], sent["bytes"], sent["largest"])
        assert actual == (len(messages), sum(messages), max(messages, default=0)), case


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_each_gives_the_right_sum_and_sends_what_its_text_says(n):
    run = launch(add_up, TENSORS, ranks=n, threads=1, quiet=True)
    for rank, results in enumerate(run.results):
        assert len(results) == len(TENSORS) * len(ALL_REDUCES)
        hold(results, n, rank)
        # the launch's recorder sees the same messages
        recorded = [c.bytes for c in run.collectives if c.rank == rank and c.kind == "send"]
        assert len(recorded) == sum(sent["messages"] for *_, sent in results)
        assert sum(recorded) == sum(sent["bytes"] for *_, sent in results)


def test_groups_that_do_not_begin_with_rank_0():
    members = [4, 2, 3, 1]
    run = launch(add_up, TENSORS, members, ranks=5, threads=1, quiet=True)
    for rank, results in enumerate(run.results):
        assert bool(results) == (rank in members)
        hold(results, 4, rank - 1)  # new_group numbers its members by their global rank
        assert all(set(sent["to"]) <= set(members) - {rank} for *_, sent in results)


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


def served(staleness: int, server: int):
    """(report, final parameters, traffic) of each rank."""
    net = small_net(seed=dist.get_rank() - server)  # only the server's own parameters count
    with Traffic() as sent:
        report = parameter_server.train(net, loss_of, make_adam, steps=STEPS, staleness=staleness, server=server)
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
    server, workers, size = 2, 3, NUMEL * 8
    run = launch(served, 0, server, ranks=4, threads=1, quiet=True)
    for rank, (report, parameters, sent) in enumerate(run.results):
        torch.testing.assert_close(parameters, averaged(workers), rtol=1e-12, atol=1e-14)
        if rank == server:  # the bottleneck: all that the others send goes in, as much goes out
            assert (sent["messages"], sent["bytes"]) == ((STEPS + 1) * workers, (STEPS + 1) * workers * size)
            assert report["missed"] == [0] * STEPS * workers and report["order"] == STEPS * list(range(workers))
        else:
            assert (sent["messages"], sent["to"]) == (STEPS, {server: STEPS * size})
            assert len(report["losses"]) == STEPS


def test_the_stale_server_lets_no_worker_run_further_ahead_than_its_bound():
    run = launch(served, 1, 0, ranks=4, threads=1, quiet=True)
    report, parameters, _ = run.results[0]
    for _, others, _ in run.results:
        torch.testing.assert_close(parameters, others, rtol=0, atol=0)
    assert sorted(report["order"]) == sorted(STEPS * [0, 1, 2]) and max(report["missed"]) > 0
    done = [0, 0, 0]
    for worker in report["order"]:
        done[worker] += 1
        assert done[worker] - min(done) <= 1 + 1  # that far ahead a gradient may come; then its worker waits


# ----------------------------------------------------------------------------------------- what is refused
def refuse() -> None:
    rank, n, t = dist.get_rank(), dist.get_world_size(), torch.ones
    odd = dist.new_group([1, 3])
    alone = [dist.new_group([r]) for r in range(n)][rank]
    server = parameter_server.train
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    calls = [
        ("shape", lambda: naive.all_reduce(t(2, 3) if rank else t(3, 2))),
        ("dtype", lambda: ring.all_reduce(t(4, dtype=torch.float64 if rank == 3 else torch.float32))),
        ("naive.all_reduce on 0", lambda: ring.all_reduce(t(4)) if rank else naive.all_reduce(t(4))),
        ("contiguous", lambda: ring.all_reduce(t(4, 4).t()[:, :2])),
        ("float", lambda: naive.all_reduce(1.0)),
        ("2 ranks", lambda: server(small_net(), loss_of, make_adam, steps=2, server=rank, group=alone)),
        ("root=7", lambda: server(small_net(), loss_of, make_adam, steps=2, server=7)),
        ("root", lambda: server(small_net(), loss_of, make_adam, steps=2, server=int(rank == 2))),
        ("staleness=-1", lambda: server(small_net(), loss_of, make_adam, steps=2, staleness=-1)),
        ("steps", lambda: server(small_net(), loss_of, make_adam, steps=2 + rank)),
        ("dtype", lambda: server(mixed, loss_of, make_adam, steps=2)),
    ]
    if rank == 0:
        calls.append(("rank 0", lambda: ring.all_reduce(t(4), group=odd)))
    assert_refused([(call, ValueError, word) for word, call in calls])
    ring.all_reduce(last := torch.nn.Parameter(t(5)))  # nothing of a refused call is left in the connections
    assert last.tolist() == [n] * 5 and last.requires_grad


def test_bad_input_is_refused_on_every_rank_before_it_hangs():
    launch(refuse, ranks=4, threads=1, quiet=True)
