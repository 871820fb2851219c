"""The simulated caching allocator, held against cases worked out by hand from CUDACachingAllocator.cpp's rules."""

from __future__ import annotations

import random
import re
from pathlib import Path

from refusals import assert_refused

from course_lib.memory import allocator
from course_lib.memory.allocator import Event, replay, smallest_limit

MIB = 2**20


def events_of(text: str) -> list[Event]:
    """`a12 b3 -a`: allocate 12 MiB as a, 3 as b, free a."""
    return [
        Event(False, word[1:]) if word[0] == "-" else Event(True, word[0], round(float(word[1:]) * MIB))
        for word in text.split()
    ]


def script(text: str, **options):
    return replay(events_of(text), **options)


ROUNDED = [  # bytes requested, one after another; bytes allocated, reserved
    ([1], 512, 2 * MIB),
    ([MIB + 1], MIB + 512, 20 * MIB),
    ([10 * MIB - 512], 10 * MIB - 512, 20 * MIB),
    ([10 * MIB], 10 * MIB, 10 * MIB),
    ([19 * MIB], 20 * MIB, 20 * MIB),  # the remainder of 1 MiB is no more than kSmallSize: not split off
    ([21 * MIB + 1], 22 * MIB, 22 * MIB),
    ([MIB, MIB - 512, 512], 2 * MIB, 2 * MIB),  # small requests share a segment, down to the last 512 bytes
    ([MIB, MIB - 512, 513], 2 * MIB + 512, 4 * MIB),
]


def test_requests_are_rounded_and_get_a_segment_of_their_size() -> None:
    for sizes, allocated, reserved in ROUNDED:
        result = replay([Event(True, i, size) for i, size in enumerate(sizes)])
        assert (result.allocated_peak, result.reserved_peak) == (allocated, reserved), sizes


def test_the_requested_peak_is_counted_before_rounding() -> None:
    events = [(True, "a", 1), (True, "b", 700), (False, "a", 0), (True, "c", 0), (True, "d", 3), (False, "b", 0)]
    result = replay(events)
    assert (result.requested_peak, result.allocated_peak) == (703, 3 * 512)


RESERVED = [  # script; MiB reserved
    ("a8 b8", 20),  # requests of 1 to 10 MiB share 20
    ("a8 b8 c8", 40),
    ("a2 -a b0.5", 22),  # the pools of small and of large requests do not lend to each other
    ("a0.5 -a b2", 22),
    ("a40 b30 -a -b c25 d40 e5", 70),  # best fit: 25 into the free 30, so that 40 stays whole; 5 into the rest
    ("a40 -a b60", 100),  # what is too small is of no use
    ("a10 -a b30", 40),
    ("a8 b8 c4 -a -c -b d15", 20),  # free neighbours merge on both sides
]


def test_free_blocks_are_shared_split_and_taken_by_best_fit() -> None:
    for text, reserved in RESERVED:
        assert script(text).reserved_peak == reserved * MIB, text


def test_cached_segments_go_back_before_memory_is_said_to_be_out() -> None:
    result = script("a40 -a b60", limit=64 * MIB)
    assert (result.out_of_memory, result.retries, result.reserved_peak) == (None, 1, 60 * MIB)


def test_fragmented_memory_fails_a_request_for_less_than_is_free() -> None:
    # Three 40s that each keep a 12 at their end: 84 MiB are free, the largest piece is 28, and none can go back.
    text = "A40 B40 C40 -A a28 x12 -B b28 y12 -C c28 z12 -a -b -c"
    result = script(text, limit=120 * MIB)
    assert result.free == 84 * MIB
    failed = script(text + " q60", limit=120 * MIB)
    assert failed.out_of_memory == Event(True, "q", 60 * MIB) and failed.free > 60 * MIB


def test_a_growing_sequence_strands_segments() -> None:
    sizes = range(100, 160, 4)
    events = [event for size in sizes for event in ((True, size, size * MIB), (False, size, 0))]
    assert replay(events).reserved_peak == sum(sizes) * MIB
    assert smallest_limit(events) == sizes[-1] * MIB


def test_the_smallest_limit_lies_below_what_a_roomy_card_reserves() -> None:
    events = events_of("a40 -a b60 -b c100")
    assert (replay(events).reserved_peak, smallest_limit(events)) == (200 * MIB, 100 * MIB)
    assert smallest_limit([]) == 0


def test_random_events_keep_the_books() -> None:
    dice = random.Random(1)
    events, alive = [], []
    for i in range(3000):
        if alive and dice.random() < 0.5:
            events.append((False, alive.pop(dice.randrange(len(alive))), 0))
        else:
            events.append((True, i, int(2 ** dice.uniform(4, 25))))
            alive.append(i)
    sizes = {event[1]: event[2] for event in events if event[0]}
    for limit in (None, 300 * MIB):
        result = replay(events, limit)
        held = {part.id: part.bytes for segment in result.segments for part in segment.parts if part.id is not None}
        assert sum(held.values()) == result.timeline[-1].allocated
        assert all(held[name] >= sizes[name] for name in held)
        total = sum(segment.bytes for segment in result.segments)
        assert total == sum(held.values()) + result.free
        assert all(moment.allocated <= moment.reserved <= result.reserved_peak for moment in result.timeline)
        assert result.out_of_memory is None or (limit is not None and total <= limit)


def test_events_that_cannot_be_are_refused() -> None:
    assert_refused(
        [
            (lambda: replay([(True, "a", 1), (True, "a", 1)]), ValueError, "allocated twice"),
            (lambda: replay([(False, "a", 1)]), ValueError, "not allocated"),
            (lambda: replay([(True, "a", -1)]), ValueError, "-1"),
        ]
    )


def test_the_constants_are_those_of_the_installed_pytorch() -> None:
    """torch ships its headers, and the constants with them."""
    import torch

    header = (Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h").read_text()
    theirs = dict(re.findall(r"size_t (k\w+) = (\d+);", header))
    theirs["kLargeBuffer"] = theirs.get("kLargeBuffer") or re.search(r"large_segment_size_\{(\d+)\}", header)[1]
    names = ("MIN_BLOCK_SIZE", "SMALL_SIZE", "SMALL_BUFFER", "MIN_LARGE_ALLOC", "LARGE_BUFFER", "ROUND_LARGE")
    for name in names:
        ours = str(getattr(allocator, name))
        assert theirs.get("k" + name.title().replace("_", ""), ours) == ours, name
