"""The planner's clock, part by part, against the rooms it is made from: traffic, links, schedules, FLOPs."""

from __future__ import annotations

import pytest

from course_lib.collectives.links import LINKS, Cluster, Link, ring_seconds
from course_lib.memory import card, estimate, shape_of
from course_lib.memory.compute import multiplied_weights
from course_lib.memory.estimate import in_flight
from course_lib.parallel import traffic
from course_lib.parallel.schedules import ideal_bubble, orders
from course_lib.parallel.simulate import simulate
from course_tools.planning import CONSTANTS, Settings, machines, plan
from course_tools.planning.network import Network
from course_tools.planning.question import chosen_batch, question
from course_tools.planning.search import measured

EIGHT = "2x8xa100-80gb"


def asked_of(cluster=EIGHT, model="llama-2-13b", batch=64, **more):
    return question(model, cluster, global_batch=batch, seq_len=2048, **more)


def measure(asked, **settings):
    return measured(asked, Settings(**({"strategy": "ddp"} | settings)))[0]


def test_matrix_products_take_their_flops_at_the_stated_efficiency() -> None:
    asked = asked_of(batch=256, cluster="2xa100-80gb")
    result = measure(asked, dp=2, micro_batch_size=64, num_microbatches=2)
    flops = 6 * sum(multiplied_weights(shape_of("llama-2-13b"))) * 64 * 2048 * 2
    at_best = flops / (card("a100-80gb").peak_flops * CONSTANTS.matmul)
    assert 1 < result.parts["matrix products"] / at_best < 1.1  # such large ones are nearly at their best
    lora = measure(asked, method="lora", dp=2, micro_batch_size=64, num_microbatches=2)
    without_weight_gradients = result.parts["matrix products"] * 2 / 3
    assert lora.parts["matrix products"] == pytest.approx(without_weight_gradients)
    narrow = asked_of(batch=256, cluster="8xa100-80gb")
    split = measure(narrow, strategy="single", tp=8, micro_batch_size=1, num_microbatches=256)
    share = 8 * split.parts["matrix products"] / (2 * result.parts["matrix products"])
    assert 1.05 < share < 1.6, "cut in eight they are smaller, and slower for it"


def test_the_pipeline_waits_for_its_ideal_bubble_and_holds_what_its_schedule_holds() -> None:
    asked = asked_of(model="gpt3-175b", cluster="8x8xa100-80gb")
    for chunks, schedule in ((1, "1f1b"), (3, "interleaved")):
        split = {"strategy": "single", "tp": 8, "pp": 8, "virtual_stages": chunks}
        result = measure(asked, **split, num_microbatches=64, activation_checkpointing="full")
        outside = ("data parallelism", "optimizer", "offload")
        inside = sum(part for name, part in result.parts.items() if name not in outside)
        assert result.parts["pipeline bubble"] / inside == pytest.approx(ideal_bubble(schedule, 8, 64, chunks))
    for p, m, v in ((4, 8, 1), (4, 8, 2), (4, 8, 3), (2, 4, 4), (4, 2, 1)):
        ran = simulate(orders("1f1b" if v == 1 else "interleaved", p, m, v)).in_flight
        expected = (pytest.approx(ran[0]), pytest.approx(ran[-1]))
        assert (in_flight(p, m, v, True), in_flight(p, m, v, False)) == expected, (p, m, v)


def test_tensor_parallel_seconds_are_its_messages_over_its_links() -> None:
    asked, settings = asked_of(), {"dp": 2, "tp": 8, "micro_batch_size": 4, "num_microbatches": 8}
    nvlink = machines(EIGHT).inner
    slower = Link("x", nvlink.latency, nvlink.bandwidth * CONSTANTS.inner)
    sent = traffic.tensor_parallel(asked.shape, tp=8, micro_batch_size=4, seq_len=2048)
    once = sum(message.count * ring_seconds(message.collective, 8, message.num_bytes, slower) for message in sent)
    assert measure(asked, **settings).parts["tensor parallelism"] == pytest.approx(8 * once)
    again = measure(asked, **settings, activation_checkpointing="full")
    # a block that runs forward again sends again
    assert again.parts["tensor parallelism"] == pytest.approx(1.5 * 8 * once)


