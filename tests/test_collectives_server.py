"""The parameter server: in step it averages gradients, stale it is a replay of the order that it noted."""

from __future__ import annotations

import sys
import time
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.launch import launch

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest
pytestmark = pytest.mark.usefixtures("no_leftovers")

STEPS, NUMEL = 12, 5 * 4 + 4 + 4 + 1


def small_net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1), torch.nn.Linear(1, 1))
    torch.nn.init.constant_(net[3].requires_grad_(False).weight, 1.5)  # frozen: does not travel
    torch.nn.init.constant_(net[3].bias, 0.1)
    return net.double()


def loss_of(net: torch.nn.Module, worker: int, step: int) -> torch.Tensor:
    """Squared error on a batch of its own for each worker and step; the target can be learned."""
    batch = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(16, 5, generator=batch, dtype=torch.float64)
    return (net(x) - torch.tanh(x.sum(1, keepdim=True))).square().mean()


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.03)


def sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def vector(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters() if p.requires_grad])


def served(make: Any, steps: int, staleness: int, server: int = 0, members: list[int] | None = None, lame: float = 0):
    """(report, final parameters, traffic) of each rank; ``lame``: seconds that the last worker takes longer a step."""
    from course_lib.collectives.by_hand import Traffic, parameter_server

    group = None if members is None else dist.new_group(members)
    if members is not None and dist.get_rank() not in members:
        return None
    net = small_net(seed=dist.get_rank() - server)  # only the server's own parameters count

    def timed(net: torch.nn.Module, worker: int, step: int) -> torch.Tensor:
        time.sleep(lame * (worker == dist.get_world_size(group) - 2))
        return loss_of(net, worker, step)

    with Traffic() as sent:
        report = parameter_server.train(net, timed, make, steps=steps, staleness=staleness, server=server, group=group)
    return vars(report), vector(net), vars(sent)


def averaged(make: Any, steps: int, workers: int) -> torch.Tensor:
    """One process that does what all-reduce would: average the workers' gradients, then step."""
    net = small_net()
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer = make(parameters)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(net, worker, step) for worker in range(workers)) / workers).backward()
        optimizer.step()
    return vector(net)


def replayed(make: Any, order: list[int], missed: list[int], workers: int) -> torch.Tensor:
    """One process that applies the gradients in ``order``, each computed on parameters ``missed`` updates old."""
    net = small_net()
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimizer, history, steps = make(parameters), [vector(net)], dict.fromkeys(range(workers), 0)
    for update, (worker, late) in enumerate(zip(order, missed, strict=True)):
        old = small_net()
        torch.nn.utils.vector_to_parameters(history[update - late], [p for p in old.parameters() if p.requires_grad])
        (loss_of(old, worker, steps[worker]) / workers).backward()
        for parameter, other in zip(parameters, [p for p in old.parameters() if p.requires_grad], strict=True):
            parameter.grad = other.grad
        optimizer.step()
        history.append(vector(net))
        steps[worker] += 1
    return history[-1]


@pytest.mark.parametrize(
    ("ranks", "server", "members", "make"),
    [(2, 0, None, adam), (3, 1, None, adam), (5, 3, [1, 2, 3, 4], sgd)],
)
def test_the_synchronous_server_averages_gradients(ranks, server, members, make):
    run = launch(served, make, STEPS, 0, server, members, ranks=ranks, threads=1, quiet=True)
    taking_part = [r for r in run.results if r is not None]
    workers = len(taking_part) - 1
    truth = averaged(make, STEPS, workers)
    size = NUMEL * 8
    for rank, result in enumerate(run.results):
        if result is None:
            continue
        report, parameters, sent = result
        assert torch.allclose(parameters, truth, rtol=1e-12, atol=1e-14)
        if rank == server:  # the bottleneck: all that the others send goes in, as much goes out
            assert (sent["messages"], sent["bytes"]) == ((STEPS + 1) * workers, (STEPS + 1) * workers * size)
            assert report["losses"] == [] and report["missed"] == [0] * STEPS * workers
            assert report["order"] == STEPS * list(range(workers))
        else:
            assert (sent["messages"], sent["bytes"], set(sent["to"])) == (STEPS, STEPS * size, {server})
            assert report["order"] == [] and len(report["losses"]) == STEPS


