"""Lab 7, exercise 2: a run was resumed, and something of its state was not. What?"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from course_checks.harness import Contract, NotYet, fresh_seed, returned
from course_checks.lab07.common import lab
from course_lib.launch.threads import one_thread
from course_lib.models.data import sample_batch

STATES = ("model", "optimizer", "scheduler", "random state", "data position")
NOTHING = "nothing"
LOST = ((NOTHING, 1), *((state, 1) for state in STATES), (NOTHING, 2))  # and the ranks after the resume
STEPS, SAVED_AT = 18, (6, 9, 11)
CLEAR = 2e-3  # by chance other dropout hardly changes a loss: such runs are made again, and 1e-3 is a right tolerance
HINTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "on another number of ranks sums come in another order, and the last digits differ": lambda f: f["ranks"] > 1,
    "compare records of the same step, also after the first update": lambda f: f["right"] == NOTHING,
    "this loss needs the weights, and no dropout": lambda f: f["right"] == "model",
    "another batch explains another loss: look at the batch first": lambda f: f["right"] == "data position",
    "look at lr": lambda f: f["right"] == "scheduler",
    "the same weights and the same batch: what else does a loss with dropout need?": lambda f: (
        f["right"] == "random state"
    ),
    "all is equal before the first update, and nothing after it": lambda f: f["right"] == "optimizer",
}


class Record(NamedTuple):
    """What is logged of one step."""

    step: int
    lr: float
    batch: str  # a fingerprint of its tokens
    loss: float  # with dropout, before the update, in nats
    held_out: float  # also before the update, without dropout, always on the same tokens

    def __str__(self) -> str:
        return f"step {self.step}: lr {self.lr:.5f}, batch {self.batch}, loss {self.loss:.6f}, held out {self.held_out:.6f}"


@lab.exercise("What was not restored?", importance=4, difficulty=2, minutes=15)
def not_restored(find: Callable[..., Any]) -> str:
    """Runs resumed with one state left out, three of each; and complete ones, of which some differ in the last digits."""
    for missing, ranks, whole, resumed in runs():
        answer = returned(find(list(whole), list(resumed)), str, "the answer")
        if answer not in (*STATES, NOTHING):
            raise NotYet(f"{answer!r} is none of {', '.join((*STATES, NOTHING))}")
        mine = resumed[missing == "optimizer"]
        about = f"{mine}; the run that was never stopped: {whole[mine.step - 1]}"
        contract = Contract(HINTS, {"right": missing, "ranks": ranks}, about)
        lost = "nothing was lost" if missing == NOTHING else f"the {missing} was not restored"
        contract.holds(answer == missing, f"{lost}, and you say {answer}")
    return (
        f"{len(runs())} resumed runs: {len(SAVED_AT)} that lost each state, and {2 * len(SAVED_AT)} that lost nothing"
    )


@functools.cache
def runs() -> list[tuple[str, int, tuple[Record, ...], tuple[Record, ...]]]:
    """What is missing, ranks after the resume, the uninterrupted run, the resumed one from its first step on."""
    made: list[tuple[str, int, tuple[Record, ...], tuple[Record, ...]]] = []
    with one_thread(), torch.random.fork_rng(devices=[]):
        while len(made) < len(SAVED_AT) * len(LOST):
            save_at = SAVED_AT[len(made) // len(LOST)]
            whole, saved = _train(seed := fresh_seed(), save_at=save_at)
            resumed = {lost: _train(seed, start=saved, missing=lost[0], ranks=lost[1])[0] for lost in LOST}
            dropout = resumed["random state", 1][0].loss / whole[save_at].loss
            adam = resumed["optimizer", 1][1].held_out / whole[save_at + 1].held_out
            if min(abs(dropout - 1), abs(adam - 1)) > CLEAR:
                made += [(*lost, whole, one) for lost, one in resumed.items()]
    return made


def _train(
    seed: int, *, save_at: int = 0, start: dict[str, Any] | None = None, missing: str = "", ranks: int = 1
) -> tuple[tuple[Record, ...], dict[str, Any]]:
    """A small model with dropout on the course's text: its records, and its state after step `save_at`."""
    batch = functools.partial(sample_batch, global_batch=8, seq_len=9, seed=seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Dropout(0.2), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, (STEPS - step) / STEPS))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    position, records, saved = 0, [], {}
    if start:
        for name in parts.keys() - {missing}:
            parts[name].load_state_dict(copy.deepcopy(start[name]))
        optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
        position = 0 if missing == "data position" else start["data position"]
        torch.manual_seed(seed + 1) if missing == "random state" else torch.set_rng_state(start["random state"])
    for step in range(start["step"] + 1 if start else 1, STEPS + 1):
        ids = batch(position)
        with torch.no_grad():
            held_out = _loss(model.eval(), batch(10**6), ranks).item()
        loss = _loss(model.train(), ids, ranks)
        loss.backward()
        fingerprint = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:8]
        records.append(Record(step, scheduler.get_last_lr()[0], fingerprint, loss.item(), held_out))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        position += 1
        if step == save_at:
            saved = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
            saved |= {"step": step, "data position": position, "random state": torch.get_rng_state()}
    return tuple(records), saved


def _loss(model: nn.Module, ids: torch.Tensor, ranks: int) -> torch.Tensor:
    """The mean over the tokens, summed as by so many ranks: each takes its mean, and these are averaged."""
    each = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return each.view(ranks, -1).mean(1).mean()
