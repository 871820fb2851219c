"""Lab 8: the schedule and the plans that its checks hold a learner's against."""

from course_checks.lab08 import planning, schedule
from course_lib.parallel.schedules import orders


def test_the_schedule_to_beat_is_zero_bubbles_with_room_and_quicker_than_1f1b_without() -> None:
    for stages, micro_batches in schedule.SHAPES:
        wide = schedule.Case(stages, micro_batches, [stages] * stages)
        assert schedule.reference(wide) == orders("zero_bubble", stages, micro_batches)
        assert schedule.timed(schedule.reference(wide)).seconds == wide.bound
        tight = schedule.Case(stages, micro_batches, [stages - rank for rank in range(stages)])
        line, plain = schedule.timed(schedule.reference(tight)), schedule.timed(orders("1f1b", stages, micro_batches))
        assert line.in_flight == plain.in_flight and plain.seconds - line.seconds >= stages - 1
        assert line.seconds >= tight.bound


def test_each_task_has_several_good_plans_and_the_planners_own_is_none() -> None:
    answers = set()
    for task in planning.TASKS:
        least, offer, best = planning.cheapest(task)
        assert best.memory_bytes <= (1 - planning.HEADROOM) * task.offers[offer].rent(1).card.memory
        assert best.days <= task.time
        theirs, _, first = planning.planners(task)
        assert theirs > planning.FACTOR * least and first.days < best.days
        rented = [task.offers[offer].rent(count) for count in (best.machines.nodes, 4)]
        asked = {**task.asked, "headroom": planning.HEADROOM, "keep": 10}
        plans = [each for on in rented for each in planning.plan(task.model, on, **asked).plans]
        costs = [task.dollars(each, offer) for each in plans if each.machines.nodes <= task.offers[offer].most]
        assert sum(cost <= planning.FACTOR * least for cost in costs) >= 2, f"{task.name}: one plan and no other"
        answers.add((offer, best.strategy, best.pp > 1))
    assert len(answers) == len(planning.TASKS)
