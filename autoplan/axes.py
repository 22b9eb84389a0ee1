"""Logical axes of a block graph: which dimensions of which values are the same extent.

Every dimension of every value is an ordered list of atoms (row-major factors). A rule per operator
equates dimensions of its operands and result, as the letters of an einsum do; views regroup
dimensions by equal products and split atoms into factors, and a split shows wherever the atom
occurs. What an operator can be sliced along stands in its `Rule`: links from a run of atoms to the
dimensions that hold it. The rules are in `autoplan.axis_rules`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

__all__ = [
    "RESULT",
    "Analysis",
    "Atom",
    "Cut",
    "Dim",
    "GemmDim",
    "Link",
    "Rule",
    "Side",
    "cut",
    "cuts_of",
    "equate",
    "fresh",
    "leaves",
    "pieces",
    "singles",
]

GemmDim = Literal["", "m", "n", "k", "batch"]
RESULT = -1


@dataclass(eq=False, slots=True)
class Atom:
    """A logical axis; it may turn out to equal another, or to be a product of two others.

    One of size 1 is told apart from others but never sliced, and is no leaf.
    """

    size: int
    same: Atom | None = None
    factors: tuple[Atom, Atom] | None = None

    def root(self) -> Atom:
        """Return the atom that stands for all atoms equal to this one."""
        atom = self
        while atom.same is not None:
            atom = atom.same
        return atom


Dim = list[Atom]


def leaves(dim: Iterable[Atom]) -> list[Atom]:
    """Return the unsplit atoms of a dimension, outermost first."""
    found: list[Atom] = []
    for atom in dim:
        root = atom.root()
        found += leaves(root.factors) if root.factors else [root] * (root.size > 1)
    return found


def singles(dim: Iterable[Atom]) -> list[Atom]:
    """Return the atoms of size 1 of a dimension, which `leaves` leaves out."""
    return [root for atom in dim if (root := atom.root()).size == 1]


def fresh(size: int) -> Dim:
    """Return a dimension of one new atom."""
    return [Atom(size)]


def cut(dim: Dim, at: int) -> bool:
    """Split atoms so that the leading ones multiply to `at`; False where that is impossible."""
    seen = 1
    for atom in leaves(dim):
        if seen == at:
            return True
        after = seen * atom.size
        if at < after:
            if at % seen or after % at:
                return False
            atom.factors = (Atom(at // seen), Atom(after // at))
            return True
        seen = after
    return seen == at


def _products(atoms: Sequence[Atom]) -> set[int]:
    return {prod(a.size for a in atoms[:i]) for i in range(1, len(atoms) + 1)}


def equate(first: Dim, second: Dim) -> bool:
    """Make two dimensions of one size the same; False where their factors do not agree."""
    while True:
        a, b = leaves(first), leaves(second)
        if [x.size for x in a] == [y.size for y in b]:
            break
        cuts = sorted(_products(a) | _products(b))
        if not all(cut(first, at) and cut(second, at) for at in cuts):
            return False
    for x, y in zip(a, b, strict=True):
        left, right = x.root(), y.root()
        if left is not right:
            right.same = left
    return True


@dataclass(frozen=True, slots=True)
class Side:
    """Where a link lies in an operand: `dims` in order, after leading atoms of product `skip`."""

    operand: int
    dims: tuple[int, ...]
    skip: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A run of atoms of product `size` that operands and result of an op share."""

    size: int
    sides: tuple[Side, ...]
    gemm_dim: GemmDim = ""


@dataclass(slots=True, kw_only=True)
class Rule:
    """How one op treats its dimensions.

    Attributes:
        operands: value names by argument position (a value may stand in two).
        links: what the op can be sliced along.
        is_view: linear in its only operand without arithmetic, so it may run on addends.
        blocked: dimensions of operands or result that the op needs whole.
        added_once: operand that must be added on one rank only when a contraction is sliced.
        reduces_itself: whether a sliced contraction ends replicated (the op communicates inside).
        in_one_piece: whether a contraction may only be sliced in one piece per rank.
        query_heads: of attention with fewer key-value heads: number of query heads and their dim.
    """

    operands: tuple[str, ...]
    links: list[Link] = field(default_factory=list)
    is_view: bool = False
    blocked: list[Dim] = field(default_factory=list)
    added_once: int | None = None
    reduces_itself: bool = False
    in_one_piece: bool = False
    query_heads: tuple[int, int] | None = None


