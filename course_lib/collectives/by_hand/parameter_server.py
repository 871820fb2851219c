"""The parameter server: one rank holds the parameters, the w others compute gradients on them.

1. A worker sends its gradient to the server and gets parameters back: S bytes each way, two messages a step.
2. Synchronous (``staleness=0``): the server waits for all w gradients, averages them, takes one step of the optimizer and
   answers everybody: the same numbers as gradient averaging by all-reduce.
3. Stale: each gradient is applied, 1/w of it, as it comes, and its sender alone is answered. Nobody waits for a slow
   worker, but others have changed the parameters meanwhile; who is more than ``staleness`` steps ahead has to wait.
4. Either way w · S bytes a step go into the server and w · S out of it, through one link: the bottleneck, which grows
   with the number of workers; a ring's 2(n-1)/n · S a rank stays below 2S.

Li et al. 2014, "Scaling distributed machine learning with the parameter server"; Ho et al. 2013 on bounded staleness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from course_lib.collectives.by_hand.peers import Peers
from course_lib.collectives.by_hand.validation import check_same


@dataclass
class Report:
    """What one rank saw: a worker its losses, the server the other two.

    Attributes:
        losses: a worker's own loss before each of its steps.
        order: the worker (0 to w-1) of each gradient, in the order in which they were applied.
        missed: for each of them, how many updates its worker did not know of when it computed it.
    """

    losses: list[float] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    missed: list[int] = field(default_factory=list)


def train(
    model: torch.nn.Module,
    loss_of: Callable[[torch.nn.Module, int, int], torch.Tensor],
    make_optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    *,
    steps: int,
    staleness: int = 0,
    server: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Report:
    """Train ``model`` on the group's workers with its rank ``server`` holding the parameters.

    All ranks bring the same architecture and end with the same parameters; the server's initial ones count. Frozen
    ones and buffers do not travel: let them be the same everywhere.

    Args:
        loss_of: ``loss_of(model, worker, step)`` is the loss on that worker's batch, worker being 0 to w-1.
        make_optimizer: ``make_optimizer(parameters)``, called on the server, which alone holds optimizer states.
        steps: gradients that each worker sends.
        staleness: 0 for the synchronous server, else how many steps a worker may be ahead of the slowest.
        server: global rank that serves.

    Raises:
        ValueError: fewer than two ranks, a server outside the group, ranks that differ in parameters or steps,
            parameters of several dtypes, negative steps or staleness, staleness on NCCL.
    """
    peers = Peers(group)
    server_member = peers.member(server)
    if peers.size < 2:
        raise ValueError("a parameter server needs a rank to serve and one to work: launch at least 2 ranks.")
    if steps < 0 or staleness < 0:
        raise ValueError(f"steps={steps!r}, staleness={staleness!r}: give whole numbers of at least 0.")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if staleness and any(p.is_cuda for p in parameters) and "nccl" in dist.get_backend(group):
        raise ValueError("staleness needs a receive from any rank, which NCCL lacks: use staleness=0, or the CPU.")
    if len({p.dtype for p in parameters}) != 1:
        raise ValueError("the parameter server sends all trainable parameters as one vector: give them one dtype.")
    vector = _joined(parameters)
    check_same(peers, f"serve {steps} steps, stale {staleness}", vector, server, check=True)
    workers = [member for member in range(peers.size) if member != server_member]
    if peers.rank != server_member:
        return _work(model, parameters, loss_of, steps, peers, server_member, workers.index(peers.rank))
    for member in workers:
        peers.send(vector, member)
    serve = _serve_stale if staleness else _serve_in_step
    return serve(parameters, make_optimizer(parameters), steps, peers, workers, staleness)


def _work(model, parameters, loss_of, steps, peers: Peers, server: int, worker: int) -> Report:
    report, vector = Report(), _joined(parameters)
    peers.receive(vector, server)
    _load(vector, parameters)
    for step in range(steps):
        loss = loss_of(model, worker, step)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        report.losses.append(loss.item())
        peers.send(_joined(gradients), server)
        peers.receive(vector, server)
        _load(vector, parameters)
    return report


def _serve_in_step(parameters, optimizer, steps, peers: Peers, workers: list[int], _: int) -> Report:
    gradient = _joined(parameters)
    for _ in range(steps):
        mean = torch.zeros_like(gradient)
        for member in workers:
            peers.receive(gradient, member)
            mean += gradient / len(workers)
        _update(parameters, optimizer, mean)
        for member in workers:
            peers.send(_joined(parameters), member)
    return Report(order=steps * list(range(len(workers))), missed=[0] * steps * len(workers))


def _serve_stale(parameters, optimizer, steps, peers: Peers, workers: list[int], staleness: int) -> Report:
    report, gradient, waiting = Report(), _joined(parameters), []
    done, knows = dict.fromkeys(workers, 0), dict.fromkeys(workers, 0)  # own steps; updates in the parameters it has
    for update in range(steps * len(workers)):
        member = peers.receive_any(gradient)
        report.order.append(workers.index(member))
        report.missed.append(update - knows[member])
        _update(parameters, optimizer, gradient / len(workers))
        done[member] += 1
        waiting.append(member)
        for other in list(waiting):
            if done[other] - min(done.values()) <= staleness and done[other] < steps:
                waiting.remove(other)
                peers.send(_joined(parameters), other)
                knows[other] = update + 1
    for member in waiting:  # all have finished: everybody gets the last parameters
        peers.send(_joined(parameters), member)
    return report


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def _load(vector: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    for parameter, piece in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        parameter.data.copy_(piece.view_as(parameter))


def _update(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, gradient: torch.Tensor) -> None:
    for parameter, piece in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)
    optimizer.step()