def test_a_group_that_crosses_nodes_goes_over_the_network_and_one_that_does_not_does_not() -> None:
    network = Network(machines(EIGHT), CONSTANTS)
    assert [network.inside(*group) for group in ((1, 8), (4, 2), (4, 4), (1, 16))] == [True, True, False, False]
    wire = network.wire("all_reduce", 4, 4)  # a data-parallel group of 4 beside TP 4: two ranks in each node
    inner = Link("in", 3.4e-6, 300e9 * CONSTANTS.inner)
    outer = Link("out", LINKS["infiniband-hdr"].latency, 25e9 * CONSTANTS.outer)
    assert wire.seconds(1, 1e9) == pytest.approx(Cluster(2, 2, inner, outer, 2).seconds("all_reduce", 1e9))
    shared = Network(machines(EIGHT, outer_links=1), CONSTANTS).wire("all_reduce", 4, 4)
    assert shared.seconds(1, 1e9) > 3 * wire.seconds(1, 1e9), "one network card for eight GPUs"
    assert network.wire("send", 8, 2).seconds(1, 1e9) == pytest.approx(outer.latency + 1e9 / 25e9 / CONSTANTS.outer)


def test_the_limit_moves_with_the_links() -> None:
    slow_inside = asked_of(machines("8xa100-80gb", inner="pcie3"))
    slow_outside = asked_of(machines(EIGHT, outer="ethernet-10", outer_links=1))
    home = asked_of("2x24GiB", "llama-3.1-8b", 4)
    rows = [
        (slow_inside, {"strategy": "single", "tp": 8, "micro_batch_size": 4, "num_microbatches": 16}, "PCIe"),
        (slow_outside, {"strategy": "fsdp", "dp": 16, "micro_batch_size": 4}, "Ethernet"),
        (asked_of(batch=8), {"strategy": "single", "pp": 16, "num_microbatches": 8}, "pipeline bubble"),
        (home, {"strategy": "zero3", "dp": 2, "num_microbatches": 2, "offload": "all"}, "host"),
    ]
    for asked, settings, fragment in rows:
        limit = measure(asked, **settings, activation_checkpointing="full").limit
        assert fragment in limit, (fragment, limit)


