"""The folder of checkpoints and what may stand in it: names, order, damage, pickles. No ranks are started."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock

from course_lib import checkpoints
from course_lib.checkpoints import CheckpointError, deepspeed_state, manifest
from course_lib.checkpoints.errors import together


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


def replace_file(checkpoint: Path, name: str, content) -> None:
    """Save ``content`` as one of a checkpoint's files, and make its manifest agree."""
    torch.save(content, checkpoint / name)
    fields = json.loads((checkpoint / manifest.NAME).read_text())
    del fields["checksum"]
    raw = (checkpoint / name).read_bytes()
    fields["files"][name] = [len(raw), hashlib.sha256(raw).hexdigest()]
    (checkpoint / manifest.NAME).write_text(json.dumps({**fields, "checksum": manifest._checksum(fields)}))


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
    assert load_into(path, again, adamw, steps) == {"seen": [1, 2.5, "x", None], "step": 7}
    assert drawn == [torch.rand(1).item(), random.random(), np.random.rand()]
    for here, there in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(here, there)  # BatchNorm's buffers too
    for here, there in zip(again.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[there].items():
            assert torch.equal(adamw.state[here][key], value)
    assert adamw.param_groups[0]["lr"] == 0.1 and steps.milestones == scheduler.milestones


def load_into(path, model, optimizer, scheduler):
    return checkpoints.load(path, model=model, optimizer=optimizer, scheduler=scheduler)


def test_saved_in_the_background_it_is_the_state_of_the_call(tmp_path):
    model, optimizer = trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    saving = checkpoints.save_async(tmp_path, 1, model=model, optimizer=optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert saving.result(30) == tmp_path / "step-00000001"
    held = checkpoints.weights(tmp_path)
    assert all(torch.equal(held[name], tensor) for name, tensor in before.items())


def test_what_is_frozen_may_be_left_out(tmp_path):
    model, _ = trained()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    path = checkpoints.save(tmp_path, 1, model=model, optimizer=optimizer, trainable_only=True)
    assert not any(name.startswith("0.") for name in checkpoints.weights(path))
    again = small()
    again[0].requires_grad_(False)
    with torch.no_grad():
        again[0].weight.fill_(5.0)
    checkpoints.load(path, model=again)
    assert torch.equal(again[1].weight, model[1].weight) and again[0].weight.unique().tolist() == [5.0]


def test_only_the_newest_are_kept_and_later_steps_are_left_alone(folder):
    model, optimizer = trained()
    for step in (3, 10):
        checkpoints.save(folder, step, model=model, optimizer=optimizer, keep=2)
    assert names(folder) == ["step-00000003", "step-00000010"]
    checkpoints.save(folder, 5, model=model, optimizer=optimizer, keep=1)  # a run that went back
    assert names(folder) == ["step-00000005", "step-00000010"]
    assert checkpoints.latest(folder).name == "step-00000010"


def test_a_whole_one_is_not_removed_for_the_sake_of_a_broken_one(folder):
    (folder / "step-00000002" / "random-00000.pt").unlink()
    model, optimizer = trained()
    checkpoints.save(folder, 3, model=model, optimizer=optimizer, keep=2)
    assert names(folder) == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_step_that_is_there_is_replaced(folder):
    model, optimizer = trained()
    checkpoints.save(folder, 2, model=model, optimizer=optimizer, extra={"at": "again"})
    assert names(folder) == ["step-00000001", "step-00000002"]
    assert load(folder)["at"] == "again"


def test_the_newest_whole_one_is_found_and_the_others_are_named(folder, capsys):
    shutil.copytree(folder / "step-00000002", folder / "step-00000004.part-0123abcd")
    shutil.copytree(folder / "step-00000002", folder / "step-00000003")
    (folder / "step-00000003" / "fsdp" / "__0_0.distcp").write_bytes(b"short")
    (folder / "notes").mkdir()
    assert checkpoints.latest(folder) == folder / "step-00000002"
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and "step-00000004.part-0123abcd was never finished." in said[0]
    assert "__0_0.distcp has 5 bytes instead of" in said[1]
    found = [(one.step, bool(one.problem)) for one in checkpoints.survey(folder)]
    assert found == [(4, True), (3, True), (2, False), (1, False)]
    assert load(folder)["at"] == 2
    model, optimizer = trained()
    checkpoints.save(folder, 4, model=model, optimizer=optimizer)
    assert "step-00000004.part-0123abcd" not in names(folder)


def test_a_replacement_that_was_killed_between_two_renames_is_put_back(folder):
    os.replace(folder / "step-00000002", folder / "step-00000002.replaced")
    assert checkpoints.latest(folder).name == "step-00000002.replaced" and load(folder)["at"] == 2
    model, optimizer = trained()
    checkpoints.save(folder, 3, model=model, optimizer=optimizer)
    assert names(folder) == ["step-00000002", "step-00000003"]


def test_nothing_there(tmp_path):
    assert checkpoints.latest(tmp_path) is None and checkpoints.latest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="is no folder: no checkpoint is there"):
        load(tmp_path / "nowhere")


def test_two_saves_at_a_time_are_refused(folder):
    with FileLock(folder / ".lock"), pytest.raises(CheckpointError, match="Another save into .* is under way"):
        checkpoints.save(folder, 3, model=small())
    assert names(folder) == ["step-00000001", "step-00000002"]
    checkpoints.save(folder, 3, model=small())


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def edit(path: Path, key: str, value) -> None:
    told = json.loads(path.read_text())
    told[key] = value
    path.write_text(json.dumps(told))


DAMAGE = {
    "a flipped bit": (lambda c: flip(c / "fsdp/__0_0.distcp"), "has other bytes than when it was saved"),
    "a shorter file": (lambda c: os.truncate(c / "fsdp/__0_0.distcp", 100), "has 100 bytes instead of"),
    "a missing file": (lambda c: (c / "random-00000.pt").unlink(), "lacks its file random-00000.pt"),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), "no finished checkpoint is there"),
    "half a manifest": (lambda c: os.truncate(c / "manifest.json", 100), "is no JSON: it was truncated"),
    "deep JSON": (lambda c: (c / "manifest.json").write_text("[" * 100_000), "is no JSON"),
    "a list": (lambda c: (c / "manifest.json").write_text("[1]"), "does not say which format it has"),
    "another step": (lambda c: edit(c / "manifest.json", "step", 99), "does not agree with its own checksum"),
    "a newer format": (
        lambda c: edit(c / "manifest.json", "format", 2),
        "was saved in format 2, and this version .* up to 1",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_damaged_is_refused_and_the_model_and_the_older_one_stay(what, folder):
    damage, sentence = DAMAGE[what]
    newest, model = folder / "step-00000002", small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    damage(newest)
    with pytest.raises(CheckpointError, match=sentence) as refused:
        checkpoints.load(newest, model=model)
    assert "\n" not in str(refused.value) and str(newest) in str(refused.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError):
        checkpoints.verify(newest)
    assert load(folder / "step-00000001")["at"] == 1
    if what != "a flipped bit":  # sizes do not show it: it is told, with the older one's name
        assert load(folder)["at"] == 1
    else:
        assert "step-00000001 is whole." in str(refused.value)


class Evil:
    """A pickle that makes a file when it is opened blindly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def evil(tmp_path):
    """Something to pickle; at the end nobody may have opened it blindly."""
    yield Evil(tmp_path / "owned")
    assert not (tmp_path / "owned").exists()


def test_a_learning_rate_is_not_unpickled_blindly(tmp_path, evil):
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = evil
    path = checkpoints.save(tmp_path, 1, model=model, optimizer=optimizer)
    again = small()
    with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.mkdir, which no checkpoint of ours does"):
        checkpoints.load(path, model=again, optimizer=torch.optim.AdamW(again.parameters()))


def test_random_numbers_are_not_unpickled_blindly(folder, evil):
    checkpoint = folder / "step-00000002"
    replace_file(checkpoint, "random-00000.pt", evil)
    with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.mkdir, which no checkpoint of ours does"):
        load(checkpoint)


def test_deepspeed_s_files_are_not_unpickled_blindly(tmp_path, evil):
    pytest.importorskip("deepspeed")
    (tmp_path / "zero").mkdir()
    torch.save({"module": evil}, tmp_path / "zero" / "mp_rank_00_model_states.pt")
    head = manifest.Manifest(step=1, kind="zero", world_size=1, model={}, zero_stage=0)
    with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.mkdir"), together("reading", tmp_path):
        deepspeed_state.weights(tmp_path, head)


def test_what_could_not_be_read_back_is_not_saved(folder, evil):
    class Scheduler:
        def state_dict(self):
            return {"when": evil}

    with pytest.raises(CheckpointError, match="scheduler.pt holds an object that cannot be read back"):
        checkpoints.save(folder, 3, model=small(), scheduler=Scheduler())
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_another_model_is_told_by_its_first_difference(folder):
    for model, word in (
        (small(width=5), r"its '0.weight' has shape \[3, 4\], and this model's \[3, 5\]"),
        (torch.nn.Sequential(torch.nn.Linear(4, 3)), "it has a parameter '1.weight', and this model has not"),
        (
            small().double(),
            "its '0.weight' is float32, and this model's float64: build the model in the same precision",
        ),
        (torch.nn.Sequential(*small(), torch.nn.Linear(3, 1)), "this model has a parameter '2.weight', and it has not"),
    ):
        with pytest.raises(CheckpointError, match=word):
            checkpoints.load(folder, model=model)


def test_an_optimizer_or_scheduler_that_was_not_saved(tmp_path):
    model, optimizer = trained()
    checkpoints.save(tmp_path, 1, model=model)
    with pytest.raises(CheckpointError, match="holds no optimizer's state, and this run's optimizer is AdamW"):
        checkpoints.load(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="holds no scheduler's state"):
        checkpoints.load(tmp_path, model=model, scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer))


def test_arguments_that_do_not_go_together(tmp_path):
    model, optimizer = trained()
    quantized = torch.nn.Linear(2, 2)
    quantized.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    engine = type("Engine", (), {"zero_optimization_stage": lambda self: 2})()
    for arguments, word in (
        (dict(), "give either model= .* or engine="),
        (dict(model=model, engine=engine), "give either model= .* or engine="),
        (dict(model=model, kind="zero"), "kind='zero' does not go with a model"),
        (dict(engine=engine, optimizer=optimizer), "leave optimizer= and scheduler= out"),
        (dict(model=model, keep=0), "keep=0: give a whole number of at least 1"),
        (dict(model=model, extra={"set": {1}}), "extra= must be plain JSON"),
        (dict(model=model, extra={1: "a number as a name"}), "extra= must be plain JSON"),
        (dict(model=quantized), "weight is quantized: save with trainable_only=True"),
    ):
        with pytest.raises(ValueError, match=word):
            checkpoints.save(tmp_path / "run", 1, **arguments)
    with pytest.raises(ValueError, match="step=-1: give a whole number of at least 0"):
        checkpoints.save(tmp_path / "run", -1, model=model)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="step 1 was not saved in .*: rank 0: .*(exists|directory)"):
        checkpoints.save(tmp_path / "file", 1, model=small())


def test_an_error_that_is_none_of_ours_says_who_and_where(tmp_path):
    with pytest.raises(CheckpointError, match=r"reading: rank 0: KeyError|reading: rank 0: 'x' \(") as told:
        with together("reading", tmp_path):
            {}["x"]
    assert isinstance(told.value.__cause__, KeyError)
