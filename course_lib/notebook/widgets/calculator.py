"""The memory calculator of lesson 1: menus and sliders over `estimate`, the answer as bars against the card's line."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from course_lib.figures.memory import draw_against_card
from course_lib.figures.style import as_html
from course_lib.memory import CARDS, PRESETS, Breakdown, card, estimate
from course_lib.memory.settings import CHOICES
from course_lib.notebook.widgets.static_view import box_with_still

if TYPE_CHECKING:
    import ipywidgets

GIB = 2**30
MODELS = ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-2-13b", "qwen3-32b", "llama-3.1-70b")  # fmt: skip
START = {
    "model": "llama-3.1-8b", "card": "a100-80gb", "gpus": 1, "strategy": "fsdp", "method": "full",
    "checkpointing": "none", "optimizer": "adamw", "micro_batch": 1, "seq_len": 2048,
}  # fmt: skip


def answer(
    model: str, card_name: str, gpus: int, strategy: str, method: str, checkpointing: str, optimizer: str,
    micro_batch: int, seq_len: int,
) -> tuple[Breakdown, str]:  # fmt: skip
    """The estimate behind a choice of the calculator, and its verdict in one sentence.

    With one GPU the strategy is "single". The precision is bf16-mixed, fp16-mixed on cards without bf16.
    Raises ValueError where `estimate` does.
    """
    on = card(card_name)
    need = estimate(
        PRESETS[model], method=method, checkpointing=checkpointing, optimizer=optimizer, micro_batch=micro_batch,
        seq_len=seq_len, ranks=gpus, strategy=strategy if gpus > 1 else "single",
        precision="bf16-mixed" if on.bf16 else "fp16-mixed", card=on,
    )  # fmt: skip
    spare = (on.memory - need.device) / GIB
    verdict = f"fits, {spare:.1f} GiB to spare" if spare >= 0 else f"does not fit: {-spare:.1f} GiB too much"
    return need, (
        f"{model}, {method}, on {gpus} x {on.name}: {verdict}. Peak {need.peak / GIB:.1f} GiB ({need.moment}), "
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
    controls = {
        "model": w.Dropdown(options=MODELS, value=values["model"], description="model", **wide),
        "card": w.Dropdown(options=list(CARDS), value=values["card"], description="card", **wide),
        "gpus": w.SelectionSlider(options=[1, 2, 4, 8, 16, 32, 64], value=values["gpus"], description="GPUs", **wide),
        "strategy": w.Dropdown(options=CHOICES["strategy"][1:], value=values["strategy"], description="shared by", **wide),
        "method": w.Dropdown(options=CHOICES["method"], value=values["method"], description="method", **wide),
        "checkpointing": w.Dropdown(options=CHOICES["checkpointing"], value=values["checkpointing"], description="checkpointing", **wide),
        "optimizer": w.Dropdown(options=CHOICES["optimizer"], value=values["optimizer"], description="optimizer", **wide),
        "micro_batch": w.SelectionSlider(options=[1, 2, 4, 8, 16, 32], value=values["micro_batch"], description="sequences", **wide),
        "seq_len": w.SelectionSlider(options=[2**i for i in range(8, 18)], value=values["seq_len"], description="tokens each", **wide),
    }  # fmt: skip
    shown = w.HTML()

    def draw(_: Any = None) -> None:
        chosen = {name: control.value for name, control in controls.items()}
        on = card(chosen.pop("card"))
        controls["strategy"].disabled = chosen["gpus"] == 1
        need, verdict = answer(card_name=on.name, **chosen)
        figure, alt = draw_against_card(
            {chosen["model"]: need}, card=on.memory, card_name=on.name, title="Will it fit?"
        )
        shown.value = f"<p><b>{html.escape(verdict)}</b></p>{as_html(figure, alt)}"

    for control in controls.values():
        control.observe(draw, "value")
    draw()
    listed = list(controls.values())
    return box_with_still([w.HBox([w.VBox(listed[:5]), w.VBox(listed[5:])]), shown], shown.value)
