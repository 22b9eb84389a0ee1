"""The trace of one micro-batch size from the traces of two others, where all numbers are affine.

Every count of a trace (shapes, bytes, FLOPs) is a constant plus a multiple of the rows as long as
the graph is the same. Two traces give both; anything that is not a number must be equal in them.
"""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

from autoplan.graph import Placement, Trace

__all__ = ["interpolate"]

_IGNORED = ("fingerprint",)


class _Different(Exception):
    """The two traces differ in more than numbers."""


def interpolate(low: Trace, high: Trace, rows: int) -> Trace | None:
    """Return the trace for micro-batches of `rows`, or None where the two traces do not allow it.

    Args:
        low, high: traces of the same model for two micro-batch sizes, `low` the smaller.
        rows: the size wanted.

    Returns:
        A trace whose fingerprints are empty: it belongs to no captured program.
    """
    a, b = low.microbatch_size, high.microbatch_size
    try:
        found: Trace = _affine(low, high, a, b, rows)
    except _Different:
        return None
    return replace(found, microbatch_size=rows)


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(own.name for own in fields(kind))


def _affine(low: Any, high: Any, a: int, b: int, rows: int, key: str = "") -> Any:
    if type(low) is not type(high):
        raise _Different
    if key in _IGNORED:
        return ""
    if low == high:
        return low
    if is_dataclass(low) and not isinstance(low, type):
        names = _field_names(type(low))
        values = {
            name: _affine(getattr(low, name), getattr(high, name), a, b, rows, name)
            for name in names
        }
        return type(low)(**values)
    if isinstance(low, dict):
        if low.keys() != high.keys():
            raise _Different
        return {k: _affine(v, high[k], a, b, rows, k) for k, v in low.items()}
    if isinstance(low, tuple):
        if len(low) != len(high):
            raise _Different
        return tuple([_affine(x, y, a, b, rows, key) for x, y in zip(low, high, strict=True)])
    if isinstance(low, int) and not isinstance(low, bool):
        slope, rest = divmod(high - low, b - a)
        if rest:
            raise _Different
        return low + slope * (rows - a)
    if key == "signature":
        return _affine_text(low, high, a, b, rows)
    if isinstance(low, str) and low.startswith("S(") and isinstance(high, str):
        return _affine_placement(low, high, a, b, rows)
    raise _Different


def _affine_text(low: str, high: str, a: int, b: int, rows: int) -> str:
    """Return a text whose whole numbers follow the rows; everything between them is equal."""
    parts, others = re.split(r"(\d+)", low), re.split(r"(\d+)", high)
    if len(parts) != len(others):
        raise _Different
    found = []
    for one, two in zip(parts, others, strict=True):
        if one != two and not (one.isdigit() and two.isdigit()):
            raise _Different
        found.append(one if one == two else str(_affine(int(one), int(two), a, b, rows)))
    return "".join(found)


def _affine_placement(low: str, high: str, a: int, b: int, rows: int) -> str:
    """Return a slice placement whose number of pieces follows the rows (a flattened batch)."""
    one, two = Placement.parse(low), Placement.parse(high)
    pieces = _affine(one.outer, two.outer, a, b, rows)
    if replace(one, outer=1) != replace(two, outer=1):
        raise _Different
    return str(replace(one, outer=pieces))
