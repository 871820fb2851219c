"""The mistakes that Axolotl takes without a word: where, when, what is wrong with it, what to write instead."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from course_lib.memory.architectures import block_class
from course_lib.units import GIB
from course_lib.validation import did_you_mean
from course_tools.axolotl.check.batch import VARIABLE_LENGTH
from course_tools.axolotl.check.document import written_number
from course_tools.axolotl.check.findings import Facts, Finding
from course_tools.axolotl.check.settings import MOST

COUNTS = """micro_batch_size gradient_accumulation_steps sequence_len tensor_parallel_size context_parallel_size
    dp_shard_size dp_replicate_size expert_parallel_size eval_batch_size lora_r""".split()
HIGH = 0.1  # a learning rate above this is a slip of the exponent
TARGETS = ("lora_target_linear", "lora_target_modules", "lora_target_parameters")
EMBEDDINGS = ("embed_tokens", "lm_head")
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
SAVE = ("no", "epoch", "steps", "best")
GATHER = "gather_16bit_weights_on_model_save"  # DeepSpeed reads it with and without the prefix
# The optimizers that transformers takes from bitsandbytes
BITSANDBYTES = """adamw_8bit adamw_bnb_8bit paged_adamw_8bit paged_adamw_32bit ademamix ademamix_8bit paged_ademamix_8bit
    paged_ademamix_32bit lion_8bit lion_32bit paged_lion_8bit paged_lion_32bit rmsprop_bnb rmsprop_bnb_8bit
    rmsprop_bnb_32bit""".split()


class Mistake(NamedTuple):
    """A row. `made` returns what is wrong, {it} in the other columns, and something false where nothing is.

    `mend` of what `made` returns: what `--fix` writes, only where nobody could mean anything else.
    """

    key: str
    made: Callable[[Facts], Any]
    sentence: str
    fix: str
    level: str = "warning"
    mend: Callable[[Any], dict[str, Any]] = lambda it: {}


def below_one(key: str) -> Callable[[Facts], Any]:
    return lambda f: (value := f.given(key)) is not None and value < 1 and f"{value}"


def saving(f: Facts) -> tuple[str, int | None]:
    """ "no", "epoch", "steps", "best", and steps between two checkpoints where they are known.

    As Axolotl's `normalize_config` and `_configure_save_and_eval_strategy` decide it: steps win over every strategy,
    saves_per_epoch becomes a share of the run if that is below 1, and a 0 there counts as unset. The strategy "steps"
    saves the last step, too, wherever it falls.
    """
    every = f.given("save_steps") or None
    saves, epochs = f.given("saves_per_epoch"), float(f.get("num_epochs") or 1)
    if saves and saves * epochs > 1:
        every = 1 / (saves * epochs)
    if every:
        total = f.batch.total_steps
        if every < 1:
            return "steps", math.ceil(every * total) if total else None
        return "steps", int(every)
    strategy = f.given("save_strategy") or "epoch"
    return strategy, 500 if strategy == "steps" else None  # transformers' own default


def late(f: Facts) -> Any:
    strategy, every = saving(f)
    total = f.batch.total_steps
    key = "save_steps" if f.given("save_steps") else "save_strategy"
    return strategy == "steps" and every and total and every >= total and (every, total, max(1, total // 4), key)


def ends_within_an_epoch(f: Facts) -> Any:
    total, epoch = f.batch.total_steps, f.batch.steps_per_epoch
    return saving(f)[0] == "epoch" and total and epoch and total < epoch and (total, epoch)


def best_cannot_be_loaded(f: Facts) -> bool:
    """Axolotl turns `load_best_model_at_end` off unless steps of saving are a multiple of those of evaluation."""
    evaluates = f.get("val_set_size") or f.given("test_datasets")
    save, evaluate = f.given("save_steps"), f.given("eval_steps")
    saves, evaluations = f.given("saves_per_epoch"), f.given("evals_per_epoch")
    joined = (save and evaluate and save % evaluate == 0) or (saves and evaluations and evaluations % saves == 0)
    return bool(f.given("load_best_model_at_end")) and not (evaluates and joined)


def batch_without_accumulation(f: Facts) -> Any:
    wanted, batch = f.given("batch_size"), f.batch
    alone = wanted and not f.given("gradient_accumulation_steps")
    return alone and (batch.global_batch, max(1, wanted // (batch.micro * batch.data_ranks)))


def less_than_a_step(f: Facts) -> Any:
    rows, whole = f.batch.rows, f.batch.global_batch
    return rows and rows < whole and not f.batch.packing and (rows, whole)


def long_warmup(f: Facts) -> Any:
    warmup, total = f.given("warmup_steps"), f.batch.total_steps
    return warmup and total and warmup >= total and (warmup, total)


def rate_as_text(f: Facts) -> Any:
    given = f.given("learning_rate")
    return isinstance(given, str) and 0 < (rate(f) or 0) <= HIGH and (given, written_number(given))


def unknown_strategy(f: Facts) -> Any:
    given = f.given("save_strategy")
    return given is not None and given not in SAVE and (given, next(iter(did_you_mean(given, SAVE)), "one of them"))


def saves_shards(f: Facts) -> bool:
    gathers = f.settings.zero.get(f"stage3_{GATHER}") or f.settings.zero.get(GATHER)
    return f.settings.strategy == "zero3" and not f.settings.adapter and not gathers


def rate(f: Facts) -> float | None:
    try:
        return float(f.given("learning_rate"))
    except (TypeError, ValueError):
        return None  # missing, or Axolotl's validator says so


def untrained_tokens(f: Facts) -> Any:
    """New tokens beside adapters that leave embedding and head alone. For `tokens` Axolotl stops as it loads the model."""
    special = f.given("special_tokens") or {}
    new = "tokens" if f.given("tokens") else "special_tokens" if special.get("additional_special_tokens") else ""
    saved = set(map(str, f.given("lora_modules_to_save") or []))
    trained = set(EMBEDDINGS) <= saved or f.given("peft_trainable_token_indices")
    stops = ": Axolotl stops as it loads the model" if new == "tokens" else ""
    return f.settings.adapter and not trained and new and (new, stops)


def packs_nothing(f: Facts) -> Any:
    """Fewer rows to evaluate on than a batch of packed ones has; attention of variable length packs one long row."""
    if not f.get("sample_packing") or f.given("eval_sample_packing") is False or not f.batch.validation:
        return None
    micro = f.settings.number("eval_batch_size" if f.given("eval_batch_size") else "micro_batch_size")
    whole = f.given("multipack_real_batches") or f.settings.attention not in VARIABLE_LENGTH
    return whole and f.batch.validation < micro and (f.batch.validation, micro)


def wrong_block(f: Facts) -> Any:
    """A class to wrap that is another model's: accelerate finds none of it, and stops."""
    named, shape = f.settings.fsdp.get("transformer_layer_cls_to_wrap"), f.prediction.shape
    block = shape and block_class(shape.kind)
    names = named.split(",") if isinstance(named, str) else []
    wrong = [name for name in names if name.strip().endswith("DecoderLayer") and name.strip() != block]
    return block and wrong and (wrong[0], shape.name, block)


