"""ZeRO's choices on real ranks: accumulation, clipping, offloading, precision, resuming; and what is refused."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed", allow_module_level=True)

import test_zero
from parity import TOLERANCE, off_by, one_rank, refusals
from test_zero import BUCKET, NUMELS, ROTARY, SIZES, WEIGHTS, every_stage, oracle, share

from course_lib.training.sharded import accelerate_zero, zero
from course_lib.training.sharded.zero_config import zero_config
from course_lib.training.sharded.zero_engine import assert_sharded, initialize

for module in (sys.modules[__name__], test_zero):  # ranks need not import pytest
    cloudpickle.register_pickle_by_value(module)

__all__ = ["oracle"]  # a fixture of test_zero's
SHORT = {**SIZES, "steps": 3}


def variants(folder, **kwargs):
    torch.set_num_threads(1)

    def go(**how):
        return zero.train(**{"bucket_elements": BUCKET, **kwargs, **how})

    user = f"{folder}/user.json"
    rank = torch.distributed.get_rank()
    if rank == 0:
        with open(user, "w") as file:
            json.dump(
                {
                    "train_batch_size": 12,
                    "gradient_accumulation_steps": 3,
                    "gradient_clipping": 0.0,
                    "zero_optimization": {"stage": 2},
                },
                file,
            )
    torch.distributed.barrier()
    told = {
        "stage 2": go(stage=2),
        "stage 3": go(stage=3),
        "2 micro-batches": go(stage=2, gradient_accumulation_steps=2, max_grad_norm=1e9),
        "2 micro-batches at 1": go(stage=1, gradient_accumulation_steps=2),
        "clipped": go(stage=3, max_grad_norm=0.5),
        "larger bucket": go(stage=2, bucket_elements=20 * BUCKET, steps=2),
        "optimizer on the host": go(stage=2, offload="optimizer"),
        "all on the host": go(stage=3, offload="all"),
        "checkpointed": go(stage=3, activation_checkpointing="full"),
        "bf16": go(stage=2, precision="bf16"),
        "user's file": go(config_file=user),
        "accelerate": accelerate_zero.train(
            stage=3, gradient_accumulation_steps=2, expect_ranks=2, bucket_elements=BUCKET, **kwargs
        ),
    }
    go(stage=2, steps=2, save_every=2, checkpoint_dir=f"{folder}/saved")
    told["resumed"] = go(stage=2, resume=True, checkpoint_dir=f"{folder}/saved")
    return told, unnamed_bytes(kwargs), refused(kwargs, folder)


def unnamed_bytes(sizes):
    """The largest tensor that is alive after a step and that the probe does not name, by stage."""
    import gc

    from course_lib.observe.deepspeed_memory import holdings

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


def refused(sizes, folder):
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
            **{**sizes, "steps": 2}, resume=True, checkpoint_dir=f"{folder}/saved", bucket_elements=BUCKET
        ),
    }
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder import AsyncIOBuilder

    get_accelerator().is_fp16_supported = lambda: False  # as most CPUs
    AsyncIOBuilder.is_compatible = lambda self, verbose=False: False  # as a machine without libaio
    return refusals(calls)


@pytest.fixture(scope="module")
def more(private_tmp, tmp_path_factory):
    return launch(variants, str(tmp_path_factory.mktemp("zero")), ranks=2, quiet=True, timeout=290, **SHORT)


EXACT = [
    "2 micro-batches",
    "2 micro-batches at 1",
    "larger bucket",
    "optimizer on the host",
    "all on the host",
    "checkpointed",
    "user's file",
    "accelerate",
]


@pytest.mark.parametrize("name", EXACT)
def test_no_choice_changes_the_training(name, more, oracle):
    for told, *_ in more.results:
        assert off_by(told[name].losses, oracle.losses[: len(told[name].losses)]) < TOLERANCE
        assert told[name].wrapper == "DeepSpeedEngine"


def test_gradients_are_means_and_clipping_clips(more):
    losses, norms = one_rank(tiny_llama(), **SHORT, max_grad_norm=0.5)
    whole_losses, whole_norms = one_rank(tiny_llama(), **SHORT, max_grad_norm=1e9)
    assert off_by(losses, whole_losses) > 1e-5  # a difference that the tolerance below would not let pass
    for told, *_ in more.results:
        assert told["2 micro-batches"].extra["gradient_norms"] == pytest.approx(whole_norms, rel=1e-4)
        assert told["clipped"].extra["gradient_norms"] == pytest.approx(norms, rel=1e-4)
        assert off_by(told["clipped"].losses, losses) < 2e-6


def test_the_bucket_is_in_the_peak_and_nowhere_else(more):
    large, small = more.results[0][0]["larger bucket"].memory, more.results[0][0]["stage 2"].memory
    assert large["buckets"] == small["buckets"] == 0
    # gloo's threads let a buffer go when they come to it: on a busy machine the peak holds one copy of gradients more
    assert large["peak"] - small["peak"] == pytest.approx(19 * 4 * BUCKET, abs=WEIGHTS)


def test_stage_1_reduces_once_a_step_and_stage_2_with_every_micro_batch(more):
    for told, *_ in more.results:
        for name, times in {"2 micro-batches at 1": 1.5, "2 micro-batches": 2.5}.items():
            assert told[name].wire_bytes is None or times < told[name].wire_bytes / WEIGHTS < 1.02 * times


def test_what_offloading_moves(more):
    mine = 4 * share(2, 2)
    for told, *_ in more.results:
        device, host = told["optimizer on the host"].memory, told["optimizer on the host"].extra["on_host"]
        assert device["parameters"] == WEIGHTS + ROTARY and device["optimizer_state"] == device["master"] == 0
        assert device["buckets"] == 4 * max(NUMELS) and device["gradients"] == 0
        assert host == dict(
            parameters=0, gradients=mine, optimizer_state=2 * mine + 4, master=mine, buckets=mine + 4 * max(NUMELS)
        )
        device, host = told["all on the host"].memory, told["all on the host"].extra["on_host"]
        assert device["parameters"] == ROTARY and device["buckets"] == 4 * BUCKET and device["gradients"] == 0
        assert host == dict(parameters=mine, gradients=2 * mine, optimizer_state=2 * mine + 4, master=mine, buckets=0)


def test_checkpointed_activations_are_fewer(more):
    assert (
        more.results[0][0]["checkpointed"].memory["activations"]
        < more.results[0][0]["stage 3"].memory["activations"] / 2
    )


def test_bf16_halves_weights_and_gradients(more):
    half, whole = more.results[0][0]["bf16"], more.results[0][0]["stage 2"]
    assert half.memory["parameters"] - ROTARY == (whole.memory["parameters"] - ROTARY) / 2
    assert half.memory["gradients"] == whole.memory["gradients"] / 2
    assert all(half.memory[name] == whole.memory[name] for name in ("optimizer_state", "master"))
    assert 1e-6 < off_by(half.losses, whole.losses) < 5e-3


def test_a_user_s_file_decides(more):
    config = more.results[0][0]["user's file"].extra["config"]
    assert config["gradient_accumulation_steps"] == 3 and config["optimizer"]["params"]["torch_adam"] is True


def test_a_resumed_run_goes_on(more, oracle):
    for told, *_ in more.results:
        assert told["resumed"].extra["first_step"] == 2
        assert off_by(told["resumed"].losses, oracle.losses[2:3]) < TOLERANCE


def test_accelerate_shards_on_cpu_ranks(more):
    for told, *_ in more.results:
        extra = told["accelerate"].extra
        assert (extra["distributed_type"], extra["stage"]) == ("DistributedType.DEEPSPEED", 3)
        assert extra["local_elements"] == share(2, 3)
        assert told["accelerate"].memory["optimizer_state"] == more.results[0][0]["stage 3"].memory["optimizer_state"]


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


def test_nobody_chatters(more):
    for log in more.logs:
        assert "[WARNING]" not in log and "FutureWarning" not in log and "[INFO]" not in log


def test_nothing_was_compiled(more, tmp_path, private_tmp, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    launch(every_stage, (1,), ranks=1, quiet=True, **{**SHORT, "steps": 1})
    assert list(tmp_path.iterdir()) == []
