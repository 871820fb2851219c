"""Checkpoints on disk: split, merged, interrupted, damaged; of every architecture with Llama's tensors. No rank is needed."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from refusals import assert_refused
from safetensors.torch import load_file
from test_conversion import SIZES
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from course_lib.checkpoints import CheckpointError
from course_lib.models import byte_tokenizer, no_progress_bars
from course_tools.conversion import LAYOUTS, command, folders, merge, split

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A Qwen2 with tied embeddings and biases, in bfloat16 with norms in fp32, in several files, and its tokenizer."""
    folder = tmp_path_factory.mktemp("made") / "qwen2"
    config = Qwen2Config(**SIZES, tie_word_embeddings=True)
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
        assert split(checkpoint, there, tp=tp, pp=pp, layout=layout) == there
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


# Every architecture of transformers that has Llama's tensors, and some of those that have others.
LLAMA_S = ["llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "smollm3", "granite", "gemma", "cwm"]
LLAMA_S += ["ernie4_5", "helium", "seed_oss", "internlm3", "iquestcoder"]
OTHERS = {
    "phi3": "mlp.gate_up_proj.weight",
    "glm4": "mlp.gate_up_proj.weight",
    "mixtral": "mlp.experts.gate_up_proj",
    "qwen3_moe": "mlp.experts.gate_up_proj",
    "gemma2": "pre_feedforward_layernorm.weight",
    "olmo2": "input_layernorm.weight",
    "olmo": "input_layernorm.weight",
    "arcee": "mlp.gate_proj.weight",
    "starcoder2": "mlp.c_fc.weight",
    "granite_swa": "self_attn.sinks",
    "stablelm": "input_layernorm.bias",
    "gpt2": "mlp.gate_proj.weight",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_architecture_with_llama_s_tensors_comes_back_as_the_same_file(tmp_path, layout):
    for kind in LLAMA_S:
        config = AutoConfig.for_model(kind, **SIZES, head_dim=4, pad_token_id=0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.2
        whole, cut, back = (tmp_path / f"{kind}-{what}" for what in ("whole", "cut", "back"))
        with no_progress_bars():
            model.save_pretrained(whole)
        split(whole, cut, tp=2, pp=2, layout=layout)
        merge(cut, back)
        assert (back / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes(), kind
        ids = torch.arange(12).reshape(1, 12)
        with no_progress_bars(), torch.no_grad():
            merged = AutoModelForCausalLM.from_pretrained(back).eval()
            assert torch.equal(merged(ids).logits, model(ids).logits), kind


def test_models_with_other_tensors_are_refused(tmp_path):
    for kind, tensor in OTHERS.items():
        AutoConfig.for_model(kind, **SIZES, pad_token_id=0).save_pretrained(tmp_path / kind)
        with pytest.raises(CheckpointError, match=tensor):
            split(tmp_path / kind, tmp_path / "out", tp=2, pp=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(OTHERS)


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
    with pytest.raises(CheckpointError):
        merge(left, tmp_path / "back")


SHARD, FIRST = (f"iter_0000001/mp_rank_{rank}_000/model_optim_rng.pt" for rank in ("01", "00"))
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def rewritten(change, shard: str = SHARD):
    """What does something to a shard and saves it anew, as a training does."""

    def does(folder: Path) -> None:
        checkpoint = torch.load(folder / shard, weights_only=False)
        change(checkpoint)
        torch.save(checkpoint, folder / shard)

    return does


def edited(name: str, change):
    """What does something to one of the folder's JSON files."""

    def does(folder: Path) -> None:
        fields = json.loads((folder / name).read_text())
        change(fields)
        (folder / name).write_text(json.dumps(fields))

    return does


def in_model(change):
    return rewritten(lambda checkpoint: change(checkpoint["model"]))


NORM, EMBEDDING = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "embedding.word_embeddings.weight"
BAD_SHARDS = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "an odd setting": (edited("config.json", lambda c: c.update(hidden_act=3)), "config.json"),
    "another model's config": (edited("config.json", lambda c: c.update(intermediate_size=52)), "[52, 32]"),
    "a missing shard": (lambda f: (f / SHARD).unlink(), "is missing"),
    "half a shard": (lambda f: os.truncate(f / SHARD, 5000), SHARD),
    "no shard": (lambda f: shutil.rmtree(f / "iter_0000001"), "iter_0000001"),
    "no tracker": (lambda f: (f / "latest_checkpointed_iteration.txt").unlink(), "latest_checkpointed"),
    "no grid": (rewritten(lambda c: vars(c["args"]).clear(), FIRST), "how many ranks"),
    "virtual stages": (rewritten(lambda c: c.update(model0=c.pop("model"))), "virtual"),
    "a tensor too few": (in_model(lambda t: t.pop(QKV)), QKV),
    "another shape": (in_model(lambda t: t.update({QKV: t[QKV][:-1]})), "[31, 32]"),
    "integers": (in_model(lambda t: t.update({QKV: t[QKV].int()})), "int32"),
    # what several ranks hold, and a training forgot to add up the gradients of
    "a norm apart": (in_model(lambda t: t[NORM].add_(1)), NORM),
    "an embedding apart": (in_model(lambda t: t[EMBEDDING].add_(1)), EMBEDDING),
}


ONE = "tp-02-of-02_pp-01-of-02.safetensors"
BAD_SPLITS = {
    "a missing shard": (lambda f: (f / ONE).unlink(), ONE),
    "half a shard": (lambda f: os.truncate(f / ONE, 5000), ONE),
    "another split's": (lambda f: shutil.copy(f / ONE, f / ONE.replace("of-02", "of-04")), "one split"),
}
INDEX = "model.safetensors.index.json"
BAD_CHECKPOINTS = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "no weights": (lambda f: [path.unlink() for path in f.glob("model*")], "neither model.safetensors"),
    "a truncated file": (lambda f: os.truncate(next(f.glob("model-00001*")), 900), "model-00001-of-"),
    "a path out of it": (edited(INDEX, lambda i: i["weight_map"].update({"model.norm.weight": "../x"})), "outside"),
    "a tensor too few": (edited(INDEX, lambda i: i["weight_map"].pop("model.norm.weight")), "model.norm.weight"),
    "another model's config": (edited("config.json", lambda c: c.update(hidden_size=64)), "model.embed_tokens.weight"),
}


def test_damaged_folders_are_refused_and_left_alone(checkpoint, shards, tmp_path):
    plain = split(checkpoint, tmp_path / "plain", tp=2, pp=2)
    calls = [
        (shards, merge, BAD_SHARDS),
        (plain, merge, BAD_SPLITS),
        (checkpoint, partial(split, tp=2, pp=2), BAD_CHECKPOINTS),
    ]
    rows = [(source, call, what, *row) for source, call, faults in calls for what, row in faults.items()]
    for source, call, what, damage, fragment in rows:
        bad = tmp_path / "bad"
        shutil.copytree(source, bad)
        damage(bad)
        before = contents(bad)
        with pytest.raises(CheckpointError) as refused:
            call(bad, tmp_path / "new" / "out")
        assert fragment in str(refused.value), (what, str(refused.value))
        assert contents(bad) == before and not (tmp_path / "new").exists(), what
        shutil.rmtree(bad)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("precious")
    assert_refused([(lambda: split(checkpoint, tmp_path / "out", tp=2, pp=2), FileExistsError, "out")])
    assert contents(tmp_path / "out") == {"mine.txt": b"precious"}


def test_the_command_line(checkpoint, tmp_path, capsys):
    there, back, grid = tmp_path / "shards", tmp_path / "back", ["--tp", "4", "--pp", "1"]
    assert command.main(["split", str(checkpoint), str(there), *grid]) == 0
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
