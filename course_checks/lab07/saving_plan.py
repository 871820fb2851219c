"""Lab 7, exercise 4: which way to save, after how many steps, and what saving and failures cost per day."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from course_checks.harness import Contract, NotYet, fresh_seed, number, returned, slip_hints
from course_checks.lab07.common import lab

WAYS = ("blocking", "async")
STEPS = sorted({round(1.01**n) for n in range(1400)})  # 1 % apart are enough to search: the minimum is flat
PRICE = 0.1  # first order in (interval + write + restart) / time between failures is off by less than half of it here
CHEAPEST = 1.02  # times the best price: the minimum is flat, and first order's choice stays below 1.01


@dataclass(frozen=True)
class Cluster:
    """A job on a cluster: how long its saves take, how often it fails, what its GPUs cost."""

    gpus: int  # one failure stops all of them
    step_seconds: float  # one optimizer step while nothing is written
    gpu_hours_between_failures: float  # on average
    restart_seconds: float  # from a failure until steps go on from the last checkpoint that counts
    save_seconds: float  # blocking: training stops; then the checkpoint counts
    copy_seconds: float  # async: training stops for the copy to the host's memory
    write_seconds: float  # async: the write after that, beside training; then the checkpoint counts
    slowdown: float  # async: share of the training speed that is lost during the write
    dollars_per_gpu_hour: float

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value:,g}" for name, value in vars(self).items())


CLUSTERS = (
    Cluster(8, 2.5, 50e3, 600, 300, 12, 320, 0.05, 2.2),  # a slow disk
    Cluster(512, 4.5, 50e3, 900, 120, 20, 900, 0.4, 2.6),  # the write is slow, and slows training a lot
    Cluster(512, 6.5, 50e3, 1800, 90, 4, 100, 0.06, 2.4),
    Cluster(4096, 5.5, 50e3, 240, 120, 1.3, 660, 0.003, 2.3),  # the write takes longer than the best interval would
    Cluster(16_384, 7.5, 100e3, 300, 60, 2.5, 75, 0.03, 2.1),
    Cluster(16_384, 7.5, 100e3, 300, 20, 2.5, 500, 0.01, 2.1),  # an async save costs less, and a failure much more
)
SLIPS = {
    "save": "an async save stops training for copy_seconds, not for save_seconds",
    "copy": "the copy is not all: the write slows training, and the checkpoint counts only after it",
    "one fails": "more GPUs fail more often: divide the hours between failures by the number of GPUs",
    "write": "an async checkpoint counts only once it is written, so a failure also loses the time of a write",
    "none": "a failure also loses the work since the last save, half an interval on average",
    "whole": "a failure comes at any moment of the interval, so it loses half of one on average",
    "restart": "each failure costs the restart, too",
    "slowdown": "the write slows training: that costs slowdown · write_seconds per async save",
    "one pays": "this is one GPU's price, and all of them wait",
}


def dollars(c: Cluster, way: str, steps: float, slip: str = "") -> float:
    """Exact dollars per day of all the GPUs' time that is no progress; with a slip, less what that leaves out."""
    between = c.gpu_hours_between_failures * 3600 / (1 if slip == "one fails" else c.gpus)
    stop, write = (c.copy_seconds, c.write_seconds) if way == "async" and slip != "save" else (c.save_seconds, 0.0)
    write *= slip != "copy"
    training, beside = steps * c.step_seconds, (1 - c.slowdown * (slip != "slowdown")) * write  # all; during the write
    if not slip and training < beside * (1 - 1e-9):  # 1e-9 is for a learner's own rounding
        return math.inf  # the next save would begin before the last is written
    # Tries until one reaches the next checkpoint that counts; the first has the steps beside the last write behind it.
    growth = math.exp(min(600.0, (training + stop + write) / between)) - math.exp(beside / between)  # e^710: overflow
    lost = 1 - training / (between + c.restart_seconds) / growth
    per_failure = {"write": write, "restart": c.restart_seconds, "none": training / 2, "whole": -training / 2}
    lost -= per_failure.get(slip, 0.0) / between
    return (1 if slip == "one pays" else c.gpus) * 24 * c.dollars_per_gpu_hour * lost


@lab.exercise("How often to save, and how", importance=5, difficulty=3, minutes=20)
def saving_plan(plan: Callable[..., object]) -> str:
    """The price is that of the plan, and no plan is much cheaper, on named clusters and on fresh ones."""
    clusters, generator = list(CLUSTERS), random.Random(fresh_seed())
    for c in (*CLUSTERS, *CLUSTERS, *CLUSTERS[-2:]):
        changes = {name: float(f"{vars(c)[name] * generator.uniform(0.85, 1.15):.3g}") for name in list(vars(c))[1:]}
        clusters.append(replace(c, **changes))
    cases, prices = zip(*[_asked(plan, c) for c in clusters], strict=True)
    n = 5  # hints look at named ones only, so that every run says the same; the sixth is for the choice
    contract = Contract(slip_hints(lambda case, slip: dollars(*case, slip), SLIPS, cases[:n], prices[:n], PRICE / 2))
    for (c, way, steps), price in zip(cases, prices, strict=True):
        contract.about, yours, exact = str(c), f"{way} every {steps} steps", dollars(c, way, steps)
        contract.holds(steps >= 1 and steps % 1 == 0, f"{yours}: that should be a whole number of at least 1")
        contract.holds(exact < math.inf, f"{yours} is too often: the next save would begin while the last is written")
        contract.values(f"your price of {yours}", price, exact, rtol=PRICE)
        least, best = min((dollars(c, w, s), f"{w} every {s} steps") for w in WAYS for s in STEPS)
        contract.holds(exact <= CHEAPEST * least, f"{yours} costs ${exact:,.2f} per day, and {best} ${least:,.2f}")
    return f"{len(cases)} clusters; on the last, {c.gpus:,} GPUs, {yours} costs ${price:,.0f} per day"


def _asked(plan: Callable[..., object], c: Cluster) -> tuple[tuple[Cluster, str, float], float]:
    answer = returned(plan(replace(c)), tuple, "(way, steps_between_saves, dollars_per_day)")
    if len(answer) != 3 or answer[0] not in WAYS:
        raise NotYet(f"give (way, steps_between_saves, dollars_per_day), with one of {WAYS}, not {answer}")
    return (c, answer[0], number(answer[1], "steps_between_saves")), number(answer[2], "dollars_per_day")
