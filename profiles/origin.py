"""Where a number comes from: every number of a profile names an origin, and every origin exists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "SCHEMA_VERSION",
    "Origin",
    "OriginKind",
    "check_origins",
    "check_positive",
    "check_schema_version",
]

SCHEMA_VERSION = 1

OriginKind = Literal["measured", "published", "datasheet", "assumed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The source of one or more numbers.

    Attributes:
        kind: `measured` by the measuring code, `published` (somebody else measured or derived it),
            `datasheet` (the vendor says so) or `assumed` (nobody measured it for this device).
        text: the citation, or how it was measured, derived or transferred.
        device: what it was measured on; empty where that does not apply.
        driver: driver version; empty if unknown.
        torch_version: empty if torch was not involved or its version is unknown.
        date: ISO date of the measurement; empty if unknown.
    """

    kind: OriginKind
    text: str
    device: str = ""
    driver: str = ""
    torch_version: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ValueError("text: an origin must say where the number comes from, got ''")


def check_origins(
    origins: Mapping[str, Origin],
    origin_by_field: Mapping[str, str],
    fields: Iterable[str],
    table_origins: Iterable[str],
) -> None:
    """Check that every numeric field names an origin and that every named origin exists.

    Raises:
        ValueError: names the field without an origin, or the origin that does not exist.
    """
    fields = tuple(fields)
    for field in fields:
        if field not in origin_by_field:
            raise ValueError(f"origin_by_field.{field}: missing key; every number needs an origin")
    for field, origin in origin_by_field.items():
        if field not in fields:
            raise ValueError(f"origin_by_field.{field}: no such number; allowed are {fields}")
        if origin not in origins:
            raise ValueError(
                f"origin_by_field.{field}: unknown origin {origin!r}; "
                f"origins has {', '.join(sorted(origins)) or 'none'}"
            )
    for origin in table_origins:
        if origin not in origins:
            raise ValueError(
                f"origin: a table names {origin!r}; "
                f"origins has {', '.join(sorted(origins)) or 'none'}"
            )


def check_positive(name: str, value: float) -> None:
    """Raise `ValueError` with the name unless the value is finite and above zero."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: must be finite and above 0, got {value!r}")


def check_schema_version(version: int) -> None:
    """Raise `ValueError` unless this code can read the version."""
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"schema_version: this release reads {SCHEMA_VERSION}, got {version}; measure again"
        )
