"""Lab 7, exercise 8: a run was resumed, and something of its state was not. What?"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from course_checks.harness import NotYet, returned
from course_checks.lab07.common import lab
from course_lib.launch.threads import one_thread

STATES = ("model", "optimizer", "scheduler", "random state", "data position")
NOTHING = "nothing"
STEPS, SEEDS, SAVED_AT = 18, (0, 1, 2), (9, 6, 11)


class Record(NamedTuple):
    """One step: the learning rate and the batch that it used, its loss, and a loss on fixed data just before it."""

    step: int
    lr: float
    batch: str  # a fingerprint of the tokens
    loss: float  # with dropout, before the update
    held_out: float  # before the update too, without dropout, always on the same tokens


@lab.exercise("What was not restored?", importance=4, difficulty=2, minutes=20)
def not_restored(find: Callable[..., Any]) -> str:
    """Real runs resumed with one state left out, three of each; and complete ones, the last digits of which differ."""
    for (missing, _, ranks), (whole, resumed) in runs().items():
        answer = returned(find(list(whole), list(resumed)), str, "the answer")
        if answer not in (*STATES, NOTHING):
            raise NotYet(f"{answer!r} is none of {', '.join((*STATES, NOTHING))}")
        if answer != missing:
            raise NotYet(_why(answer, missing, whole, resumed, ranks))
    return f"{len(runs())} resumed runs: of each state three that lost it, and six that lost nothing, three of them summed as by two ranks"


@functools.cache
def runs() -> dict[tuple[str, int, int], tuple[tuple[Record, ...], tuple[Record, ...]]]:
    """(what is missing, seed, ranks after the resume) -> (the uninterrupted run, the resumed one from its first step on)."""
    with one_thread():
        told = {}
        for seed, at in zip(SEEDS, SAVED_AT, strict=True):
            whole, saved = _train(seed, save_at=at)
            for missing in (NOTHING, *STATES):
                told[missing, seed, 1] = whole, _train(seed, start=saved, missing=missing)[0]
            told[NOTHING, seed, 2] = whole, _train(seed, start=saved, missing=NOTHING, ranks=2)[0]
        return dict(
            sorted(
                told.items(), key=lambda item: (item[0][2], STATES.index(item[0][0]) if item[0][0] in STATES else -1)
            )
        )


def _train(
    seed: int, *, save_at: int = 0, start: dict[str, Any] | None = None, missing: str = "", ranks: int = 1
) -> tuple[tuple[Record, ...], dict[str, Any]]:
    """A small model with dropout on the course's text; (records, the state after step ``save_at``)."""
    import copy
    import hashlib

    import torch
    from torch import nn

    from course_lib.models.data import sample_batch

    def tokens(number: int) -> torch.Tensor:
        return sample_batch(number, global_batch=8, seq_len=9, seed=seed)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(256, 32), nn.Dropout(0.2), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 256))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 5, (STEPS - step) / STEPS)
        )
        position, records, saved = 0, [], {}
        if start:
            restored = copy.deepcopy(start)
            position = 0 if missing == "data position" else restored["position"]
            if missing != "model":
                model.load_state_dict(restored["model"])
            if missing != "optimizer":
                optimizer.load_state_dict(restored["optimizer"])
            if missing != "scheduler":
                scheduler.load_state_dict(restored["scheduler"])
            for group in optimizer.param_groups:
                group["lr"] = scheduler.get_last_lr()[0]
            torch.manual_seed(seed + 100) if missing == "random state" else torch.set_rng_state(restored["rng"])
        for step in range(start["step"] + 1 if start else 1, STEPS + 1):
            ids = tokens(position)
            with torch.no_grad():
                held_out = _loss(model.eval(), tokens(10**6), ranks).item()
            loss = _loss(model.train(), ids, ranks)
            loss.backward()
            fingerprint = hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:8]
            records.append(Record(step, scheduler.get_last_lr()[0], fingerprint, loss.item(), held_out))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            position += 1
            if step == save_at:
                saved = copy.deepcopy(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict(),
                        "rng": torch.get_rng_state(),
                        "position": position,
                        "step": step,
                    }
                )
    return tuple(records), saved


def _loss(model: Any, ids: Any, ranks: int) -> Any:
    """The mean over the tokens, summed as by so many ranks: each takes its mean, and these are averaged."""
    import torch

    each = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return each.view(ranks, -1).mean(1).mean()


def true_missing(whole: tuple[Record, ...], resumed: tuple[Record, ...]) -> str:
    """The first thing that does not agree, in the order in which one follows from the other."""
    pairs = [(next(w for w in whole if w.step == r.step), r) for r in resumed]

    def differ(a: float, b: float) -> bool:
        return abs(a - b) > 1e-5 * abs(a)

    first, mine = pairs[0]
    if differ(first.held_out, mine.held_out):
        return "model"
    if first.batch != mine.batch:
        return "data position"
    if differ(first.lr, mine.lr):
        return "scheduler"
    if differ(first.loss, mine.loss):
        return "random state"
    return "optimizer" if any(differ(a.held_out, b.held_out) for a, b in pairs) else NOTHING


def _why(answer: str, missing: str, whole: tuple[Record, ...], resumed: tuple[Record, ...], ranks: int) -> str:
    mine = resumed[0]
    same = next(w for w in whole if w.step == mine.step)
    shown = (
        f"the first resumed step, {mine.step}: learning rate {mine.lr:.5g} (uninterrupted: {same.lr:.5g}), batch {mine.batch} "
        f"({same.batch}), held-out loss before it {mine.held_out:.5f} ({same.held_out:.5f}), its loss {mine.loss:.5f} ({same.loss:.5f})"
    )
    if missing == NOTHING and ranks > 1:
        return f"nothing is missing, and you say {answer}: on another number of ranks sums come in another order, and the last digits differ ({shown})"
    if missing == NOTHING:
        return f"nothing is missing, and you say {answer}. Compare the records of the same `step`: the resumed run begins at step {mine.step}"
    hints = {
        "model": "weights that were not restored show before the first update, on fixed data and without dropout",
        "optimizer": "up to the first update all is equal, and after it nothing is: what takes part in an update, and in no loss before it?",
        "scheduler": "the learning rate is another, and all that follows from it",
        "random state": "the same weights, the same batch, and another loss: what is left that a loss with dropout depends on?",
        "data position": "another batch explains another loss; look at the batch first",
    }
    return f"the {missing} was not restored, and you say {answer}: {hints[missing]} ({shown})"
