"""The training programs against one rank on the whole batch: the same losses, and no silent fall-back."""

from __future__ import annotations

import importlib.util
import json
import sys

import cloudpickle
import pytest
import torch
from parity import TOLERANCE, off_by

from course_lib.launch import launch
from course_lib.launch.commands import Background
from course_lib.models import tiny_llama
from course_lib.models.data import sample_batch
from course_lib.training import command_line, single
from course_lib.training.data_parallel import accelerate_ddp, ddp
from course_lib.training.micro_batches import micro_batch_size

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need not import pytest

STEPS, BATCH, SEQ_LEN = 4, 8, 32
SIZES = dict(steps=STEPS, global_batch=BATCH, seq_len=SEQ_LEN)
GRADIENT_BYTES = 4 * 803_968  # fp32; the parameters of tiny_llama's docstring

LAUNCHES = {
    "2 ranks": dict(ranks=2),
    "2 ranks, buckets of 0.25 MiB, 2 micro-batches": dict(ranks=2, gradient_accumulation_steps=2, bucket_cap_mb=0.25),
    "2 ranks, 2 micro-batches, no no_sync": dict(ranks=2, gradient_accumulation_steps=2, sync_every_micro_batch=True),
    "4 ranks, buckets of 4 MiB": dict(ranks=4, bucket_cap_mb=4.0),
}


def with_both_optimizers(train, **kwargs):
    """AdamW as the program has it, and plain SGD: Adam's step hardly depends on the gradient's scale, so a sum where a
    mean belongs, or a missing division by the micro-batches, shows under SGD only."""
    torch.set_num_threads(1)  # a small batch gains nothing from two, and loses much on a busy machine
    adamw = torch.optim.AdamW
    outcomes = [train(**kwargs, lr=1e-3)]
    torch.optim.AdamW = torch.optim.SGD
    try:
        return [*outcomes, train(**kwargs, lr=0.1)]
    finally:
        torch.optim.AdamW = adamw


@pytest.fixture(scope="module")
def oracle(private_tmp):
    run = launch(with_both_optimizers, single.train, ranks=1, quiet=True, **SIZES)
    return run.results[0]


@pytest.fixture(scope="module")
def ddp_runs(private_tmp):
    return {name: launch(with_both_optimizers, ddp.train, quiet=True, **SIZES, **how) for name, how in LAUNCHES.items()}


def assert_parity(results, oracle, ranks):
    assert len(results) == ranks
    for rank, outcomes in enumerate(results):
        for outcome, whole in zip(outcomes, oracle, strict=True):
            assert outcome.wrapper == "DistributedDataParallel"
            assert (outcome.rank, outcome.world_size) == (rank, ranks)
            assert off_by(outcome.losses, whole.losses) < TOLERANCE


def test_the_oracle_learns_and_says_what_it_is(oracle):
    for outcome in oracle:
        assert (outcome.wrapper, outcome.rank, outcome.world_size) == ("LlamaForCausalLM", 0, 1)
        assert len(outcome.losses) == STEPS and 5.4 < outcome.losses[0] < 5.8  # ln 256 = 5.55: it knows nothing yet
        assert outcome.losses[-1] < outcome.losses[0] - 0.1
    assert off_by(oracle[0].losses[1:], oracle[1].losses[1:]) > 1e-3  # two optimizers indeed


@pytest.mark.parametrize("name", LAUNCHES)
def test_ddp_trains_as_one_rank_does(name, ddp_runs, oracle):
    assert_parity(ddp_runs[name].results, oracle, LAUNCHES[name]["ranks"])


def test_micro_batches_on_one_rank_are_the_whole_batch(oracle, private_tmp):
    cut = launch(
        with_both_optimizers, single.train, ranks=1, quiet=True, gradient_accumulation_steps=4, **SIZES
    ).results[0]
    for outcome, whole in zip(cut, oracle, strict=True):
        assert off_by(outcome.losses, whole.losses) < TOLERANCE


