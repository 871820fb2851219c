"""The rules behind `course_lib.memory.allocator`: blocks, pools, and when the CUDA driver is asked.

Constants and functions bear the names (in comments) of those in c10/core/AllocatorConfig.h and
c10/cuda/CUDACachingAllocator.cpp of PyTorch, the source of all that stands here.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from typing import NamedTuple

MIN_BLOCK_SIZE = 512  # kMinBlockSize: every size is rounded up to a multiple of it
SMALL_SIZE = 1 << 20  # kSmallSize: the largest request that the small pool serves
SMALL_BUFFER = 2 << 20  # kSmallBuffer: a segment of the small pool
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: from here on a request gets a segment of its own size
LARGE_BUFFER = 20 << 20  # kLargeBuffer (now the default of large_segment_size_mb): a segment for smaller ones
ROUND_LARGE = 2 << 20  # kRoundLarge: a segment of its own size is rounded up to a multiple of it
ADDRESS_SPACE = 1 << 46  # of an expandable segment; PyTorch takes 9/8 of the card, which is never used up either


class Part(NamedTuple):
    """A block within a segment: bytes, and the id of what lies there (None: free)."""

    bytes: int
    id: Hashable | None


class Segment(NamedTuple):
    """One cudaMalloc (or the mapped part of an expandable segment), its blocks in the order of addresses."""

    bytes: int
    small: bool
    parts: tuple[Part, ...]


class _Block:
    """A stretch of addresses in a segment, free or in use. Unmapped ones, of expandable segments, have no memory behind."""

    __slots__ = ("address", "size", "pool", "prev", "next", "id", "used", "mapped")

    def __init__(self, address: int, size: int, pool: _Pool, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.prev: _Block | None = None
        self.next: _Block | None = None
        self.id: Hashable | None = None
        self.used = False

    def cut(self, size: int) -> _Block:
        """Keep the first `size` bytes; the rest becomes a block of its own."""
        rest = _Block(self.address + size, self.size - size, self.pool, self.mapped)
        rest.prev, rest.next, self.next = self, self.next, rest
        if rest.next:
            rest.next.prev = rest
        self.size = size
        return rest

    def swallow(self, other: _Block | None) -> bool:
        """Merge with a neighbour, if that is free and as mapped as this one. The other is gone then."""
        if other is None or other.used or other.mapped != self.mapped:
            return False
        if self.mapped:
            other.pool.take(other)
        if other is self.prev:
            self.address, self.prev = other.address, other.prev
            if self.prev:
                self.prev.next = self
        else:
            self.next = other.next
            if self.next:
                self.next.prev = self
        self.size += other.size
        return True


class _Pool:
    """Free blocks in the order of (size, address), so that the first one large enough is the best fit."""

    def __init__(self, small: bool) -> None:
        self.small, self.page = small, SMALL_BUFFER if small else LARGE_BUFFER
        self.order: list[tuple[int, int]] = []
        self.free: dict[int, _Block] = {}  # by address

    def put(self, block: _Block) -> None:
        insort(self.order, (block.size, block.address))
        self.free[block.address] = block

    def take(self, block: _Block) -> None:
        del self.order[bisect_left(self.order, (block.size, block.address))]
        del self.free[block.address]

    def fitting(self, size: int) -> Iterator[_Block]:
        for i in range(bisect_left(self.order, (size, 0)), len(self.order)):
            yield self.free[self.order[i][1]]


class Allocator:
    """The allocator's state. `limit`: bytes that the driver can give; None for no end."""

    def __init__(self, limit: int | None, expandable: bool) -> None:
        self.limit, self.expandable = limit, expandable
        self.pools = {small: _Pool(small) for small in (True, False)}
        self.used: dict[Hashable, _Block | None] = {}
        self.heads: dict[int, _Block] = {}  # one block of each segment, by the segment's first address
        self.next_address = self.allocated = self.reserved = self.reserved_peak = self.retries = 0

    def allocate(self, name: Hashable, requested: int) -> bool:
        """Whether there was memory for it. What needs no bytes gets none (as in PyTorch) and always succeeds."""
        if requested < 0:
            raise ValueError(f"{name!r} asks for {requested} bytes: give 0 or more.")
        if name in self.used:
            raise ValueError(f"{name!r} is allocated twice: free it first, or give the second one another id.")
        if not requested:
            self.used[name] = None
            return True
        size = -(-requested // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
        pool = self.pools[size <= SMALL_SIZE]
        block = self._from_cache(pool, size) or self._from_driver(pool, size)
        if block is None:
            self.retries += 1
            self._give_back_cached()
            block = self._from_driver(pool, size)
        if block is None:
            return False
        rest = block.size - size
        if rest >= MIN_BLOCK_SIZE if pool.small or self.expandable else rest > SMALL_SIZE:  # should_split
            pool.put(block.cut(size))
        block.used, block.id = True, name
        self.used[name] = block
        self.allocated += block.size
        return True

    def free(self, name: Hashable) -> None:
        if name not in self.used:
            raise ValueError(f"{name!r} is freed, but it is not allocated.")
        block = self.used.pop(name)
        if block is None:
            return
        self.allocated -= block.size
        block.used, block.id = False, None
        self._to_pool(block)

    def _to_pool(self, block: _Block) -> None:
        block.swallow(block.prev)
        block.swallow(block.next)
        block.pool.put(block)
        self._note_head(block)

    def _note_head(self, block: _Block) -> None:
        if block.prev is None:
            self.heads[block.address] = block

    def _from_cache(self, pool: _Pool, size: int) -> _Block | None:
        """get_free_block: best fit. In an expandable segment a block that can grow counts as large as it can become."""
        candidates = pool.fitting(size)
        block = next(candidates, None)
        if block is not None and self.expandable:
            for other in candidates:
                if _room(other) >= _room(block):
                    break
                block = other
        if block is not None:
            pool.take(block)
        return block

    def _from_driver(self, pool: _Pool, size: int) -> _Block | None:
        if self.expandable:
            return self._grown(pool, size)
        if size <= SMALL_SIZE:  # get_allocation_size
            segment = SMALL_BUFFER
        elif size < MIN_LARGE_ALLOC:
            segment = LARGE_BUFFER
        else:
            segment = -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self._reserve(segment):
            return None
        block = _Block(self.next_address, segment, pool)
        self.next_address += segment
        self._note_head(block)
        return block

    def _reserve(self, size: int) -> bool:
        if self.limit is not None and self.reserved + size > self.limit:
            return False
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return True

    def _grown(self, pool: _Pool, size: int) -> _Block | None:
        """try_allocate_expandable_block: map pages at the lowest address where the request then fits."""
        start = next((b for b in self.heads.values() if b.pool is pool), None)
        if start is None:
            start = _Block(self.next_address, ADDRESS_SPACE, pool, mapped=False)
            self.next_address += ADDRESS_SPACE
            self._note_head(start)
        block = _first_gap(start, size)
        while not block.mapped or block.size < size:
            hole = block if not block.mapped else block.next
            missing = size - (block.size if block.mapped else 0)
            pages = min(-(-missing // pool.page) * pool.page, hole.size)
            if not self._reserve(pages):
                return None
            if pages < hole.size:
                hole.cut(pages)
            hole.mapped = True
            self._to_pool(hole)
            block = hole
        pool.take(block)
        return block

    def _give_back_cached(self) -> None:
        """release_cached_blocks: every segment (or page of an expandable one) that holds nothing goes back."""
        for pool in self.pools.values():
            for block in list(pool.free.values()):
                if self.expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    pool.take(block)
                    del self.heads[block.address]
                    self.reserved -= block.size

    def _unmap(self, block: _Block) -> None:
        page, base = block.pool.page, block.address // ADDRESS_SPACE * ADDRESS_SPACE
        first = base - (base - block.address) // page * page
        last = base + (block.address + block.size - base) // page * page
        if first >= last:
            return
        block.pool.take(block)
        if first > block.address:
            before, block = block, block.cut(first - block.address)
            before.pool.put(before)
        if last < block.address + block.size:
            block.pool.put(block.cut(last - block.address))
        self.reserved -= block.size
        block.mapped = False
        block.swallow(block.prev)
        block.swallow(block.next)
        self._note_head(block)

    def segments(self) -> Iterator[Segment]:
        for head in self.heads.values():
            parts, block = [], head
            while block:
                if block.mapped:
                    parts.append(Part(block.size, block.id if block.used else None))
                block = block.next
            if parts:
                yield Segment(sum(part.bytes for part in parts), head.pool.small, tuple(parts))


def _room(block: _Block) -> int:
    return block.size + (block.next.size if block.next and not block.next.mapped else 0)


def _first_gap(block: _Block, size: int) -> _Block:
    """find_expandable_block: free (mapped or not) neighbours, an unmapped one among the first two, that have `size`."""
    while True:
        if not block.mapped:
            start = block.prev if block.prev and not block.prev.used else block
            room, look = 0, start
            while look and not look.used:
                room, look = room + look.size, look.next
            if room >= size:
                return start
        block = block.next
        assert block is not None, "the last block of an expandable segment is unmapped and vast"
