"""Widgets that a page shows as they are at the start where no kernel moves them: GitHub, a site, a fresh notebook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ipywidgets


def box_with_still(children: Sequence[Any], still: str) -> ipywidgets.VBox:
    """`children` one below the other; `still` is the HTML for viewers that cannot run widgets."""
    import ipywidgets as w

    class Box(w.VBox):
        def _repr_mimebundle_(self, **how: Any) -> Any:
            bundle = super()._repr_mimebundle_(**how)
            data = bundle[0] if isinstance(bundle, tuple) else bundle
            if data is not None:
                data["text/html"] = still
            return bundle

    return Box(list(children))
