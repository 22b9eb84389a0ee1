"""What the decisions of a block class cost by themselves, side by side: an array per number.

A search prices all decisions of a class under every setting it meets. What a setting adds is the
same operation on each of them, so it is done on arrays; `autoplan.call_prices` and
`autoplan.search_options` take a table where they take the work of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.block_choice import Decision
from autoplan.block_work import BlockWork
from autoplan.call_prices import GroupPrice
from autoplan.stage_costs import GroupBytes

__all__ = ["DecisionTable", "Floats", "Groups", "Ints"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_PRICES = tuple(GroupPrice.__dataclass_fields__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The parameters of decisions: the distinct ones, and for each decision which it has."""

    distinct: tuple[GroupBytes, ...]
    places: Ints

    def ints(self, of_group: Callable[[GroupBytes], int]) -> Ints:
        """Return [decision] a whole number of its parameters."""
        return np.array([of_group(group) for group in self.distinct], dtype=np.int64)[self.places]

    def prices(self, of_group: Callable[[GroupBytes], GroupPrice]) -> GroupPrice:
        """Return what parameters add, an array [decision] for each number."""
        prices = [of_group(group) for group in self.distinct]
        rows = np.array([[getattr(own, name) for name in _PRICES] for own in prices])[self.places]
        found: dict[str, Any] = dict(zip(_PRICES, rows.T, strict=True))
        return GroupPrice(**found)


@dataclass(frozen=True, kw_only=True)
class DecisionTable:
    """The works of decisions of a class, and of each of their numbers an array [decision].

    Attributes:
        decisions: at least one. They are kept, so that no other object comes to have the id of one.
        works: of each.
        groups: by which of its states are new to a call, and how many ranks have the same experts,
            the parameters of each decision.
    """

    decisions: tuple[Decision, ...]
    works: Sequence[BlockWork]
    groups: dict[tuple[tuple[bool, ...], int], Groups] = field(default_factory=dict)

    def _floats(self, of_work: Callable[[BlockWork], float]) -> Floats:
        return np.array([of_work(work) for work in self.works], dtype=np.float64)

    def _ints(self, of_work: Callable[[BlockWork], int]) -> Ints:
        return np.array([of_work(work) for work in self.works], dtype=np.int64)

    @cached_property
    def forward_s(self) -> Floats:
        """Return `BlockWork.forward_s`."""
        return self._floats(lambda work: work.forward_s)

    @cached_property
    def backward_s(self) -> Floats:
        """Return `BlockWork.backward_s`."""
        return self._floats(lambda work: work.backward_s)

    @cached_property
    def summed_s(self) -> Floats:
        """Return `BlockWork.summed_s`."""
        return self._floats(lambda work: work.summed_s)

    @cached_property
    def host_forward_s(self) -> Floats:
        """Return `BlockWork.host_forward_s`."""
        return self._floats(lambda work: work.host_forward_s)

    @cached_property
    def host_backward_s(self) -> Floats:
        """Return `BlockWork.host_backward_s`."""
        return self._floats(lambda work: work.host_backward_s)

    @cached_property
    def kept(self) -> Ints:
        """Return `BlockMemory.kept`."""
        return self._ints(lambda work: work.memory.kept)

    @cached_property
    def held_output_bytes(self) -> Ints:
        """Return `BlockMemory.held_output_bytes`."""
        return self._ints(lambda work: work.memory.held_output_bytes)

    @cached_property
    def transient(self) -> Ints:
        """Return the most bytes while a block runs over what it keeps, its inputs included."""
        return self._ints(
            lambda work: (
                max(
                    work.memory.backward_peak,
                    sum(work.local.inputs.values()) + work.memory.forward_peak,
                )
                - work.memory.kept
            )
        )

    @cached_property
    def accumulating_transient(self) -> Ints:
        """Return the most bytes while a later backward runs over what the first one keeps."""
        return self._ints(lambda work: work.accumulating.backward_peak - work.memory.kept)

    @cached_property
    def deferred_bytes(self) -> Ints:
        """Return `Deferred.nbytes`."""
        return self._ints(lambda work: work.deferred.nbytes)

    @cached_property
    def released_bytes(self) -> Ints:
        """Return `Deferred.released_bytes`."""
        return self._ints(lambda work: work.deferred.released_bytes)
