"""Forms of bytes and seconds: as text, and as ticks, the whole numbers of the solver.

Inside the library everything else is SI: bytes and seconds.
"""

from __future__ import annotations

import re

__all__ = [
    "GIB",
    "KIB",
    "MIB",
    "TICK_S",
    "format_bytes",
    "format_bytes_up",
    "format_seconds",
    "parse_bytes",
    "parse_seconds",
    "to_ticks",
]

KIB, MIB, GIB = 2**10, 2**20, 2**30
TICK_S = 1e-9

_UNITS = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """Return a size in bytes from text such as `40GiB`, `512 MiB`, `80e9` or `80GB`.

    Raises:
        ValueError: if the text is no size, or not positive; names the units that are allowed.
    """
    if isinstance(text, int):
        value = float(text)
        unit = ""
    else:
        match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", text.lower())
        unit = match.group(2) if match else "?"
        try:
            value = float(match.group(1)) if match else 0.0
        except ValueError:
            unit = "?"
            value = 0.0
    if unit not in _UNITS or value <= 0:
        raise ValueError(
            f"{text!r} is not a size: write a positive number with one of "
            "B, KiB, MiB, GiB, TiB, KB, MB, GB, TB, for example 40GiB"
        )
    return int(value * _UNITS[unit])


_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_seconds(text: str) -> float:
    """Return seconds from text such as `120s`, `2min`, `1.5h` or `30`.

    Raises:
        ValueError: if the text is no duration, or not positive; names the units that are allowed.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match.group(2) not in _SECONDS or float(match.group(1)) <= 0:
        raise ValueError(
            f"{text!r} is not a duration: write a positive number with one of "
            f"{', '.join(unit for unit in _SECONDS if unit)}, for example 120s"
        )
    return float(match.group(1)) * _SECONDS[match.group(2)]


def format_bytes(num_bytes: float) -> str:
    """Return bytes as text in the largest binary unit that keeps the number at or above one."""
    sign, size = ("-", -num_bytes) if num_bytes < 0 else ("", num_bytes)
    for unit, factor in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{sign}{size / factor:.2f} {unit}"
    return f"{sign}{size:.0f} B"


def format_bytes_up(num_bytes: int) -> str:
    """Return bytes as text rounded up, so that reading it back never gives less."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if num_bytes >= factor:
            return f"{-(-num_bytes * 100 // factor) / 100:.2f} {unit}"
    return f"{num_bytes} B"


def format_seconds(seconds: float) -> str:
    """Return seconds as text with the unit that keeps the number readable."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def to_ticks(seconds: float) -> int:
    """Return seconds in whole ticks, rounded up."""
    return -int(-seconds // TICK_S)
