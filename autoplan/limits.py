"""Settings that are bounded or forbidden, and every constraint of the user in words."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoplan.schedules import SCHEDULES

__all__ = [
    "FORBIDDABLE",
    "LIMITED_KEYS",
    "Limits",
    "constraint_texts",
    "kept_constraints",
    "make_limits",
]

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
FORBIDDABLE = (*LIMITED_KEYS, "schedule")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What settings may be.

    Attributes:
        within: per setting the least and the largest value allowed.
        forbidden: per setting the values that are not.
    """

    within: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    forbidden: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)

    def allows(self, name: str, value: int | str) -> bool:
        """Return whether a setting may have a value."""
        if isinstance(value, int) and name in self.within:
            low, high = self.within[name]
            if not low <= value <= high:
                return False
        return value not in self.forbidden.get(name, ())

    def allows_setting(self, setting: Any) -> bool:
        """Return whether every one of a setting's values is allowed."""
        return all(self.allows(name, getattr(setting, name)) for name in FORBIDDABLE)


def make_limits(
    within: Mapping[str, Sequence[int]] | None, forbid: Mapping[str, Any] | None
) -> Limits:
    """Return the limits that a user gave.

    Args:
        within: such as `{"tp": (1, 4)}`, both ends allowed.
        forbid: such as `{"tp": [8], "zero_stage": 3, "schedule": "zero_bubble"}`.

    Raises:
        ValueError: says what was got and what is allowed.
    """
    bounded: dict[str, tuple[int, int]] = {}
    for name, ends in (within or {}).items():
        _check_name("bound", name, LIMITED_KEYS)
        numbers = _numbers(f"within[{name!r}]", ends)
        if len(numbers) != 2 or numbers[0] > numbers[1]:
            raise ValueError(
                f"within[{name!r}] is {ends!r}: give the least and the largest value, as in (1, 4)"
            )
        bounded[name] = (numbers[0], numbers[1])
    forbidden: dict[str, tuple[int | str, ...]] = {}
    for name, values in (forbid or {}).items():
        _check_name("forbid", name, FORBIDDABLE)
        is_several = isinstance(values, Iterable) and not isinstance(values, str)
        several = tuple(values) if is_several else (values,)
        if name == "schedule":
            forbidden[name] = _schedules(several)
        else:
            forbidden[name] = _numbers(f"forbid[{name!r}]", several)
    return Limits(within=bounded, forbidden=forbidden)


def _check_name(verb: str, name: str, allowed: Sequence[str]) -> None:
    if name not in allowed:
        raise ValueError(f"cannot {verb} {name!r}; allowed are {', '.join(allowed)}")


def _schedules(names: tuple[Any, ...]) -> tuple[str, ...]:
    wrong = [name for name in names if name not in SCHEDULES[1:]]
    if wrong or not names:
        raise ValueError(
            f"forbid['schedule'] is {names!r}: give one or more of {', '.join(SCHEDULES[1:])}"
        )
    return names


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
