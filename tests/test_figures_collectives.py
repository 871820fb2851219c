"""Lesson 3's pictures: what they say is what the library's collectives do, and the ring is the ring of the course."""

import pytest
import torch

from course_lib.collectives.by_hand import Traffic, ring
from course_lib.figures import collectives as pictures
from course_lib.launch import launch
from course_lib.notebook.widgets.ring_stepper import ring_stepper


def test_the_ring_is_finished_after_its_last_step_and_not_before():
    for ranks in (2, 3, 4, 5):
        everyone = frozenset(range(ranks))
        last = 2 * (ranks - 1)
        whole = [
            sum(content == everyone for row in pictures.ring_state(ranks, s)[0] for content, _ in row)
            for s in range(last + 1)
        ]
        assert whole[ranks - 1] == ranks, "the first half leaves one finished chunk a rank"
        assert whole[last] == ranks**2 and whole[last - 1] < ranks**2


def test_rank_r_owns_chunk_r_after_the_first_half():
    state, _ = pictures.ring_state(4, 3)
    assert all(len(state[r][c][0]) == 4 for r, c in ((0, 0), (1, 1), (2, 2), (3, 3)))


def test_only_neighbours_talk_and_each_sends_one_chunk():
    for step in range(1, 7):
        _, sent = pictures.ring_state(4, step)
        assert [(receiver - sender) % 4 for sender, _, receiver in sent] == [1] * 4
        assert sorted(chunk for _, chunk, _ in sent) == [0, 1, 2, 3]


def messages_of_the_ring(elements):
    with Traffic() as traffic:
        ring.all_reduce(torch.ones(elements), check=False)
    return traffic.messages, traffic.to


def test_the_picture_has_the_messages_of_the_ring():
    run = launch(messages_of_the_ring, 32, ranks=4, quiet=True)
    for rank, (messages, to) in enumerate(run.results):
        drawn = [
            receiver
            for step in range(1, 7)
            for sender, _, receiver in pictures.ring_state(4, step)[1]
            if sender == rank
        ]
        assert messages == len(drawn) and set(to) == set(drawn)


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_each_collective_has_its_picture(kind):
    shown = pictures.before_and_after([kind])
    assert kind in shown.alt and "before" in shown.alt


def test_by_ranks_and_links_tell_their_numbers():
    assert (
        "ring from 1 at 2 ranks to 1.5 at 4" in pictures.by_ranks({"ring": {2: 1, 4: 1.5}}, {}, unit="u", title="t").alt
    )
    assert "slow 1e+03 ms" in pictures.seconds_by_link({"slow": 1.0}, title="t").alt


@pytest.mark.parametrize(
    "draw",
    [
        lambda: pictures.before_and_after([]),
        lambda: pictures.before_and_after(["gossip"]),
        lambda: pictures.ring_state(4, 7),
        lambda: pictures.ring_state(1, 0),
        lambda: pictures.by_ranks({}, {}, unit="u", title="t"),
        lambda: pictures.seconds_by_link({}, title="t"),
        lambda: ring_stepper(9),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(draw):
    with pytest.raises(ValueError):
        draw()


def test_the_slider_steps_the_ring():
    widget = ring_stepper(4)
    (_, slider), shown = widget.children[0].children, widget.children[1]
    assert slider.max == 6 and "nothing was sent yet" in shown.value
    slider.value = 6
    assert "16 of 16 chunks hold the whole sum" in shown.value
