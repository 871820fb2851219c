"""What the cards cannot do: bf16 and flash attention before Ampere, kernels without a GPU, more memory than there is."""

from __future__ import annotations

from collections.abc import Iterator

from course_tools.axolotl.check.facts import Facts
from course_tools.axolotl.check.findings import Finding, nearest
from course_tools.axolotl.check.schema import stored

GIB = 2**30
AMPERE = (8, 0)
FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
SHORT = {"flash": "flash_attention_2", "flex": "flex_attention", "sdp": "sdpa"}


def rules(facts: Facts) -> Iterator[Finding]:
    """Findings about cards."""
    yield from _attention_name(facts)
    if facts.settings.cluster is None:
        return
    yield from _bf16(facts)
    yield from _flash(facts)
    yield from _cpu(facts)
    yield from _memory(facts)


def _attention_name(facts: Facts) -> Iterator[Finding]:
    name, known = facts.given("attn_implementation"), stored()["attention"]
    if name is not None and name not in known and "/" not in name:
        near = SHORT.get(name) or nearest(name, known, 0.5)
        yield facts.error(
            "attn_implementation", f"{name!r} is no attention that Axolotl accepts.",
            f"write {near}" if near else f"take one of {', '.join(known)}",
        )  # fmt: skip


def _old(facts: Facts) -> str:
    """The card's name and capability if it is older than Ampere; "" otherwise."""
    cluster = facts.settings.cluster
    assert cluster is not None
    if cluster.capability is None or cluster.capability >= AMPERE or cluster.card is None:
        return ""
    major, minor = cluster.capability
    return f"a {cluster.card.name} has compute capability {major}.{minor}"


def _bf16(facts: Facts) -> Iterator[Finding]:
    old = _old(facts)
    if not old:
        return
    for key in ("bf16", "bfloat16"):
        if facts.given(key) is True:
            yield facts.error(
                key, f"bf16 needs 8.0, and {old}: Axolotl's schema only warns, the trainer refuses.",
                "write bf16: false and fp16: true",
            )  # fmt: skip
            return
    settings = facts.settings
    if settings.precision == "fp16" and not settings.adapter and settings.strategy in ("single", "ddp", "tensor"):
        how = "bf16: auto becomes fp16 there" if facts.get("bf16") == "auto" and not facts.given("fp16") else "fp16"
        yield facts.error(
            "fp16" if facts.given("fp16") else "bf16",
            f"{old[0].upper()}{old[1:]}; {how}, the weights are loaded in fp16, and fp16 gradients cannot be unscaled.",
            "train an adapter (adapter: lora), shard with fsdp_config, or write bf16: false and fp16: false",
        )
    if facts.given("tf32") is True:
        yield facts.warning("tf32", f"tf32 needs 8.0, and {old}: it changes nothing.", "write tf32: false")


def _flash(facts: Facts) -> Iterator[Finding]:
    old, attention = _old(facts), facts.settings.attention
    key = "attn_implementation" if facts.given("attn_implementation") else "flash_attention"
    if attention not in FLASH:
        return
    if facts.settings.cluster and facts.settings.cluster.cpu:
        yield facts.error(
            key, "Flash attention runs on GPUs only, and these ranks are on CPUs.", "write attn_implementation: sdpa"
        )
    elif old:
        yield facts.error(
            key, f"Flash attention needs compute capability 8.0, and {old}.", "write attn_implementation: sdpa"
        )


def _cpu(facts: Facts) -> Iterator[Finding]:
    settings = facts.settings
    if settings.cluster is None or not settings.cluster.cpu:
        return
    if settings.adapter in ("lora", "qlora"):
        on = [key for key in KERNELS if facts.given(key)]
        unset = all(facts.given(key) is None for key in KERNELS)
        if on or unset:
            what = f"{on[0]} is on" if on else "Axolotl turns its LoRA kernels on where none of them is mentioned"
            yield facts.error(
                on[0] if on else "adapter", f"{what}; they are written in Triton, which needs a GPU.",
                "write all four lora_*_kernel: false",
            )  # fmt: skip
    if facts.given("bf16") is True or facts.given("fp16") is True:
        key = "bf16" if facts.given("bf16") else "fp16"
        yield facts.warning(key, "On a CPU 16-bit training is slower than fp32, not faster.", f"write {key}: false")


def _memory(facts: Facts) -> Iterator[Finding]:
    found, cluster = facts.prediction, facts.settings.cluster
    if found.fits is not False or found.memory is None or cluster is None or cluster.card is None:
        return
    need, room, batch = found.memory.device + found.extra, cluster.card.memory, facts.batch
    sentence = f"A GPU needs {need / GIB:.1f} GiB and has {room / GIB:.1f}"
    if found.largest:
        fix = f"write micro_batch_size: {found.largest}"
        accumulate = batch.accumulate * batch.micro / found.largest
        if accumulate == int(accumulate):
            fix += (
                f" and gradient_accumulation_steps: {int(accumulate)}, the same {batch.global_batch} sequences a step"
            )
        yield facts.error("micro_batch_size", f"{sentence}: {batch.micro} sequences at once are too many.", fix)
    else:
        more = [] if facts.get("gradient_checkpointing") else ["gradient_checkpointing: true"]
        more += [] if facts.settings.strategy in ("fsdp", "zero3") else ["fsdp_config"]
        more += [] if facts.settings.adapter else ["an adapter"]
        yield facts.error(
            "micro_batch_size", f"{sentence}: not even a micro-batch of 1 fits ({found.memory.moment} is the worst moment).",
            f"try {', '.join([*more, 'a shorter sequence_len', 'more cards'])}",
        )  # fmt: skip
