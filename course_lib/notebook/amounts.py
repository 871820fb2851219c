"""Numbers with a unit: read as people type them, written as people read them."""

from __future__ import annotations

import math
import re
import unicodedata

from course_lib.units import GB, GIB, KB, KIB, MB, MIB, TB, TIB

_BYTES = {"bytes": 1, "KB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
UNITS: dict[str, tuple[str, float]] = {
    **{unit: ("bytes", size) for unit, size in _BYTES.items()},
    **{unit: ("seconds", size) for unit, size in {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}.items()},
    "%": ("percent", 1),
    "tokens": ("tokens", 1),
    "times": ("times", 1),
    "": ("a count", 1),
}
"""Unit -> (what it measures, its size). Numbers become one another only within what a unit measures."""
_WORDS = {
    **{unit.lower(): unit for unit in UNITS if unit},
    **dict.fromkeys(("b", "byte"), "bytes"),
    **dict.fromkeys(("μs", "microseconds"), "us"),  # NFKC makes one of the two signs for micro
    **dict.fromkeys(("msec", "milliseconds"), "ms"),
    **dict.fromkeys(("sec", "second", "seconds"), "s"),
    **dict.fromkeys(("minute", "minutes"), "min"),
    **dict.fromkeys(("hour", "hours"), "h"),
    **{"percent": "%", "token": "tokens", "x": "times", "×": "times"},
}
_LARGE = {"k": 1e3, "thousand": 1e3, "m": 1e6, "million": 1e6, "b": 1e9, "billion": 1e9}
_NUMBER = r"(?:\d{1,3}(?:[, ]\d{3})+|\d+|(?=\.\d))(?:\.\d*)?(?:[eE][+-]?\d+)?"
_TYPED = re.compile(rf"[~≈]?\s*([+-]?{_NUMBER}(?:\s*(?:\*\*|[*×/^])\s*{_NUMBER})*)\s*([^\d*/^]*)")


def read_amount(text: str, unit: str) -> float:
    """The number in `text`, in `unit`: "2.4 GiB", "2400 MiB", "1,607,936", "4 * 135e6", "2**20", "3/4", and "2.4" alone.

    Raises ValueError with one sentence for a reader who typed something else.
    """
    kind, size = UNITS[unit]
    text = unicodedata.normalize("NFKC", text).strip().rstrip(".")
    shown, example = f"“{text[:30]}”", f"type a number, such as {amount(2.5, unit)}"
    found = _TYPED.fullmatch(text)
    if not found and re.fullmatch(r"\d+,\d+\D*", text):
        raise ValueError("decimals follow a point (2.5); a comma separates thousands (1,607,936)")
    if not found:
        raise ValueError(f"{shown} is not a number: {example}")
    if found[1].startswith("-"):
        raise ValueError(f"a guess cannot be negative: {example}")
    try:
        number = _product(re.sub(r"[, ]", "", found[1]))
    except (OverflowError, ZeroDivisionError):
        number = math.inf
    word = found[2].strip()
    if kind in ("a count", "tokens") and word.split(" ")[0].lower() in _LARGE:
        large, _, word = word.partition(" ")
        number *= _LARGE[large.lower()]
    if word:
        meant = word if word in UNITS else "" if re.fullmatch("[KMGT]i?b", word) else _WORDS.get(word.lower(), "")
        if not meant or UNITS[meant][0] != kind:
            alike = ", ".join(name for name, (its_kind, _) in UNITS.items() if its_kind == kind and name)
            raise ValueError(
                f"“{word[:20]}” is not a unit here: {f'use {alike}' if alike else 'type the number alone'}"
            )
        number *= UNITS[meant][1] / size
    if number and not 1e-30 < number < 1e30:
        raise ValueError(f"{shown} is out of range: {example}")
    return number


def _product(text: str) -> float:
    """Numbers joined by * × / and powers; a power binds more tightly."""
    first, *rest = re.split(r"([*×/])", text.replace("**", "^"))
    number = _power(first)
    for sign, factor in zip(rest[::2], rest[1::2], strict=True):
        number = number / _power(factor) if sign == "/" else number * _power(factor)
    return number


def _power(text: str) -> float:
    base, *exponents = map(float, text.split("^"))
    return base ** math.prod(exponents)


def amount(value: float, unit: str = "", *, sign: bool = False) -> str:
    """A number with its unit: '1.9 GiB', '13,912,064 bytes', '+7.9 %'. Whole numbers in full, others in 4 digits."""
    whole = float(value).is_integer() or abs(value) >= 9999.5
    return f"{value:{'+' if sign and value else ''}{',.0f' if whole and abs(value) < 1e15 else ',.4g'}} {unit}".rstrip()
