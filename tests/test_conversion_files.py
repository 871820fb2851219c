"""Checkpoints on disk: split, trained, sealed, merged; interrupted, damaged, and told apart. No rank is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shard_forward import forward
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen2ForCausalLM

from course_lib.checkpoints import CheckpointError
from course_lib.models import byte_tokenizer, no_progress_bars
from course_tools.conversion import LAYOUTS, command, folders, merge, merge_state, seal, split, split_state

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(20).reshape(2, 10) * 11 % 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Qwen2 with tied embeddings and biases, in bfloat16 with norms in fp32, in several files, and its tokenizer."""
    folder = tmp_path_factory.mktemp("made") / "qwen2"
    config = Qwen2Config(
        hidden_size=32,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=48,
        num_hidden_layers=4,
        vocab_size=60,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).bfloat16()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape) * 0.2 + ("norm" in name)
        parameter.data = drawn if "norm" in name else drawn.bfloat16()
    with no_progress_bars():
        model.save_pretrained(folder, max_shard_size=20_000)
        byte_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.fixture
def shards(checkpoint, tmp_path):
    return split(checkpoint, tmp_path / "shards", tp=2, pp=2, layout="megatron")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(one[n].dtype == t.dtype and torch.equal(one[n], t) for n, t in other.items())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logits(folder: Path) -> torch.Tensor:
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_comes_back_byte_for_byte(checkpoint, tmp_path, layout):
    for tp, pp in ((1, 1), (2, 4), (4, 2)):
        there, back = tmp_path / f"shards-{tp}-{pp}", tmp_path / f"back-{tp}-{pp}"
        assert split(checkpoint, there, tp=tp, pp=pp, layout=layout, pad_vocab=layout == "megatron") == there
        assert merge(there, back) == back
        assert equal(weights(back), weights(checkpoint))
        assert {path.name for path in back.iterdir()} == {
            path.name for path in checkpoint.iterdir() if not re.match(r"model-|model\.safetensors\.index", path.name)
        } | {"model.safetensors"}
        assert (back / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"{kind}-{grid}" for kind in ("shards", "back") for grid in ("1-1", "2-4", "4-2")
    )
    assert torch.equal(logits(back), logits(checkpoint))


def test_the_files_are_what_the_tensors_say(checkpoint, shards, tmp_path):
    """On disk as in memory; computed on, they give the model's logits; several files come with an index."""
    assert sorted(p.name for p in shards.glob("mp_rank_*")) == [
        f"mp_rank_{t:02d}_{p:03d}" for t in (0, 1) for p in (0, 1)
    ]
    config = Qwen2Config.from_pretrained(checkpoint)
    whole = weights(checkpoint)
    in_memory = split_state(whole, config, tp=2, pp=2, layout="megatron")
    on_disk = {(t, p): load_file(shards / f"mp_rank_{t:02d}_{p:03d}" / "model.safetensors") for t, p in in_memory}
    assert all(equal(on_disk[place], shard) for place, shard in in_memory.items())
    assert equal(
        merge_state(on_disk, config, layout="megatron"), whole | {"lm_head.weight": whole["model.embed_tokens.weight"]}
    )
    wide = {place: {name: tensor.float() for name, tensor in shard.items()} for place, shard in on_disk.items()}
    with torch.no_grad():
        found = forward(wide, config, IDS, tp=2, pp=2, layout="megatron")
    torch.testing.assert_close(found, logits(checkpoint), rtol=1e-4, atol=1e-5)

    merge(shards, tmp_path / "several", file_bytes=20_000)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert equal(weights(tmp_path / "several"), whole)
    assert torch.equal(logits(tmp_path / "several"), logits(checkpoint))


def test_one_tensor_at_a_time_is_in_memory(checkpoint, tmp_path, monkeypatch):
    held, most = [0], [0]

    def counted(tensor):
        held[0] += tensor.nbytes
        most[0] = max(most[0], held[0])
        weakref.finalize(tensor, lambda size=tensor.nbytes: held.__setitem__(0, held[0] - size))
        return tensor

    plain_cut, plain_whole = folders.cut, folders.whole
    monkeypatch.setattr(folders, "cut", lambda *given: counted(plain_cut(*given)))
    monkeypatch.setattr(folders, "whole", lambda *given: ((n, counted(t)) for n, t in plain_whole(*given)))
    largest = max(tensor.nbytes for tensor in weights(checkpoint).values())
    split(checkpoint, tmp_path / "shards", tp=1, pp=1)
    merge(tmp_path / "shards", tmp_path / "back")
    assert 0 < most[0] <= 2 * largest


