"""What cannot be a row of `mistakes`: files that are not there, axes that do not fill the ranks, DeepSpeed's JSON, cards."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

from course_lib.choices import Widths, why_not_tensor_parallel
from course_lib.units import GIB
from course_tools.axolotl.check.batch import validation_rows
from course_tools.axolotl.check.datafiles import looks_like, missing, peek
from course_tools.axolotl.check.findings import Facts, Finding
from course_tools.axolotl.check.mistakes import KERNELS
from course_tools.axolotl.check.settings import Settings

ENDINGS = (".json", ".jsonl", ".parquet", ".arrow", ".csv", ".txt", ".gz")
LETTERS_A_TOKEN = 6  # English text has fewer: a sequence is not called too long by mistake
MOST_ROWS = 2000  # looked at for their length
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# DeepSpeed's name of what the YAML says already, and the YAML's
MATCHING = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def sources(facts: Facts) -> Iterator[Finding]:
    """Each data set, its file and its format."""
    raw = facts.settings.document.values
    for key in ("datasets", "test_datasets"):
        if isinstance(raw.get(key), dict):
            yield facts.error(
                key, "It is a list of data sets, and this is one mapping.", "begin it with a dash: - path: …"
            )
    if raw.get("datasets") is None and raw.get("pretraining_dataset") is None:
        yield facts.error("datasets", "There is no data: neither datasets nor pretraining_dataset.", "add datasets")
    for key in ("datasets", "test_datasets"):
        for index, dataset in facts.settings.datasets(key):
            if dataset.get("type") != "_synthetic":
                yield from _source(facts, (key, index), dataset)


def _source(facts: Facts, path: tuple[str | int, ...], dataset: dict[str, Any]) -> Iterator[Finding]:
    kind, name = dataset.get("type"), dataset.get("path")
    if not name:
        yield facts.error(path, "The data set has no path.", "add path: a file, a folder or a name on the hub")
        return
    place = facts.settings.folder / name
    if not os.path.exists(place):
        if "://" not in name and (name.endswith(ENDINGS) or facts.settings.local(name)):
            yield _absent(facts, (*path, "path"), name)
        return
    found = peek(place)
    likely = looks_like(found.columns)
    if found.problem:
        yield facts.error((*path, "path"), found.problem, "give a file with one JSON object a line")
    elif kind is None and not facts.get("rl") and not facts.get("skip_prepare_dataset"):
        if "input_ids" not in found.columns:  # tokens, which Axolotl takes as they are
            sentence = "The data set has no type: Axolotl would not know how to read a row."
            yield facts.error(path, sentence, f"add type: {likely or 'alpaca'}")
    elif problem := missing(dataset, found):
        fix = f"write type: {likely}" if likely and likely != kind else "name its fields, or convert the file"
        yield facts.error((*path, "type"), problem, fix)


def _absent(facts: Facts, path: str | tuple[str | int, ...], name: str) -> Finding:
    document = facts.settings.document.path
    fix = "paths count from the folder that axolotl is started in; write an absolute one to be sure"
    if document and os.path.exists(document.parent / name):
        beside = "it lies beside the YAML, and paths count from the working directory"
        fix = f"{beside}: start axolotl in {document.parent}"
    return facts.error(path, f"{name} does not exist.", fix)


def model(facts: Facts) -> Iterator[Finding]:
    """A model or tokenizer that is meant to lie here and does not."""
    for key in ("base_model", "tokenizer_config"):
        name = facts.given(key)
        if not name or not facts.settings.local(name):
            continue
        place = facts.settings.folder / name
        if not os.path.exists(place):
            yield _absent(facts, key, name)
        elif key == "base_model" and place.is_dir() and not (place / "config.json").is_file():
            sentence = f"{name} holds no config.json: it is no model."
            yield facts.error(key, sentence, "name the folder of save_pretrained")


def validation(facts: Facts) -> Iterator[Finding]:
    """A split that leaves nothing to train on."""
    size, rows = facts.given("val_set_size"), facts.batch.rows
    if size is not None and size < 0:
        sentence = f"{size} is no share and no number of rows."
        yield facts.warning("val_set_size", sentence, "give a share such as 0.05")
    elif size and rows is not None:
        total = rows + facts.batch.validation
        if total and validation_rows(facts.settings, total) >= total:
            sentence = f"It takes all {total} rows: nothing is left to train on."
            yield facts.error("val_set_size", sentence, "give a share such as 0.05")


def too_long(facts: Facts) -> Iterator[Finding]:
    """Texts that do not fit into a packed row."""
    length, lengths = facts.batch.sequence_len, []
    for _, one in facts.settings.datasets() if facts.get("sample_packing") else ():
        place = facts.settings.folder / str(one.get("path"))
        if one.get("type") in ("alpaca", "chat_template") and os.path.exists(place):
            lengths += [sum(len(str(value)) for value in row.values()) for row in peek(place).values[:MOST_ROWS]]
    if above := sum(one > length * LETTERS_A_TOKEN for one in lengths):
        share = f"{100 * above / len(lengths):.0f} % of the rows are longer than {length} tokens"
        sentence = f"{share} and are dropped or cut: nothing is left to pack them with."
        yield facts.warning("sequence_len", sentence, "give a longer sequence_len")


def axes(facts: Facts) -> Iterator[Finding]:
    """Heads that do not divide, and axes that do not fill the ranks: the model cannot be split so.

    Tried with Axolotl 0.21 on CPU ranks, where each of these runs ends before its first step; that of experts is read off
    its source.
    """
    settings, shape = facts.settings, facts.prediction.shape
    heads = Widths(shape.heads, shape.kv_heads, 0, 0) if shape else Widths(0, 0, 0, 0)  # the rest may be cut unevenly
    if reason := why_not_tensor_parallel(heads, settings.tensor_parallel):
        sentence, _, fix = reason.rstrip(".").partition(": ")
        yield facts.error("tensor_parallel_size", f"{sentence}.", fix)
    elif shape and shape.experts and shape.experts.number % settings.expert_parallel:
        sentence = f"{shape.experts.number} experts do not divide by {settings.expert_parallel}."
        yield facts.error("expert_parallel_size", sentence, f"take a divisor of {shape.experts.number}")
    elif settings.cluster and (wrong := _wrong_axis(settings)):
        key, sentence, fix, *mend = wrong
        yield facts.error(key, sentence, fix, dict(mend))


def _wrong_axis(settings: Settings) -> tuple[Any, ...] | None:
    """Key, sentence, fix, and what to write, where the sizes of the axes do not fill the ranks."""
    sizes, left = settings.axes, settings.ranks
    for key, size in sizes.items():
        if left % size and left < settings.ranks:
            written = " x ".join(f"{one} {many}" for one, many in sizes.items())
            return (
                key,
                f"{written} are {math.prod(sizes.values())} ranks, and there are {settings.ranks}.",
                "take fewer",
            )
        if left % size:
            return key, f"{left} ranks do not divide by {size}.", f"take a divisor of {left}"
        left //= size
    others = [key for key in sizes if key != "tensor_parallel_size"]
    if settings.tensor_parallel > 1 and others and others != ["dp_shard_size"]:
        sentence = "Beside tensor_parallel_size the run ends before its first step (tried with Axolotl 0.21)."
        return others[0], sentence, "leave it out: the other ranks shard the model by themselves"
    if "dp_shard_size" in sizes and not (settings.given("fsdp_config") or settings.tensor_parallel > 1):
        return "dp_shard_size", "Without fsdp_config there is nothing that shards: Axolotl raises.", "add fsdp_config"
    filled_in = settings.tensor_parallel > 1 or (settings.given("deepspeed") and settings.context_parallel > 1)
    if not others or filled_in:
        return None
    sharded = settings.given("fsdp_config") or settings.context_parallel > 1 or settings.expert_parallel > 1
    unsharded = "dp_shard_size" not in sizes and sharded
    if left > 1:  # Accelerate multiplies the sizes that are written
        sentence = f"All sizes together make {settings.ranks // left} ranks, and there are {settings.ranks}."
        missing_axis = "dp_shard_size" if unsharded else "dp_replicate_size"
        size = sizes.get(missing_axis, 1) * left
        return others[-1], sentence, f"write {missing_axis}: {size}", (missing_axis, size)
    if unsharded and "dp_replicate_size" in sizes:
        return "dp_replicate_size", "It leaves no ranks to shard over.", "add dp_shard_size, or leave it out"
    return None


def ulysses(facts: Facts) -> Iterator[Finding]:
    """Context parallelism under DeepSpeed: heads and tokens that its ranks cannot share. Under FSDP2 tokens are padded."""
    settings, shape, ranks = facts.settings, facts.prediction.shape, facts.settings.context_parallel
    if ranks == 1 or not facts.given("deepspeed"):
        return
    multiple = settings.number("pad_to_multiple_of", 64 if facts.given("pad_to_multiple_of") is None else 1)
    tokens = multiple * -(-settings.number("sequence_len") // multiple)
    if shape and (shape.heads % ranks or (shape.kv_heads % ranks and ranks % shape.kv_heads)):
        sentence = f"DeepSpeed does not share {shape.heads} heads and {shape.kv_heads} kv heads among {ranks} ranks."
        yield facts.error(settings.context_key, sentence, "take a divisor of the heads")
    elif not (facts.get("pad_to_sequence_len") or facts.get("sample_packing")):
        sentence = "DeepSpeed gathers the batches of all ranks on a sequence, which must be of one length."
        yield facts.warning(
            settings.context_key, sentence, "write pad_to_sequence_len: true", {"pad_to_sequence_len": True}
        )
    elif tokens % ranks and not facts.get("sample_packing"):
        sentence = f"Sequences of {tokens} tokens do not divide over {ranks} ranks."
        yield facts.error("sequence_len", sentence, f"take a multiple of {math.lcm(multiple, ranks)}")


def deepspeed(facts: Facts) -> Iterator[Finding]:
    """DeepSpeed's configuration: a file that cannot be read, or numbers that contradict the YAML."""
    given, settings = facts.given("deepspeed"), facts.settings
    if not given:
        return
    if problem := _unreadable(facts):
        yield problem
        return
    config, name = settings.deepspeed, f"{given}: " if isinstance(given, str) else ""

    def wrong(sentence: str, fix: str) -> Finding:
        return facts.error("deepspeed", f"{name}{sentence}", fix)

    for key in ("zero_optimization", "bf16", "fp16"):
        if not isinstance(config.get(key, {}), dict):
            yield wrong(f'"{key}" in DeepSpeed\'s configuration is an object.', f'write "{key}": {{…}}')
    stage = settings.zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        yield wrong(f"ZeRO has the stages 0, 1, 2 and 3, and {stage!r} is none.", "give one of them")
    elif stage == 0:
        sentence = f"{name}stage 0 shards nothing: it is DDP."
        yield facts.warning("deepspeed", sentence, "name a stage of 1, 2 or 3")
    if settings.section("zero_optimization", "offload_param").get("device") in ("cpu", "nvme") and stage != 3:
        yield wrong(f"offload_param needs stage 3, and this is stage {stage}.", "leave it out")
    auto = {"train_batch_size": "auto"} | dict.fromkeys(MATCHING, "auto") | config
    for theirs, ours in MATCHING.items():
        if auto[theirs] not in ("auto", settings.number(ours)):
            sentence = f"{theirs} is {auto[theirs]!r}, and {ours} is {settings.number(ours)}."
            yield wrong(sentence, f'write "{theirs}": "auto"')
    whole = auto["train_batch_size"]
    if settings.cluster and whole not in ("auto", facts.batch.global_batch):
        sentence = f"train_batch_size is {whole!r}, and the YAML makes it {facts.batch.global_batch}."
        yield wrong(sentence, 'write "train_batch_size": "auto"')
    enabled = {kind: settings.section(kind).get("enabled", "auto") for kind in ("bf16", "fp16")}
    if enabled["bf16"] is True and enabled["fp16"] is True:
        yield wrong("bf16 and fp16 are both enabled.", 'write "enabled": "auto" in both')
        return
    for kind, value in enabled.items():
        if value not in ("auto", settings.precision == kind):
            sentence = f"{kind} is {'on' if value else 'off'}, and the YAML trains in {settings.precision}."
            yield wrong(sentence, f'write "{kind}": {{"enabled": "auto"}}')


