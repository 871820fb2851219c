"""The memory calculator of lesson 1: menus and sliders over `estimate`, the answer as bars against the card's line."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from course_lib.choices import CHOICES
from course_lib.figures.memory import against_card
from course_lib.memory import CARDS, PRESETS, Breakdown, card, estimate
from course_lib.notebook.widgets.panel import menu, panel, slider
from course_lib.units import GIB

if TYPE_CHECKING:
    import ipywidgets

MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-2-13b", "qwen3-32b", "llama-3.1-70b")  # fmt: skip


def answer(model: str, card_name: str, gpus: int, strategy: str, **settings: Any) -> tuple[Breakdown, str]:
    """The estimate behind a choice of the calculator, and its verdict in one sentence.

    With one GPU the strategy is "single". The precision is bf16-mixed, fp16-mixed on cards without bf16. `settings` are
    `estimate`'s.
    """
    gpu = card(card_name)
    strategy = strategy if gpus > 1 else "single"
    precision = "bf16-mixed" if gpu.bf16 else "fp16-mixed"
    need = estimate(PRESETS[model], ranks=gpus, strategy=strategy, precision=precision, card=gpu, **settings)
    spare = (gpu.memory - need.device) / GIB
    verdict = f"fits, {spare:.1f} GiB to spare" if spare >= 0 else f"does not fit: {-spare:.1f} GiB too much"
    return need, (
        f"{model}, {settings['method']}, on {gpus} x {gpu.name}: {verdict}. Peak {need.peak / GIB:.1f} GiB ({need.peak_phase}), "
        f"reserved about {need.reserved.expected / GIB:.1f} GiB, CUDA's context up to {need.cuda_context / GIB:.1f} GiB."
    )


def calculator() -> ipywidgets.VBox:
    """The calculator as a widget: any model of the list on any card, fine-tuned one way or another."""

    def draw(**chosen: Any) -> str:
        need, verdict = answer(**chosen)
        gpu = card(chosen["card_name"])
        picture = against_card({chosen["model"]: need}, card=gpu.memory, card_name=gpu.name, title="Will it fit?")
        return f"<p><b>{html.escape(verdict)}</b></p>{picture.html}"

    controls = {
        "model": menu("model", MODELS, "llama-3.1-8b"),
        "card_name": menu("card", list(CARDS), "a100-80gb"),
        "gpus": slider("GPUs", [2**i for i in range(7)], 1),
        "strategy": menu("shared by", CHOICES["strategy"][1:], "fsdp"),
        "method": menu("method", CHOICES["method"], "full"),
        "activation_checkpointing": menu("checkpointing", CHOICES["activation_checkpointing"], "none"),
        "optimizer": menu("optimizer", CHOICES["optimizer"], "adamw"),
        "micro_batch_size": slider("sequences", [2**i for i in range(6)], 1),
        "seq_len": slider("tokens each", [2**i for i in range(8, 18)], 2048),
    }
    return panel(controls, draw)
