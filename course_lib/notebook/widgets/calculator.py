"""The memory calculator of lesson 1: menus and sliders over `estimate`, the answer as bars against the card's line."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from course_lib.choices import CHOICES
from course_lib.figures.memory import against_card
from course_lib.memory import CARDS, PRESETS, Breakdown, card, estimate
from course_lib.notebook.widgets.static_view import with_fallback
from course_lib.units import GIB

if TYPE_CHECKING:
    import ipywidgets

MODELS = (
    "smollm2-135m",
    "qwen3-0.6b",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "llama-2-13b",
    "qwen3-32b",
    "llama-3.1-70b",
)
START = {
    "model": "llama-3.1-8b",
    "card": "a100-80gb",
    "gpus": 1,
    "strategy": "fsdp",
    "method": "full",
    "activation_checkpointing": "none",
    "optimizer": "adamw",
    "micro_batch_size": 1,
    "seq_len": 2048,
}


def answer(model: str, card_name: str, gpus: int, strategy: str, **settings: Any) -> tuple[Breakdown, str]:
    """The estimate behind a choice of the calculator, and its verdict in one sentence.

    With one GPU the strategy is "single". The precision is bf16-mixed, fp16-mixed on cards without bf16. `settings` are
    the other names of START. Raises ValueError where `estimate` does.
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


def calculator(**start: Any) -> ipywidgets.VBox:
    """The calculator as a widget; `start` sets choices by the names of START.

    Raises:
        ValueError: a name that is no choice of the calculator.
    """
    import ipywidgets as w

    unknown = set(start) - set(START)
    if unknown:
        raise ValueError(f"The calculator has no {sorted(unknown)[0]!r}: it has {', '.join(START)}.")
    values = START | start
    wide = {"style": {"description_width": "110px"}, "layout": w.Layout(width="340px")}

    def menu(name: str, description: str, options: Sequence[str]) -> Any:
        return w.Dropdown(options=options, value=values[name], description=description, **wide)

    def slider(name: str, description: str, powers: range) -> Any:
        options = [2**power for power in powers]
        return w.SelectionSlider(options=options, value=values[name], description=description, **wide)

    controls = {
        "model": menu("model", "model", MODELS),
        "card": menu("card", "card", list(CARDS)),
        "gpus": slider("gpus", "GPUs", range(7)),
        "strategy": menu("strategy", "shared by", CHOICES["strategy"][1:]),
        "method": menu("method", "method", CHOICES["method"]),
        "activation_checkpointing": menu(
            "activation_checkpointing", "checkpointing", CHOICES["activation_checkpointing"]
        ),
        "optimizer": menu("optimizer", "optimizer", CHOICES["optimizer"]),
        "micro_batch_size": slider("micro_batch_size", "sequences", range(6)),
        "seq_len": slider("seq_len", "tokens each", range(8, 18)),
    }
    shown = w.HTML()

    def draw(_: Any = None) -> None:
        chosen = {name: control.value for name, control in controls.items()}
        gpu = card(chosen.pop("card"))
        controls["strategy"].disabled = chosen["gpus"] == 1
        need, verdict = answer(card_name=gpu.name, **chosen)
        picture = against_card({chosen["model"]: need}, card=gpu.memory, card_name=gpu.name, title="Will it fit?")
        shown.value = f"<p><b>{html.escape(verdict)}</b></p>{picture.html}"

    for control in controls.values():
        control.observe(draw, "value")
    draw()
    listed = list(controls.values())
    return with_fallback([w.HBox([w.VBox(listed[:5]), w.VBox(listed[5:])]), shown], shown.value)
