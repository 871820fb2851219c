"""Lab 4, exercise 1: a data-parallel wrapper of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from course_checks.harness import ATOL, RTOL, NotYet, close, phases, ratio_hint, run_ranks, same
from course_checks.lab04 import on_ranks
from course_checks.lab04.common import lab
from course_lib.launch import Run


@lab.exercise("Your own DistributedDataParallel", importance=5, difficulty=4, minutes=35)
def own_ddp(make_ddp: Callable[..., Any]) -> str:
    """Parity with one rank on the whole batch, gradients once over the wire, in buckets, while backward computes."""
    bucket_bytes, straggle = 40_000, 0.25
    evidence = ""
    for ranks in (1, 2, 3, 4):
        slow = straggle if ranks == 2 else 0.0
        run = run_ranks(on_ranks.own_ddp, make_ddp, bucket_bytes, slow, ranks=ranks, timeout=8)
        for rank, told in enumerate(run.results):
            _same_start(told, rank, ranks)
        for rank, told in enumerate(run.results):
            _right_numbers(told, rank, ranks)
        if ranks > 1:
            evidence = _right_traffic(run, bucket_bytes)
        if slow:
            _overlaps(run, straggle)
    return f"equal to one rank on 1, 2, 3 and 4 ranks; {evidence}; rank 0 kept computing while rank 1 was late"


def _same_start(told: dict[str, Any], rank: int, ranks: int) -> None:
    if not same(told["start"], told["expected_start"]):
        raise NotYet(
            f"rank {rank} of {ranks} starts from other weights than rank 0: broadcast rank 0's parameters and buffers "
            "when you wrap the model"
        )


def _right_numbers(told: dict[str, Any], rank: int, ranks: int) -> None:
    for number, step in enumerate(told["steps"], 1):
        got, expected = step["got"], step["expected"]
        missing = [name for name in expected if name not in got]
        if missing:
            raise NotYet(f"after finish() {missing[0]} has no .grad on rank {rank}: put the averaged values back")
        if ranks > 1 and same(got, step["local"]) and not same(expected, step["local"]):
            raise NotYet(
                f"after finish() rank {rank} of {ranks} still holds its own gradients: nothing was averaged, or the "
                "average never reached .grad"
            )
        hint = ratio_hint(
            got,
            expected,
            {
                ranks: f"your gradients are exactly world_size ({ranks}) times too large: you summed where DDP averages",
                1 / ranks: f"your gradients are exactly world_size ({ranks}) times too small: you divided twice",
            },
        )
        if hint:
            raise NotYet(hint)
        if number > 1 and not same(got, expected):
            raise NotYet(
                f"step 1 is right and step {number} is not (rank {rank} of {ranks}): finish() must leave every bucket "
                "empty for the next backward"
            )
        close(got, expected, rtol=RTOL, atol=ATOL, what=f"rank {rank} of {ranks}, the gradient")
    close(
        told["end"], told["expected_end"], rtol=RTOL, atol=ATOL, what=f"rank {rank} of {ranks}, after {number} steps,"
    )


def _right_traffic(run: Run, bucket_bytes: int) -> str:
    sizes = run.results[0]["parameter_bytes"]
    total, largest = sum(sizes), max(sizes)
    cut = phases(run, 0)  # before wrapping | wrapping, forward | backward | finish | step, forward | backward | …
    in_backward, in_finish = cut[2], cut[3]
    sent = [c for c in in_backward + in_finish if c.kind == "all_reduce"]
    strange = {c.kind for c in in_backward + in_finish} - {"all_reduce"}
    if strange:
        raise NotYet(f"backward uses {', '.join(sorted(strange))}: averaging needs all_reduce alone")
    if not [c for c in in_backward if c.kind == "all_reduce"]:
        raise NotYet(
            "no all-reduce starts before backward() is over, so nothing overlaps: start a bucket's all-reduce in the "
            "hook that fills it (register_post_accumulate_grad_hook), not in finish()"
        )
    num_bytes = sum(c.bytes for c in sent)
    if num_bytes > 1.05 * total:
        frozen = on_ranks.WIDTH * (on_ranks.WIDTH + 1) * 4
        why = " (the frozen layer's zeros travel too)" if abs(num_bytes - total - frozen) < 0.02 * total else ""
        raise NotYet(f"you send {num_bytes:,} bytes a step for {total:,} bytes of gradients{why}: send each one once")
    if num_bytes < 0.95 * total:
        raise NotYet(f"you all-reduce {num_bytes:,} bytes of {total:,} bytes of gradients: some never travel")
    if len(sent) >= len(sizes):
        raise NotYet(
            f"{len(sent)} all-reduces for {len(sizes)} parameters: one each pays the latency each time; fill buckets of "
            "bucket_bytes first"
        )
    biggest = max(c.bytes for c in sent)
    if biggest > bucket_bytes + largest:
        raise NotYet(
            f"your largest all-reduce has {biggest:,} bytes, and a bucket {bucket_bytes:,}: a bucket that holds "
            "everything is full only when backward is over"
        )
    return f"{num_bytes:,} bytes of gradients a step in {len(sent)} buckets"


def _overlaps(run: Run, straggle: float) -> None:
    """Rank 1 is late in the middle of backward; a rank 0 that waits for it there has a blocking all-reduce."""
    seconds = run.results[0]["steps"][-1]["backward"]
    if seconds > 0.6 * straggle:
        raise NotYet(
            f"rank 0's backward() took {seconds:.2f} s because rank 1 was {straggle:.2f} s late: your hook waits for the "
            "all-reduce. Start it with async_op=True and wait in finish()"
        )
