"""DeepSpeed's ZeRO on real ranks: one rank's losses, a share of the bytes, the collectives of each stage, no fall-backs."""

from __future__ import annotations

import importlib.util
import json
import math
import socket
import sys

import cloudpickle
import pytest
import torch
from parity import TOLERANCE, off_by

from course_lib.launch import launch
from course_lib.launch.commands import Background
from course_lib.models import tiny_llama
from course_lib.training import single

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

from course_lib.training.sharded import zero
from course_lib.training.sharded.zero_keys import KNOWN

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=8, global_batch=12, seq_len=16)
SHORT = {**SIZES, "steps": 3}
BUCKET = 200_000  # elements; larger than the largest weight, a quarter of the model
NUMELS = [p.numel() for p in tiny_llama().parameters()]
WEIGHTS = 4 * sum(NUMELS)  # bytes in fp32
ROTARY = 4 * 2 * 16  # two buffers of half a head's width


def every_stage(stages, **kwargs):
    torch.set_num_threads(1)
    return {stage: zero.train(stage=stage, bucket_elements=BUCKET, **kwargs) for stage in stages}


@pytest.fixture(scope="module")
def oracle(private_tmp):
    return single.train(**SIZES)


@pytest.fixture(scope="module")
def two(private_tmp):
    return launch(every_stage, (0, 1, 2, 3), ranks=2, quiet=True, timeout=280, **SIZES)


@pytest.fixture(scope="module")
def three(private_tmp):  # 803,968 weights do not divide by 3
    return launch(every_stage, (2, 3), ranks=3, quiet=True, timeout=280, **SHORT)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_as_one_rank_does(stage, two, three, oracle):
    for run in (two, three):
        for rank, outcomes in enumerate(run.results):
            if stage in outcomes:
                told = outcomes[stage]
                assert off_by(told.losses, oracle.losses[: len(told.losses)]) < TOLERANCE
                assert (told.wrapper, told.rank, told.world_size) == ("DeepSpeedEngine", rank, len(run.results))
                assert told.extra["stage"] == stage and told.extra["config"]["zero_optimization"]["stage"] == stage
    names = {0: "AdamW", 3: "DeepSpeedZeroOptimizer_Stage3"}
    assert two.results[0][stage].extra["zero_optimizer"] == names.get(stage, "DeepSpeedZeroOptimizer")


def share(ranks, stage):
    """Elements of a rank's share: of the flat tensor, or of each weight."""
    if stage == 3:
        return sum(math.ceil(n / ranks) for n in NUMELS)
    return math.ceil(sum(NUMELS) / (2 * ranks)) * 2


def gradients(ranks, rank):
    """Bytes of stages 1 and 2: every weight that lies in the share at least in part, and the padding at the end."""
    mine, at, found = share(ranks, 1), 0, 0
    for numel in NUMELS:
        found += numel if at < (rank + 1) * mine and at + numel > rank * mine else 0
        at += numel
    return 4 * (found + max(0, (rank + 1) * mine - at))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_bytes_of_a_share_to_the_byte(stage, two, three):
    for run in (two, three):
        ranks = len(run.results)
        mine = share(ranks, stage)
        for rank, outcomes in enumerate(run.results if stage in run.results[0] else []):
            held = outcomes[stage].memory
            assert held["parameters"] == ROTARY + 4 * mine * (1 if stage == 3 else ranks)
            assert held["optimizer_state"] == 8 * mine + 4  # two moments, one step counter
            assert held["master"] == 4 * mine
            assert held["gradients"] == (4 * mine if stage == 3 else gradients(ranks, rank))
            assert held["buckets"] == (4 * BUCKET if stage == 3 else 0)
            assert outcomes[stage].extra["local_elements"] == mine
            assert not any(outcomes[stage].extra["on_host"].values())


def test_the_bytes_of_stage_0_are_all(two):
    held = two.results[0][0].memory
    assert (held["parameters"], held["gradients"]) == (WEIGHTS + ROTARY, WEIGHTS)
    assert held["optimizer_state"] == 2 * WEIGHTS + 4 * len(NUMELS) and held["master"] == held["buckets"] == 0


def test_stages_1_and_2_rest_alike(two):
    for outcomes in two.results:
        one, also = outcomes[1].memory, outcomes[2].memory
        assert {k: v for k, v in one.items() if k != "peak"} == {k: v for k, v in also.items() if k != "peak"}


def test_the_bytes_that_the_system_counts(two):
    """In times the weights' bytes, of two ranks: all-reduce 1, all-gather 1/2. gloo's reduce_scatter costs 1, too."""
    for outcomes in two.results:
        for stage, times in {0: 1.0, 1: 1.5, 2: 1.5, 3: 2.0}.items():
            sent = outcomes[stage].wire_bytes
            assert sent is None or times < sent / WEIGHTS < 1.02 * times


def test_what_each_stage_calls(two):
    calls = [(c.kind, c.bytes) for c in two.collectives if c.rank == 1]

    def total(kind):
        return sum(size for k, size in calls if k == kind and size > 100) / SIZES["steps"]

    # stages 0, 1 and 2 all-reduce all gradients, stage 3 scatters their sums
    assert total("all_reduce") == pytest.approx(3 * WEIGHTS, rel=1e-3)
    assert total("reduce_scatter") == WEIGHTS
    # 1 and 2 gather the weights after a step, 3 in its forward and in its backward pass; in its first step it may gather all
    # once more, while it learns the order
    assert 4 * WEIGHTS / 2 <= total("all_gather") <= (4 + 1 / SIZES["steps"]) * WEIGHTS / 2


def test_the_keys_are_deepspeed_s():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields.items()
    assert KNOWN["zero_optimization"] == {field.alias or name for name, field in fields}


COMMANDS = {
    "torchrun": "torchrun --nproc_per_node 2 -m course_lib.training.sharded.zero --stage 1",
    "deepspeed": "deepspeed --num_gpus 2 --master_port {port} --module course_lib.training.sharded.zero --stage 2",
    "accelerate": "accelerate launch --config_file {configuration} --main_process_port {port} "
    "-m course_lib.training.sharded.accelerate_zero",
}


ACCELERATE = """
distributed_type: DEEPSPEED
num_processes: 2
deepspeed_config: {zero_stage: 3, gradient_clipping: 0.0}
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """All launchers at the same time: most of what they do is importing."""
    started = {}
    configuration = tmp_path_factory.mktemp("accelerate") / "zero.yaml"
    configuration.write_text(ACCELERATE)
    for name, command in COMMANDS.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = " --steps 2 --global-batch 12 --seq-len 16 --expect-ranks 2"
        started[name] = Background(command.format(port=port, configuration=configuration) + options)
    yield started
    for command in started.values():
        command.end()


@pytest.mark.parametrize(("name", "stage"), [("torchrun", 1), ("deepspeed", 2), ("accelerate", 3)])
def test_each_launcher_runs_the_same_training(name, stage, commands, oracle):
    output = commands[name].wait(150)
    told = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert off_by(told["losses"], oracle.losses[:2]) < TOLERANCE
    assert (told["wrapper"], told["world_size"], told["extra"]["stage"]) == ("DeepSpeedEngine", 2, stage)
    assert told["extra"]["local_elements"] == share(2, stage)
