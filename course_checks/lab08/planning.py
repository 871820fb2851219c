"""Lab 8, exercise 5: which machines to rent for two trainings, and how to lay them out, with headroom and for little money."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from course_checks.harness import Contract, NotYet, plain, returned
from course_checks.lab08.common import lab
from course_lib.choices import STRATEGIES
from course_lib.notebook import table
from course_lib.notebook.page import Page
from course_lib.units import GIB
from course_tools.planning import Machines, NoPlan, Plan, check_settings, machines, plan

HEADROOM = 0.08  # of each card's memory, for what no formula knows
SLACK = 0.2  # of the days, for restarts
FACTOR = 1.1  # a plan may cost so many times the cheapest one: about what the clock is off by
CHOICES = ("strategy", "dp", "tp", "pp", "micro_batch", "checkpointing")
KEYS = ("offer", "machines", *CHOICES)
SLOW = {"outer": "roce-100", "outer_links": 1}


@dataclass(frozen=True)
class Offer:
    """Machines for rent."""

    machine: str  # cards, as the planner reads them
    price: float  # dollars per hour of one machine
    most: int  # machines
    network: Mapping[str, Any] = field(default_factory=dict)  # between machines; the usual one if empty

    def rent(self, count: int) -> Machines:
        """So many of them."""
        return machines(f"{count}x{self.machine}", **(self.network if count > 1 else {}))


@dataclass(frozen=True)
class Task:
    """A training, and what may be rented for it."""

    name: str
    model: str  # a preset of course_lib.memory
    global_batch: int  # sequences
    seq_len: int  # tokens
    tokens: float
    days: float  # until it must be done
    offers: Mapping[str, Offer] = field(hash=False)

    @property
    def time(self) -> float:
        """Days that the training may take."""
        return (1 - SLACK) * self.days

    @property
    def asked(self) -> dict[str, Any]:
        """What `course_tools.planning.plan` takes beside model and machines."""
        return {"global_batch": self.global_batch, "seq_len": self.seq_len, "tokens": self.tokens, "offload": ("none",), "axes": ("pp", "dp", "tp"), "methods": ("full",), "strategies": tuple(STRATEGIES), "optimizers": "adamw"}  # fmt: skip

    def dollars(self, found: Plan, offer: str) -> float:
        return found.days * 24 * found.machines.nodes * self.offers[offer].price


SMALL = {"A100-40": Offer("8xa100-40gb", 6.00, 4), "H100": Offer("8xh100-80gb", 15.50, 4, SLOW)}
LARGE = {"H100": Offer("8xh100-80gb", 15.50, 10, SLOW), "A100": Offer("8xa100-80gb", 10.00, 8)}
TASKS = (
    Task("all of 8B", "llama-3.1-8b", 128, 8192, 5e9, 1.25, MappingProxyType(SMALL)),
    Task("all of 70B", "llama-3.1-70b", 256, 4096, 2e9, 1.4, MappingProxyType(LARGE)),
)


@functools.cache
def every(task: Task, headroom: float) -> list[tuple[float, str, Plan]]:
    """(dollars, offer, fastest plan) for each number of machines of each offer."""
    found = []
    for name, offer in task.offers.items():
        for count in range(1, offer.most + 1):
            try:
                answer = plan(task.model, offer.rent(count), headroom=headroom, **task.asked)
            except (NoPlan, ValueError):  # it does not fit, or the batch does not divide
                continue
            fastest = min(answer.plans, key=lambda each: each.step_seconds)
            found.append((task.dollars(fastest, name), name, fastest))
    return found


def cheapest(task: Task) -> tuple[float, str, Plan]:
    """The least dollars with headroom and in time."""
    return min((each for each in every(task, HEADROOM) if each[2].days <= task.time), key=lambda each: each[0])


def planners(task: Task) -> tuple[float, str, Plan]:
    """What the planner calls the fastest, given everything there is, and no headroom to leave."""
    return min(every(task, 0.0), key=lambda each: each[2].days)


def show() -> Page:
    """The tasks, and what is on offer for each."""
    rows = []
    for task in TASKS:
        days = f"{task.days:g} day{'s' * (task.days > 1)}"
        what = f"{task.tokens / 1e9:g} billion tokens in {days}, {task.global_batch} x {task.seq_len:,} per step"
        about = {"task": task.name, "training": f"{task.model}, {what}"}
        for name, offer in task.offers.items():
            on = offer.rent(min(2, offer.most))
            machine = {
                "offer": name,
                "a machine": f"{on.per_node} x {on.card.name}, {on.card.memory / GIB:.0f} GiB",
                "at most": offer.most,
            }
            links = {
                "inside": on.inner.name * (on.per_node > 1),
                "between": f"{on.outer_links} x {on.outer.name}" * (on.nodes > 1),
            }
            rows.append(about | machine | {"$ per hour": f"{offer.price:.2f}"} | links)
            about = {"task": "", "training": ""}
    return table(rows)


@lab.exercise("Beat the planner", importance=4, difficulty=4, minutes=25)
def choose_plan(choose: Callable[..., Any]) -> str:
    """Two plans that leave headroom, are done in time, and cost little more than the cheapest."""
    said = []
    for task in TASKS:
        offer, found = _planned(choose(task), task)
        contract, yours, (least, *_) = Contract(about=task.name), task.dollars(found, offer), cheapest(task)
        held = f"{found}: most of what is not computing is the {found.limit}"
        contract.holds(
            found.days <= task.time,
            f"takes {found.days:.2f} days, and {task.time:g} of {task.days:g} are yours. {held}",
        )
        same = min((cost for cost, name, other in every(task, HEADROOM) if (name, other.machines.nodes) == (offer, found.machines.nodes)), default=yours)  # fmt: skip
        better = (
            f"other plans for these machines cost {same:,.2f}. {held}"
            if yours > FACTOR * same
            else "these machines, or as many of them, cost too much"
        )
        contract.holds(yours <= FACTOR * least, f"costs {yours:,.2f} dollars, and {least:,.2f} are possible: {better}")
        theirs, _, first = planners(task)
        full = first.memory_bytes / first.machines.card.memory
        said.append(f"{task.name}: {yours:,.2f} dollars; with everything on offer the planner spends {theirs:,.2f} and fills {full:.0%} of each card; the cheapest that we know costs {least:,.2f}")  # fmt: skip
    return f"by the memory model and the planner's clock. {'; '.join(said)}"


def _planned(value: Any, task: Task) -> tuple[str, Plan]:
    """The offer, and the plan with all that follows from the choices."""
    chosen = {key: plain(each) for key, each in returned(value, Mapping, f"{task.name}: the plan").items()}
    missing, extra = [k for k in KEYS if k not in chosen], [k for k in chosen if k not in KEYS]
    if missing or extra:
        why = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r}, which nobody asks for"
        raise NotYet(f"{task.name}: the plan {why}: give {', '.join(KEYS)}")
    offer, count = task.offers.get(chosen["offer"]), chosen["machines"]
    if offer is None or type(count) is not int or not 1 <= count <= offer.most:
        told = ", ".join(f"1 to {each.most} of {name!r}" for name, each in task.offers.items())
        raise NotYet(f"{task.name}: there are {told}, and not {count} of {chosen['offer']!r}")
    rented, choices = offer.rent(count), {name: chosen[name] for name in CHOICES}
    choices["micro_batch_size"], choices["activation_checkpointing"] = (
        choices.pop("micro_batch"),
        choices.pop("checkpointing"),
    )
    how = {name: task.asked[name] for name in ("global_batch", "seq_len")}
    try:
        verdict = check_settings(task.model, rented, **how, **choices, headroom=HEADROOM)
    except ValueError as error:
        raise NotYet(f"{task.name}: {error}") from None
    if verdict.wrong:
        raise NotYet(f"{task.name}, with {HEADROOM:.0%} of each card left free: {verdict.wrong[0]}")
    return chosen["offer"], replace(verdict.plan, days=task.tokens / task.global_batch / task.seq_len * verdict.plan.step_seconds / 86_400)  # fmt: skip