def gradient_bytes_sent(run, rank=0):
    """All-reduced bytes of one rank, less the four that each step's report takes, over both trainings' steps."""
    total = sum(c.bytes for c in run.collectives if c.rank == rank and c.kind == "all_reduce")
    return (total - 2 * STEPS * 4) / (2 * STEPS)


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_step_all_reduces_each_gradient_once(name, ddp_runs):
    how = LAUNCHES[name]
    times = how["gradient_accumulation_steps"] if how.get("sync_every_micro_batch") else 1
    for rank in range(how["ranks"]):
        assert gradient_bytes_sent(ddp_runs[name], rank) == times * GRADIENT_BYTES


def test_the_bucket_size_arrives(ddp_runs):
    def last_step(name):  # DDP lays its buckets after the first step
        sizes = [c.bytes for c in ddp_runs[name].collectives if c.rank == 0 and c.kind == "all_reduce"][:-1]
        return sizes[len(sizes) - sizes[::-1].index(4) :]  # back to the report of the step before

    small, large = last_step("2 ranks, buckets of 0.25 MiB, 2 micro-batches"), last_step("4 ranks, buckets of 4 MiB")
    assert sum(small) == GRADIENT_BYTES and max(small) < 2**19 and len(small) >= 8
    assert large == [GRADIENT_BYTES]


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_bytes_that_the_system_counts_are_the_ring_s(name, ddp_runs):
    how = LAUNCHES[name]
    times = how["gradient_accumulation_steps"] if how.get("sync_every_micro_batch") else 1
    ring = 2 * (how["ranks"] - 1) / how["ranks"] * GRADIENT_BYTES * times
    for outcomes in ddp_runs[name].results:
        for outcome in outcomes:
            assert outcome.wire_bytes is None or ring < outcome.wire_bytes < 1.02 * ring  # a little for headers


def test_accelerate_trains_as_one_rank_does(oracle, private_tmp):
    run = launch(
        with_both_optimizers,
        accelerate_ddp.train,
        ranks=2,
        quiet=True,
        gradient_accumulation_steps=2,
        expect_ranks=2,
        **SIZES,
    )
    assert_parity(run.results, oracle, 2)
    assert gradient_bytes_sent_by_accelerate(run) == 2 * STEPS * GRADIENT_BYTES  # no_sync for the first micro-batch


def gradient_bytes_sent_by_accelerate(run):
    return sum(c.bytes for c in run.collectives if c.rank == 0 and c.kind == "all_reduce" and c.bytes > 4)


def test_the_saved_weights_load_into_a_plain_model(oracle, private_tmp, tmp_path):
    path = tmp_path / "weights.pt"
    launch(ddp.train, ranks=2, quiet=True, **{**SIZES, "steps": STEPS - 1}, save_to=str(path))
    plain = tiny_llama(seed=1)
    plain.load_state_dict(torch.load(path, weights_only=True))
    batch = sample_batch(STEPS - 1, global_batch=BATCH, seq_len=SEQ_LEN)
    with torch.no_grad():
        loss = plain(input_ids=batch, labels=batch).loss.item()
    assert loss == pytest.approx(oracle[0].losses[-1], rel=TOLERANCE)
    assert list(tmp_path.iterdir()) == [path]


def what_it_says(*calls):
    said = []
    for train, kwargs in calls:
        try:
            train(**{"steps": 1, **kwargs})
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    return said


def test_batches_and_ranks_that_do_not_fit(private_tmp):
    calls = [
        (ddp.train, dict(global_batch=6, gradient_accumulation_steps=2)),
        (accelerate_ddp.train, dict(global_batch=7)),
        (accelerate_ddp.train, dict(expect_ranks=3)),
    ]
    for said in launch(what_it_says, *calls, ranks=2, quiet=True).results:
        assert [kind for kind, _ in said] == ["ValueError", "ValueError", "RuntimeError"]
        assert "global_batch=6 does not divide into 2 ranks x 2 micro-batches" in said[0][1]
        assert "global_batch=7 does not divide into 2 ranks x 1 micro-batches" in said[1][1]
        assert "asked for 3 ranks and Accelerate gave 2" in said[2][1] and "torchrun" in said[2][1]


