"""What the cards cannot do: bf16 and flash attention before Ampere, kernels without a GPU, more memory than there is."""

from __future__ import annotations

from collections.abc import Iterator

from course_lib.units import GIB
from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding

AMPERE = (8, 0)
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


def _old(facts: Facts) -> str:
    """The card's name and capability if it is older than Ampere; "" otherwise."""
    cluster = facts.settings.cluster
    if cluster is None or cluster.card is None or cluster.capability is None or cluster.capability >= AMPERE:
        return ""
    major, minor = cluster.capability
    return f"a {cluster.card.name} has compute capability {major}.{minor}"


def bf16(facts: Facts) -> Iterator[Finding]:
    """bf16 where there is none, and what `auto` makes of it."""
    old, settings = _old(facts), facts.settings
    if not old:
        return
    for key in ("bf16", "bfloat16"):
        if facts.given(key) is True:
            sentence = f"bf16 needs 8.0, and {old}: Axolotl only warns, the trainer refuses."
            yield facts.error(key, sentence, "write bf16: false and fp16: true")
            return
    if settings.precision == "fp16" and not settings.adapter and settings.strategy in ("single", "ddp", "tensor"):
        how = "bf16: auto becomes fp16 there" if facts.get("bf16") == "auto" and not facts.given("fp16") else "fp16"
        yield facts.error(
            "fp16" if facts.given("fp16") else "bf16",
            f"{old[0].upper()}{old[1:]}; {how}, the weights are loaded in fp16, and fp16 gradients cannot be unscaled.",
            "train an adapter (adapter: lora), shard with fsdp_config, or write bf16: false and fp16: false",
        )
    if facts.given("tf32") is True:
        yield facts.warning("tf32", f"tf32 needs 8.0, and {old}: it changes nothing.", "write tf32: false")


def flash_attention(facts: Facts) -> Iterator[Finding]:
    """Flash attention on cards that cannot, and without a card."""
    if facts.settings.attention not in FLASH:
        return
    key = "attn_implementation" if facts.given("attn_implementation") else "flash_attention"
    if facts.settings.cluster and facts.settings.cluster.cpu:
        sentence = "Flash attention runs on GPUs only, and these ranks are on CPUs."
        yield facts.error(key, sentence, "write attn_implementation: sdpa")
    elif old := _old(facts):
        sentence = f"Flash attention needs compute capability 8.0, and {old}."
        yield facts.error(key, sentence, "write attn_implementation: sdpa")


def without_gpu(facts: Facts) -> Iterator[Finding]:
    """Triton kernels and 16 bits on CPU ranks."""
    settings = facts.settings
    if settings.cluster is None or not settings.cluster.cpu:
        return
    on = [key for key in KERNELS if facts.given(key)]
    unset = all(facts.given(key) is None for key in KERNELS)
    if settings.adapter in ("lora", "qlora") and (on or unset):
        what = f"{on[0]} is on" if on else "Axolotl turns its LoRA kernels on where none of them is mentioned"
        sentence = f"{what}; they are written in Triton, which needs a GPU."
        yield facts.error(on[0] if on else "adapter", sentence, "write all four lora_*_kernel: false")
    for key in ("bf16", "fp16"):
        if facts.given(key) is True:
            sentence = "On a CPU 16-bit training is slower than fp32, not faster."
            yield facts.warning(key, sentence, f"write {key}: false")


def memory(facts: Facts) -> Iterator[Finding]:
    """More than a card holds; a note where the loss or the lengths are not known well enough to judge."""
    found, cluster, batch = facts.prediction, facts.settings.cluster, facts.batch
    if found.fits is not False or found.memory is None or cluster is None or cluster.card is None:
        return
    level = "error" if found.certain else "note"
    need, room = found.memory.device + found.extra, cluster.card.memory
    sentence = f"A GPU needs {need / GIB:.1f} GiB and has {room / GIB:.1f}"
    if not found.certain:
        sentence = f"At most a GPU needs {need / GIB:.1f} GiB, and has {room / GIB:.1f}"
    if found.memory.peak_phase == "evaluation":
        sentence += ": evaluation is the peak, where every logit is written out."
        smaller = found.largest or 1
        more = "" if found.largest else ", a shorter sequence_len or val_set_size: 0"
        yield facts.say(level, "eval_batch_size", sentence, f"write eval_batch_size: {smaller}{more}")
        return
    if found.largest:
        fix = f"write micro_batch_size: {found.largest}"
        accumulate = batch.accumulate * batch.micro / found.largest
        if accumulate == int(accumulate):
            fix += (
                f" and gradient_accumulation_steps: {int(accumulate)}, the same {batch.global_batch} sequences a step"
            )
        yield facts.say(level, "micro_batch_size", f"{sentence}: {batch.micro} sequences at once are too many.", fix)
        return
    more = [] if facts.get("gradient_checkpointing") else ["gradient_checkpointing: true"]
    more += [] if facts.settings.strategy in ("fsdp", "zero3") else ["fsdp_config"]
    more += [] if facts.settings.adapter else ["an adapter"]
    sentence += f": not even a micro-batch of 1 fits ({found.memory.peak_phase} is the worst phase)."
    fix = f"try {', '.join([*more, 'a shorter sequence_len', 'more cards'])}"
    yield facts.say(level, "micro_batch_size", sentence, fix)


RULES = (bf16, flash_attention, without_gpu, memory)
