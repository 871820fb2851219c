"""Lab 1, exercise 7: the first method of a ladder that fits a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from course_checks.harness import NotYet, returned
from course_checks.lab01.common import gib, lab
from course_lib.memory import Breakdown, Card, card, estimate


@dataclass(frozen=True)
class Rung:
    """A method to try. `sharded`: the ranks share out all states (ZeRO-3), which takes at least two."""

    method: str
    activation_checkpointing: str
    sharded: bool


# From the one that gives up least to the one that gives up most.
LADDER: tuple[Rung, ...] = (
    Rung("full", "none", sharded=False),
    Rung("full", "full", sharded=False),
    Rung("full", "full", sharded=True),
    Rung("lora", "none", sharded=False),
    Rung("lora", "full", sharded=False),
    Rung("lora", "full", sharded=True),
    Rung("qlora", "full", sharded=False),
    Rung("qlora", "full", sharded=True),
)
KEYS = ("method", "activation_checkpointing", "strategy", "ranks", "precision", "seq_len")


@dataclass(frozen=True)
class Machine:
    """A model, and what it is to be trained on. `seq_len` in tokens."""

    model: str
    card: str
    gpus: int
    seq_len: int

    def __str__(self) -> str:
        return f"{self.model} on {self.gpus} x {self.card}, {self.seq_len} tokens"


MACHINES: tuple[Machine, ...] = (
    Machine("smollm2-1.7b", "t4", 1, 2048),
    Machine("llama-3.1-8b", "rtx4090", 1, 1024),
    Machine("llama-3.1-8b", "a100-80gb", 1, 2048),
    Machine("qwen2.5-14b", "a100-80gb", 4, 2048),
    Machine("llama-3.1-70b", "v100-32gb", 32, 2048),
)
MORE = (  # not announced: the smallest, on one GPU and on two; half the memory a card; one card for 32; the impossible
    Machine("smollm2-135m", "t4", 1, 512),
    Machine("smollm2-360m", "t4", 2, 512),
    Machine("llama-3.1-70b", "v100-16gb", 32, 2048),
    Machine("llama-3.1-70b", "h100-80gb", 1, 2048),
    Machine("llama-2-13b", "rtx4090", 2, 2048),
    Machine("llama-3.1-405b", "t4", 1, 512),
)


def settings(rung: Rung, machine: Machine) -> dict[str, Any] | None:
    """What `estimate` is to be asked for a rung; None where one GPU cannot share."""
    if rung.sharded and machine.gpus == 1:
        return None
    strategy = "zero3" if rung.sharded else "ddp" if machine.gpus > 1 else "single"
    precision = "bf16-mixed" if card(machine.card).bf16 else "fp16-mixed"
    kinds = {"method": rung.method, "activation_checkpointing": rung.activation_checkpointing, "strategy": strategy}
    return kinds | {"ranks": machine.gpus, "precision": precision, "seq_len": machine.seq_len}


def first_that_fits(machine: Machine) -> dict[str, Any] | None:
    memory = card(machine.card).memory
    asked = [found for rung in LADDER if (found := settings(rung, machine))]
    return next((one for one in asked if estimate(machine.model, **one).fits(memory)), None)


@lab.exercise("Choose the method", importance=5, difficulty=3, minutes=25)
def choose_method(choose: Callable[..., Any]) -> str:
    """The first rung of the ladder that fits, for the five machines and for six more, one of which nothing fits."""
    seen = []
    for machine in [*MACHINES, *MORE]:
        best, on = first_that_fits(machine), card(machine.card)
        try:
            answer = choose(machine.model, on, machine.gpus, machine.seq_len)
        except ValueError as error:
            if best is not None:
                story = f"you refuse ({' '.join(str(error).split())[:120]}), and {_named(best)} fits: {_numbers(machine, best)}"
                raise NotYet(f"{machine}: {story}") from None
            continue
        chosen = _asked(returned(answer, dict, "the choice"), machine, on)
        if best is None:
            story = f"nothing fits, and you give {_named(chosen)}, {_numbers(machine, chosen)}; raise ValueError"
            raise NotYet(f"{machine}: {story}")
        _right(machine, on, chosen, best)
        seen.append(f"{machine.model} on {machine.gpus} x {machine.card}: {_named(best)}, {_numbers(machine, best)}")
    return "; ".join(seen[: len(MACHINES)])


def _asked(answer: Mapping[str, Any], machine: Machine, on: Card) -> dict[str, Any]:
    """The learner's settings, each of them one that the machine can run."""
    missing, extra = [key for key in KEYS if key not in answer], [key for key in answer if key not in KEYS]
    if missing or extra:
        story = f"{missing[0]} is missing" if missing else f"{extra[0]!r} is not asked for"
        raise NotYet(f"{machine}: give {', '.join(KEYS)}; {story}")
    chosen = dict(answer)
    if chosen["seq_len"] != machine.seq_len:
        raise NotYet(f"{machine}: you estimate for {chosen['seq_len']} tokens")
    if str(chosen["precision"]).startswith("bf16") and not on.bf16:
        raise NotYet(f"{machine}: a {on.name} has no bf16 (card.bf16 says so): take fp16-mixed there")
    if chosen["precision"] != ("bf16-mixed" if on.bf16 else "fp16-mixed"):
        story = "take bf16-mixed where the card has bf16, fp16-mixed elsewhere"
        raise NotYet(f"{machine}: precision {chosen['precision']!r}; {story}")
    if chosen["ranks"] != machine.gpus:
        raise NotYet(f"{machine}: you plan {chosen['ranks']} ranks for {machine.gpus} GPUs: one rank a GPU")
    if machine.gpus == 1 and chosen["strategy"] != "single":
        raise NotYet(f"{machine}: strategy {chosen['strategy']!r} with one GPU has nobody to share with: 'single'")
    if machine.gpus > 1 and chosen["strategy"] not in ("ddp", "zero3"):
        story = "the ladder has 'ddp', and 'zero3' where it is sharded"
        raise NotYet(f"{machine}: strategy {chosen['strategy']!r}; {story}")
    if chosen not in [settings(rung, machine) for rung in LADDER]:
        raise NotYet(f"{machine}: {_named(chosen)} is no rung of the ladder")
    return chosen