def test_single_refuses_a_batch_that_does_not_divide():
    with pytest.raises(ValueError, match="global_batch=8 does not divide into 1 ranks x 3 micro-batches"):
        single.train(gradient_accumulation_steps=3)


@pytest.mark.parametrize("name", ["steps", "global_batch", "ranks", "gradient_accumulation_steps"])
@pytest.mark.parametrize("value", [0, -1])
def test_nothing_at_all_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}: .*at least 1"):
        micro_batch_size(**{"steps": 1, "global_batch": 8, name: value})


def test_the_size_of_a_micro_batch():
    assert micro_batch_size(steps=1, global_batch=24, ranks=2, gradient_accumulation_steps=3) == 4


def test_lightning_knows_its_strategies():
    lightning_ddp = pytest.importorskip("course_lib.training.data_parallel.lightning_ddp", exc_type=ModuleNotFoundError)
    with pytest.raises(ValueError, match="strategy='fsdp' is not one of 'ddp', 'ddp_spawn'"):
        lightning_ddp.train(strategy="fsdp")
    with pytest.raises(ValueError, match="global_batch=9 does not divide into 2 ranks"):
        lightning_ddp.train(global_batch=9)


def outcome_of(output):
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


@pytest.fixture(scope="module")
def commands():
    """Both launchers at the same time: most of what they do is importing, one core each."""
    options = f"--steps {STEPS} --global-batch {BATCH} --seq-len {SEQ_LEN}"
    started = {
        "torchrun": Background(f"torchrun --nproc_per_node 2 -m course_lib.training.data_parallel.ddp {options}")
    }
    if importlib.util.find_spec("lightning"):
        started["lightning"] = Background(
            f"python -m course_lib.training.data_parallel.lightning_ddp --strategy ddp {options}"
        )
    yield started
    for command in started.values():
        command.end()


def test_torchrun_runs_the_same_program(oracle, commands):
    told = outcome_of(commands["torchrun"].wait())
    assert (told["wrapper"], told["rank"], told["world_size"]) == ("DistributedDataParallel", 0, 2)
    assert off_by(told["losses"], oracle[0].losses) < TOLERANCE


def test_lightning_runs_the_same_training(oracle, commands):
    pytest.importorskip("lightning")
    output = commands["lightning"].wait()
    told = outcome_of(output)
    assert (told["wrapper"], told["rank"], told["world_size"]) == ("DistributedDataParallel", 0, 2)
    assert off_by(told["losses"], oracle[0].losses) < TOLERANCE
    for rank in range(2):
        assert f"rank {rank} of 2: DistributedDataParallel" in output


def program(*, steps: int = 3, lr: float = 1, cap: None | float = None, name: str = "", fast: bool = False):
    """Train %s nothing.

    And more.
    """


def test_types_come_from_the_annotations():
    assert command_line.parse(program, []) == dict(steps=3, lr=1, cap=None, name="", fast=False)
    words = "--steps 5 --lr 1e-3 --cap 0.25 --name x --fast".split()
    told = command_line.parse(program, words)
    assert told == dict(steps=5, lr=0.001, cap=0.25, name="x", fast=True)
    assert [type(value) for value in told.values()] == [int, float, float, str, bool]
    assert command_line.parse(program, ["--fast", "--no-fast"])["fast"] is False


def test_every_option_of_a_real_program_has_its_name():
    told = command_line.parse(ddp.train, ["--global-batch", "16", "--sync-every-micro-batch", "--bucket-cap-mb", "1.5"])
    assert (told["global_batch"], told["sync_every_micro_batch"], told["bucket_cap_mb"]) == (16, True, 1.5)
    assert told["save_to"] == "" and told["steps"] == 20


@pytest.mark.parametrize(("words", "named"), [(["--lrr", "1"], "--lrr"), (["--steps", "1.5"], "--steps")])
def test_a_wrong_option_ends_with_the_usage(words, named, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.parse(ddp.train, words)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "usage: python -m course_lib.training.data_parallel.ddp" in said
    assert named in said.splitlines()[-1]


def test_help_tells_the_options_and_their_defaults(capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.parse(program, ["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "--cap CAP" in said and "default: 3" in said
    assert "nothing." in said and "And more" not in said
