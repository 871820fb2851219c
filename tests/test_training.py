"""One device, DDP and Accelerate against a plain loop on the whole batch; and the command line of a training program."""

from __future__ import annotations

import inspect
import sys
from functools import cache

import cloudpickle
import pytest
from parity import Runs, assert_same_training, by, off_by, one_rank
from refusals import assert_refused

from course_lib.launch import launch
from course_lib.models import tiny_llama
from course_lib.training import accelerate_ddp, command_line, ddp, fsdp, pipeline, single, tensor_parallel, three_d

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

SIZES = dict(steps=4, global_batch=8, seq_len=32)
SGD = dict(optimizer="sgd", lr=0.1)  # Adam does not see a factor in all gradients
GRADIENTS = 4 * 803_968  # bytes in fp32; the parameters of tiny_llama's docstring
PROGRAMS = {"single": single.train, "ddp": ddp.train, "accelerate": accelerate_ddp.train}


def train(*, program="ddp", **how):
    return PROGRAMS[program](**how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def runs(private_tmp, folder):
    settings = {
        "ddp": {},
        "ddp, SGD": SGD,
        "accelerate": dict(program="accelerate", expect_ranks=2, save_to=str(folder)) | SGD,
        "accelerate, accumulating": dict(program="accelerate", gradient_accumulation_steps=2, expect_ranks=2) | SGD,
    }
    return Runs(train, {2: settings}, SIZES)


@cache
def expected(optimizer="adamw", lr=1e-3):
    return one_rank(tiny_llama(seed=0), **SIZES, optimizer=optimizer, lr=lr)[0]


def test_ranks_train_as_one_does(runs):
    for _, name, how, outcomes in runs.every():
        assert_same_training(outcomes, expected(how.get("optimizer", "adamw"), how.get("lr", 1e-3)), name)
        assert {outcome.wrapper for outcome in outcomes} == {"DistributedDataParallel"}
    assert expected()[-1] < expected()[0] - 0.1  # it learns
    assert off_by(expected()[1:], expected(**SGD)[1:]) > 1e-3  # two optimizers indeed


def test_micro_batches_on_one_device_are_the_whole_batch(one_thread):
    outcome = by(single.train, gradient_accumulation_steps=4, **SIZES, **SGD)
    assert_same_training([outcome], expected(**SGD), "single")


def test_a_step_all_reduces_each_gradient_once(runs):
    names = runs.settings[2]
    for rank in (0, 1):
        calls = [c for c in runs[2].collectives if c.rank == rank and c.kind == "all_reduce" and c.bytes > 1000]
        assert sum(c.bytes for c in calls) == SIZES["steps"] * len(names) * GRADIENTS
    ring = 2 * (2 - 1) / 2 * GRADIENTS  # a little more on the wire, for headers and buffers
    for name in names:
        for outcome in runs.outcomes(2, name):
            assert outcome.wire_bytes is None or ring < outcome.wire_bytes < 1.02 * ring, name
            held = outcome.memory["optimizer_state"]
            assert held == (0 if "sgd" in names[name].values() else 2 * GRADIENTS + 39 * 4), name


def test_every_rank_saves_its_random_state(runs, folder):
    runs.outcomes(2, "accelerate")
    names = {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"}
    assert {path.name for path in folder.iterdir()} == names


def refuse():
    assert_refused(
        [
            (lambda: ddp.train(steps=0), ValueError, "steps=0"),
            (lambda: ddp.train(global_batch=7), ValueError, "global_batch=7"),
            (lambda: accelerate_ddp.train(global_batch=7), ValueError, "global_batch=7"),
            (lambda: fsdp.train(global_batch=7), ValueError, "global_batch=7"),
            (lambda: accelerate_ddp.train(expect_ranks=3), RuntimeError, "3 ranks"),
            (lambda: single.train(gradient_accumulation_steps=3), ValueError, "3 micro-batches"),
        ]
    )


def test_what_does_not_fit_the_ranks_is_refused(private_tmp):
    launch(refuse, ranks=2, quiet=True)


# ------------------------------------------------------------------------------------- the command line
def program(*, steps: int = 3, lr: float = 1, cap: None | float = None, name: str = "", fast: bool = False):
    """Train nothing."""


def test_options_have_the_types_of_the_annotations():
    result = command_line.parse(program, "--steps 5 --lr 1e-3 --cap 0.25 --name x --fast".split())
    assert result == dict(steps=5, lr=0.001, cap=0.25, name="x", fast=True)
    assert [type(value) for value in result.values()] == [int, float, float, str, bool]
    assert command_line.parse(program, ["--fast", "--no-fast"]) == dict(steps=3, lr=1, cap=None, name="", fast=False)


def test_every_training_program_has_a_command_line():
    for train in (*PROGRAMS.values(), *(one.train for one in (fsdp, tensor_parallel, pipeline, three_d))):
        defaults = {name: p.default for name, p in inspect.signature(train).parameters.items()}
        assert command_line.parse(train, []) == {k: v for k, v in defaults.items() if not callable(v)}, train.__module__


def test_a_wrong_option_ends_with_code_2_and_is_named(capsys):
    for words in (["--lrr", "1"], ["--steps", "1.5"]):
        with pytest.raises(SystemExit) as ended:
            command_line.parse(ddp.train, words)
        assert ended.value.code == 2 and words[0] in capsys.readouterr().err