@pytest.mark.parametrize("staleness", [1, 3])
def test_the_stale_server_lets_fast_workers_run_ahead_but_not_further_than_its_bound(staleness):
    run = launch(served, sgd, STEPS, staleness, 0, None, 0.02, ranks=4, threads=1, quiet=True)
    report, parameters, sent = run.results[0]
    assert all(torch.equal(parameters, other) for _, other, _ in run.results)
    assert sorted(report["order"]) == sorted(STEPS * [0, 1, 2])
    assert torch.allclose(parameters, replayed(sgd, report["order"], report["missed"], 3), rtol=1e-12, atol=1e-14)
    done, furthest = [0, 0, 0], 0
    for worker in report["order"]:
        done[worker] += 1
        furthest = max(furthest, done[worker] - min(done))
    assert furthest == staleness + 1  # that far ahead a gradient may come; then its worker waits
    assert max(report["missed"]) > 0
    assert not torch.allclose(parameters, averaged(sgd, STEPS, 3), rtol=1e-6)
    assert sent["messages"] == (STEPS + 1) * 3


def test_the_stale_server_waits_less_for_a_slow_worker_only_until_the_bound():
    """With a bound as large as the training, the fast workers' last gradients come before the slow one's second half."""
    run = launch(served, sgd, STEPS, STEPS, 0, None, 0.05, ranks=3, threads=1, quiet=True)
    order = run.results[0][0]["order"]
    assert order[:STEPS].count(0) > 0.7 * STEPS


def test_a_stale_server_with_one_worker_is_plain_training_and_several_converge():
    one = launch(served, adam, STEPS, 2, 0, None, ranks=2, threads=1, quiet=True)
    assert torch.allclose(one.results[0][1], averaged(adam, STEPS, 1), rtol=1e-12, atol=1e-14)
    assert one.results[0][0]["missed"] == [0] * STEPS
    several = launch(served, sgd, 60, 2, 0, None, ranks=4, threads=1, quiet=True)
    for report, _, _ in several.results[1:]:
        assert sum(report["losses"][-5:]) < 0.5 * sum(report["losses"][:5])


def refusals() -> list[str]:
    from course_lib.collectives.by_hand import parameter_server

    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    other = small_net() if dist.get_rank() else torch.nn.Linear(3, 1).double()
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).double())
    told = []
    for net, options in [
        (small_net(), dict(steps=2, group=alone, server=dist.get_rank())),
        (small_net(), dict(steps=2, server=7)),
        (small_net(), dict(steps=-1)),
        (small_net(), dict(steps=2, staleness=-1)),
        (small_net(), dict(steps=2 + dist.get_rank())),
        (small_net(), dict(steps=2, staleness=dist.get_rank())),
        (other, dict(steps=2)),
        (mixed, dict(steps=2)),
    ]:
        with pytest.raises(ValueError) as told_here:
            parameter_server.train(net, loss_of, sgd, **options)
        told.append(str(told_here.value))
    return told


def test_bad_input_is_told_before_anything_is_sent():
    for told in launch(refusals, ranks=2, threads=1, timeout=20, quiet=True).results:
        for sentence, words in zip(
            told,
            [
                "needs a rank to serve and one to work: launch at least 2 ranks",
                "root=7 is not in the group of ranks [0, 1]",
                "steps=-1, staleness=0: give whole numbers",
                "steps=2, staleness=-1: give whole numbers",
                "the ranks differ in their call (serve 2 steps, stale 0 on 0; serve",
                "the ranks differ in their call (serve 2 steps, stale 0 on 0; serve",
                "the ranks differ in their shape ((4,) on 0; (29,) on 1)",
                "give them one dtype",
            ],
            strict=True,
        ):
            assert words in sentence, told
