"""A data-parallel step without ranks: when does each bucket of gradients travel, and what of it sticks out of backward?"""

from __future__ import annotations

from course_lib.collectives.links import Link, ring_seconds
from course_lib.observe.trace import Span
from course_lib.validation import check_counts, positive


def bucketed_step(
    bucket_bytes: float, *, gradient_bytes: float, compute: float, link: Link | str, ranks: int
) -> tuple[float, list[Span]]:
    """Seconds of a step, and what it consists of: "forward", "backward", and a "collective" for each bucket.

    Buckets fill evenly during backward, which takes two thirds of the computing. A full one leaves as soon as the link
    is free, and takes what a ring all-reduce takes. On GPUs the sending also slows the computing; not here.

    Args:
        bucket_bytes, gradient_bytes: bytes of a rank.
        compute: seconds that a rank computes in a step.
        link: from each rank to the next of the ring.
    """
    positive(bucket_bytes=bucket_bytes, gradient_bytes=gradient_bytes, compute=compute)
    check_counts(ranks=ranks)
    spans = [("forward", 0.0, compute / 3), ("backward", compute / 3, compute)]
    filled = free = 0.0
    while ranks > 1 and gradient_bytes - filled > 1e-9 * gradient_bytes:  # not for a rounding error
        size = min(bucket_bytes, gradient_bytes - filled)
        filled += size
        start = max(free, compute / 3 + compute * 2 / 3 * filled / gradient_bytes)
        free = start + ring_seconds("all_reduce", ranks, size, link)
        spans.append(("collective", start, free))
    return max(free, compute), [Span(kind, kind, start, end, thread=0) for kind, start, end in spans]
