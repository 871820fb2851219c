"""Widgets with a fallback: pages without a kernel (GitHub, a site, a fresh notebook) show how the widget starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ipywidgets


def with_fallback(children: Sequence[Any], html: str) -> ipywidgets.VBox:
    """`children` one below the other; `html` is for viewers that cannot run widgets."""
    import ipywidgets as w

    class Box(w.VBox):
        def _repr_mimebundle_(self, **options: Any) -> Any:
            bundle = super()._repr_mimebundle_(**options)
            data = bundle[0] if isinstance(bundle, tuple) else bundle
            if data is not None:
                data["text/html"] = html
            return bundle

    return Box(list(children))
