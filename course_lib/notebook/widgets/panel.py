"""Menus and sliders over what a function says of their values. Pages without a kernel show how the widget starts."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ipywidgets

_WIDE = {"style": {"description_width": "120px"}}


def menu(description: str, options: Sequence[str] | Mapping[str, str], start: str) -> ipywidgets.Dropdown:
    """A menu of `options`: values, or what the reader sees -> value."""
    import ipywidgets as w

    return w.Dropdown(options=options, value=start, description=description, layout=w.Layout(width="340px"), **_WIDE)


def slider(description: str, options: Sequence[int], start: int) -> ipywidgets.SelectionSlider:
    """A slider that stops at each of `options`."""
    import ipywidgets as w

    layout = w.Layout(width="340px")
    return w.SelectionSlider(options=options, value=start, description=description, layout=layout, **_WIDE)


def panel(controls: Mapping[str, Any], draw: Callable[..., str]) -> ipywidgets.VBox:
    """Two columns of controls above what `draw(name=value, …)` returns, as HTML; its ValueError is an answer, too."""
    import ipywidgets as w

    shown = w.HTML()

    def redraw(_: Any = None) -> None:
        try:
            shown.value = draw(**{name: control.value for name, control in controls.items()})
        except ValueError as error:  # a choice that does not fit
            shown.value = f"<p><b>Does not fit.</b> {html.escape(str(error))}</p>"

    for control in controls.values():
        control.observe(redraw, "value")
    redraw()
    listed = list(controls.values())
    half = -(-len(listed) // 2)
    columns = w.HBox([w.VBox(listed[:half]), w.VBox(listed[half:])], layout=w.Layout(flex_flow="row wrap"))
    return with_fallback([columns, shown], shown.value)


def with_fallback(children: Sequence[Any], page: str) -> ipywidgets.VBox:
    """`children` one below the other; `page` is the HTML for viewers that cannot run widgets (by ipywidgets 8)."""
    import ipywidgets as w

    class Box(w.VBox):
        def _repr_mimebundle_(self, **options: Any) -> Any:
            bundle = super()._repr_mimebundle_(**options)
            data = bundle[0] if isinstance(bundle, tuple) else bundle
            if data is not None:
                data["text/html"] = page
            return bundle

    return Box(list(children))
