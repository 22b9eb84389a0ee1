"""Small sizes for the logical axes of a block graph, consistent wherever an axis stands."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod

import torch

from autoplan.autocast import bare
from autoplan.axes import Analysis, Atom, Dim, leaves
from autoplan.program import BlockGraph, Op

__all__ = ["AxisSizes"]

_KEPT_SIZE = 16  # counts such as experts, parts of a projection or dimensions of a head stay
_LEAST_PER_RANK = 2  # so that a slice that lies in the wrong order shows


class AxisSizes:
    """The small size of every axis.

    Axes are in groups that shrink alike; `kept` groups do not shrink.

    Attributes:
        is_hopeless: an op does not run even where all of its axes keep their sizes.
    """

    def __init__(self, graph: BlockGraph, found: Analysis, degree: int) -> None:
        self.is_hopeless = False
        self._degree = degree
        self._parent: dict[Atom, Atom] = {}
        self._kept: set[Atom] = set()
        self._blamed: dict[str, int] = {}
        self._small: dict[Atom, int] = {}
        self._atoms: list[Atom] = []
        values = [*graph.inputs, *(s.name for s in graph.states), *(op.name for op in graph.ops)]
        for value in values:
            for dim in _dims_of(value, found):
                for atom in leaves(dim):
                    if atom not in self._parent:
                        self._parent[atom] = atom
                        self._atoms.append(atom)
        for op in graph.ops:
            if not isinstance(bare(op).target, (torch._ops.OpOverload, type(operator.getitem))):
                self.keep(_op_dims(op, found))
        for first, second in found.alike:
            self._tie(first, second)

    def shape(self, dims: Sequence[Dim]) -> tuple[int, ...]:
        """Return the small shape of a value's dimensions."""
        return tuple(self.extent(dim) for dim in dims)

    def extent(self, dim: Iterable[Atom]) -> int:
        """Return the small size of a dimension."""
        return prod(self._small[atom] for atom in leaves(dim))

    def is_kept(self, dim: Dim) -> bool:
        """Return whether all axes of a dimension have their sizes."""
        return all(self._small[atom] == atom.size for atom in leaves(dim))

    def keep(self, dims: Iterable[Dim]) -> None:
        """Let the axes of some dimensions keep their sizes."""
        self._kept |= {self._root(atom) for dim in dims for atom in self._known(dim)}

    def blame(self, op: Op, found: Analysis) -> None:
        """Restrict the axes of an op whose small form does not run as its axes say.

        First what it needs whole becomes one group for each size, then that keeps its sizes, then
        everything does. Of an op without a rule what it makes keeps its sizes first.
        """
        times = self._blamed[op.name] = self._blamed.get(op.name, 0) + 1
        rule = found.rules.get(op.name)
        if times == 1:
            by_size: dict[int, Atom] = {}
            for dim in rule.blocked if rule is not None else _op_dims(op, found):
                for atom in self._known(dim):
                    self._join(by_size.setdefault(atom.size, atom), atom)
        elif times == 2:
            self.keep(rule.blocked if rule is not None else _dims_of(op.name, found))
        else:
            self.is_hopeless = times > 3
            self.keep(_op_dims(op, found))

    def assign(self) -> None:
        """Choose the small sizes."""
        groups: dict[Atom, list[Atom]] = {}
        for atom in self._atoms:
            groups.setdefault(self._root(atom), []).append(atom)
        kept = {self._root(atom) for atom in self._kept}
        used = {a.size for root, group in groups.items() if root in kept for a in group}
        for root, group in groups.items():
            sizes = {atom.size for atom in group}
            if root in kept:
                chosen = {size: size for size in sizes}
            elif len(sizes) == 1:
                chosen = {size: self._fitting(size, used) for size in sizes}
            else:
                factor = self._factor(sizes)
                chosen = {size: size // factor for size in sizes}
            used |= set(chosen.values())
            self._small |= {atom: chosen[atom.size] for atom in group}

    def _fitting(self, size: int, used: set[int]) -> int:
        """Return the smallest size that no other axis has and shares what `size` does."""
        if size <= _KEPT_SIZE:
            return size
        step = gcd(size, self._degree)
        small = step * max(_LEAST_PER_RANK, -(-4 // step))
        while small in used:
            small += step
        return min(small, size)

    def _factor(self, sizes: set[int]) -> int:
        """Return the largest factor by which all sizes can be divided."""
        factor = gcd(*(size // gcd(size, self._degree) for size in sizes))
        least = min(sizes)
        for divisor in range(1, factor + 1):
            if factor % divisor == 0 and least * divisor >= factor * _LEAST_PER_RANK:
                return factor // divisor
        return 1

    def _tie(self, first: Dim, second: Dim) -> None:
        """Let a dimension that is cut from another shrink by the same factor."""
        a, b = leaves(first), leaves(second)
        if not a or not b or set(a) <= set(b) or set(b) <= set(a):
            return
        known = self._known([*a, *b])
        if len(a) == len(b) == 1 and len(known) == 2:
            self._join(a[0], b[0])
        else:
            self.keep([known])

    def _known(self, dim: Dim) -> list[Atom]:
        """Return the axes of a dimension; a dimension that no value has any more has none."""
        return [atom for atom in leaves(dim) if atom in self._parent]

    def _root(self, atom: Atom) -> Atom:
        while self._parent[atom] is not atom:
            atom = self._parent[atom]
        return atom

    def _join(self, first: Atom, second: Atom) -> None:
        a, b = self._root(first), self._root(second)
        if a is not b:
            is_kept = bool({a, b} & {self._root(x) for x in self._kept})
            self._parent[b] = a
            if is_kept:
                self._kept.add(a)


def _dims_of(value: str, found: Analysis) -> Iterator[Dim]:
    """Yield the dimensions of a value, of all components of a tuple."""
    yield from found.dims.get(value, ())
    for dims in found.tuples.get(value, ()):
        yield from dims


def _op_dims(op: Op, found: Analysis) -> list[Dim]:
    return [dim for name in (*op.inputs(), op.name) for dim in _dims_of(name, found)]