def _unreadable(facts: Facts) -> Finding | None:
    """A finding if DeepSpeed's JSON cannot be read."""
    name, file = facts.given("deepspeed"), facts.settings.deepspeed_file
    if file is None:
        return None
    if not os.path.isfile(file):
        return _absent(facts, "deepspeed", name)
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return facts.error("deepspeed", f"{name} cannot be read.", "give DeepSpeed's JSON")
    except json.JSONDecodeError as error:
        sentence = f"{name} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}."
        return facts.error("deepspeed", sentence, "mend the file")
    return None if isinstance(read, dict) else facts.error("deepspeed", f"{name} holds no object.", "write {…}")


def old_cards(facts: Facts) -> Iterator[Finding]:
    """bf16 and flash attention before Ampere, and what `auto` makes of bf16 there."""
    old, settings = facts.settings.old_card, facts.settings
    attention = "attn_implementation" if facts.given("attn_implementation") else "flash_attention"
    if settings.attention in FLASH and (old or settings.on_cpu):
        sentence = f"Flash attention needs compute capability 8.0, and {old}."
        if settings.on_cpu:
            sentence = "Flash attention runs on GPUs only, and these ranks are on CPUs."
        yield facts.error(attention, sentence, "write attn_implementation: sdpa")
    if not old:
        return
    for key in ("bf16", "bfloat16"):
        if facts.given(key) is True:
            sentence = f"bf16 needs compute capability 8.0, and {old}: Axolotl only warns, the trainer refuses."
            yield facts.error(key, sentence, "write bf16: false and fp16: true", {key: False, "fp16": True})
            return
    if settings.precision == "fp16" and not settings.adapter and settings.strategy in ("single", "ddp", "tensor"):
        how = "bf16: auto becomes fp16 there" if facts.get("bf16") == "auto" and not facts.given("fp16") else "fp16"
        yield facts.error(
            "fp16" if facts.given("fp16") else "bf16",
            f"{old[0].upper()}{old[1:]}; {how}, the weights are loaded in fp16, and fp16 gradients cannot be unscaled.",
            "train an adapter (adapter: lora), shard with fsdp_config, or write bf16: false and fp16: false",
        )


