"""A colleague's program as a class in parts: the learner's subclass replaces the broken ones, and only those."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from course_checks.harness.comparing import NotYet


def put_together(parts: Callable[[], Any], colleagues: type) -> Any:
    """An instance of the subclass of `colleagues` that the learner's function returns."""
    repaired = parts()
    if not (isinstance(repaired, type) and issubclass(repaired, colleagues)):
        raise NotYet(f"return the class itself, a subclass of {colleagues.__name__}")
    return repaired()


def healthy_untouched(repaired: type, colleagues: type, healthy: Iterable[str]) -> None:
    """Raise NotYet where a part that works was replaced as well."""
    touched = [f"`{name}`" for name in healthy if getattr(repaired, name) is not getattr(colleagues, name)]
    if touched:
        raise NotYet(f"you also replaced a healthy part, {', '.join(touched)}: change only what is broken")