def lost_weights(f: Facts) -> Any:
    """Axolotl merges the trained weights from the last checkpoint where a state dict is sharded."""
    section = f.settings.fsdp
    if section.get("state_dict_type") != "SHARDED_STATE_DICT" or section.get("final_state_dict_type"):
        return None
    lost = {"no": "and save_strategy is no: they are never written", "best": "which need not be the last step"}
    return not f.settings.adapter and lost.get(saving(f)[0])


def optimizer_of_sharded(f: Facts) -> Any:
    sharded = f.get("optimizer") in BITSANDBYTES and f.settings.strategy in ("fsdp", "tensor")
    return sharded and ("adamw_torch_fused" if f.settings.fsdp.get("offload_params") else "adamw_torch_8bit")


def whole_on_each_card(f: Facts) -> Any:
    """FSDP that loads the whole model onto each card before it shards it, where that is the worst moment."""
    memory = f.prediction.memory
    return memory is not None and memory.peak_phase == "loading" and f"{memory.peak / GIB:.1f}"


def unused_adapter(f: Facts) -> Any:
    return not f.settings.adapter and next((key for key in ("lora_r", "lora_alpha", *TARGETS) if f.given(key)), "")


def trains_adapter(f: Facts) -> bool:
    loaded = f.given("lora_model_dir")  # which brings its own
    return f.settings.adapter in ("lora", "qlora") and not loaded


