"""Settings that are bounded or forbidden, and every constraint of the user in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LIMITED_KEYS", "Limits", "constraint_texts", "kept_constraints", "make_limits"]

LIMITED_KEYS = (
    "dp",
    "tp",
    "pp",
    "zero_stage",
    "microbatch_size",
    "num_microbatches",
    "virtual_stages",
    "dp_replicate",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What settings may be.

    Attributes:
        within: per setting the least and the largest value allowed.
        forbidden: per setting the values that are not.
    """

    within: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    forbidden: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def allows(self, name: str, value: int) -> bool:
        """Return whether a setting may have a value."""
        low, high = self.within.get(name, (value, value))
        return low <= value <= high and value not in self.forbidden.get(name, ())

    def allows_all(self, values: Mapping[str, int]) -> bool:
        """Return whether every one of several settings may have its value."""
        return all(self.allows(name, value) for name, value in values.items())


def make_limits(
    within: Mapping[str, Sequence[int]] | None, forbid: Mapping[str, Any] | None
) -> Limits:
    """Return the limits that a user gave.

    Args:
        within: such as `{"tp": (1, 4)}`, both ends allowed.
        forbid: such as `{"tp": [8], "zero_stage": 3}`.

    Raises:
        ValueError: says what was got and what is allowed.
    """
    bounded: dict[str, tuple[int, int]] = {}
    for name, ends in (within or {}).items():
        _check_name("bound", name)
        numbers = _numbers(f"within[{name!r}]", ends)
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise ValueError(
                f"within[{name!r}] is {ends!r}: give the least and the largest value, as in (1, 4)"
            )
        bounded[name] = (numbers[0], numbers[1])
    forbidden: dict[str, tuple[int, ...]] = {}
    for name, values in (forbid or {}).items():
        _check_name("forbid", name)
        several = values if isinstance(values, Iterable) else (values,)
        forbidden[name] = _numbers(f"forbid[{name!r}]", several)
    return Limits(within=bounded, forbidden=forbidden)


def _check_name(verb: str, name: str) -> None:
    if name not in LIMITED_KEYS:
        raise ValueError(f"cannot {verb} {name!r}; allowed are {', '.join(LIMITED_KEYS)}")


def _numbers(what: str, values: Any) -> tuple[int, ...]:
    found = tuple(values) if isinstance(values, Iterable) else (values,)
    if not found or any(not isinstance(v, int) or isinstance(v, bool) or v < 0 for v in found):
        raise ValueError(f"{what} is {values!r}: give whole numbers of at least 0")
    return found


def constraint_texts(pins: Mapping[str, Any], limits: Limits) -> dict[str, str]:
    """Return every constraint of the user in words, by a name of its own."""
    texts = {f"pin {name}": f"{name}={value}" for name, value in pins.items()}
    for name, (low, high) in limits.within.items():
        texts[f"within {name}"] = f"{name} within {low}..{high}"
    for name, values in limits.forbidden.items():
        texts[f"forbid {name}"] = f"{name} not {' or '.join(map(str, values))}"
    return texts


def kept_constraints(
    pins: Mapping[str, Any], limits: Limits, names: Collection[str]
) -> tuple[dict[str, Any], Limits]:
    """Return pins and limits less those that `names` (of `constraint_texts`) leaves out."""
    left = Limits(
        within={key: ends for key, ends in limits.within.items() if f"within {key}" in names},
        forbidden={key: out for key, out in limits.forbidden.items() if f"forbid {key}" in names},
    )
    return {key: value for key, value in pins.items() if f"pin {key}" in names}, left
