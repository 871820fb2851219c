"""A simulation of PyTorch's CUDA caching allocator: which segments it asks the driver for, and when it says out of memory.

No GPU is asked. The rules are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h (read in torch's
main branch and 2.13) on one stream and with default settings; comments give their names there. Left out: other streams,
CUDA graphs' pools, `expandable_segments`, `max_split_size_mb`, `garbage_collection_threshold`, `roundup_power2_divisions`.
An assumption: the driver gives each segment a higher address than the one before. It only decides between two free blocks
of the same size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIN_BLOCK_SIZE = 512  # kMinBlockSize: every size is rounded up to a multiple of it
SMALL_SIZE = 1 << 20  # kSmallSize: the largest request that the small pool serves
SMALL_BUFFER = 2 << 20  # kSmallBuffer: a segment of the small pool
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: from here on a request gets a segment of its own size
LARGE_BUFFER = 20 << 20  # kLargeBuffer (now the default of large_segment_size_mb): a segment for smaller ones
ROUND_LARGE = 2 << 20  # kRoundLarge: a segment of its own size is rounded up to a multiple of it


class Event(NamedTuple):
    """A storage allocated or freed. `bytes` is only read where it is allocated."""

    allocate: bool
    id: Hashable
    bytes: int = 0


class Moment(NamedTuple):
    """After an event, bytes: torch.cuda.memory_allocated() and memory_reserved()."""

    allocated: int
    reserved: int


class Part(NamedTuple):
    """A block within a segment: bytes, and the id of what lies there (None: free)."""

    bytes: int
    id: Hashable | None


class Segment(NamedTuple):
    """One cudaMalloc, its blocks in the order of addresses."""

    bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Replay:
    """What the simulated allocator did; all sizes in bytes.

    Attributes:
        requested_peak: the most that was asked for at one time, before rounding.
        allocated_peak, reserved_peak: torch.cuda.max_memory_allocated() and max_memory_reserved().
        timeline: one moment an event; it ends before the event that failed.
        segments: at the end, or when memory ran out (then after the cached segments were given back).
        out_of_memory: the event that failed, or None.
        retries: how often cached segments were given back for a request (num_alloc_retries; each costs time).
    """

    requested_peak: int
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


def replay(events: Iterable[Event], limit: int | None = None) -> Replay:
    """Run allocations and frees through the allocator's rules.

    Args:
        events: in the order of time; plain tuples (allocate, id, bytes) will do.
        limit: bytes that the driver can give, CUDA's context already taken off; None for no end.
    """
    simulated = _Allocator(limit)
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
        requested_peak=simulated.requested_peak,
        allocated_peak=max((moment.allocated for moment in timeline), default=0),
        reserved_peak=simulated.reserved_peak,
        timeline=tuple(timeline),
        segments=tuple(map(_shown, simulated.segments)),
        out_of_memory=failed,
        retries=simulated.retries,
    )


def _shown(segment: list[_Block]) -> Segment:
    parts = tuple(Part(block.size, block.id) for block in segment)
    return Segment(sum(part.bytes for part in parts), parts)


def smallest_limit(events: Iterable[Event]) -> int:
    """The fewest bytes, a multiple of 2 MiB, with which the driver still sees the events through.

    Less than the reserved peak of a card with room: where memory is short, cached segments are given back in time. Found
    by bisection, which takes for granted that more memory never hurts; of a best fit that is not certain, only usual.
    """
    events = list(events)
    roomy = replay(events)
    limits = range(roomy.allocated_peak // ROUND_LARGE * ROUND_LARGE, roomy.reserved_peak, ROUND_LARGE)
    enough = bisect_left(limits, True, key=lambda limit: replay(events, limit).out_of_memory is None)
    return limits.start + enough * ROUND_LARGE


@dataclass(eq=False, slots=True)
class _Block:
    """A stretch of addresses, free or in use. `segment`: all blocks of its segment, in the order of addresses."""

    address: int
    size: int
    small: bool
    segment: list[_Block]
    used: bool = False
    id: Hashable | None = None


class _Allocator:
    """The allocator's state. `limit`: bytes that the driver can give; None for no end."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.segments: list[list[_Block]] = []
        self.pools: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}  # size, address, free block
        self.used: dict[Hashable, tuple[_Block | None, int]] = {}  # id -> block, bytes asked for
        self.requested = self.requested_peak = self.allocated = self.reserved = self.reserved_peak = 0
        self.next_address = self.retries = 0

    def allocate(self, name: Hashable, requested: int) -> bool:
        """Whether there was memory for it. What needs no bytes gets none (as in PyTorch) and always succeeds."""
        if requested < 0:
            raise ValueError(f"{name!r} asks for {requested} bytes: give 0 or more.")
        if name in self.used:
            raise ValueError(f"{name!r} is allocated twice: free it first, or give the second one another id.")
        if not requested:
            self.used[name] = None, 0
            return True
        size = -(-requested // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
        block = self._from_cache(size) or self._from_driver(size)
        if block is None:
            self.retries += 1
            self._give_back_cached()
            block = self._from_driver(size)
        if block is None:
            return False
        left = block.size - size
        if left >= MIN_BLOCK_SIZE if block.small else left > SMALL_SIZE:  # should_split
            rest = _Block(block.address + size, left, block.small, block.segment)
            block.segment.insert(block.segment.index(block) + 1, rest)
            block.size = size
            self._put(rest)
        block.used, block.id = True, name
        self.used[name] = block, requested
        self.allocated += block.size
        self.requested += requested
        self.requested_peak = max(self.requested_peak, self.requested)
        return True

    def free(self, name: Hashable) -> None:
        if name not in self.used:
            raise ValueError(f"{name!r} is freed, but it is not allocated.")
        block, requested = self.used.pop(name)
        if block is None:
            return
        self.allocated -= block.size
        self.requested -= requested
        block.used, block.id = False, None
        place = block.segment.index(block)
        first, *others = [one for one in block.segment[max(place - 1, 0) : place + 2] if not one.used]
        for one in (first, *others):
            if one is not block:
                self._take(one)
        for one in others:
            first.size += one.size
            first.segment.remove(one)
        self._put(first)

    def _put(self, block: _Block) -> None:
        insort(self.pools[block.small], (block.size, block.address, block))

    def _take(self, block: _Block) -> None:
        pool = self.pools[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]

    def _from_cache(self, size: int) -> _Block | None:
        """get_free_block, best fit: the smallest that is large enough, of several the one at the lowest address."""
        pool = self.pools[size <= SMALL_SIZE]
        best = bisect_left(pool, (size,))
        return pool.pop(best)[-1] if best < len(pool) else None

    def _from_driver(self, size: int) -> _Block | None:
        if size < MIN_LARGE_ALLOC:  # get_allocation_size
            length = SMALL_BUFFER if size <= SMALL_SIZE else LARGE_BUFFER
        else:
            length = -(-size // ROUND_LARGE) * ROUND_LARGE
        if self.limit is not None and self.reserved + length > self.limit:
            return None
        block = _Block(self.next_address, length, size <= SMALL_SIZE, [])
        block.segment.append(block)
        self.segments.append(block.segment)
        self.next_address += length
        self.reserved += length
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return block

    def _give_back_cached(self) -> None:
        """release_cached_blocks: every segment that holds nothing goes back."""
        for segment in list(self.segments):
            if len(segment) == 1 and not segment[0].used:
                self._take(segment[0])
                self.segments.remove(segment)
                self.reserved -= segment[0].size
