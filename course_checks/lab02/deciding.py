"""Lab 2, exercise 5: what to give up first, for runs that do not fit, and what each technique saves where it is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from course_checks.harness import Contract, NotYet, number, returned
from course_checks.lab02.common import lab
from course_lib.memory import card, estimate
from course_lib.units import GIB

LEAST = 0.05  # of what the run needs when it is taken: what saves less is left out
# price -> technique -> what it changes of a run's settings
TECHNIQUES: Mapping[str, Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "time": MappingProxyType(
            {
                "micro-batches of one": {"micro_batch_size": 1},
                "checkpointing": {"activation_checkpointing": "full"},
                "fused loss": {"loss": "fused"},
            }
        ),
        "precision": MappingProxyType({"8-bit Adam": {"optimizer": "adamw8bit"}}),
        "learning": MappingProxyType({"LoRA": {"method": "lora"}}),
    }
)
PRICES = {technique: price for price, techniques in TECHNIQUES.items() for technique in techniques}
Plan = list[tuple[str, float]]


class Run(NamedTuple):
    """A full fine-tune under bf16 autocast with AdamW: `rows` sequences of `seq_len` tokens in a step."""

    model: str
    rows: int
    seq_len: int
    card: str

    def __str__(self) -> str:
        return f"{self.model}, {self.rows} x {self.seq_len:,} tokens, on {self.card}"

    @property
    def room(self) -> float:
        """GiB of the card."""
        return card(self.card).memory / GIB


RUNS = (
    Run("llama-3.2-1b", 4, 4096, "l4"),
    Run("llama-3.2-3b", 1, 512, "a100-40gb"),
    Run("qwen2.5-0.5b", 1, 16384, "rtx4090"),
    Run("qwen2.5-1.5b", 16, 1024, "l4"),
    Run("llama-3.1-8b", 64, 512, "a100-40gb"),
    Run("qwen3-0.6b", 1, 512, "l4"),
    Run("qwen3-4b", 4, 4096, "l4"),
)
HIDDEN = (
    Run("smollm2-1.7b", 4, 4096, "rtx4090"),
    Run("qwen3-0.6b", 2, 8192, "l4"),
    Run("qwen3-4b", 1, 4096, "l4"),
    Run("llama-3.1-70b", 1, 2048, "a100-80gb"),
    Run("qwen2.5-0.5b", 4, 4096, "l4"),
    Run("qwen2.5-1.5b", 1, 4096, "l4"),
)


def need(run: Run, techniques: Any = ()) -> float:
    """GiB that the run needs on its card with these techniques, by the memory model of lesson 1."""
    settings: dict[str, Any] = {"micro_batch_size": run.rows, "seq_len": run.seq_len}
    for technique in techniques:
        settings |= TECHNIQUES[PRICES[technique]][technique]
    micro_batches = run.rows // settings["micro_batch_size"]
    return estimate(run.model, **settings, num_microbatches=micro_batches).device / GIB


SLIPS = {
    "alone": "you take each technique's saving from the run as it was, not from where you take it",
    "price": "a technique of a dearer price comes before a cheaper one that helps",
    "order": "among techniques of one price, the one that saves most at that moment comes first",
    "once": "among techniques of one price, ask after each one again which saves most",
    "small": f"a technique that saves less than {LEAST:.0%} at that moment is left out",
    "start": f"{LEAST:.0%} of what the run needs at that moment, not at the start",
    "on": "the run fits already: stop there",
}


def plan(run: Run, slip: str = "") -> Plan | None:
    """The techniques in order, each with the GiB it saves; None where they do not make the run fit. `slip`: of SLIPS."""
    taken: Plan = []
    names: list[str] = []
    groups = [list(PRICES)] if slip == "price" else [list(each) for each in TECHNIQUES.values()]
    for group in groups:
        left, at_first = list(group), list(names)
        while left and (slip == "on" or need(run, names) > run.room):
            now, rank = need(run, names), at_first if slip == "once" else names
            best = left[0] if slip == "order" else min(left, key=lambda name: need(run, [*rank, name]))
            left.remove(best)
            saving = now - need(run, [*names, best])
            least = 0.0 if slip == "small" else LEAST * (need(run) if slip == "start" else now)
            if saving >= least and saving > 0:
                taken.append((best, need(run) - need(run, [best]) if slip == "alone" else saving))
                names.append(best)
    return taken if need(run, names) <= run.room else None


@lab.exercise("What to give up first", importance=4, difficulty=3, minutes=15)
def order(order: Callable[..., Any]) -> str:
    """For each run the cheapest order that fits, with what each technique saves where it is taken, within 5 %."""
    runs = (*RUNS, *HIDDEN)
    answers = [_asked(order, run) for run in runs]

    def made(slip: str) -> bool:
        return all(_same(given, plan(run, slip)) for run, given in zip(runs, answers, strict=True))

    contract = Contract({sentence: lambda _, slip=slip: made(slip) for slip, sentence in SLIPS.items()})
    for run, given in zip(runs, answers, strict=True):
        contract.about, right = str(run), plan(run)
        if given is None or right is None:
            contract.holds(given is right, "it fits" if right is not None else "nothing makes it fit: raise ValueError")
            continue
        names, wanted = [name for name, _ in given], [name for name, _ in right]
        contract.holds(names == wanted, f"you take {', then '.join(names) or 'nothing'}", "order")
        for (name, saving), (_, measured) in zip(given, right, strict=True):
            contract.values(f"the GiB that {name} saves", saving, measured, rtol=0.05)
    first = [f"{run.model} {(given or [('nothing', 0)])[0][0]}" for run, given in zip(RUNS, answers, strict=False)]
    return f"{len(runs)} runs. The first techniques: {', '.join(first)}"


def _asked(order: Callable[..., Any], run: Run) -> Plan | None:
    """None: refused."""
    try:
        answer = order(run)
    except ValueError:
        return None
    given = []
    for pair in returned(answer, list, "the plan"):
        name, saving = pair if isinstance(pair, (tuple, list)) and len(pair) == 2 else (None, None)
        if name not in PRICES:
            raise NotYet(f"{run}: give a list of (technique, GiB), techniques out of {', '.join(PRICES)}, not {pair}")
        given.append((name, number(saving, f"the saving of {name}")))
    return given


def _same(one: Plan | None, other: Plan | None) -> bool:
    if one is None or other is None:
        return one is other
    close = all(abs(a - b) <= 0.05 * abs(b) for (_, a), (_, b) in zip(one, other, strict=False))
    return [name for name, _ in one] == [name for name, _ in other] and close
