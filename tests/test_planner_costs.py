"""The planner's clock, part by part, against the rooms it is made from: traffic, links, schedules, FLOPs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from course_lib.collectives.links import Cluster, Link, seconds
from course_lib.memory import card, shape_of
from course_lib.memory.compute import weights_counted
from course_lib.memory.estimate import in_flight
from course_lib.parallel import traffic
from course_lib.parallel.schedules import ideal_bubble, orders
from course_lib.parallel.simulate import simulate
from course_tools.planning import CONSTANTS, Settings, machines
from course_tools.planning.costs import PARTS
from course_tools.planning.limits import COMPUTE, said
from course_tools.planning.network import Network
from course_tools.planning.question import question
from course_tools.planning.search import measured

EIGHT = "2x8xa100-80gb"


def asked_of(cluster=EIGHT, model="llama-2-13b", batch=64, **more):
    return question(model, cluster, global_batch=batch, seq_len=2048, **more)


def measure(asked, **settings):
    return measured(asked, Settings(**({"strategy": "ddp"} | settings)))[0]


def test_parts_add_up_and_the_limit_is_the_largest_beyond_compute() -> None:
    asked = asked_of()
    found = measure(asked, dp=2, tp=4, pp=2, micro_batch_size=2, num_microbatches=16, activation_checkpointing="full")
    assert set(found.parts) <= set(PARTS)
    assert found.step_seconds == pytest.approx(sum(found.parts.values()))
    largest = max((name for name in found.parts if name not in COMPUTE), key=found.parts.__getitem__)
    assert found.limit.startswith(said(asked, found, largest))
    assert f"({100 * found.parts[largest] / found.step_seconds:.0f} % of the step)" in found.limit


def test_matrix_products_take_their_flops_at_the_stated_efficiency() -> None:
    found = measure(asked_of(batch=256, cluster="2xa100-80gb"), dp=2, micro_batch_size=64, num_microbatches=2)
    shape = shape_of("llama-2-13b")
    flops = 6 * sum(weights_counted(shape, "matrices")) * 64 * 2048 * 2
    at_best = flops / (card("a100-80gb").peak_flops * CONSTANTS.matmul)
    assert 1 < found.parts["matrix products"] / at_best < 1.1  # such large ones are nearly at their best
    lora = measure(
        asked_of(batch=256, cluster="2xa100-80gb"), method="lora", dp=2, micro_batch_size=64, num_microbatches=2
    )
    assert lora.parts["matrix products"] == pytest.approx(found.parts["matrix products"] * 2 / 3), (
        "no gradient of weights"
    )
    narrow = measure(
        asked_of(batch=256, cluster="8xa100-80gb"), strategy="single", tp=8, micro_batch_size=1, num_microbatches=256
    )
    share = 8 * narrow.parts["matrix products"] / (2 * found.parts["matrix products"])
    assert 1.05 < share < 1.6, "cut in eight they are smaller, and slower for it"


def test_the_pipeline_waits_for_its_ideal_bubble() -> None:
    asked = asked_of(model="gpt3-175b", cluster="8x8xa100-80gb")
    for chunks, schedule in ((1, "1f1b"), (3, "interleaved")):
        found = measure(
            asked,
            strategy="single",
            tp=8,
            pp=8,
            num_microbatches=64,
            virtual_stages=chunks,
            activation_checkpointing="full",
        )
        outside = ("data parallelism", "optimizer", "offload")
        inside = sum(part for name, part in found.parts.items() if name not in outside)
        assert found.parts["pipeline bubble"] / inside == pytest.approx(ideal_bubble(schedule, 8, 64, chunks))


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 1), (4, 8, 1), (4, 8, 2), (4, 8, 3), (2, 4, 4), (4, 2, 1)])
def test_micro_batches_in_flight_are_those_of_the_schedule(p: int, m: int, v: int) -> None:
    ran = simulate(orders("1f1b" if v == 1 else "interleaved", p, m, v))
    assert in_flight(p, m, v, True) == pytest.approx(ran.in_flight[0])
    assert in_flight(p, m, v, False) == pytest.approx(ran.in_flight[-1])


def test_tensor_parallel_seconds_are_its_messages_over_its_links() -> None:
    asked = asked_of()
    found = measure(asked, dp=2, tp=8, micro_batch_size=4, num_microbatches=8)
    nvlink = machines(EIGHT).inner
    slower = Link("x", nvlink.latency, nvlink.bandwidth * CONSTANTS.inner)
    sent = traffic.tensor_parallel(asked.shape, tp=8, micro_batch_size=4, seq_len=2048)
    once = sum(message.count * seconds("ring", message.collective, 8, message.num_bytes, slower) for message in sent)
    assert found.parts["tensor parallelism"] == pytest.approx(8 * once)
    again = measure(asked, dp=2, tp=8, micro_batch_size=4, num_microbatches=8, activation_checkpointing="full")
    assert again.parts["tensor parallelism"] == pytest.approx(1.5 * 8 * once), (
        "a block that runs forward again sends again"
    )


def test_a_group_that_crosses_nodes_goes_over_the_network_and_one_that_does_not_does_not() -> None:
    network = Network(machines(EIGHT), CONSTANTS)
    assert network.inside(1, 8) and network.inside(4, 2) and not network.inside(4, 4) and not network.inside(1, 16)
    wire = network.wire("all_reduce", 4, 4)  # a data-parallel group of 4 beside TP 4: two ranks in each node
    inner = Link("in", 3.4e-6, 300e9 * CONSTANTS.inner)
    outer = Link("out", 9.6e-6, 25e9 * CONSTANTS.outer)
    expected = Cluster(2, 2, inner, outer, 2).seconds("all_reduce", 1e9)
    assert wire.seconds(1, 1e9) == pytest.approx(expected)
    shared = Network(machines(EIGHT, outer_links=1), CONSTANTS).wire("all_reduce", 4, 4)
    assert shared.seconds(1, 1e9) > 3 * wire.seconds(1, 1e9), "one network card for eight GPUs"
    assert network.wire("send", 8, 2).seconds(1, 1e9) == pytest.approx(9.6e-6 + 1e9 / 25e9 / CONSTANTS.outer)


def test_the_limit_moves_with_the_links() -> None:
    fast = {"strategy": "single", "tp": 8, "micro_batch_size": 4, "num_microbatches": 16}
    slow_inside = measure(asked_of(machines("8xa100-80gb", inner="pcie3")), **fast)
    assert "tensor-parallel all-reduces over PCIe 3.0 x16" in slow_inside.limit
    slow_outside = machines(EIGHT, outer="ethernet-10", outer_links=1)
    spread = measure(asked_of(slow_outside), strategy="fsdp", dp=16, micro_batch_size=4)
    assert "data-parallel" in spread.limit and "Ethernet" in spread.limit
    bubble = measure(asked_of(batch=8), strategy="single", pp=16, num_microbatches=8)
    assert "pipeline bubble of 16 stages and 8 micro-batches" in bubble.limit
    home = asked_of("2x24GiB", "llama-3.1-8b", 4)
    moved = measure(home, strategy="zero3", dp=2, num_microbatches=2, offload="all", activation_checkpointing="full")
    assert "host" in moved.limit


@pytest.mark.parametrize(
    ("slower", "than"),
    [
        ({"activation_checkpointing": "full"}, {}),
        ({"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}),
        ({"strategy": "zero3"}, {"strategy": "zero1"}),
        ({"strategy": "zero1", "offload": "optimizer"}, {"strategy": "zero1"}),
        ({"tp": 4, "dp": 4}, {"tp": 4, "dp": 4, "sequence_parallel": True}),
        ({"dp": 4, "pp": 4, "num_microbatches": 16}, {"dp": 4, "pp": 4, "num_microbatches": 16, "virtual_stages": 5}),
        ({"method": "qlora"}, {"method": "lora"}),
        ({}, {"method": "lora"}),
        ({"micro_batch_size": 1, "num_microbatches": 4}, {"micro_batch_size": 4, "num_microbatches": 1}),
    ],
)
def test_what_costs_time_costs_time(slower, than) -> None:
    usual = {"strategy": "ddp", "dp": 16, "num_microbatches": 4}
    asked = asked_of(EIGHT)
    assert measure(asked, **usual | slower).step_seconds > measure(asked, **usual | than).step_seconds


def test_constants_are_one_set_that_can_be_exchanged() -> None:
    settings = {"dp": 16, "num_microbatches": 4}
    usual = measure(asked_of(), **settings)
    better = measure(asked_of(constants=replace(CONSTANTS, matmul=0.9)), **settings)
    assert better.parts["matrix products"] < usual.parts["matrix products"]
    assert better.parts["optimizer"] == usual.parts["optimizer"] and better.mfu > usual.mfu
    slow = measure(asked_of(precision="fp32"), **settings)
    assert slow.parts["matrix products"] > 8 * usual.parts["matrix products"]
