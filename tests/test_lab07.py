"""Lab 7's checks: planted wrong answers get their words, a right answer written another way passes, a stub is no try."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from planted import lab07 as planted
from planted.contract import Contract

from course_checks.lab07 import (
    beats,
    broken_runs,
    from_script,
    killing,
    lab,
    packing,
    resuming,
    runs,
    spikes,
    switching,
    watchdog,
)
from course_lib.launch import launch
from course_tools.axolotl import warm_axolotl

FOLDER = Path(spikes.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def warm_ranks():
    """The first launch of a session imports PyTorch and Axolotl; a check's time is taken warm."""
    warm_axolotl()
    launch(float, ranks=1, quiet=True)


class TestChecks(Contract):
    lab, planted = lab, planted
    fewest = 6


def test_a_save_that_is_not_written_yet_is_no_try():
    assert lab.survives(planted.stub, planted.right_load).status == "not attempted"


def _with_axolotl(texts: dict[str, str], mended: dict, lengths: list[int], capacity: int) -> dict:
    """What Axolotl's own validation says of each YAML, as it is and mended, and its own packer's bins."""
    import numpy as np
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault
    from axolotl.utils.samplers.multipack import pack_group
    from axolotl.utils.schemas.config import AxolotlInputConfig

    def refused(config: dict, old: bool) -> bool:
        cards = {"bf16": not old, "fp8": False, "tf32": not old, "n_gpu": 8, "n_node": 1}
        cards["compute_capability"] = "sm_75" if old else "sm_90"
        try:
            validate_config(DictDefault(config), capabilities=cards, env_capabilities={"torch_version": "2.13.0"})
        except ValueError:
            return True
        return False

    told = {}
    for name, text in texts.items():
        config = yaml.safe_load(text)
        good = {key: value for key, value in {**config, **mended[name]}.items() if value is not None}
        told[name] = refused(config, name == "colab.yml"), refused(good, name == "colab.yml")
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    bins = pack_group(np.array([lengths[i] for i in order]), 0, capacity, len(lengths), len(lengths))
    told["bins"] = [[order[i] for i in b] for b in bins]
    told["keys"] = set(AxolotlInputConfig.model_fields)
    return told


def test_axolotl_refuses_one_of_the_five_packs_as_we_do_and_knows_our_keys():
    lengths, capacity = packing.BINS[-1]
    told = launch(
        _with_axolotl, broken_runs.BROKEN, planted.MENDED, list(lengths), capacity, ranks=1, quiet=True, timeout=120
    ).results[0]
    keys = told.pop("keys")
    assert set(runs.KNOWN) <= keys
    assert "gradient_acumulation_steps" not in keys
    assert told.pop("bins") == packing.true_pack(lengths, capacity)
    assert {name for name, (broken, _) in told.items() if broken} == {"shards.yml"}
    assert not any(good for _, good in told.values())


def test_no_two_mistakes_about_an_epoch_look_alike():
    told = {m: tuple(packing._epoch(*case, (m,))[0] for case in packing.epochs()) for m in ("", *packing.MISTAKES)}
    assert len(set(told.values())) == len(told)


def test_a_child_dies_at_the_moment_asked_for_and_a_power_failure_tears_what_was_not_synced(tmp_path):
    synced, hasty = tmp_path / "synced", tmp_path / "hasty"

    def write() -> None:
        import os

        for path in (synced, hasty):
            with open(path, "wb") as file:
                file.write(b"x" * 1000)
                file.flush()
                if path == synced:
                    os.fsync(file.fileno())

    whole = killing.in_a_child(write, tmp_path)
    assert whole.code == 0 and whole.events >= 6
    assert killing.used_bytes(tmp_path) == 2000
    for path in (synced, hasty):
        path.unlink()
    seen = []
    for at in range(whole.events):
        assert killing.in_a_child(write, tmp_path, kill_at=at).code == killing.KILLED
        seen.append(killing.used_bytes(tmp_path))
        for path in tmp_path.iterdir():
            path.unlink()
    assert seen == sorted(seen) and seen[0] == 0 and 1000 in seen
    with killing.noting_what_is_synced():
        assert killing.in_a_child(write, tmp_path, power=True).code == killing.KILLED
    assert (synced.stat().st_size, hasty.stat().st_size) == (1000, 500)
    full = killing.in_a_child(write, tmp_path, room=100)
    assert full.code == 1 and "OSError" in full.said


def test_recordings_are_what_they_say():
    for name in ("losses", "beats", "witnesses"):
        stamp = json.loads((FOLDER / f"{name}.json").read_text())["stamp"]
        assert set(stamp) == {"made", "device", "torch", "by"}, name
    assert set(spikes.recorded()) == set(spikes.SPIKES) == set(spikes.ABOUT)
    for name, losses in spikes.recorded().items():
        for spike in spikes.SPIKES[name]:
            before = sorted(losses[spike.first - 20 : spike.first])[10]
            assert not losses[spike.first] < 1.5 * before, (name, spike)
    for trace in (*beats.made_up(), *beats.recorded()):
        assert watchdog._watch(lambda *a: watchdog.true_rule(*a), trace), trace.shows
    for name, method in (("typo", "DDP"), ("fsdp2", "FSDP2"), ("zero1", "ZeRO-1"), ("alone", "alone")):
        assert switching.true_proof(switching.recorded()[name][1])[0] == method
    uneven = [w["local_elements"] for w in switching.recorded()["fsdp2_3"][1]]
    assert len(set(uneven)) > 1 and sum(uneven) == switching.recorded()["fsdp2_3"][1][0]["total_elements"]


def test_resumed_runs_show_what_they_lack():
    for (missing, _, _), (whole, resumed) in resuming.runs().items():
        assert resuming.true_missing(whole, resumed) == missing
        exact = resumed == whole[-len(resumed) :]
        assert (
            exact
            or missing != resuming.NOTHING
            or any(a.loss != b.loss for a, b in zip(resumed, whole[-len(resumed) :], strict=True))
        )
    assert any(
        resumed == whole[-len(resumed) :]
        for (missing, _, ranks), (whole, resumed) in resuming.runs().items()
        if ranks == 1
    ), "a complete resume is equal to the last bit"


def test_the_script_and_its_wiki_page_are_what_the_words_say():
    assert torch.tensor(from_script.script_losses()).isfinite().all()
    assert from_script.named_difference(planted.RUN) is None
    for setting in from_script.SETTINGS:
        assert setting.wanted != setting.default