@dataclass(slots=True)
class Analysis:
    """Dimensions of all values of a graph, and the rule of every op that has one.

    Attributes:
        dims: per tensor value.
        tuples: per tuple value, the dimensions of its components.
        rules: per op.
        alike: pairs of dimensions; the second means what the first does, at whatever extent.
        possible: axes of size 1 that may be hidden where they stand, or in a neighbour.
        heads: dimensions that hold attention heads.
        vocabulary: dimensions that hold a vocabulary.
    """

    dims: dict[str, list[Dim]] = field(default_factory=dict)
    tuples: dict[str, list[list[Dim]]] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)
    alike: list[tuple[Dim, Dim]] = field(default_factory=list)
    possible: set[Atom] = field(default_factory=set)
    heads: list[Dim] = field(default_factory=list)
    vocabulary: list[Dim] = field(default_factory=list)

    def result(self, name: str) -> list[Dim]:
        """Return the dimensions of a value; of a tuple's first component."""
        return self.dims[name] if name in self.dims else self.tuples[name][0]


def pieces(
    side: Side, size: int, dims: Mapping[int, Sequence[Dim]]
) -> Iterator[tuple[Atom, int, int]]:
    """Yield (atom, dim, outer) for each atom of a link's side, outermost first.

    Args:
        side: of the link.
        size: of the link.
        dims: dimensions by operand index.
    """
    seen = 1
    for dim in side.dims:
        outer = 1
        for atom in leaves(dims[side.operand][dim]):
            if side.skip <= seen < side.skip * size:
                yield atom, dim, outer
            seen *= atom.size
            outer *= atom.size


@dataclass(frozen=True, slots=True)
class Cut:
    """An atom of a link, and where it lies: operand -> (dim, outer).

    `inner` are the atoms of the link that follow it in the same dimension of every operand: a slice
    of the atom may go on into them.
    """

    atom: Atom
    places: Mapping[int, tuple[int, int]]
    link: Link
    inner: tuple[Atom, ...]

    def extent(self, names: Mapping[Atom, str]) -> int:
        """Return what the degree must divide: the atom with the offered atoms inside it."""
        size = self.atom.size
        for atom in self.inner:
            if atom not in names:
                break
            size *= atom.size
        return size


def cuts_of(name: str, rule: Rule, found: Analysis) -> list[Cut]:
    """Return what an op can be sliced along, in the order of its links."""
    dims = {i: found.result(operand) for i, operand in enumerate(rule.operands)}
    dims[RESULT] = found.result(name)
    cuts: list[Cut] = []
    for link in rule.links:
        by_side = [list(pieces(side, link.size, dims)) for side in link.sides]
        if len({len(parts) for parts in by_side}) > 1:
            continue
        for position, (atom, _, _) in enumerate(by_side[0]):
            places = {
                side.operand: (part[position][1], part[position][2])
                for side, part in zip(link.sides, by_side, strict=True)
            }
            if len(places) == len(link.sides):
                inner = _atoms_inside(by_side, position)
                cuts.append(Cut(atom.root(), places, link, inner))
    return cuts


def _atoms_inside(
    by_side: Sequence[Sequence[tuple[Atom, int, int]]], position: int
) -> tuple[Atom, ...]:
    """Return the atoms that follow one in the same dimension on every side of a link."""
    found = []
    for later in range(position + 1, len(by_side[0])):
        if any(part[later][1] != part[position][1] for part in by_side):
            break
        found.append(by_side[0][later][0].root())
    return tuple(found)
