"""Lab 3, exercise 4: a broadcast by a binomial tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course_checks.harness import NotYet, fresh_seed, in_bytes, named_seed
from course_checks.lab03 import on_ranks
from course_checks.lab03.common import lab, named, only_messages, run, sent

ELEMENTS, ITEM = 1000, 4


@lab.exercise("A broadcast tree", importance=3, difficulty=3, minutes=20)
def broadcast_tree(broadcast: Callable[..., Any]) -> str:
    """Any root, 1 to 5 ranks: n-1 messages of the tensor in ceil(log2 n) rounds."""
    seed = fresh_seed()
    with named_seed(seed):
        for ranks in (4, 5, 3, 2, 1):
            told = run(on_ranks.broadcast, broadcast, list(range(ranks)), ELEMENTS, seed, ranks=ranks)
            for root in range(ranks):
                outcomes = [by_rank[root] for by_rank in told]
                only_messages(outcomes, "it")
                _right_values(outcomes, root)
                _right_tree(outcomes, root)
    return "the root's tensor on 1 to 5 ranks from any root; 5 ranks took 3 rounds and 4 messages"


def _right_values(outcomes: list[dict[str, Any]], root: int) -> None:
    ranks = len(outcomes)
    wrong = [rank for rank, o in enumerate(outcomes) if not torch.equal(o["got"], o["expected"])]
    if not wrong:
        return
    if wrong == [root]:
        raise NotYet(f"root {root} of {ranks} ranks loses its own tensor: who has it only sends")
    if any(
        torch.equal(outcomes[rank]["value"], outcomes[rank]["expected"])
        for rank in wrong
        if outcomes[rank]["value"] is not None
    ):
        raise NotYet(
            "the function returns the root's tensor, and the argument stays as it was: broadcast works in place"
        )
    if not root or all(not sent(outcome["messages"]) for outcome in outcomes):
        raise NotYet(f"with root {root} on {ranks} ranks the tensor never reaches {named(wrong)}")
    raise NotYet(
        f"with root {root} on {ranks} ranks the tensor is wrong on {named(wrong)}, while root 0 works: count the ranks "
        "from the root, (rank - root) % n"
    )


def _right_tree(outcomes: list[dict[str, Any]], root: int) -> None:
    ranks = len(outcomes)
    levels = (ranks - 1).bit_length()
    sends = [len(sent(outcome["messages"])) for outcome in outcomes]
    where = f"with root {root} on {ranks} ranks"
    if ranks > 3 and sends[root] == ranks - 1:
        raise NotYet(
            f"{where} the root sends {ranks - 1} messages, one after the other, while the others watch: after the first "
            f"one two ranks have the tensor, and both can send. {levels} rounds are enough"
        )
    num_bytes = sum(message.bytes for outcome in outcomes for message in sent(outcome["messages"]))
    wanted = (ranks - 1) * ELEMENTS * ITEM
    if sum(sends) > ranks - 1 or num_bytes > wanted:
        raise NotYet(
            f"{where} {sum(sends)} messages and {in_bytes(num_bytes)} are sent where {ranks - 1} and {in_bytes(wanted)} are "
            "enough: each rank gets the tensor once"
        )
    if num_bytes < wanted:
        raise NotYet(
            f"{where} {in_bytes(num_bytes)} are sent, and it takes {in_bytes(wanted)}: the tensor must travel as messages of "
            "the process group"
        )
    took = _rounds([outcome["messages"] for outcome in outcomes], root)
    if took > levels:
        raise NotYet(
            f"{where} it takes {took} rounds, and {levels} are enough: in each round every rank that has the tensor sends "
            "it to one that has not"
        )


def _rounds(by_rank: list[list[Any]], root: int) -> int:
    """The round in which the last rank gets the tensor, if a rank sends one message a round from when it has it."""
    has, waiting, last = {root: 0}, [root], 0
    while waiting:
        rank = waiting.pop(0)
        for number, message in enumerate(sent(by_rank[rank]), 1):
            has[message.peer] = has[rank] + number
            waiting.append(message.peer)
            last = max(last, has[message.peer])
    return last
