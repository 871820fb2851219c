"""DeepSpeed's ZeRO on real ranks: one rank's losses, a share of the bytes, the collectives of each stage, no fall-backs."""

from __future__ import annotations

import importlib.util
import json
import math
import socket
import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from course_lib.data import sample_batch
from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.shell import Background
from course_lib.training import single

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

from course_lib.training import accelerate_zero, zero
from course_lib.training.zero_config import zero_config
from course_lib.training.zero_engine import assert_sharded, initialize
from course_lib.training.zero_keys import KNOWN

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=20, global_batch=12, seq_len=16)
SHORT = {**SIZES, "steps": 3}
BUCKET = 200_000  # elements; larger than the largest weight, a quarter of the model
NUMELS = [p.numel() for p in tiny_llama().parameters()]
WEIGHTS = 4 * sum(NUMELS)  # bytes in fp32
ROTARY = 4 * 2 * 16  # two buffers of half a head's width

# fp32 rounds to 6e-8 of a value and the ranks' slices add up in another order: up to 2.2e-7 seen after 20 steps. A sum
# where a mean belongs hardly shows in losses under Adam, so gradients are compared, too.
TOLERANCE = 1e-5


def off_by(losses, oracle) -> float:
    return max(abs(a / b - 1) for a, b in zip(losses, oracle, strict=True))


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
    return launch(every_stage, (1, 2, 3), ranks=3, quiet=True, timeout=280, **SHORT)


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
        for rank, outcomes in enumerate(run.results):
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


def test_stages_1_and_2_differ_only_during_a_step(two):
    for outcomes in two.results:
        one, also = outcomes[1].memory, outcomes[2].memory
        assert {k: v for k, v in one.items() if k != "peak"} == {k: v for k, v in also.items() if k != "peak"}
        assert also["peak"] < one["peak"]  # stage 1 keeps gradients until the backward pass is over


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
    # 1 and 2 gather the weights after a step, 3 in its forward and in its backward pass (while it learns the order, more)
    assert 4 * WEIGHTS / 2 <= total("all_gather") < 4.1 * WEIGHTS / 2


# ---------------------------------------------------------------------------------------------------------------------


def variants(folder, **kwargs):
    torch.set_num_threads(1)

    def go(**how):
        return zero.train(**{"bucket_elements": BUCKET, **kwargs, **how})

    user = f"{folder}/user.json"
    rank = torch.distributed.get_rank()
    if rank == 0:
        with open(user, "w") as file:
            json.dump({"train_batch_size": 12, "gradient_accumulation_steps": 3, "gradient_clipping": 0.0,
                       "zero_optimization": {"stage": 2}}, file)  # fmt: skip
    torch.distributed.barrier()
    told = {
        "2 micro-batches": go(stage=2, accumulate=2, clip=1e9),
        "clipped": go(stage=3, clip=0.5),
        "clipped at 1": go(stage=1, clip=0.5),
        "larger bucket": go(stage=2, bucket_elements=2 * BUCKET, steps=2),
        "optimizer on the host": go(stage=2, offload="optimizer"),
        "all on the host": go(stage=3, offload="all"),
        "checkpointed": go(stage=3, checkpointing="full"),
        "bf16": go(stage=2, precision="bf16"),
        "user's file": go(config_file=user),
        "accelerate": accelerate_zero.train(stage=3, accumulate=2, expect_ranks=2, bucket_elements=BUCKET, **kwargs),
    }
    go(stage=2, steps=2, save_every=2, checkpoints=f"{folder}/saved")
    told["resumed"] = go(stage=2, resume=True, checkpoints=f"{folder}/saved")
    return told, unnamed_bytes(kwargs), refusals(kwargs, folder)


def unnamed_bytes(sizes):
    """The largest tensor that is alive after a step and that the probe does not name, by stage."""
    import gc

    from course_lib.observe.zero import holdings

    def alive():
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t.device.type != "meta"}

    found, older = {}, alive()
    for stage in (2, 3):
        world = torch.distributed.get_world_size()
        engine = initialize(tiny_llama(), zero_config(stage, ranks=world, global_batch=4, bucket_elements=BUCKET))
        for step in range(2):
            rows = sample_batch(step, global_batch=4, seq_len=8, rank=torch.distributed.get_rank(), world_size=world)
            engine.backward(engine(input_ids=rows, labels=rows).loss)
            engine.step()
        named = {t.untyped_storage()._cdata for _, _, tensors in holdings(engine) for t in tensors}
        found[stage] = max(size for storage, size in alive().items() if storage not in named | older.keys())
        engine.destroy()
        del engine
    return found


