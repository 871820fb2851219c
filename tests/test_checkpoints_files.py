"""The folder of checkpoints and what may stand in it: names, order, damage, pickles. No ranks are started."""

from __future__ import annotations

import json
import os
import random
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from refusals import assert_refused

from course_lib import checkpoints
from course_lib.checkpoints import CheckpointError


def small(width: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, 3), torch.nn.BatchNorm1d(3))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(5, 4) * torch.arange(5)[:, None]).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def folder(tmp_path):
    """Steps 1 and 2 of a plain model."""
    model, optimizer = trained()
    for step in (1, 2):
        checkpoints.save(tmp_path / "run", step, model=model, optimizer=optimizer, extra={"at": step})
    return tmp_path / "run"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def load(where: Path, **more):
    return checkpoints.load(where, model=small(), **more)


def test_a_plain_model_without_ranks_comes_back_whole(tmp_path):
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 3])
    path = checkpoints.save(
        tmp_path, 7, model=model, optimizer=optimizer, scheduler=scheduler, extra={"seen": [1, 2.5, "x", None]}
    )
    drawn = [torch.rand(1).item(), random.random(), np.random.rand()]
    again = small()
    adamw = torch.optim.AdamW(again.parameters(), lr=9.0)
    steps = torch.optim.lr_scheduler.MultiStepLR(adamw, milestones=[5])
    extra = checkpoints.load(path, model=again, optimizer=adamw, scheduler=steps)
    assert extra == {"seen": [1, 2.5, "x", None], "step": 7}
    assert drawn == [torch.rand(1).item(), random.random(), np.random.rand()]
    for here, there in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(here, there)  # BatchNorm's buffers too
    for here, there in zip(again.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[there].items():
            assert torch.equal(adamw.state[here][key], value)
    assert adamw.param_groups[0]["lr"] == 0.1 and steps.milestones == scheduler.milestones


def test_only_the_newest_are_kept_one_that_is_there_is_replaced_and_later_steps_stay(folder):
    model, optimizer = trained()
    for step in (3, 10):
        checkpoints.save(folder, step, model=model, optimizer=optimizer, keep=2)
    assert names(folder) == ["step-00000003", "step-00000010"]
    checkpoints.save(folder, 10, model=model, optimizer=optimizer, extra={"at": "again"})
    assert names(folder) == ["step-00000003", "step-00000010"] and load(folder)["at"] == "again"
    checkpoints.save(folder, 5, model=model, optimizer=optimizer, keep=1)  # a run that went back
    assert names(folder) == ["step-00000005", "step-00000010"]
    assert checkpoints.latest(folder).name == "step-00000010"


def test_the_newest_whole_one_is_found_and_the_others_are_named(folder, capsys):
    shutil.copytree(folder / "step-00000002", folder / "step-00000004.part-0123abcd")
    shutil.copytree(folder / "step-00000002", folder / "step-00000003")
    (folder / "step-00000003" / "fsdp" / "__0_0.distcp").write_bytes(b"short")
    (folder / "notes").mkdir()
    assert checkpoints.latest(folder) == folder / "step-00000002"
    unfinished, damaged = capsys.readouterr().out.splitlines()
    assert "step-00000004.part-0123abcd" in unfinished and "__0_0.distcp" in damaged
    surveyed = [(each.step, bool(each.problem)) for each in checkpoints.survey(folder)]
    assert surveyed == [(4, True), (3, True), (2, False), (1, False)]
    assert load(folder)["at"] == 2
    model, optimizer = trained()
    checkpoints.save(folder, 4, model=model, optimizer=optimizer, keep=3)
    # nothing unfinished is left, and no whole one was removed for the sake of the broken one
    assert names(folder) == ["notes", "step-00000001", "step-00000002", "step-00000003", "step-00000004"]


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def edit(path: Path, key: str, value) -> None:
    told = json.loads(path.read_text())
    told[key] = value
    path.write_text(json.dumps(told))


DAMAGE = {
    "a flipped bit": (lambda c: flip(c / "fsdp/__0_0.distcp"), "__0_0.distcp"),
    "a shorter file": (lambda c: os.truncate(c / "fsdp/__0_0.distcp", 100), "100 bytes"),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), "no manifest.json"),
    "deep JSON": (lambda c: (c / "manifest.json").write_text("[" * 100_000), "no JSON"),
    "another step": (lambda c: edit(c / "manifest.json", "step", 99), "own checksum"),
    "an older format": (lambda c: edit(c / "manifest.json", "format", 1), "format 1"),
    "a newer format": (lambda c: edit(c / "manifest.json", "format", 3), "format 3"),
}