def _right(machine: Machine, on: Card, chosen: dict[str, Any], best: dict[str, Any]) -> None:
    if chosen == best:
        return
    found = estimate(machine.model, **chosen)
    if found.fits(on.memory):
        raise NotYet(
            f"{machine}: {_named(chosen)} fits, and gives up more than it must: {_named(best)} comes before it, "
            f"{_numbers(machine, best)}"
        )
    short = f"{machine}: {_named(chosen)} does not fit: {_numbers(machine, chosen)}"
    if found.peak <= on.memory:
        raise NotYet(
            f"{short}. Its peak of {gib(found.peak)} alone would; the allocator's waste and CUDA's context come on top: ask "
            "`fits`, or compare `device`"
        )
    if machine.gpus > 1 and found.device <= machine.gpus * on.memory and chosen["strategy"] == "ddp":
        raise NotYet(f"{short}. {machine.gpus} cards have more together, but under DDP each of them must hold it all")
    raise NotYet(f"{short}, most of it at the {_of(found)}")


def _named(chosen: Mapping[str, Any]) -> str:
    kind = chosen["activation_checkpointing"]
    checkpointing = {"full": " with checkpointing", "none": ""}.get(kind, f" with {kind} checkpointing")
    return f"{chosen['method']}{checkpointing}{' and ZeRO-3' if chosen['strategy'] == 'zero3' else ''}"


def _numbers(machine: Machine, asked: Mapping[str, Any]) -> str:
    found = estimate(machine.model, **asked)
    return f"{gib(found.device)} of {gib(card(machine.card).memory)} a card"


def _of(found: Breakdown) -> str:
    return found.peak_phase if found.peak_phase.startswith("optimizer") else f"phase '{found.peak_phase}'"