def refusals(sizes, folder):
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState

    def plain_ddp():
        """What FACTS of Accelerate are: with cpu=True it drops the plugin, trains, and ends with exit code 0."""
        AcceleratorState._reset_state(reset_partial_state=True)
        plugin = DeepSpeedPlugin(hf_ds_config={"train_batch_size": 4, "zero_optimization": {"stage": 2}})
        assert_sharded(Accelerator(cpu=True, deepspeed_plugin=plugin).prepare(tiny_llama()), stage=2, ranks=2)

    def engine(stage, elements):
        fake = type("DeepSpeedEngine", (), {})()
        fake.zero_optimization_stage = lambda: stage
        fake.module = tiny_llama()
        fake.optimizer = SimpleNamespace(param_groups=[{"params": [torch.empty(elements)]}])
        return fake

    calls = {
        "plain DDP": plain_ddp,
        "shards nothing": lambda: assert_sharded(engine(1, sum(NUMELS)), stage=1, ranks=2),
        "another stage": lambda: assert_sharded(engine(0, sum(NUMELS)), stage=2, ranks=2),
        "another world": lambda: assert_sharded(engine(1, sum(NUMELS) // 2), stage=1, ranks=4),
        "ranks": lambda: zero.train(**sizes, expect_ranks=3),
        "ranks of accelerate": lambda: accelerate_zero.train(**sizes, expect_ranks=3),
        "stage 4": lambda: zero.train(**sizes, stage=4),
        "fp16": lambda: zero.train(**sizes, precision="fp16"),
        "nvme": lambda: zero.train(**sizes, stage=3, offload="nvme", nvme_path=folder),
        "no folder": lambda: zero.train(**sizes, save_every=1),
        "no steps left": lambda: zero.train(
            **{**sizes, "steps": 2}, resume=True, checkpoints=f"{folder}/saved", bucket_elements=BUCKET
        ),
    }
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder

    get_accelerator().is_fp16_supported = lambda: False  # as most CPUs
    AsyncIOBuilder.is_compatible = lambda self, verbose=False: False  # as a machine without libaio
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except (ValueError, RuntimeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.fixture(scope="module")
def more(private_tmp, tmp_path_factory):
    return launch(variants, str(tmp_path_factory.mktemp("zero")), ranks=2, quiet=True, timeout=290, **SHORT)


def by_hand(clip):
    """(losses, gradient norms before clipping) of a plain loop."""
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for step in range(SHORT["steps"]):
        batch = sample_batch(step, global_batch=12, seq_len=16)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


EXACT = [
    "2 micro-batches", "larger bucket", "optimizer on the host", "all on the host", "checkpointed", "user's file", "accelerate",
]  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_no_choice_changes_the_training(name, more, oracle):
    for told, *_ in more.results:
        assert off_by(told[name].losses, oracle.losses[: len(told[name].losses)]) < TOLERANCE
        assert told[name].wrapper == "DeepSpeedEngine"


def test_gradients_are_means_and_clipping_clips(more):
    losses, norms = by_hand(clip=0.5)
    whole_losses, whole_norms = by_hand(clip=1e9)
    assert off_by(losses, whole_losses) > 1e-5  # a difference that the tolerance below would not let pass
    for told, *_ in more.results:
        assert told["2 micro-batches"].extra["gradient_norms"] == pytest.approx(whole_norms, rel=1e-4)
        for name in ("clipped", "clipped at 1"):
            assert told[name].extra["gradient_norms"] == pytest.approx(norms, rel=1e-4)
            assert off_by(told[name].losses, losses) < 2e-6


def test_the_bucket_is_in_the_peak_and_nowhere_else(more, two):
    large, small = more.results[0][0]["larger bucket"].memory, two.results[0][2].memory
    assert large["buckets"] == small["buckets"] == 0
    assert large["peak"] - small["peak"] == pytest.approx(4 * BUCKET, rel=0.5)


def test_what_offloading_moves(more):
    mine = 4 * share(2, 2)
    for told, *_ in more.results:
        device, host = told["optimizer on the host"].memory, told["optimizer on the host"].extra["on_host"]
        assert device["parameters"] == WEIGHTS + ROTARY and device["optimizer_state"] == device["master"] == 0
        assert device["buckets"] == 4 * max(NUMELS) and device["gradients"] == 0
        assert host == dict(parameters=0, gradients=mine, optimizer_state=2 * mine + 4, master=mine,
                            buckets=mine + 4 * max(NUMELS))  # fmt: skip
        device, host = told["all on the host"].memory, told["all on the host"].extra["on_host"]
        assert device["parameters"] == ROTARY and device["buckets"] == 4 * BUCKET and device["gradients"] == 0
        assert host == dict(parameters=mine, gradients=2 * mine, optimizer_state=2 * mine + 4, master=mine, buckets=0)


def test_checkpointed_activations_are_fewer(more, two):
    assert more.results[0][0]["checkpointed"].memory["activations"] < two.results[0][3].memory["activations"] / 2


def test_bf16_halves_weights_and_gradients(more, two):
    half, whole = more.results[0][0]["bf16"], two.results[0][2]
    assert half.memory["parameters"] - ROTARY == (whole.memory["parameters"] - ROTARY) / 2
    assert half.memory["gradients"] == whole.memory["gradients"] / 2
    assert all(half.memory[name] == whole.memory[name] for name in ("optimizer_state", "master"))
    assert 1e-6 < off_by(half.losses, whole.losses[: len(half.losses)]) < 5e-3


def test_a_user_s_file_decides(more):
    config = more.results[0][0]["user's file"].extra["config"]
    assert config["gradient_accumulation_steps"] == 3 and config["optimizer"]["params"]["torch_adam"] is True


def test_a_resumed_run_goes_on(more, oracle):
    for told, *_ in more.results:
        assert told["resumed"].extra["first_step"] == 2
        assert off_by(told["resumed"].losses, oracle.losses[2:3]) < TOLERANCE


def test_accelerate_shards_on_cpu_ranks(more, two):
    for told, *_ in more.results:
        extra = told["accelerate"].extra
        assert (extra["distributed_type"], extra["stage"]) == ("DistributedType.DEEPSPEED", 3)
        assert extra["local_elements"] == share(2, 3)
        assert told["accelerate"].memory["optimizer_state"] == two.results[0][3].memory["optimizer_state"]


def test_the_probe_names_every_tensor_of_size(more):
    for _, unnamed, _ in more.results:
        assert all(size < 1000 for size in unnamed.values()), unnamed


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "plain DDP",
            "RuntimeError: asked for ZeRO stage 2 and got DistributedDataParallel, where every rank holds every",
        ),
        (
            "shards nothing",
            "RuntimeError: ZeRO stage 1 over 2 ranks, and this rank's optimizer steps 803,968 of 803,968",
        ),
        ("another stage", "RuntimeError: asked for ZeRO stage 2 and DeepSpeed runs stage 0"),
        ("another world", "RuntimeError: asked for 4 ranks and got 2"),
        ("ranks", "RuntimeError: asked for 3 ranks and got 2. Launch with `torchrun --nproc_per_node N` or `deepspeed"),
        ("ranks of accelerate", "RuntimeError: asked for ZeRO on 3 ranks and Accelerate gave 2"),
        ("stage 4", "ValueError: ZeRO has the stages 0, 1, 2 and 3"),
        ("fp16", "ValueError: This machine does not compute in fp16"),
        ("nvme", 'ValueError: Offloading to "nvme" needs libaio'),
        ("no folder", "ValueError: save_every and resume need a folder"),
        ("no steps left", "ValueError: steps=2: the newest checkpoint has taken 2 already"),
    ],
)
def test_nothing_falls_back_in_silence(name, words, more):
    for *_, said in more.results:
        assert said[name].startswith(words)