def test_what_is_damaged_is_refused_and_the_model_and_the_older_one_stay(folder, tmp_path):
    for number, (what, (damage, fragment)) in enumerate(DAMAGE.items()):
        copy, model = tmp_path / f"copy-{number}", small()
        shutil.copytree(folder, copy)
        newest, before = copy / "step-00000002", {name: t.clone() for name, t in model.state_dict().items()}
        damage(newest)
        with pytest.raises(CheckpointError) as refused:
            checkpoints.load(newest, model=model)
        assert fragment in str(refused.value) and str(newest) in str(refused.value), what
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), what
        with pytest.raises(CheckpointError):
            checkpoints.verify(newest)
        assert load(copy / "step-00000001")["at"] == 1, what
        if what == "a flipped bit":  # sizes do not show it: it is told, with the older one's name
            assert "step-00000001" in str(refused.value)
        else:
            assert load(copy)["at"] == 1, what


class Evil:
    """A pickle that makes a file when it is opened blindly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_checkpoint_is_unpickled_blindly(tmp_path):
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = Evil(tmp_path / "owned")
    path = checkpoints.save(tmp_path / "rate", 1, model=model, optimizer=optimizer)
    fragment = f"{os.mkdir.__module__}.mkdir"
    assert_refused([(partial(checkpoints.load, path, model=model, optimizer=optimizer), CheckpointError, fragment)])
    assert not (tmp_path / "owned").exists()


def test_what_cannot_be_saved_leaves_the_folder_as_it_is(folder, tmp_path):
    model, quantized, engine = small(), torch.nn.Linear(2, 2), small()
    engine.zero_optimization_stage = lambda: 3  # what tells a DeepSpeed engine
    quantized.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    scheduler = type("Scheduler", (), {"state_dict": lambda self: {"when": Evil(tmp_path)}})()  # not to be read back
    (tmp_path / "file").write_text("")
    save = partial(checkpoints.save, folder, 3)
    assert_refused(
        [
            (partial(save, model=model, scheduler=scheduler), CheckpointError, "scheduler.pt"),
            (partial(save, model=model, keep=0), ValueError, "keep=0"),
            (partial(save, model=model, extra={"set": {1}}), ValueError, "extra="),
            (partial(save, model=engine), ValueError, "save_checkpoint"),
            (partial(save, model=quantized), ValueError, "trainable_only=True"),
            (partial(checkpoints.save, folder, -1, model=model), ValueError, "step=-1"),
            (partial(checkpoints.save, tmp_path / "file", 1, model=model), CheckpointError, "rank 0"),
        ]
    )
    with FileLock(folder / ".lock"):
        assert_refused([(partial(save, model=model), CheckpointError, "Another save")])
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_what_does_not_fit_is_refused_by_its_first_difference(folder, tmp_path):
    model, optimizer = trained()
    checkpoints.save(tmp_path / "bare", 1, model=model)
    (tmp_path / "empty").mkdir()
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    deeper = torch.nn.Sequential(*small(), torch.nn.Linear(3, 1))
    bare = partial(checkpoints.load, tmp_path / "bare", model=model)
    assert_refused(
        [
            (partial(checkpoints.load, folder, model=small(width=5)), CheckpointError, "[3, 5]"),
            (partial(checkpoints.load, folder, model=small()[:1]), CheckpointError, "'1.weight'"),
            (partial(checkpoints.load, folder, model=small().double()), CheckpointError, "float64"),
            (partial(checkpoints.load, folder, model=deeper), CheckpointError, "'2.weight'"),
            (partial(bare, optimizer=optimizer), CheckpointError, "AdamW"),
            (partial(bare, scheduler=constant), CheckpointError, "scheduler"),
            (partial(load, tmp_path / "empty"), CheckpointError, "no whole checkpoint"),
            (partial(load, tmp_path / "nowhere"), CheckpointError, "no folder"),
        ]
    )
    assert checkpoints.latest(tmp_path / "empty") is None and checkpoints.latest(tmp_path / "nowhere") is None