def earlier_run(f: Facts) -> Any:
    fresh = not f.given("auto_resume_from_checkpoints") and not f.given("resume_from_checkpoint")
    output = f.settings.folder / f.get("output_dir")
    return fresh and os.path.isdir(output) and any(output.glob("checkpoint-*"))


def missing_checkpoint(f: Facts) -> Any:
    given = f.given("resume_from_checkpoint")
    return given and not os.path.isdir(f.settings.folder / given) and given


def resumes(f: Facts) -> Any:
    return f.given("auto_resume_from_checkpoints") or f.given("resume_from_checkpoint")


# fmt: off
MISTAKES = [
    # batch, learning rate, length of the run
    *(Mistake(key, below_one(key),
              "{it} means nothing here, though Axolotl takes it.", "give at least 1")
      for key in COUNTS),
    *(Mistake(key, lambda f, key=key: (f.given(key) or 0) > MOST and f"{f.given(key):g}",
              "{it} is beyond any machine.", "give a smaller number")
      for key in COUNTS),
    Mistake("num_epochs",
            lambda f: (n := f.given("num_epochs")) is not None and n <= 0 and not f.batch.capped and f"{n}",
            "{it} epochs train nothing.", "give a number above 0"),
    Mistake("max_steps", below_one("max_steps"),
            "{it} counts as no limit at all: num_epochs decides.", "leave it out"),
    Mistake("batch_size", batch_without_accumulation,
            "It does not set the accumulation: Axolotl's default of 1 wins, so a step has {it[0]} sequences.",
            "write gradient_accumulation_steps: {it[1]} instead"),
    Mistake("datasets", less_than_a_step,
            "{it[0]} rows, and a step takes {it[1]}: an epoch is less than one full step.", "make the batch smaller"),
    Mistake("learning_rate",
            lambda f: (r := rate(f)) is not None and not 0 < r < math.inf and f"{f.given('learning_rate')}",
            "A learning rate of {it} trains nothing.", "give a number above 0"),
    Mistake("learning_rate",
            lambda f: (r := rate(f)) is not None and HIGH < r < math.inf and f"{f.given('learning_rate')}",
            "{it} is far above what a language model survives.", "write 2.0e-5, say"),
    Mistake("learning_rate", rate_as_text,
            "YAML 1.1 reads {it[0]} as text; Axolotl turns this one key into a number, which other programs may not.",
            "write {it[1]}", "note", lambda it: {"learning_rate": float(it[0])}),
    Mistake("warmup_steps", long_warmup,
            "{it[0]} steps of warm-up, and the run has {it[1]}: the learning rate is never reached.",
            "give fewer than {it[1]}"),
    # adapters
    Mistake("{it}", unused_adapter,
            "Without `adapter:` there is no LoRA: all weights are trained, and this changes nothing.",
            "add adapter: lora"),
    Mistake("adapter", lambda f: trains_adapter(f) and not any(f.given(key) for key in TARGETS),
            "No weights are named for the adapter: there is nothing to train.",
            "add lora_target_linear: true"),
    *(Mistake("adapter", lambda f, key=key: trains_adapter(f) and key not in f.settings.document.values,
              f"{key} is missing, and Axolotl has no default for it.", f"add {key}: {usual}")
      for key, usual in (("lora_r", 16), ("lora_alpha", 32))),
    Mistake("load_in_4bit", lambda f: f.settings.adapter == "lora" and f.given("load_in_4bit"),
            "adapter: lora with weights in 4 bits is QLoRA under another name; merging treats the two apart.",
            "write adapter: qlora", mend=lambda it: {"adapter": "qlora"}),
    Mistake("tensor_parallel_size", lambda f: f.settings.tensor_parallel > 1 and f.settings.adapter,
            "Axolotl trains no {it} under tensor parallelism (but on NVFP4 weights).",
            "shard with fsdp_config instead"),
    Mistake("{it[0]}", untrained_tokens,
            "New tokens get random embeddings, and the adapter trains none of them{it[1]}.",
            "add lora_modules_to_save: [embed_tokens, lm_head]",
            mend=lambda it: {"lora_modules_to_save": list(EMBEDDINGS)}),
    Mistake("load_in_8bit", lambda f: f.settings.adapter and f.given("load_in_8bit") and f.settings.strategy == "zero3",
            "ZeRO-3 loads weights in pieces, and bitsandbytes' 8-bit weights have their scales beside them: it raises.",
            "take ZeRO-2, or 4 bits with adapter: qlora"),
    # how the ranks share the model
    Mistake("fsdp_version", lambda f: f.given("fsdp_version") and not f.given("fsdp_config"),
            "Without fsdp_config there is no FSDP: the run is plain DDP.", "add fsdp_config"),
    Mistake("fsdp_config", lambda f: f.given("fsdp_config") and f.settings.cluster and f.settings.ranks == 1,
            "One rank has nobody to shard with.", "leave it out, or take more cards"),
    Mistake("fsdp_config", lambda f: f.given("fsdp_config") and f.settings.tensor_parallel > 1,
            "Beside tensor_parallel_size transformers shards the model itself, and FSDP then finds no layers.",
            "leave it out"),
    Mistake("fsdp_config.state_dict_type", lambda f: f.settings.fsdp.get("state_dict_type") == "LOCAL_STATE_DICT",
            "FSDP2 has no LOCAL_STATE_DICT: accelerate refuses when training starts.",
            "write FULL_STATE_DICT or SHARDED_STATE_DICT"),
    Mistake("fsdp_config.transformer_layer_cls_to_wrap", wrong_block,
            "{it[1]} has no {it[0]}: accelerate finds none, and stops.",
            "write {it[2]}", mend=lambda it: {"fsdp_config.transformer_layer_cls_to_wrap": it[2]}),
    Mistake("fsdp_config", whole_on_each_card,
            "Each rank loads the whole model onto its card before it is sharded, {it} GiB.",
            "add cpu_ram_efficient_loading: true", mend=lambda it: {"fsdp_config.cpu_ram_efficient_loading": True}),
    Mistake("optimizer", optimizer_of_sharded,
            "bitsandbytes steps plain tensors, and sharded weights are DTensors: the first step raises.",
            "write optimizer: {it}", mend=lambda it: {"optimizer": it}),
    # packing
    Mistake("pad_to_sequence_len", lambda f: f.get("sample_packing") and f.given("pad_to_sequence_len") is False,
            "Packed rows of changing length fragment the memory.",
            "write true", mend=lambda it: {"pad_to_sequence_len": True}),
    Mistake("val_set_size", packs_nothing,
            "{it[0]} rows to evaluate on fill no batch of {it[1]} packed ones: nothing is evaluated.",
            "add eval_sample_packing: false", mend=lambda it: {"eval_sample_packing": False}),
    # cards
    Mistake("tf32", lambda f: f.given("tf32") is True and f.settings.old_card,
            "tf32 needs compute capability 8.0, and {it}: it changes nothing.",
            "write tf32: false", mend=lambda it: {"tf32": False}),
    *(Mistake(key, lambda f, key=key: f.settings.on_cpu and f.given(key) is True,
              "On a CPU 16-bit training is slower than fp32, not faster.",
              f"write {key}: false", mend=lambda it, key=key: {key: False})
      for key in ("bf16", "fp16")),
    # what is written, and whether a run can go on from it
    Mistake("save_strategy", unknown_strategy,
            "{it[0]!r} is none of no, epoch, steps, best; transformers refuses it.", "write {it[1]}"),
    Mistake("save_strategy",
            lambda f: f.given("save_strategy") == "no" and saving(f)[0] == "steps" and not f.given("save_steps"),
            "saves_per_epoch wins over it: there will be checkpoints.", "leave one of the two out"),
    Mistake("saves_per_epoch",
            lambda f: f.given("saves_per_epoch") == 0 and f.given("save_strategy") != "no" and not f.given("save_steps"),
            "A 0 switches nothing off: it counts as unset, and every epoch is saved.",
            'write save_strategy: "no" for no checkpoints'),
    Mistake("save_strategy", lambda f: saving(f)[0] == "no",
            "No checkpoint is ever written, not of the last step either: a run that dies leaves nothing, one that ends well "
            "leaves weights without the optimizer's state.", "give save_steps or saves_per_epoch"),
    Mistake("save_strategy", lambda f: saving(f)[0] == "best",
            "Only steps that improve the metric become checkpoints: the last step is kept by luck alone.",
            "take save_strategy: steps to be able to resume"),
    Mistake("{it[3]}", late,
            "The first checkpoint is due after {it[0]} steps, and the run has {it[1]}: there is one at the very end only.",
            "write save_steps: {it[2]}, say"),
    Mistake("save_strategy", ends_within_an_epoch,
            "Saved once an epoch, and the run ends within the first ({it[0]} of {it[1]} steps): one checkpoint, at the end.",
            "", "note"),
    Mistake("load_best_model_at_end", best_cannot_be_loaded,
            "It stays off: that takes evaluation, and save_steps that are a multiple of eval_steps.",
            "give both, in steps"),
    Mistake("fsdp_config.state_dict_type", lost_weights,
            "The final weights are merged from the last checkpoint, {it}.",
            "add final_state_dict_type: FULL_STATE_DICT",
            mend=lambda it: {"fsdp_config.final_state_dict_type": "FULL_STATE_DICT"}),
    Mistake("save_only_model",
            lambda f: f.settings.fsdp.get("state_dict_type") == "SHARDED_STATE_DICT" and f.given("save_only_model"),
            "transformers refuses it under SHARDED_STATE_DICT.", "write state_dict_type: FULL_STATE_DICT"),
    Mistake("deepspeed", saves_shards,
            f"stage3_{GATHER} is not on: what is saved are ZeRO's shards, which no from_pretrained reads.",
            "set it to true, or run zero_to_fp32.py afterwards"),
    Mistake("resume_from_checkpoint", missing_checkpoint,
            "There is no folder {it} to go on from.", "name a checkpoint-N folder", "error"),
    Mistake("auto_resume_from_checkpoints",
            lambda f: f.given("auto_resume_from_checkpoints") and f.given("resume_from_checkpoint"),
            "resume_from_checkpoint wins: a restart goes back to it each time, not to the newest checkpoint.",
            "leave resume_from_checkpoint out"),
    Mistake("auto_resume_from_checkpoints", lambda f: f.given("auto_resume_from_checkpoints") and saving(f)[0] == "no",
            "There will be no checkpoint to resume from.", "give save_steps or saves_per_epoch"),
    Mistake("save_only_model", lambda f: f.given("save_only_model") and resumes(f),
            "Checkpoints without the optimizer's state: a resumed run starts Adam from nothing.",
            "write save_only_model: false", mend=lambda it: {"save_only_model": False}),
    Mistake("output_dir", earlier_run,
            "Checkpoints of an earlier run lie there, and this one starts from nothing beside them.",
            "write auto_resume_from_checkpoints: true, or another output_dir"),
    Mistake("output_dir", lambda f: f.given("output_dir") is None,
            "Not given: every run writes to ./model-out, over the one before.", "name a folder"),
]
# fmt: on


def mistakes(facts: Facts) -> Iterator[Finding]:
    """The rows of the table that a run makes; and numbers that stay text where nothing converts them."""
    for row in MISTAKES:
        if it := row.made(facts):
            key, sentence, fix = (text.format(it=it) for text in (row.key, row.sentence, row.fix))
            yield facts.say(row.level, key, sentence, fix, row.mend(it))
    document = facts.settings.document
    for path in document.texts_like_numbers:
        if path[0] in ("lr_scheduler_kwargs", "optim_args", "deepspeed") and len(path) > 1:
            raw = document.value(*path)
            sentence = f"YAML 1.1 reads {raw!r} as text, not as a number, and nothing converts it here."
            yield facts.warning(path, sentence, f"write {written_number(raw)}", {path: float(raw)})
