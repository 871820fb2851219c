"""Units of memory and data: KiB, MiB, GiB are powers of 1024; KB, MB, GB are powers of 1000."""

from __future__ import annotations

import numbers

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12


def nice_bytes(value: float) -> str:
    """``5767168`` -> ``"5.50 MiB"``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} bytes"


def nice_number(value: float) -> str:
    """``1234567`` -> ``"1,234,567"``: whole numbers and those from 1000 on in full, others in 4 digits."""
    if isinstance(value, numbers.Integral):
        return f"{value:,}"
    return f"{float(value):,.0f}" if abs(value) >= 1000 else f"{float(value):.4g}"
