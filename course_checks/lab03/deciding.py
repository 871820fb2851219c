"""Lab 3, exercise 5: what a cluster's step costs, and which change makes it cheaper by most."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, get_type_hints

from course_checks.harness import Contract, fresh_seed, number, returned, slip_hints
from course_checks.lab03.common import lab
from course_lib.collectives import links
from course_lib.notebook import table
from course_lib.notebook.page import Page

MARGIN = 0.03  # by which the best change is cheaper than the next best


@dataclass(frozen=True)
class Job:
    """A training job on a cluster, in the units of data sheets."""

    parameters: Annotated[float, "of the model"]
    gradient_bytes: Annotated[int, "for each parameter"]
    tokens: Annotated[float, "in a step, of all GPUs"]
    compute: Annotated[float, "seconds of a step without its messages"]
    nodes: Annotated[int, ""]
    gpus: Annotated[int, "in each node"]
    nvlink: Annotated[float, "GB/s of a GPU, both directions added up"]
    nvlink_latency: Annotated[float, "seconds a message"]
    cards: Annotated[int, "network cards of each node"]
    network: Annotated[float, "Gbit/s of a card, each direction"]
    network_latency: Annotated[float, "seconds a message"]
    price: Annotated[float, "dollars an hour, of all nodes together"]

    def __str__(self) -> str:
        return f"{self.parameters / 1e9:.2f} billion parameters on {self.nodes} nodes, {self.cards} x {self.network:g} Gbit/s each"


Change = tuple[dict[str, Any], float]  # the job's fields with their new values, and dollars an hour more
AS_IT_IS: Change = ({}, 0.0)
NOTHING = "nothing"
NAMES = ("GPUs twice as fast", "a card for each GPU", "cards four times as fast", "NVLink twice as fast")


def dollars(case: tuple[Job, Change], slip: str = "") -> float:
    """Dollars of a billion tokens, with this slip made."""
    job, (fields, more) = case
    job = replace(job, **fields)
    inner = links.Link("NVLink", job.nvlink_latency, job.nvlink * 1e9 / (1 if slip == "both" else 2))
    outer = links.Link("card", job.network_latency, job.network * 1e9 / (1 if slip == "bits" else 8))
    num_bytes = job.parameters * (1 if slip == "count" else job.gradient_bytes)
    cards = job.gpus if slip == "unshared" else job.cards
    cluster = links.Cluster(job.gpus, job.nodes, inner, outer, cards)
    sends = (cluster.flat_seconds if slip == "flat" else cluster.seconds)("all_reduce", num_bytes)
    if slip == "half":
        sends /= 2
    if slip == "no latency":
        sends -= cluster.seconds("all_reduce", 0)
    seconds = job.compute + sends
    price = job.price if slip == "free" else job.price + more
    return price * seconds / 3600 / job.tokens * 1e9


SLIPS = {
    "both": "NVLink's sheet adds both directions: a rank sends with half of it",
    "bits": "the network's Gbit/s are taken for GB/s",
    "count": "that is bytes per gradient left out",
    "unshared": "the GPUs of a node share its cards",
    "flat": "that is one ring through all GPUs; here the gradients cross the network once per node",
    "half": "the all-gather takes as long as the reduce-scatter",
    "no latency": "each message pays its latency: 2(n-1) of them in a ring",
}


def jobs(seed: int) -> list[tuple[Job, dict[str, Change]]]:
    """Bound by its cards, by bytes inside the node, by messages, by computing, and where the change that helps most costs too much."""
    draw = random.Random(seed)

    def pair(
        parameters: float, compute: float, nodes: int, gpus: int, network: float, nvlink: float, *shares: float
    ) -> tuple[Job, dict[str, Change]]:
        """`shares`: what each change costs of the price."""
        parameters, compute = round(parameters * draw.uniform(0.9, 1.3), -7), round(compute * draw.uniform(0.9, 1.2), 4)
        tokens, price = draw.randrange(500, 2000) * 1e3, nodes * draw.randrange(18, 30)
        size = draw.choice((2, 4))
        parameters *= 4 / size
        cards = gpus if nodes > 4 else 1
        latencies = round(draw.uniform(2e-6, 5e-6), 8), round(draw.uniform(9e-6, 2e-5), 7)
        job = Job(
            parameters, size, tokens, compute, nodes, gpus, nvlink, latencies[0], cards, network, latencies[1], price
        )
        fields = ({"compute": compute / 2}, {"cards": gpus}, {"network": 4 * network}, {"nvlink": 2 * nvlink})
        costs = [round(share * price * draw.uniform(0.9, 1.1), 2) for share in shares]
        return job, dict(zip(NAMES, zip(fields, costs, strict=True), strict=True))

    pairs = [
        pair(7e9, 2.0, 4, 8, 100.0, 900.0, 0.8, 0.25, 0.2, 0.2),
        pair(7e9, 0.3, 1, 8, 100.0, 64.0, 0.8, 0.2, 0.2, 0.05),
        pair(1.5e8, 0.004, 64, 8, 400.0, 900.0, 0.6, 0.1, 0.3, 0.2),
        pair(1.5e9, 6.0, 8, 8, 400.0, 900.0, 0.5, 0.1, 0.1, 0.1),
        pair(7e9, 3.0, 4, 4, 25.0, 900.0, 0.8, 1.6, 0.12, 0.3),
    ]
    draw.shuffle(pairs)
    return pairs


def ranked(job: Job, changes: dict[str, Change], slip: str = "") -> list[tuple[float, str]]:
    """Dollars of a billion tokens with each change and with none, the cheapest first."""
    return sorted((dollars((job, change), slip), name) for name, change in {NOTHING: AS_IT_IS, **changes}.items())


def _per_dollar(job: Job, changes: dict[str, Change]) -> str:
    """A tempting rule that is wrong: what saves most for each dollar more."""
    now = dollars((job, AS_IT_IS))
    saved = {name: (now - dollars((job, change))) / change[1] for name, change in changes.items()}
    return max(saved, key=saved.get) if max(saved.values()) > 0 else NOTHING


def drawn(seed: int) -> list[tuple[Job, dict[str, Change]]]:
    """Jobs in each of which one change stands out, and in some it is not the one that saves most for each dollar."""
    for pairs in map(jobs, itertools.count(seed)):
        orders = [ranked(*pair) for pair in pairs]
        stands_out = all(second / first > 1 + MARGIN for (first, _), (second, _), *_ in orders)
        if stands_out and any(_per_dollar(*pair) != order[0][1] for pair, order in zip(pairs, orders, strict=True)):
            return pairs
    raise AssertionError("the seeds never end")


def show() -> Page:
    """A job, and what each change costs."""
    job, changes = drawn(1)[0]
    meanings = get_type_hints(Job, include_extras=True)
    rows = [{"field": n, "value": f"{v:,.10g}", "": meanings[n].__metadata__[0]} for n, v in asdict(job).items()]
    rows += [{"field": name, "value": f"{more:,.2f}", "": f"dollars an hour more; then {', '.join(f'{k} = {v:g}' for k, v in fields.items())}"} for name, (fields, more) in changes.items()]  # fmt: skip
    return table(rows)


@lab.exercise("What to change first", importance=4, difficulty=3, minutes=20)
def first_change(decide: Callable[..., Any]) -> str:
    """Dollars of a billion tokens now, and the change with which they are fewest, for five fresh jobs."""
    pairs, costs, names = drawn(fresh_seed()), [], []
    for job, changes in pairs:
        answer = returned(decide(job, dict(changes)), tuple, "(dollars, name of the change)")
        Contract().holds(len(answer) == 2, f"return (dollars, name of the change), not {answer}")
        costs.append(number(answer[0], "the dollars of a billion tokens")), names.append(answer[1])
    cases = [(job, AS_IT_IS) for job, _ in pairs]
    for case, cost in zip(cases, costs, strict=True):
        contract = Contract(slip_hints(dollars, SLIPS, cases, costs), about=str(case[0]))
        contract.values("the dollars of a billion tokens", cost, dollars(case), rtol=1e-6)
    free = [ranked(*pair, "free")[0][1] for pair in pairs]
    for (job, changes), name in zip(pairs, names, strict=True):
        contract = Contract({"a change has its price, too": lambda _: names == free}, about=str(job))
        order = {change: cost for cost, change in ranked(job, changes)}
        contract.holds(name in order, f"{name!r} is none of {', '.join(order)}")
        least = min(order.values())
        other = "no change at all" if order[NOTHING] == least else "another change"
        told = f"with {name!r} a billion tokens cost {order[name]:,.2f} dollars, and with {other} {least:,.2f}"
        contract.holds(order[name] == least, told)
    said = [f"{cost:,.1f} dollars, {ranked(*pair)[0][0]:,.1f} with {name}" for cost, pair, name in zip(costs, pairs, names, strict=True)]  # fmt: skip
    return f"a billion tokens of five jobs: {'; '.join(said)}"
