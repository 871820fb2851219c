"""Lesson 1's widgets: one step's timeline under sliders, and the calculator that says whether a model fits a card."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from course_lib.choices import CHOICES
from course_lib.figures.memory import against_cards, step_memory
from course_lib.memory import CARDS, PRESETS, Breakdown, card, estimate
from course_lib.memory.timeline import step_timeline
from course_lib.notebook.widgets.panel import menu, panel, slider
from course_lib.units import GIB

if TYPE_CHECKING:
    import ipywidgets


def timeline_explorer() -> ipywidgets.VBox:
    """One training step of SmolLM2 in fp32, computed: sequences, tokens, checkpointing and the loss can be moved."""

    def draw(**chosen: Any) -> str:
        size = f"{chosen['micro_batch_size']} x {chosen['seq_len']:,} tokens"
        title = f"One step of SmolLM2 in fp32, {size}" + ", the last micro-batch" * (chosen["num_microbatches"] > 1)
        return step_memory(step_timeline("smollm2-135m", **chosen), title=f"{title} (computed)").html

    controls = {
        "micro_batch_size": slider("sequences", [2**i for i in range(6)], 2),
        "seq_len": slider("tokens each", [2**i for i in range(6, 15)], 256),
        "num_microbatches": slider("micro-batches", [1, 2, 4, 8], 1),
        "activation_checkpointing": menu("checkpointing", ("none", "full"), "none"),
        "loss": menu("loss", CHOICES["loss"], "eager"),
    }
    return panel(controls, draw)


def answer(model: str, card_name: str, **settings: Any) -> tuple[Breakdown, str]:
    """The estimate behind a choice of the calculator, and its verdict in one sentence. `settings` are `estimate`'s."""
    gpu = card(card_name)
    need = estimate(PRESETS[model], card=gpu, **settings)
    spare = (gpu.memory - need.device) / GIB
    verdict = f"fits, {spare:.1f} GiB to spare" if spare >= 0 else f"does not fit: {-spare:.1f} GiB too much"
    return need, f"{model} on {gpu.name}: {verdict}. Peak {need.peak / GIB:.1f} GiB, {need.peak_phase}."


def calculator() -> ipywidgets.VBox:
    """The calculator as a widget: any model of the list on one card, trained one way or another."""

    def draw(**chosen: Any) -> str:
        need, verdict = answer(**chosen)
        gpu = card(chosen["card_name"])
        picture = against_cards({chosen["model"]: need}, cards={gpu.name.upper(): gpu.memory}, title="Will it fit?")
        return f"<p><b>{html.escape(verdict)}</b></p>{picture.html}"

    controls = {
        "model": menu("model", list(PRESETS), "llama-3.2-3b"),
        "card_name": menu("card", list(CARDS), "l4"),
        "method": menu("method", CHOICES["method"], "full"),
        "precision": menu("precision", CHOICES["precision"], "bf16-mixed"),
        "optimizer": menu("optimizer", ("adamw", "adamw_bf16", "adamw8bit", "muon"), "adamw"),
        "activation_checkpointing": menu("checkpointing", CHOICES["activation_checkpointing"], "none"),
        "loss": menu("loss", CHOICES["loss"], "eager"),
        "micro_batch_size": slider("sequences", [2**i for i in range(6)], 1),
        "seq_len": slider("tokens each", [2**i for i in range(8, 18)], 2048),
        "num_microbatches": slider("micro-batches", [1, 2, 4, 8, 16], 1),
    }
    return panel(controls, draw)
