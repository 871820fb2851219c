"""Checkpoints on disk: split, trained, sealed, merged; interrupted, damaged, and told apart. No rank is needed."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from refusals import assert_refused
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from course_lib.checkpoints import CheckpointError
from course_lib.models import byte_tokenizer, no_progress_bars
from course_tools.conversion import LAYOUTS, command, folders, merge, seal, split

pytestmark = pytest.mark.usefixtures("one_thread")


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


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    same = (first[n].dtype == t.dtype and torch.equal(first[n], t) for n, t in second.items())
    return set(first) == set(second) and all(same)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_comes_back_byte_for_byte(checkpoint, tmp_path, layout, monkeypatch):
    other_files = {path.name for path in checkpoint.iterdir() if not path.name.startswith("model")}
    for tp, pp in ((1, 1), (2, 4), (4, 2)):
        there, back = tmp_path / f"shards-{tp}-{pp}", tmp_path / f"back-{tp}-{pp}"
        assert split(checkpoint, there, tp=tp, pp=pp, layout=layout, pad_vocab=layout == "megatron") == there
        assert merge(there, back) == back
        assert equal(weights(back), weights(checkpoint)), (tp, pp)
        assert {path.name for path in back.iterdir()} == other_files | {"model.safetensors"}, (tp, pp)
        assert (back / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    assert len(list(tmp_path.iterdir())) == 6  # nothing temporary is left
    monkeypatch.setattr(folders, "FILE_BYTES", 20_000)
    several = merge(there, tmp_path / "several")
    assert len(list(several.glob("*.safetensors"))) > 2
    assert equal(
        Qwen2ForCausalLM.from_pretrained(several).state_dict(), Qwen2ForCausalLM.from_pretrained(back).state_dict()
    )


def test_an_interrupted_split_or_merge_leaves_nothing_that_looks_whole(checkpoint, shards, tmp_path, monkeypatch):
    write, written = folders.write, []

    def interrupted(path, *given):
        written.append(path)
        if len(written) % 2 == 0:
            raise KeyboardInterrupt
        return write(path, *given)

    monkeypatch.setattr(folders, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        split(checkpoint, tmp_path / "out", tp=2, pp=2)
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]
    monkeypatch.setattr(shutil, "rmtree", lambda *given, **more: None)  # killed: nobody cleans up
    with pytest.raises(KeyboardInterrupt):
        split(checkpoint, tmp_path / "out", tp=2, pp=2)
    (left,) = (path for path in tmp_path.iterdir() if path != shards)
    assert left.name.startswith(".out.part-")
    with pytest.raises(CheckpointError, match="no finished split"):
        merge(left, tmp_path / "back")


SHARD = "mp_rank_01_000/model.safetensors"
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def rewritten(change):
    """What does something to a shard's tensors and writes the file anew."""

    def does(folder: Path) -> None:
        tensors = load_file(folder / SHARD)
        change(tensors)
        save_file(tensors, folder / SHARD)

    return does


def edited(name: str, change):
    """What does something to one of the folder's JSON files."""

    def does(folder: Path) -> None:
        fields = json.loads((folder / name).read_text())
        change(fields)
        (folder / name).write_text(json.dumps(fields))

    return does


def flipped(folder: Path) -> None:
    data = bytearray((folder / SHARD).read_bytes())
    data[-5] ^= 1
    (folder / SHARD).write_bytes(data)


FAULTS = {
    "a missing shard": (lambda f: (f / SHARD).unlink(), "is missing"),
    "one bit": (flipped, "other bytes"),
    "trained since": (rewritten(lambda t: t[QKV].add_(1)), "seal the folder"),
    "another grid in the manifest": (edited("manifest.json", lambda m: m.update(tp=4)), "tp=4"),
    "no grid": (edited("manifest.json", lambda m: m.update(pp="two")), "lacks the grid"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "no finished split"),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 700), "manifest.json"),
    "another model's config": (edited("config.json", lambda c: c.update(intermediate_size=52)), "[52, 32]"),
    "an odd setting": (edited("config.json", lambda c: c.update(hidden_act=3)), "transformers"),
}


INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
BAD_CHECKPOINTS = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "no weights": (lambda f: [path.unlink() for path in f.glob("model*")], "neither model.safetensors"),
    "a truncated file": (lambda f: os.truncate(next(f.glob("model-00001*")), 900), "model-00001-of-"),
    "a path out of it": (edited(INDEX, lambda i: i["weight_map"].update({NORM: "../x"})), "outside"),
    "a tensor too few": (edited(INDEX, lambda i: i["weight_map"].pop(NORM)), NORM),
    "another model's config": (edited("config.json", lambda c: c.update(hidden_size=64)), "model.embed_tokens.weight"),
}


def test_damaged_folders_are_refused_and_left_alone(checkpoint, shards, tmp_path):
    calls = [(shards, merge, FAULTS), (checkpoint, partial(split, tp=2, pp=2), BAD_CHECKPOINTS)]
    rows = [(source, call, what, *row) for source, call, faults in calls for what, row in faults.items()]
    for source, call, what, damage, fragment in rows:
        bad = tmp_path / "bad"
        shutil.copytree(source, bad)
        damage(bad)
        before = contents(bad)
        with pytest.raises(CheckpointError) as refused:
            call(bad, tmp_path / "out")
        assert fragment in str(refused.value), (what, str(refused.value))
        assert contents(bad) == before and not (tmp_path / "out").exists(), what
        shutil.rmtree(bad)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    assert_refused([(lambda: split(checkpoint, tmp_path / "out", tp=2, pp=2), FileExistsError, "out")])
    assert contents(tmp_path / "out") == {"mine.txt": b"precious"}


def test_trained_shards_are_sealed_and_merged_unless_their_copies_drifted_apart(checkpoint, shards, tmp_path):
    rewritten(lambda t: t[QKV].add_(1))(shards)
    assert seal(shards, tp=2, pp=2, layout="megatron") == shards / "manifest.json"
    merge(shards, tmp_path / "back")
    changed = {n for n, t in weights(tmp_path / "back").items() if not torch.equal(t, weights(checkpoint)[n])}
    assert changed == {f"model.layers.1.self_attn.{which}_proj.weight" for which in "qkv"}

    trained = (shards / SHARD).read_bytes()

    def sealed(change=lambda tensors: None, **grid):
        """What seals the shards with one of them changed, and merges them then."""

        def call():
            (shards / SHARD).write_bytes(trained)
            rewritten(change)(shards)
            seal(shards, **{"tp": 2, "pp": 2, **grid}, layout="megatron")
            merge(shards, tmp_path / "again")

        return call

    norm, embedding = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "embedding.word_embeddings.weight"
    assert_refused(
        [
            (sealed(lambda t: t.pop(QKV)), CheckpointError, QKV),
            (sealed(lambda t: t.update({QKV: t[QKV][:-1].contiguous()})), CheckpointError, "[31, 32]"),
            (sealed(lambda t: t.update({QKV: t[QKV].int()})), CheckpointError, "I32"),
            (sealed(pp=4), ValueError, "mp_rank_00_002"),
            (sealed(tp=1), ValueError, "[60, 32]"),
            # what several ranks hold, and a training forgot to add up the gradients of
            (sealed(lambda t: t[norm].add_(1)), CheckpointError, norm),
            (sealed(lambda t: t[embedding].add_(1)), CheckpointError, embedding),
        ]
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "shards"]


def test_the_command_line(checkpoint, tmp_path, capsys):
    there, back, grid = tmp_path / "shards", tmp_path / "back", ["--tp", "4", "--pp", "1"]
    assert command.main(["split", str(checkpoint), str(there), *grid]) == 0
    assert command.main(["seal", str(there), *grid]) == 0
    assert command.main(["merge", str(there), str(back)]) == 0
    assert str(back) in capsys.readouterr().out
    assert equal(weights(back), weights(checkpoint))
    for arguments, fragment in (
        (["merge", str(there), str(back)], str(back)),
        (["split", str(checkpoint), str(tmp_path / "x"), "--tp", "3", "--pp", "1"], "tp=3"),
        (["split", str(checkpoint), str(tmp_path / "x"), "--tp", "two", "--pp", "1"], "'two'"),
    ):
        assert command.main(arguments) == 2, arguments
        output = capsys.readouterr()
        assert output.out == "" and fragment in output.err, arguments
