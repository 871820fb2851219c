"""A simulation of PyTorch's CUDA caching allocator: which segments it asks the driver for, and when it says out of memory.

No GPU is asked. The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (read in torch's
main branch and 2.13) on one stream and with default settings; `course_lib.memory.segments` holds them. Left out: other
streams, CUDA graphs' pools, `max_split_size_mb`, `garbage_collection_threshold`, `roundup_power2_divisions`. An
assumption: the driver gives each segment a higher address than the one before. It only decides between two free blocks of
the same size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from course_lib.memory.segments import ROUND_LARGE, Allocator, Segment


class Event(NamedTuple):
    """A storage allocated or freed. `bytes` is only read where it is allocated."""

    allocate: bool
    id: Hashable
    bytes: int = 0


class Moment(NamedTuple):
    """After an event, bytes: torch.cuda.memory_allocated() and memory_reserved()."""

    allocated: int
    reserved: int


@dataclass(frozen=True)
class Replay:
    """What the simulated allocator did; all sizes in bytes.

    Attributes:
        allocated_peak, reserved_peak: torch.cuda.max_memory_allocated() and max_memory_reserved().
        timeline: one moment an event; it ends before the event that failed.
        segments: at the end, or when memory ran out (then after the cached segments were given back).
        out_of_memory: the event that failed, or None.
        retries: how often cached segments were given back for a request (num_alloc_retries; each costs time).
    """

    allocated_peak: int
    reserved_peak: int
    timeline: tuple[Moment, ...]
    segments: tuple[Segment, ...]
    out_of_memory: Event | None
    retries: int

    @property
    def free(self) -> int:
        """Bytes in the segments at the end that hold nothing."""
        return sum(part.bytes for segment in self.segments for part in segment.parts if part.id is None)

    @property
    def largest_free(self) -> int:
        """The largest free block at the end: no longer request can be served from the cache."""
        return max((part.bytes for segment in self.segments for part in segment.parts if part.id is None), default=0)

    @property
    def stuck(self) -> int:
        """Free bytes in segments that also hold something, and so cannot go back to the driver (inactive_split_bytes)."""
        return sum(
            part.bytes
            for segment in self.segments
            if len(segment.parts) > 1
            for part in segment.parts
            if part.id is None
        )

    @property
    def fragmentation(self) -> float:
        """1 - largest_free / free: 0 where the free bytes are in one piece (or none are), near 1 for crumbs."""
        return 1 - self.largest_free / self.free if self.free else 0.0


def replay(events: Iterable[Event], limit: int | None = None, *, expandable_segments: bool = False) -> Replay:
    """Run allocations and frees through the allocator's rules.

    Args:
        events: in the order of time; plain tuples (allocate, id, bytes) will do.
        limit: bytes that the driver can give, CUDA's context already taken off; None for no end.
        expandable_segments: as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: one segment a pool, which grows by
            pages of 2 and 20 MiB.

    Raises:
        ValueError: an id allocated twice or freed without being there, a negative size.
    """
    simulated = Allocator(limit, expandable_segments)
    timeline: list[Moment] = []
    failed = None
    for event in map(Event._make, events):
        if not event.allocate:
            simulated.free(event.id)
        elif not simulated.allocate(event.id, event.bytes):
            failed = event
            break
        timeline.append(Moment(simulated.allocated, simulated.reserved))
    return Replay(
        allocated_peak=max((moment.allocated for moment in timeline), default=0),
        reserved_peak=simulated.reserved_peak,
        timeline=tuple(timeline),
        segments=tuple(simulated.segments()),
        out_of_memory=failed,
        retries=simulated.retries,
    )


def smallest_limit(events: Iterable[Event], *, expandable_segments: bool = False) -> int:
    """The fewest bytes, a multiple of 2 MiB, with which the driver still sees the events through.

    Less than the reserved peak of a card with room: where memory is short, cached segments are given back in time. Found
    by bisection, which takes for granted that more memory never hurts; of a best fit that is not certain, only usual.
    """
    events = list(events)
    roomy = replay(events, expandable_segments=expandable_segments)
    low, high = roomy.allocated_peak // ROUND_LARGE, -(-roomy.reserved_peak // ROUND_LARGE)  # low - 1 is too little
    while low < high:
        middle = (low + high) // 2
        if replay(events, middle * ROUND_LARGE, expandable_segments=expandable_segments).out_of_memory:
            low = middle + 1
        else:
            high = middle
    return high * ROUND_LARGE