def test_what_costs_time_costs_time() -> None:
    rows = [
        ({"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}),
        ({"strategy": "zero3"}, {"strategy": "zero1"}),
        ({"strategy": "zero1", "offload": "optimizer"}, {"strategy": "zero1"}),
        ({"tp": 4, "dp": 4}, {"tp": 4, "dp": 4, "sequence_parallel": True}),
        ({"dp": 4, "pp": 4, "num_microbatches": 16}, {"dp": 4, "pp": 4, "num_microbatches": 16, "virtual_stages": 5}),
        ({"method": "qlora"}, {"method": "lora"}),
        ({}, {"method": "lora"}),
        ({"micro_batch_size": 1, "num_microbatches": 4}, {"micro_batch_size": 4, "num_microbatches": 1}),
    ]
    asked, usual = asked_of(), {"strategy": "ddp", "dp": 16, "num_microbatches": 4}
    for slower, faster in rows:
        times = [measure(asked, **usual | changed).step_seconds for changed in (slower, faster)]
        assert times[0] > times[1], (slower, faster, times)


def test_stages_that_differ_by_a_layer_wait_for_the_longer_ones() -> None:
    asked = asked_of(model="llama-3.1-8b", cluster="4xa100-80gb")  # 32 layers: 8 a rank, in 1, 2, 3 or 4 stages
    usual = {"strategy": "single", "pp": 4, "num_microbatches": 64, "activation_checkpointing": "full"}
    bubbles = [measure(asked, **usual, virtual_stages=v).parts["pipeline bubble"] for v in (1, 2, 3, 4)]
    # the last stages hold the output layer; sends grow with the stages
    assert bubbles[1] / bubbles[0] == pytest.approx(4 / 8, rel=0.02)
    assert bubbles[2] / bubbles[0] == pytest.approx(3 / 8, rel=0.02)
    assert bubbles[3] / bubbles[0] == pytest.approx(2 / 8, rel=0.02)


def test_copies_gather_inside_a_machine_and_meet_once_between_machines() -> None:
    asked = asked_of(machines(EIGHT, outer="ethernet-25", outer_links=1), "llama-3.1-8b", 128)
    usual = {"strategy": "fsdp", "dp": 16, "num_microbatches": 8, "activation_checkpointing": "full"}
    whole, copies = measure(asked, **usual), measure(asked, **usual, copies=2)
    assert copies.parts["data parallelism"] < whole.parts["data parallelism"] / 3
    settings = {"strategy": "fsdp", "num_microbatches": 8, "activation_checkpointing": "full", "seq_len": 2048}
    assert copies.memory == estimate("llama-3.1-8b", ranks=8, reduce_each_micro_batch=True, **settings)
    # two machines, each with a part of 1/8 of the fp32 gradients on each GPU, over one shared network card
    sent = 4 * shape_of("llama-3.1-8b").parameters / 8 * 2 * (1 / 2)
    slowest = sent / (LINKS["ethernet-25"].bandwidth * CONSTANTS.outer / 8)
    hidden = CONSTANTS.overlap * slowest
    assert copies.parts["data parallelism"] >= slowest - hidden
    sharing = plan("llama-3.1-8b", "3x6xa100-80gb", seq_len=2048, methods="lora", strategies="hsdp", keep=30).plans
    assert len(sharing) >= 2
    assert all(
        each.copies > 1 and each.dp % each.copies == 0 and each.dp // each.copies * each.tp <= 6 for each in sharing
    )


def test_an_h100_reaches_less_of_its_peak_and_loose_norms_cost_memory_traffic() -> None:
    a100, h100 = (asked_of(f"2x{name}", batch=256) for name in ("a100-80gb", "h100-80gb"))
    large = {"dp": 2, "micro_batch_size": 64, "num_microbatches": 2}
    per_peak = [
        measure(each, **large).parts["matrix products"] * each.machines.card.peak_flops for each in (a100, h100)
    ]
    assert per_peak[0] / per_peak[1] == pytest.approx(CONSTANTS.hopper, rel=0.03)
    light = [measure(asked_of(compile=fused), dp=16).parts["element-wise layers"] for fused in (False, True)]
    shape, tokens = shape_of("llama-2-13b"), 2048
    extra = 3 * CONSTANTS.loose_norms * shape.hidden * 2 * tokens * shape.layers
    assert light[0] - light[1] == pytest.approx(extra / (card("a100-80gb").bandwidth * CONSTANTS.memory))
    by_torch = [measure(asked_of(model="gpt3-175b", compile=fused), dp=16) for fused in (False, True)]
    assert by_torch[0].parts["element-wise layers"] == by_torch[1].parts["element-wise layers"]  # LayerNorm is a kernel


def test_a_batch_is_chosen_that_the_gpus_share_out_and_that_suits_the_training() -> None:
    eight = shape_of("llama-3.1-8b")
    for gpus in (1, 3, 8, 96, 512):
        batch, why = chosen_batch(eight, gpus, 2048, pretraining=True, shares=True)
        assert batch % gpus == 0 and 0.7e6 < batch * 2048 < 2.9e6, (gpus, batch)
        assert f"{batch * 2048:,} tokens" in why
    assert chosen_batch(eight, 8, 2048, pretraining=False, shares=True)[0] * 2048 == 65_536
    # more GPUs than sequences: several share one, and still none is left over
    batch, _ = chosen_batch(shape_of("llama-3.1-405b"), 16_384, 8192, pretraining=True, shares=True)
    assert 16_384 % batch == 0 and 2**22 <= batch * 8192 <= 2**25
    # QLoRA shares no sequence: each GPU has one
    long = plan("llama-3.1-8b", "128xh100", seq_len=8192, methods="qlora").best
    assert long.global_batch % 128 == 0 and long.dp == 128
    for parameters, tokens in ((125e6, 0.5e6), (175e9, 3.2e6)):  # table 2.1 of GPT-3
        shape = shape_of(
            {"layers": 12, "hidden": 768, "heads": 12, "vocab": 50257} if parameters < 1e9 else "gpt3-175b"
        )
        assert chosen_batch(shape, 1, 2048, pretraining=True, shares=True)[0] * 2048 == pytest.approx(tokens, rel=0.5)