def test_an_interrupted_split_or_merge_leaves_nothing_that_looks_whole(checkpoint, shards, tmp_path, monkeypatch):
    written = []

    def interrupted(path, *given):
        written.append(path)
        if len(written) == 2:
            raise KeyboardInterrupt
        return plain(path, *given)

    plain = folders.write
    monkeypatch.setattr(folders, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        split(checkpoint, tmp_path / "out", tp=2, pp=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shards"]

    # killed: nobody cleans up, and what is left is hidden and has no manifest
    written.clear()
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(shutil, "rmtree", lambda *given, **more: None)
        split(checkpoint, tmp_path / "out", tp=2, pp=2)
    (left,) = (path for path in tmp_path.iterdir() if path != shards)
    assert left.name.startswith(".out.part-")
    with pytest.raises(CheckpointError, match="no finished split is there"):
        merge(left, tmp_path / "back")
    shutil.rmtree(left)

    def full(path, *given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "write", full)
    with pytest.raises(CheckpointError, match=r"back was not written: the disk is full \([\d.]+ GB are free there\)"):
        merge(shards, tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shards"]


SHARD = "mp_rank_01_000/model.safetensors"
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def rewritten(change):
    """What does something to a shard's tensors and writes the file anew."""

    def does(folder: Path) -> None:
        tensors = load_file(folder / SHARD)
        change(tensors)
        save_file(tensors, folder / SHARD)

    return does


def told(name: str, change):
    """What does something to one of the folder's JSON files."""

    def does(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        change(found)
        (folder / name).write_text(json.dumps(found))

    return does


def flipped(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[-5] ^= 1
    (folder / SHARD).write_bytes(data)


FAULTS = {
    "a missing shard": (lambda f: (f / SHARD).unlink(), "the shard of tp rank 1 and stage 0, is missing"),
    "a tensor too few": (rewritten(lambda t: t.pop(QKV)), "has other bytes than manifest.json says: damaged"),
    "a truncated file": (lambda f: os.truncate(f / SHARD, 5_000), "has other bytes than manifest.json says: damaged"),
    "one bit": (flipped, "has other bytes than manifest.json says: damaged"),
    "trained since": (rewritten(lambda t: t[QKV].add_(1)), "if it was trained since, seal the folder again"),
    "another grid in the manifest": (
        told("manifest.json", lambda m: m.update(tp=4)),
        "does not fit itself: tp=4, pp=2",
    ),
    "another layout in it": (told("manifest.json", lambda m: m.update(layout="hugging_face")), "does not fit itself"),
    "no grid": (told("manifest.json", lambda m: m.update(pp="two")), "lacks the grid"),
    "another model's": (
        told("config.json", lambda c: c.update(num_hidden_layers=8, layer_types=["full_attention"] * 8)),
        "it does not fit config.json.*lacks the tensor decoder.layers.2",
    ),
    "another width": (
        told("config.json", lambda c: c.update(intermediate_size=52)),
        r"it does not fit config.json.*linear_fc1.weight of shape \[48, 32\] instead of \[52, 32\]",
    ),
    "no such model": (told("config.json", lambda c: c.update(model_type="gpt2")), "type 'gpt2' is not one"),
    "no size at all": (told("config.json", lambda c: c.update(hidden_size="wide")), "number of hidden is 'wide'"),
    "an odd setting": (
        told("config.json", lambda c: c.update(hidden_act=3)),
        "config.json: transformers does not take it",
    ),
    "a shard without hash": (
        told("manifest.json", lambda m: m["shards"][SHARD].pop("sha256")),
        "lacks the grid, or a shard's size and SHA-256",
    ),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "no finished split is there"),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 700), "manifest.json cannot be read: damaged"),
    "a list for a manifest": (lambda f: (f / "manifest.json").write_text("[]"), "is no manifest of shards"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shards_that_are_not_whole_are_refused_in_one_sentence(shards, tmp_path, fault):
    damage, sentence = FAULTS[fault]
    damage(shards)
    before = contents(shards)
    with pytest.raises(CheckpointError, match=sentence) as refused:
        merge(shards, tmp_path / "back")
    assert "\n" not in str(refused.value)
    assert contents(shards) == before and [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_trained_shards_are_sealed_and_merged_unless_their_copies_drifted_apart(checkpoint, shards, tmp_path):
    rewritten(lambda t: t[QKV].add_(1))(shards)
    assert seal(shards, tp=2, pp=2, layout="megatron") == shards / "manifest.json"
    merge(shards, tmp_path / "back")
    changed = {n for n, t in weights(tmp_path / "back").items() if not torch.equal(t, weights(checkpoint)[n])}
    assert changed == {f"model.layers.1.self_attn.{which}_proj.weight" for which in "qkv"}

    for change, sentence in (
        (lambda t: t.pop(QKV), f"lacks the tensor {QKV}"),
        (lambda t: t.update({QKV: t[QKV][:-1].contiguous()}), rf"{QKV} of shape \[31, 32\] instead of \[32, 32\]"),
        (lambda t: t.update({QKV: t[QKV].int()}), "as I32: only F64, F32, F16, BF16"),
    ):
        before = (shards / SHARD).read_bytes()
        rewritten(change)(shards)
        with pytest.raises(CheckpointError, match=sentence):
            seal(shards, tp=2, pp=2, layout="megatron")
        (shards / SHARD).write_bytes(before)
    manifest = (shards / "manifest.json").read_bytes()
    for given, sentence in (
        ({"tp": 2, "pp": 4}, "mp_rank_00_002.model.safetensors is missing"),
        ({"tp": 1, "pp": 2}, r"shape \[30, 32\] instead of \[60, 32\]"),
        ({"tp": 3, "pp": 2}, "tp=3 does not divide"),
    ):
        with pytest.raises(ValueError, match=sentence):
            seal(shards, **given, layout="megatron")
    assert (shards / "manifest.json").read_bytes() == manifest

    for name in ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "embedding.word_embeddings.weight"):
        before = (shards / SHARD).read_bytes()
        rewritten(lambda t, name=name: t[name].add_(1))(shards)
        seal(shards, tp=2, pp=2, layout="megatron")
        with pytest.raises(CheckpointError, match=f"{name} .*gradients"):
            merge(shards, tmp_path / "again")
        (shards / SHARD).write_bytes(before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "shards"]


def test_checkpoints_that_cannot_be_split_are_refused(checkpoint, tmp_path):
    def refused(sentence: str, error: type = CheckpointError, **grid: int):
        with pytest.raises(error, match=sentence):
            split(tmp_path / "bad", tmp_path / "out", **{"tp": 2, "pp": 2, **grid})
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(checkpoint, tmp_path / "bad")

    refused("config.json is missing")
    bad = tmp_path / "bad"
    refused("pp=3 does not divide the model's 4 layers", ValueError, pp=3)
    for path in bad.glob("model*"):
        path.unlink()
    refused("has neither model.safetensors nor model.safetensors.index.json: save the model with save_pretrained")
    next(bad.glob("model-00002*")).unlink()
    refused("model-00002-of-.* is missing")
    os.truncate(next(bad.glob("model-00001*")), 900)
    refused("truncated or damaged")
    told("model.safetensors.index.json", lambda i: i["weight_map"].update({"model.norm.weight": "../x"}))(bad)
    refused("names a file outside of its folder")
    told("model.safetensors.index.json", lambda i: i["weight_map"].pop("model.norm.weight"))(bad)
    refused("bad: its checkpoint lacks the tensor model.norm.weight.")
    told("model.safetensors.index.json", lambda i: i.pop("weight_map"))(bad)
    refused("is no index of tensors")
    (bad / "model.safetensors").write_bytes(b"{}")
    refused("no whole safetensors file")
    LlamaConfig(**{k: 64 for k in ("hidden_size", "intermediate_size")}, num_hidden_layers=2).save_pretrained(bad)
    refused("bad: its checkpoint has model.embed_tokens.weight of shape .* instead of")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="out is there already: give a folder that is empty or not there yet"):
        split(bad, tmp_path / "out", tp=2, pp=2)
    assert contents(tmp_path / "out") == {"mine.txt": b"precious"}


def test_the_command_line(checkpoint, tmp_path, capsys):
    there, back = tmp_path / "shards", tmp_path / "back"
    assert command.main(["split", str(checkpoint), str(there), "--tp", "4", "--pp", "1"]) == 0
    assert len(list(there.glob("tp-0?-of-04_pp-01-of-01.safetensors"))) == 4
    assert command.main(["seal", str(there), "--tp", "4", "--pp", "1"]) == 0
    assert command.main(["merge", str(there), str(back)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{back} is written."
    assert equal(weights(back), weights(checkpoint))
    assert command.main(["merge", str(there), str(back)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "is there already" in said.err and said.err.count("\n") == 1
    assert command.main(["split", str(checkpoint), str(tmp_path / "x"), "--tp", "3", "--pp", "1"]) == 2
    assert "it may be 1, 2 or 4." in capsys.readouterr().err
    assert command.main(["split", str(checkpoint), str(tmp_path / "x"), "--tp", "two", "--pp", "1"]) == 2
    assert "--tp: invalid int value: 'two'" in capsys.readouterr().err
