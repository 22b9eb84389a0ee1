"""Level 1 by elimination: ops are decided one after the other, and only open links are remembered.

A link is open while some of its ops are decided and some are not. What later ops need to know of it
is the state its value was made in, if its producer is decided, and the set of states that decided
consumers need and that were, or will be, paid for. The states of all open links together are a
key. Deciding an op turns a key into another and costs what the chosen option and the transitions
that become certain cost:

    steps       edges (key before, option, key after), and a row of costs per edge     _Builder.step
    least(w)    the shortest path through all steps, for weights w of time and memory  least

Blocks of models are narrow: a few values cross any point, so keys are few. The order of the ops is
free; a greedy one that keeps keys few is chosen (_best_order). The steps depend on how options and
states go together and not on what they cost, so equal blocks under other degrees and batch sizes
share them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoplan.search.problem import ChoiceProblem, Consumer

__all__ = ["UNREACHABLE", "Costs", "Elimination", "Step", "eliminate", "structure_of"]

UNREACHABLE = 2**60
"""More than any reachable weighted cost; the sum of two still fits 64 bits."""

_MAX_EDGES = 400_000
_MAX_TRIES = 12

Structure = tuple[object, ...]
_Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The decision of one op: edges from keys before it to keys after it, ordered by `source`.

    Attributes:
        op: index of the op.
        source, option, target, row: per edge; `row` indexes `Costs`.
        first: per key before, the index of its first edge; one more entry ends the last.
        num_targets: number of keys after it.
    """

    op: int
    source: _Ints
    option: _Ints
    target: _Ints
    row: _Ints
    first: _Ints
    num_targets: int

    @cached_property
    def leaving(self) -> _Ints:
        """Return the keys before it that have an edge."""
        return np.nonzero(self.first[:-1] < self.first[1:])[0]

    @cached_property
    def starts(self) -> _Ints:
        """Return the first edges of these."""
        return self.first[self.leaving]


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """The steps of all problems of one structure.

    Attributes:
        steps: in the order of elimination.
        items: cost items of all rows, one row after the other.
        row_starts: index into `items` of the first item of each row.
    """

    steps: tuple[Step, ...]
    items: _Ints
    row_starts: _Ints

    def costs(self, problem: ChoiceProblem) -> Costs:
        """Return the costs of every row for a problem of this structure."""
        items = np.array(_cost_items(problem), dtype=np.int64).reshape(-1, 2)[self.items]
        sums = np.add.reduceat(items, self.row_starts, axis=0)
        return Costs(time=sums[:, 0], memory=sums[:, 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Ticks and memory units of every row of an `Elimination`."""

    time: _Ints
    memory: _Ints


def structure_of(problem: ChoiceProblem) -> Structure:
    """Return what the steps depend on, hashable: everything but the size of costs above 0."""
    ops = tuple(
        tuple(-1 if option.forbidden else option.produces for option in choices)
        for choices in problem.ops
    )
    links = tuple(
        (
            link.producer,
            tuple((consumer.op, consumer.requires) for consumer in link.consumers),
            tuple(
                tuple(None if cost is None else cost == (0, 0) for cost in row)
                for row in link.transitions
            ),
        )
        for link in problem.links
    )
    return ops, links


def eliminate(problem: ChoiceProblem) -> Elimination | None:
    """Return the steps for problems of this structure, or None if they are too many."""
    builder = _Builder(problem)
    for op in _best_order(problem):
        if not builder.step(op):
            return None
    return builder.finish()


def _cost_items(problem: ChoiceProblem) -> list[tuple[int, int]]:
    """Return (time, memory) of all options of all ops, then of all transitions of all links."""
    items = [(option.time, option.memory) for choices in problem.ops for option in choices]
    for link in problem.links:
        items += [cost or (0, 0) for row in link.transitions for cost in row]
    return items


class _Builder:
    """Walks the ops; `keys` has one row per key, and one column per open link."""

    def __init__(self, problem: ChoiceProblem) -> None:
        self.problem = problem
        self.touched = _touched(problem)
        self.left = [_members(problem, index) for index in range(len(problem.links))]
        self.first_item = np.cumsum([0, *(len(choices) for choices in problem.ops)]).tolist()
        self.first_transition = []
        total = self.first_item[-1]
        for link in problem.links:
            self.first_transition.append(total)
            total += sum(len(row) for row in link.transitions)
        self.states: list[dict[tuple[int, int], int]] = [{} for _ in problem.links]
        self.names: list[list[tuple[int, int]]] = [[] for _ in problem.links]
        self.open: list[int] = []
        self.keys: _Ints = np.zeros((1, 0), dtype=np.int64)
        self.steps: list[Step] = []
        self.items: list[int] = []
        self.row_starts: list[int] = []

    def step(self, op: int) -> bool:
        """Decide one op; return False if there are too many edges."""
        links = sorted(self.touched[op])
        for link in links:
            self.left[link].discard(op)
        staying = [link for link in links if self.left[link]]
        columns = [self.open.index(link) for link in links if link in self.open]
        kinds, kind_of_key = _unique_rows(self.keys[:, columns])
        known = [link for link in links if link in self.open]
        num_options = len(self.problem.ops[op])
        rows = np.full((len(kinds), num_options), -1, dtype=np.int64)
        after = np.zeros((len(kinds), num_options, len(staying)), dtype=np.int64)
        for kind, local in enumerate(kinds.tolist()):
            before = {
                link: self.names[link][state] for link, state in zip(known, local, strict=True)
            }
            for option in range(num_options):
                self._decide(op, option, links, staying, before, rows[kind], after[kind])
        source, option_of = np.nonzero(rows[kind_of_key] >= 0)
        if len(source) > _MAX_EDGES:
            return False
        kind_of_edge = kind_of_key[source]
        rest = [i for i, link in enumerate(self.open) if link not in links]
        fresh = np.concatenate([self.keys[source][:, rest], after[kind_of_edge, option_of]], axis=1)
        self.open = [self.open[i] for i in rest] + staying
        num_before = len(self.keys)
        self.keys, target = _unique_rows(fresh)
        self.steps.append(
            Step(
                op=op,
                source=source,
                option=option_of,
                target=target,
                row=rows[kind_of_edge, option_of],
                first=np.searchsorted(source, np.arange(num_before + 1)),
                num_targets=len(self.keys),
            )
        )
        return True

    def _decide(
        self,
        op: int,
        option: int,
        links: Sequence[int],
        staying: Sequence[int],
        before: dict[int, tuple[int, int]],
        rows: _Ints,
        after: _Ints,
    ) -> None:
        """Enter the row and the link states after one option in one kind of key, if it may be."""
        if self.problem.ops[op][option].forbidden:
            return
        items = [self.first_item[op] + option]
        states = {}
        for link in links:
            state = self._link_state(link, op, option, before.get(link, (-1, 0)), items)
            if state is None:
                return
            states[link] = state
        for index, link in enumerate(staying):
            known = self.states[link]
            if states[link] not in known:
                known[states[link]] = len(known)
                self.names[link].append(states[link])
            after[option, index] = known[states[link]]
        rows[option] = len(self.row_starts)
        self.row_starts.append(len(self.items))
        self.items += items

    def _link_state(
        self, index: int, op: int, option: int, state: tuple[int, int], items: list[int]
    ) -> tuple[int, int] | None:
        """Return a link's state after one of its ops is decided, adding what becomes certain.

        A state is (state made or -1, set of needed states as bits). Where the producer is known,
        only needs that cost something are in the set.
        """
        link = self.problem.links[index]
        made, needed = state
        asked = 0
        for consumer in link.consumers:
            if consumer.op == op:
                asked |= 1 << consumer.requires[option]
        if link.producer == op:
            made, asked, needed = self.problem.ops[op][option].produces, asked | needed, 0
        if made < 0:
            return made, needed | asked
        for target in _bits(asked & ~needed):
            cost = link.transitions[made][target]
            if cost is None:
                return None
            if cost != (0, 0):
                needed |= 1 << target
                width = len(link.transitions[0])
                items.append(self.first_transition[index] + made * width + target)
        return made, needed

    def finish(self) -> Elimination:
        """Return what was built."""
        return Elimination(
            steps=tuple(self.steps),
            items=np.array(self.items, dtype=np.int64),
            row_starts=np.array(self.row_starts, dtype=np.int64),
        )


def _bits(number: int) -> list[int]:
    return [index for index in range(number.bit_length()) if number >> index & 1]


def _unique_rows(rows: _Ints) -> tuple[_Ints, _Ints]:
    """Return the distinct rows, and per row the index of its like."""
    code = np.zeros(len(rows), dtype=np.int64)
    for column in rows.T:
        code = code * (int(column.max(initial=0)) + 1) + column
        if code.max(initial=0) > 2**40:
            code = np.unique(code, return_inverse=True)[1]
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return rows[first], inverse


def _touched(problem: ChoiceProblem) -> list[set[int]]:
    """Return per op the links that it makes or reads."""
    touched: list[set[int]] = [set() for _ in problem.ops]
    for index in range(len(problem.links)):
        for op in _members(problem, index):
            touched[op].add(index)
    return touched


def _members(problem: ChoiceProblem, index: int) -> set[int]:
    """Return the ops of a link."""
    link = problem.links[index]
    return {link.producer, *(consumer.op for consumer in link.consumers)}


def _best_order(problem: ChoiceProblem) -> list[int]:
    """Return the best of a few greedy orders by the estimated number of keys."""
    readers = {consumer.op for link in problem.links for consumer in link.consumers}
    starts = [op for op in range(len(problem.ops)) if op not in readers]
    if len(starts) >= _MAX_TRIES:
        starts = [starts[i * len(starts) // _MAX_TRIES] for i in range(_MAX_TRIES)]
    order = _Order(problem)
    tries = [order.greedy(start) for start in (*starts, len(problem.ops) - 1) if start >= 0]
    return min(tries, key=lambda item: item[0])[1] if tries else []


class _Order:
    """Greedy orders of elimination."""

    def __init__(self, problem: ChoiceProblem) -> None:
        self.problem = problem
        self.touched = _touched(problem)
        self.members = [_members(problem, index) for index in range(len(problem.links))]
        self.widths = [_LinkWidth.of(problem, index) for index in range(len(problem.links))]

    def greedy(self, start: int) -> tuple[float, list[int]]:
        """Return the estimated number of keys over all steps, and the order, from `start` on."""
        done: set[int] = set()
        opened: dict[int, float] = {}
        order: list[int] = []
        total = 0.0
        while len(order) < len(self.touched):
            near = {op for link in opened for op in self.members[link]} - done
            chosen = start if not order else -1
            if chosen < 0:
                ops = near or set(range(len(self.touched))) - done
                chosen = min(ops, key=lambda op: (self._growth(op, done, opened), op))
            done.add(chosen)
            order.append(chosen)
            for link in self.touched[chosen]:
                opened.pop(link, None)
                if not self.members[link] <= done:
                    opened[link] = self.widths[link].after(done)
            total += math.exp(sum(opened.values()))
        return total, order

    def _growth(self, op: int, done: set[int], opened: dict[int, float]) -> float:
        """Return by how much the logarithm of the number of keys grows when `op` is decided."""
        growth = 0.0
        done.add(op)
        for link in self.touched[op]:
            growth -= opened.get(link, 0.0)
            if not self.members[link] <= done:
                growth += self.widths[link].after(done)
        done.discard(op)
        return round(growth, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LinkWidth:
    """How many states an open link may have."""

    producer: int
    consumers: tuple[int, ...]
    num_made: int
    num_needed: int
    num_paid: int

    @classmethod
    def of(cls, problem: ChoiceProblem, index: int) -> _LinkWidth:
        """Return the counts of one link."""
        link = problem.links[index]
        made = {o.produces for o in problem.ops[link.producer] if not o.forbidden}
        needed = {state for consumer in link.consumers for state in consumer.requires}
        paid = {
            state
            for state in needed
            if any(link.transitions[f][state] not in (None, (0, 0)) for f in made)
        }
        return cls(
            producer=link.producer,
            consumers=tuple(_ops_of(link.consumers)),
            num_made=len(made),
            num_needed=len(needed),
            num_paid=len(paid),
        )

    def after(self, done: set[int]) -> float:
        """Return the logarithm of the number of states once some ops are decided."""
        decided = sum(op in done for op in self.consumers)
        if self.producer in done:
            return math.log(max(self.num_made, 1) * _subsets(self.num_paid, decided))
        return math.log(max(_subsets(self.num_needed, decided) - 1, 1))


def _ops_of(consumers: Sequence[Consumer]) -> list[int]:
    return list(dict.fromkeys(consumer.op for consumer in consumers))


def _subsets(size: int, most: int) -> int:
    """Return the number of subsets of at most `most` elements."""
    return sum(math.comb(size, count) for count in range(min(size, most) + 1))
