"""Shortest paths and Pareto points of a level 1 problem over the steps of its elimination.

    cheapest   options of least weighted sum of time and memory, and what each key costs to the end
    fastest    options of least time, of equally fast ones the leanest; `leanest` the other way
    pareto     every (time, memory) that nothing dominates, with options

First the supported points are found, those that are cheapest for some weights. Between two of them
next to each other, a and b, only points faster than b and leaner than a may hide. So a label, the
(time, memory) of a path from the start to some key, is followed only if what every key costs to
the end at least leaves room for such a point:

    time + least time to the end < time[b]        memory + least memory to the end < memory[a]
    weighted sum + least weighted sum to the end <= that of the corner (time[b] - 1, memory[a] - 1)

and only if no label of the same key dominates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.search.elimination import UNREACHABLE, Costs, Elimination

__all__ = [
    "Label",
    "Paths",
    "TooManyLabelsError",
    "cheapest",
    "fastest",
    "leanest",
    "pareto",
    "supported",
]

_Ints = NDArray[np.int64]
_Bools = NDArray[np.bool_]

_MAX_LABELS = 200_000
_MAX_PRICES = 24


class TooManyLabelsError(Exception):
    """The frontier is too large for this method."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A choice of one option per op with its cost."""

    time: int
    memory: int
    options: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The cheapest way to the end from everywhere.

    Attributes:
        time_weight, memory_weight: of the sum.
        to_end: per step, per key before it, the least weighted sum to the end; UNREACHABLE where
            no path is left.
        label: the cheapest choice; None if no options go together.
    """

    time_weight: int
    memory_weight: int
    to_end: tuple[_Ints, ...]
    label: Label | None

    def is_cheapest(self, label: Label) -> bool:
        """Return whether no choice has a smaller weighted sum than this one."""
        value = label.time * self.time_weight + label.memory * self.memory_weight
        return int(self.to_end[0][0]) == value


def cheapest(steps: Elimination, costs: Costs, time_weight: int, memory_weight: int) -> Paths:
    """Return the options of least weighted sum; of equal ones always the same.

    Weights that are too large for exact sums are halved together until they fit, none below 1:
    the weights used are those in the result.

    Raises:
        OverflowError: even the costs themselves do not fit 60 bits.
    """
    time_weight, memory_weight = _fitting(steps, costs, time_weight, memory_weight)
    weights = time_weight * costs.time + memory_weight * costs.memory
    to_end = _to_end(steps, weights)
    return Paths(
        time_weight=time_weight,
        memory_weight=memory_weight,
        to_end=tuple(to_end),
        label=_follow(steps, costs, weights, to_end),
    )


def fastest(steps: Elimination, costs: Costs) -> Label | None:
    """Return the fastest choice, of equally fast ones the leanest; None if nothing goes together.

    Raises:
        OverflowError: see `cheapest`.
    """
    return _first_then(steps, costs, costs.time, costs.memory)


def leanest(steps: Elimination, costs: Costs) -> Label | None:
    """Return the leanest choice, of equally lean ones the fastest; see `fastest`."""
    return _first_then(steps, costs, costs.memory, costs.time)


def _fitting(
    steps: Elimination, costs: Costs, time_weight: int, memory_weight: int
) -> tuple[int, int]:
    """Return weights with which no sum along a path reaches UNREACHABLE."""
    time, memory = int(costs.time.max(initial=0)), int(costs.memory.max(initial=0))
    most = UNREACHABLE // (len(steps.steps) + 1)
    if time + memory >= most:
        raise OverflowError("costs are too large for exact integers: use a coarser unit")
    while time_weight * time + memory_weight * memory >= most:
        time_weight, memory_weight = _half(time_weight), _half(memory_weight)
    return time_weight, memory_weight


def _half(weight: int) -> int:
    return max(weight // 2, min(weight, 1))


def _to_end(
    steps: Elimination, weights: _Ints, masks: Sequence[_Bools] | None = None
) -> list[_Ints]:
    """Return per step and key before it the least sum to the end, over the edges of `masks`."""
    to_end = [np.zeros(1, dtype=np.int64)]
    for index in range(len(steps.steps) - 1, -1, -1):
        step = steps.steps[index]
        total = np.minimum(weights[step.row] + to_end[-1][step.target], UNREACHABLE)
        if masks is not None:
            total[~masks[index]] = UNREACHABLE
        before = np.full(len(step.first) - 1, UNREACHABLE, dtype=np.int64)
        if len(total):
            before[step.leaving] = np.minimum.reduceat(total, step.starts)
        to_end.append(before)
    to_end.reverse()
    return to_end


def _first_then(steps: Elimination, costs: Costs, first: _Ints, then: _Ints) -> Label | None:
    """Return the choice of least `first`, and among those of least `then`."""
    _fitting(steps, costs, 1, 1)
    least = _to_end(steps, first)
    masks = []
    for index, step in enumerate(steps.steps):
        before = np.repeat(least[index], np.diff(step.first))
        masks.append(first[step.row] + least[index + 1][step.target] == before)
    return _follow(steps, costs, then, _to_end(steps, then, masks), masks)


def _follow(
    steps: Elimination,
    costs: Costs,
    weights: _Ints,
    to_end: Sequence[_Ints],
    masks: Sequence[_Bools] | None = None,
) -> Label | None:
    """Return the choice on a cheapest path; of equal edges the first. None if there is no path."""
    if to_end[0][0] >= UNREACHABLE:
        return None
    key, rows = 0, []
    options = [0] * len(steps.steps)
    for index, step in enumerate(steps.steps):
        edges = slice(int(step.first[key]), int(step.first[key + 1]))
        total = weights[step.row[edges]] + to_end[index + 1][step.target[edges]]
        if masks is not None:
            total[~masks[index][edges]] = UNREACHABLE
        edge = edges.start + int(total.argmin())
        options[step.op] = int(step.option[edge])
        rows.append(int(step.row[edge]))
        key = int(step.target[edge])
    return Label(
        time=int(costs.time[rows].sum()),
        memory=int(costs.memory[rows].sum()),
        options=tuple(options),
    )


def pareto(steps: Elimination, costs: Costs) -> tuple[Label, ...]:
    """Return every undominated choice from the fastest to the leanest, one per (time, memory).

    Raises:
        TooManyLabelsError: there are too many to keep.
        OverflowError: see `cheapest`.
    """
    gaps = _gaps(steps, costs)
    ends = [label for gap in gaps for label in (gap.fast, gap.lean)]
    return _staircase([*ends, *_between(steps, costs, gaps)])


def supported(steps: Elimination, costs: Costs) -> tuple[Label, ...]:
    """Return choices that are cheapest for some price of memory, from the fastest to the leanest.

    Raises:
        OverflowError: see `cheapest`.
    """
    gaps = _gaps(steps, costs)
    return _staircase([label for gap in gaps for label in (gap.fast, gap.lean)])


def _staircase(labels: Sequence[Label]) -> tuple[Label, ...]:
    """Return the labels that no other equals or beats in both, first of equals."""
    left: list[Label] = []
    for label in sorted(labels, key=lambda label: (label.time, label.memory)):
        if not left or label.memory < left[-1].memory:
            left.append(label)
    return tuple(left)


def _gaps(steps: Elimination, costs: Costs) -> list[_Gap]:
    """Return the gaps between supported points; one from a point to itself if there is only one."""
    fast, lean = fastest(steps, costs), leanest(steps, costs)
    if fast is None or lean is None:
        return []
    if fast.memory == lean.memory:
        return [_Gap(fast=fast, lean=fast, paths=cheapest(steps, costs, 1, 1))]
    return _split(steps, costs, fast, lean)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """Two supported points next to each other, and a price under which little lies below them."""

    fast: Label
    lean: Label
    paths: Paths

    def may_hold(self) -> bool:
        """Return whether a point between the two can be undominated, by the price."""
        if self.lean.time - self.fast.time <= 1 or self.fast.memory - self.lean.memory <= 1:
            return False
        return int(self.paths.to_end[0][0]) <= self.corner

    @property
    def corner(self) -> int:
        """Return the weighted sum of the worst point between the two that is undominated."""
        return (self.lean.time - 1) * self.paths.time_weight + (
            self.fast.memory - 1
        ) * self.paths.memory_weight


def _split(steps: Elimination, costs: Costs, first: Label, last: Label) -> list[_Gap]:
    """Return the gaps between supported points, from the largest on, a bounded number of them."""
    closed: list[_Gap] = []
    pending: list[tuple[Label, Label, Paths | None]] = [(first, last, None)]
    for _ in range(_MAX_PRICES):
        if not pending:
            break
        pending.sort(key=lambda gap: _area(gap[0], gap[1]))
        fast, lean, _ = pending.pop()
        paths = cheapest(steps, costs, fast.memory - lean.memory, lean.time - fast.time)
        label = paths.label
        assert label is not None
        # Halved weights are no longer those of the line through both, so either end may come out.
        if label.time <= fast.time or label.memory <= lean.memory or paths.is_cheapest(fast):
            closed.append(_Gap(fast=fast, lean=lean, paths=paths))
        else:
            pending += [(fast, label, paths), (label, lean, paths)]
    closed += [
        _Gap(fast=fast, lean=lean, paths=paths)
        for fast, lean, paths in pending
        if paths is not None
    ]
    return sorted(closed, key=lambda gap: gap.fast.time)


def _area(fast: Label, lean: Label) -> int:
    return (lean.time - fast.time) * (fast.memory - lean.memory)


def _between(steps: Elimination, costs: Costs, gaps: Sequence[_Gap]) -> list[Label]:
    """Return labels that include every undominated point in the gaps."""
    gaps = [gap for gap in gaps if gap.may_hold()]
    if not gaps:
        return []
    least_time = cheapest(steps, costs, 1, 0).to_end
    least_memory = cheapest(steps, costs, 0, 1).to_end
    key = np.zeros(1, dtype=np.int64)
    time = memory = np.zeros(1, dtype=np.int64)
    history: list[tuple[_Ints, _Ints]] = []
    chain = _Chain.of(gaps)
    for index, step in enumerate(steps.steps, start=1):
        counts = step.first[key + 1] - step.first[key]
        parent = np.repeat(np.arange(len(key)), counts)
        offsets = np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
        edge = step.first[key][parent] + offsets
        key = step.target[edge]
        time = time[parent] + costs.time[step.row[edge]]
        memory = memory[parent] + costs.memory[step.row[edge]]
        ahead = time + least_time[index][key], memory + least_memory[index][key]
        kept = chain.may_end_in(index, key, (time, memory), ahead)
        kept = kept[_undominated(key[kept], time[kept], memory[kept])]
        if len(kept) > _MAX_LABELS:
            raise TooManyLabelsError
        key, time, memory = key[kept], time[kept], memory[kept]
        history.append((parent[kept], step.option[edge[kept]]))
    return [
        Label(
            time=int(time[label]), memory=int(memory[label]), options=_trace(steps, history, label)
        )
        for label in range(len(key))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """Gaps from the fastest to the leanest, which share at most their ends.

    Those that are slow enough for a label come after all others, and those that take memory enough
    before them.
    """

    gaps: tuple[_Gap, ...]
    corner: tuple[int, ...]
    lean_time: _Ints
    less_memory: _Ints  # of the fast ends, negative: in the order of the gaps it does not fall

    @classmethod
    def of(cls, gaps: Sequence[_Gap]) -> _Chain:
        """Return the chain of some gaps."""
        return cls(
            gaps=tuple(gaps),
            corner=tuple(gap.corner for gap in gaps),
            lean_time=np.array([gap.lean.time for gap in gaps], dtype=np.int64),
            less_memory=np.array([-gap.fast.memory for gap in gaps], dtype=np.int64),
        )

    def may_end_in(
        self,
        index: int,
        key: _Ints,
        spent: tuple[_Ints, _Ints],
        least: tuple[_Ints, _Ints],
    ) -> _Ints:
        """Return the indices of labels that may end in an undominated point of some gap.

        Args:
            index: of the step after which the labels are, from 1 on.
            key: of each label.
            spent: its time and memory.
            least: these with what is left at the least, each alone.
        """
        first = np.searchsorted(self.lean_time, least[0], side="right")
        last = np.searchsorted(self.less_memory, -least[1], side="left")
        left = np.nonzero(first < last)[0]
        found = []
        for number, (gap, corner) in enumerate(zip(self.gaps, self.corner, strict=True)):
            is_asked = (first[left] <= number) & (number < last[left])
            asked, paths = left[is_asked], gap.paths
            total = paths.time_weight * spent[0][asked] + paths.memory_weight * spent[1][asked]
            fits = total + paths.to_end[index][key[asked]] <= corner
            found.append(asked[fits])
            is_asked[is_asked] = fits
            left = left[~is_asked]
        return np.sort(np.concatenate(found))


def _undominated(key: _Ints, time: _Ints, memory: _Ints) -> _Ints:
    """Return the indices of labels that no other of the same key beats or equals, first of equals.

    In the order of key, time and memory a label stays if its memory is below all before it of its
    key; offsetting memories by key makes that one running minimum.
    """
    if not len(key):
        return np.zeros(0, dtype=np.int64)
    most = int(time.max()) + 1
    if int(key.max()) < UNREACHABLE // most:  # both as one number: one sort less
        order = np.lexsort((memory, key * most + time))
    else:
        order = np.lexsort((memory, time, key))
    span = int(memory.max()) + 1
    offset = memory[order] - key[order] * span
    before = np.minimum.accumulate(offset)
    stays = np.ones(len(order), dtype=np.bool_)
    stays[1:] = offset[1:] < before[:-1]
    return np.sort(order[stays])


def _trace(
    steps: Elimination, history: Sequence[tuple[_Ints, _Ints]], label: int
) -> tuple[int, ...]:
    """Return the options of a label at the end."""
    options = [0] * len(steps.steps)
    for step, (parent, option) in zip(reversed(steps.steps), reversed(history), strict=True):
        options[step.op] = int(option[label])
        label = int(parent[label])
    return tuple(options)
