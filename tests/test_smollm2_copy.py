"""SmolLM2's conversion: right to the bit, done once, and nothing half-made is ever believed."""

import errno
import multiprocessing
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from course_lib.models import INSTALL, smollm2_weights


def test_the_converted_weights_are_ggufs_own():
    gguf_file = smollm2_weights.packaged_gguf()
    if gguf_file is None:
        pytest.skip(f"there is no GGUF file to compare with: {INSTALL}")
    from gguf import dequantize
    from safetensors.torch import load_file

    packed = {tensor.name: tensor for tensor in smollm2_weights._read_gguf(gguf_file).tensors}
    weights = load_file(smollm2_weights.converted_copy(gguf_file) / "model.safetensors")
    assert len(weights) == len(packed) == 272 and {w.dtype for w in weights.values()} == {torch.float32}

    def gguf_says(name: str) -> torch.Tensor:
        return torch.from_numpy(dequantize(packed[name].data, packed[name].tensor_type).copy())

    for ours, theirs in {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.17.self_attn.v_proj.weight": "blk.17.attn_v.weight",
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    }.items():
        assert torch.equal(weights[ours], gguf_says(theirs)), ours
    # Rotary pairs: row i of a head's first half and row i of its second are neighbours, 2i and 2i + 1, in GGUF.
    for ours, theirs, heads in (("q_proj", "attn_q", 9), ("k_proj", "attn_k", 3)):
        rows, packed_rows = weights[f"model.layers.5.self_attn.{ours}.weight"], gguf_says(f"blk.5.{theirs}.weight")
        for head in range(heads):
            for i in (0, 1, 31):
                assert torch.equal(rows[head * 64 + i], packed_rows[head * 64 + 2 * i])
                assert torch.equal(rows[head * 64 + 32 + i], packed_rows[head * 64 + 2 * i + 1])


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BEYOND_ONE_GPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def convert(cache, tmp_path, monkeypatch):
    """Starts a process that converts, with a stand-in for the conversion's seven seconds."""
    started = []

    def write(gguf_file, folder):
        (folder / "config.json").write_text("{}")
        (folder / "tokenizer.json").write_text("{}")
        with (tmp_path / "log").open("a") as log:
            log.write("converted ")
        time.sleep(float(gguf_file.stem))
        save_file({"x": np.zeros(1000, np.float32)}, folder / "model.safetensors")

    def start(seconds: int) -> multiprocessing.Process:
        path = Path(f"{seconds}.gguf")
        process = multiprocessing.get_context("fork").Process(target=smollm2_weights.converted_copy, args=(path,))
        process.start()
        started.append(process)
        return process

    monkeypatch.setattr(smollm2_weights, "_write_checkpoint", write)
    yield start
    for process in started:
        process.kill()
        process.join()


def test_two_processes_at_once_convert_once(cache, tmp_path, convert):
    for process in [convert(1), convert(1)]:
        process.join()
        assert process.exitcode == 0
    assert smollm2_weights.converted_copy(None) == cache / smollm2_weights.COPY_NAME
    assert (tmp_path / "log").read_text() == "converted "


def test_a_killed_conversion_or_a_damaged_copy_is_not_believed_and_made_again(cache, convert):
    killed = convert(600)
    while not list(cache.glob(".*.part-*/tokenizer.json")):
        assert killed.is_alive()
        time.sleep(0.02)
    killed.kill()
    killed.join()
    assert smollm2_weights.converted_copy(None) is None
    copy = smollm2_weights.converted_copy(Path("0.gguf"))
    assert copy == smollm2_weights.converted_copy(None) and not list(cache.glob(".*.part-*"))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert smollm2_weights.converted_copy(None) is None
    assert smollm2_weights.converted_copy(Path("0.gguf")) == smollm2_weights.converted_copy(None) == copy


def test_no_disk_space_or_no_folder_is_said_before_anything_is_written(cache, monkeypatch):
    if smollm2_weights.packaged_gguf() is None:
        pytest.skip(f"there is nothing to convert: {INSTALL}")
    full = shutil.disk_usage(cache.parent)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(OSError) as caught:
        smollm2_weights.converted_copy(smollm2_weights.packaged_gguf())
    assert caught.value.errno == errno.ENOSPC
    assert str(cache) in str(caught.value) and "BEYOND_ONE_GPU_CACHE" in str(caught.value)
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]
    (cache / "file").write_text("")
    monkeypatch.setenv("BEYOND_ONE_GPU_CACHE", str(cache / "file" / "cache"))
    with pytest.raises(NotADirectoryError, match="BEYOND_ONE_GPU_CACHE"):
        smollm2_weights.converted_copy(Path("some.gguf"))
