"""The sentences printed during a wait for GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from course_lib.launch.leases.state import Holder, Ticket


def duration(seconds: float) -> str:
    """``"40 s"``, ``"3 min"``, ``"2 h 5 min"``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def gpus_in_words(gpus: Sequence[int]) -> str:
    """``"GPU 2"``, ``"GPUs 0, 1"``."""
    return f"GPU{'s' * (len(gpus) > 1)} {', '.join(map(str, gpus))}"


def waiting(wants: int, gpus: int, holders: Sequence[Holder], before: Sequence[Ticket]) -> str:
    """``"waiting for 1 of 4 GPUs: Ada has GPU 0 for 3 min; GPU 3 is free; 2 are before you (Ben, Cem)"``."""
    return f"waiting for {wants} of {gpus} GPUs: {_state(gpus, holders, before)}"


def no_turn(wants: int, gpus: int, seconds: float, holders: Sequence[Holder], before: Sequence[Ticket]) -> str:
    """The same, after the wait was given up."""
    return f"{wants} of {gpus} GPUs did not come free within {seconds:g} s: {_state(gpus, holders, before)}"


def your_turn(gpus: Sequence[int], seconds: float) -> str:
    return f"your turn: {gpus_in_words(gpus)}, after {duration(seconds)}"


def _state(gpus: int, holders: Sequence[Holder], before: Sequence[Ticket]) -> str:
    held: dict[tuple[str, int | None], list[Holder]] = {}
    for holder in holders:
        held.setdefault((holder.name, holder.pid), []).append(holder)
    parts = []
    for (name, _), some in held.items():
        since = max((h.since for h in some if h.since is not None), default=None)
        how_long = "" if since is None else f" for {duration(time.time() - since)}"
        parts.append(f"{name} has {gpus_in_words([h.gpu for h in some])}{how_long}")
    sentences = [", ".join(parts)] if parts else []
    free = sorted(set(range(gpus)) - {h.gpu for h in holders})
    if free:
        sentences.append(f"{gpus_in_words(free)} {'is' if len(free) == 1 else 'are'} free")
    if before:
        names = ", ".join(t.name for t in before[:3]) + (", …" if len(before) > 3 else "")
        sentences.append(f"{len(before)} {'is' if len(before) == 1 else 'are'} before you ({names})")
    else:
        sentences.append("you are next")
    return "; ".join(sentences)
