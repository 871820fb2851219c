"""Transformers' Trainer with EveryRank: each rank writes its own metrics and beats, which the Trainer's own logs do not."""

from __future__ import annotations

import statistics

import pytest

from course_lib.launch import launch
from course_lib.observe.heartbeat import read_beats
from course_lib.observe.tracking import read

STEPS = 6
LONG_PHASES = [(600, "evaluating"), (600, "saving")] * 2


def fine_tune(folder: str, steps: int) -> list[float]:
    """A Trainer on every rank; rank 1's texts are harder, so its own loss is another one."""
    import importlib.util
    import os
    from types import SimpleNamespace

    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(dist.get_rank())
    os.environ["WORLD_SIZE"] = str(dist.get_world_size())
    import torch
    from transformers import Trainer, TrainingArguments

    from course_lib.models import tiny_llama
    from course_lib.observe.heartbeat import Heartbeat
    from course_lib.observe.tracking import EveryRank, Tracker

    rank, said = dist.get_rank(), []
    texts = [{"input_ids": torch.full((32,), i % 7), "labels": torch.full((32,), i % 7)} for i in range(64)]
    arguments = TrainingArguments(
        f"{folder}/out",
        max_steps=steps,
        per_device_train_batch_size=2,
        logging_steps=2,
        save_steps=4,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=4,
    )
    trainer = Trainer(tiny_llama(), arguments, train_dataset=texts, eval_dataset=texts[:4])
    if importlib.util.find_spec("axolotl"):  # as Axolotl adds it
        os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1", "EVERY_RANK_SECONDS": "0.01"}
        from course_tools.axolotl.tracking_plugin import EveryRankPlugin

        (every_rank,) = EveryRankPlugin().add_callbacks_post_trainer(SimpleNamespace(output_dir=folder), trainer)
    else:
        tracker = Tracker(f"{folder}/tracking", rank=rank, world_size=2)
        every_rank = EveryRank(tracker, Heartbeat(f"{folder}/heartbeats", rank=rank, every=0.01), trainer=trainer)
    heartbeat, beat = every_rank.heartbeat, every_rank.heartbeat.beat
    heartbeat.beat = lambda step=None, phase="", **numbers: (said.append((step, phase)), beat(step, phase, **numbers))
    declare = heartbeat.phase
    heartbeat.phase = lambda name, may_take: (said.append((may_take, name)), declare(name, may_take=may_take))[1]
    trainer.add_callback(every_rank)
    trainer.train()
    return said


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    return folder, launch(fine_tune, str(folder), STEPS, ranks=2, timeout=120, quiet=True, backend="gloo")


def test_every_rank_writes_its_own_metrics(trained):
    folder, _ = trained
    found = read(folder / "tracking")
    assert sorted(found) == [0, 1]
    wanted = {"loss", "own_loss", "gradient_norm", "tokens_per_second", "memory_bytes", "heartbeat_gap"}
    for numbers in found.values():
        assert wanted <= set(numbers)
        assert [step for step, *_ in numbers["loss"]] == [2, 4, 6]
        assert all(value > 0 for name in wanted for _, value, _ in numbers[name])
    for at in range(3):
        own = [found[rank]["own_loss"][at][1] for rank in (0, 1)]
        assert own[0] != own[1] and statistics.mean(own) == pytest.approx(found[0]["loss"][at][1], rel=1e-4)


def test_every_rank_beats_phase_by_phase_and_declares_what_is_long(trained):
    folder, run = trained
    for rank, said in enumerate(run.results):
        step = ["forward", "forward", "backward", "forward", "backward", "optimizer", "data"]
        assert [phase for _, phase in said][: 1 + 2 * len(step)] == ["data", *step, *step]
        assert [(seconds, phase) for seconds, phase in said if (seconds, phase) in LONG_PHASES] == LONG_PHASES
        beat = read_beats(folder / "heartbeats")[rank]
        assert (beat.step, beat.ended, beat.may_take) == (STEPS, "done", None)
