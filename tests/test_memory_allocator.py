"""The simulated caching allocator, held against cases worked out by hand from CUDACachingAllocator.cpp's rules."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from course_lib.memory.allocator import Event, replay, smallest_limit
from course_lib.memory.segments import Part

MIB = 2**20


def took(*sizes: int, **options):
    """Allocate these one after another, free none."""
    return replay([(True, i, size) for i, size in enumerate(sizes)], **options)


def script(text: str, **options):
    """`a12 b3 -a`: allocate 12 MiB as a, 3 as b, free a."""
    events = []
    for word in text.split():
        if word[0] == "-":
            events.append(Event(False, word[1:]))
        else:
            events.append(Event(True, word[0], round(float(word[1:]) * MIB)))
    return replay(events, **options)


@pytest.mark.parametrize(
    "request_bytes, allocated, reserved",
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (19 * MIB, 20 * MIB, 20 * MIB),  # the remainder of 1 MiB is no more than kSmallSize: not split off
        (21 * MIB + 1, 22 * MIB, 22 * MIB),
        (0, 0, 0),
    ],
)
def test_rounding_of_one_request(request_bytes, allocated, reserved):
    one = took(request_bytes)
    assert (one.allocated_peak, one.reserved_peak) == (allocated, reserved)
    assert one.out_of_memory is None


def test_small_requests_share_a_segment_and_a_remainder_of_512_bytes_is_split_off():
    assert took(MIB, MIB - 512, 512).reserved_peak == 2 * MIB
    assert took(MIB, MIB - 512, 513).reserved_peak == 4 * MIB


def test_requests_of_1_to_10_mib_share_20_mib():
    assert took(8 * MIB, 8 * MIB).reserved_peak == 20 * MIB
    assert took(8 * MIB, 8 * MIB, 8 * MIB).reserved_peak == 40 * MIB
    # of the 4 MiB that are left, 3 are cut off; of those left then, 1 MiB is no more than kSmallSize
    assert [part.bytes for part in took(8 * MIB, 8 * MIB, 3 * MIB).segments[0].parts] == [8 * MIB, 8 * MIB, 4 * MIB]


def test_pools_do_not_lend_to_each_other():
    assert script("a2 -a b0.5").reserved_peak == 22 * MIB
    assert script("a0.5 -a b2").reserved_peak == 22 * MIB


def test_best_fit_takes_the_smallest_block_that_is_large_enough():
    # free: 40 and 30; 25 goes into the 30, so that the 40 is whole for the next one
    fit = script("a40 b30 -a -b c25 d40")
    assert fit.reserved_peak == 70 * MIB
    # a remainder of more than 1 MiB is split off, and serves
    assert script("a40 b30 -a -b c25 d40 e5").reserved_peak == 70 * MIB


def test_neighbours_merge_on_both_sides():
    merged = script("a8 b8 c4 -a -c -b d15")
    assert merged.reserved_peak == 20 * MIB
    assert merged.segments[0].parts == (Part(15 * MIB, "d"), Part(5 * MIB, None))
    assert merged.largest_free == merged.free == merged.stuck == 5 * MIB


def test_cached_segments_go_back_before_memory_is_said_to_be_out():
    again = script("a40 -a b60", limit=64 * MIB)
    assert again.out_of_memory is None
    assert again.retries == 1
    assert again.reserved_peak == 60 * MIB
    assert [segment.bytes for segment in again.segments] == [60 * MIB]
    assert script("a40 -a b60").reserved_peak == 100 * MIB


def test_fragmentation_enough_bytes_are_free_and_yet_a_request_fails():
    # Three 40s that each keep a 12 at their end: 84 MiB are free, the largest piece is 28, and none can go back.
    text = "A40 B40 C40 -A a28 x12 -B b28 y12 -C c28 z12 -a -b -c"
    ok = script(text, limit=120 * MIB)
    assert ok.out_of_memory is None
    assert (ok.free, ok.largest_free, ok.stuck) == (84 * MIB, 28 * MIB, 84 * MIB)
    assert ok.fragmentation == pytest.approx(2 / 3)
    failed = script(text + " q60", limit=120 * MIB)
    assert failed.out_of_memory == Event(True, "q", 60 * MIB)
    assert failed.free > failed.out_of_memory.bytes
    assert failed.timeline[-1].allocated == 36 * MIB and len(failed.timeline) == len(text.split())


def test_expandable_segments_mend_that_case():
    # Pages of 20 MiB: a whole free page between two tenants can be taken back and mapped at the end.
    text = "A40 B40 C40 -A a28 x12 -B b28 y12 -C c28 z12 -a -b -c q60"
    assert script(text, limit=120 * MIB).out_of_memory is not None
    mended = script(text, limit=120 * MIB, expandable_segments=True)
    assert mended.out_of_memory is None
    assert mended.retries == 1


def test_expandable_segments_grow_by_pages():
    assert took(512, expandable_segments=True).reserved_peak == 2 * MIB
    assert took(2 * MIB, expandable_segments=True).reserved_peak == 20 * MIB
    assert took(*[30 * MIB] * 4, expandable_segments=True).reserved_peak == 120 * MIB
    grown = script("a10 -a b30", expandable_segments=True)  # the free 20 MiB at the end grow to 40
    assert grown.reserved_peak == 40 * MIB
    assert script("a10 -a b30").reserved_peak == 40 * MIB  # 10 and 30 apart: 10 is lost


def test_in_an_expandable_segment_the_block_that_can_grow_is_taken_last():
    # free: 30 at the start, 20 at the end, which can grow; 15 fits both, and the 20 would be the best fit
    fit = script("a30 b10 t20 -a -t q15", expandable_segments=True)
    assert [part.bytes // MIB for part in fit.segments[0].parts] == [15, 15, 10, 20]
    assert fit.segments[0].parts[0].id == "q"


def test_only_whole_free_pages_of_an_expandable_segment_go_back():
    # b is free from 10 to 30 MiB and covers no page; d is the third page
    text = "a10 b20 c10 d20 -b -d q25"
    failed = script(text, limit=70 * MIB, expandable_segments=True)
    assert failed.out_of_memory == Event(True, "q", 25 * MIB)
    assert [segment.bytes for segment in failed.segments] == [40 * MIB]
    assert script(text, limit=80 * MIB, expandable_segments=True).out_of_memory is None


def test_a_growing_sequence_strands_segments_unless_they_expand():
    events = []
    for step in range(20):
        events += [(True, step, (100 + 3 * step) * MIB), (False, step, 0)]
    assert replay(events).reserved_peak > 10 * replay(events, expandable_segments=True).reserved_peak


def test_the_smallest_limit_lies_below_what_a_roomy_card_reserves():
    text = "a40 -a b60 -b c100"
    events = [
        (word[0] != "-", word.lstrip("-")[0], 0 if word[0] == "-" else int(word[1:]) * MIB) for word in text.split()
    ]
    assert replay(events).reserved_peak == 200 * MIB
    assert smallest_limit(events) == 100 * MIB
    assert smallest_limit([(True, "a", 1)]) == 2 * MIB
    assert smallest_limit([(True, "a", 31 * MIB)], expandable_segments=True) == 40 * MIB
    assert smallest_limit([]) == 0


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("limit", [None, 300 * MIB])
def test_random_events_keep_the_books(expandable, limit):
    dice = random.Random(1)
    events, alive = [], []
    for i in range(3000):
        if alive and dice.random() < 0.5:
            events.append((False, alive.pop(dice.randrange(len(alive))), 0))
        else:
            events.append((True, i, int(2 ** dice.uniform(4, 25))))
            alive.append(i)
    done = replay(events, limit, expandable_segments=expandable)
    sizes = {event[1]: event[2] for event in events if event[0]}
    held = {part.id: part.bytes for segment in done.segments for part in segment.parts if part.id is not None}
    assert sum(held.values()) == done.timeline[-1].allocated
    assert all(held[name] >= sizes[name] for name in held)
    total = sum(segment.bytes for segment in done.segments)
    assert total == sum(held.values()) + done.free
    if done.out_of_memory is None:
        assert total == done.timeline[-1].reserved
    else:
        assert limit is not None and total <= limit
    assert done.reserved_peak >= done.allocated_peak
    assert all(moment.allocated <= moment.reserved for moment in done.timeline)
    for segment in done.segments:  # neighbours have merged
        free = [part.id is None for part in segment.parts]
        assert expandable or not any(a and b for a, b in zip(free, free[1:], strict=False))


def test_bad_events_are_refused_with_a_sentence():
    with pytest.raises(ValueError, match="allocated twice"):
        replay([(True, "a", 1), (True, "a", 1)])
    with pytest.raises(ValueError, match="not allocated"):
        replay([(False, "a", 1)])
    with pytest.raises(ValueError, match="0 or more"):
        replay([(True, "a", -1)])


def test_importing_it_does_not_import_torch():
    code = "import sys, course_lib.memory.allocator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_constants_are_those_of_the_installed_pytorch():
    """torch ships its headers, and the constants with them."""
    import re
    from pathlib import Path

    import torch

    from course_lib.memory import segments

    header = (Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h").read_text()
    found = dict(re.findall(r"size_t (k\w+) = (\d+);", header))
    found["kLargeBuffer"] = found.get("kLargeBuffer") or re.search(r"large_segment_size_\{(\d+)\}", header)[1]
    ours = {
        "kMinBlockSize": segments.MIN_BLOCK_SIZE,
        "kSmallSize": segments.SMALL_SIZE,
        "kSmallBuffer": segments.SMALL_BUFFER,
        "kMinLargeAlloc": segments.MIN_LARGE_ALLOC,
        "kLargeBuffer": segments.LARGE_BUFFER,
        "kRoundLarge": segments.ROUND_LARGE,
    }
    assert {name: found.get(name, str(value)) for name, value in ours.items()} == {k: str(v) for k, v in ours.items()}