def kernels(facts: Facts) -> Iterator[Finding]:
    """Triton kernels on CPU ranks."""
    if not facts.settings.on_cpu or facts.settings.adapter not in ("lora", "qlora"):
        return
    on = [key for key in KERNELS if facts.given(key)]
    if on or all(facts.given(key) is None for key in KERNELS):
        what = f"{on[0]} is on" if on else "Axolotl turns its LoRA kernels on where none of them is mentioned"
        sentence = f"{what}; they are written in Triton, which needs a GPU."
        off = dict.fromkeys(KERNELS, False)
        yield facts.error(on[0] if on else "adapter", sentence, "write all four lora_*_kernel: false", off)


def memory(facts: Facts) -> Iterator[Finding]:
    """More than a card holds; a note where the loss or the lengths are not known well enough to judge."""
    found, cluster, batch = facts.prediction, facts.settings.cluster, facts.batch
    if found.fits is not False or found.memory is None or cluster is None or cluster.card is None:
        return
    level, most = ("error", "needs") if found.certain else ("note", "may need up to")
    need, room = found.memory.device + found.extra, cluster.card.memory
    sentence = f"A GPU {most} {need / GIB:.1f} GiB, and has {room / GIB:.1f}"
    if found.memory.peak_phase == "evaluation":
        more = "" if found.largest else ", a shorter sequence_len or val_set_size: 0"
        fix = f"write eval_batch_size: {found.largest or 1}{more}"
        mend = {"eval_batch_size": found.largest} if found.largest else {}
        sentence += ": evaluation is the peak, where every logit is written out."
        yield facts.say(level, "eval_batch_size", sentence, fix, mend)
    elif found.fits_in_shards:
        sentence += ": gradients stay whole on each rank until the last micro-batch."
        key = "accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
        yield facts.say(level, "gradient_accumulation_steps", sentence, f"write {key}: true", {key: True})
    elif found.largest:
        fix, mend = f"write micro_batch_size: {found.largest}", {}
        accumulate, rest = divmod(batch.accumulate * batch.micro, found.largest)
        if not rest:
            fix += f" and gradient_accumulation_steps: {accumulate}, the same {batch.global_batch} sequences a step"
            mend = {"micro_batch_size": found.largest, "gradient_accumulation_steps": accumulate}
        sentence += f": {batch.micro} sequences at once are too many."
        yield facts.say(level, "micro_batch_size", sentence, fix, mend)
    else:
        more = [] if facts.get("gradient_checkpointing") or not found.states_fit else ["gradient_checkpointing: true"]
        more += [] if facts.settings.strategy in ("fsdp", "zero3") else ["fsdp_config"]
        quantized = facts.given("load_in_4bit")
        more += [] if quantized else ["adapter: qlora"] if facts.settings.adapter else ["an adapter"]
        more += ["a shorter sequence_len"] if found.states_fit else []
        sentence += f": not even a micro-batch of 1 fits ({found.memory.peak_phase} is the worst phase)."
        yield facts.say(level, "micro_batch_size", sentence, f"try {', '.join([*more, 'more cards'])}")


def output_folder(facts: Facts) -> Iterator[Finding]:
    """An output folder that cannot be written to."""
    if facts.given("output_dir") is None:
        return
    place = facts.settings.folder / facts.given("output_dir")
    there = next(one for one in (place, *place.parents) if os.path.exists(one))
    if not os.path.isdir(there):
        yield facts.error("output_dir", f"{there} is a file, so no folder can be made of it.", "name another folder")
    elif not os.access(there, os.W_OK):
        sentence = f"{there} may not be written to."
        yield facts.error("output_dir", sentence, "name another folder, or get the right to write")


RULES = (
    sources,
    model,
    validation,
    too_long,
    axes,
    ulysses,
    deepspeed,
    old_cards,
    kernels,
    memory,
    output_folder,
)