def test_nobody_chatters(two, more):
    for log in [*two.logs, *more.logs]:
        assert "[WARNING]" not in log and "FutureWarning" not in log and "[INFO]" not in log


def test_nothing_was_compiled(more, tmp_path, private_tmp, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    launch(every_stage, (1,), ranks=1, quiet=True, **{**SHORT, "steps": 1})
    assert list(tmp_path.iterdir()) == []


def test_the_keys_are_deepspeed_s():
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero import config, offload_config

    theirs = {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
    }
    for path, model in theirs.items():
        assert KNOWN[path] == {field.alias or name for name, field in model.model_fields.items()}


# ---------------------------------------------------------------------------------------------------------------------

COMMANDS = {
    "torchrun": "torchrun --nproc_per_node 2 -m course_lib.training.zero --stage 1",
    "deepspeed": "deepspeed --num_gpus 2 --master_port {port} --module course_lib.training.zero --stage 2",
    "accelerate": "accelerate launch --use_deepspeed --num_processes 2 --main_process_port {port} --zero_stage 3 "
    "-m course_lib.training.accelerate_zero",
}


@pytest.fixture(scope="module")
def commands():
    """All launchers at the same time: most of what they do is importing."""
    started = {}
    for name, command in COMMANDS.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = " --steps 2 --global-batch 12 --seq-len 16 --expect-ranks 2"
        started[name] = Background(command.format(port=port) + options)
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
