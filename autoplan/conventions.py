"""What all blocks of a plan agree on under tensor parallelism.

Activations cross the borders of blocks whole or as slices of tokens. A parameter that several calls
share (an embedding that is the head too) lies whole or in slices, and is one tensor: the same for
each of these calls. A setting is solved for every convention, the best one counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoplan.block_options import has_options, legal_options
from autoplan.graph import BlockTrace, ParameterTrace, Placement, Trace
from autoplan.local import localize
from autoplan.tensor_layout import TOKEN_BORDERS, WHOLE_BORDERS, Borders, boundary_of

if TYPE_CHECKING:
    from autoplan.costs import Pricer

__all__ = [
    "WHOLE",
    "Convention",
    "StateSlices",
    "borders_of",
    "possible_conventions",
    "shared_slices",
]

StateSlices = tuple[tuple[str, str], ...]
"""(state, placement) of the states of a class that are shared and stored in slices."""

Group = tuple[tuple[int, str], ...]
"""(class, state) pairs that must lie alike: some parameter is one of them in a call each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """How activations cross borders, and how shared parameters lie.

    Attributes:
        is_sequence_parallel: activations cross the borders of blocks as slices of tokens.
        slices: (class, state, placement) of shared states in slices; all others are whole.
    """

    is_sequence_parallel: bool = False
    slices: tuple[tuple[int, str, str], ...] = ()

    @property
    def borders(self) -> Borders:
        """Return how activations enter and leave blocks that do not change it."""
        return TOKEN_BORDERS if self.is_sequence_parallel else WHOLE_BORDERS

    def of(self, block: int) -> StateSlices:
        """Return what it says about the states of a class."""
        return tuple((state, placement) for own, state, placement in self.slices if own == block)


WHOLE = Convention()


def borders_of(trace: Trace, degree: int) -> tuple[bool, ...]:
    """Return whether activations may cross borders of blocks whole, or as slices of tokens."""
    can_slice = degree > 1 and any(
        boundary_of(value, degree, "tokens") != "R"
        for block in trace.blocks
        for value in block.inputs
    )
    return (False, True) if can_slice else (False,)


def possible_conventions(pricer: Pricer, degree: int) -> tuple[Convention, ...]:
    """Return what blocks may agree on at a degree, the simplest first.

    Every class has a decision under each.
    """

    def stored(block: int) -> Mapping[str, str]:
        traced = pricer.trace.blocks[block]
        fastest = pricer.frontiers.plain(traced, pricer.layouts.timer(degree))
        return localize(traced, fastest.axes, degree).state_placements

    def is_possible(convention: Convention) -> bool:
        return all(
            has_options(
                pricer.trace.blocks[block],
                degree,
                convention.of(block),
                pricer.layouts.whole_states(block),
            )
            and pricer.fastest_s(block, degree, convention) < math.inf
            for block in {block for block, _, _ in convention.slices}
        )

    sliced = shared_slices(pricer.trace, degree, stored) if degree > 1 else ()
    found = (
        Convention(is_sequence_parallel=borders, slices=slices)
        for slices in dict.fromkeys(((), *sliced))
        for borders in borders_of(pricer.trace, degree)
    )
    return tuple(convention for convention in found if is_possible(convention))


def _shared_groups(trace: Trace) -> tuple[Group, ...]:
    """Return the states of classes that name parameters of several calls, in groups."""
    canonical = trace.first_names()
    uses: dict[str, set[tuple[int, str]]] = {}
    num_calls: dict[str, int] = {}
    for call in trace.calls:
        own = [
            (canonical.get(fqn, fqn), state.name)
            for fqn, state in zip(call.states, trace.blocks[call.block].states, strict=True)
            if state.is_parameter
        ]
        for fqn, state_name in own:
            uses.setdefault(fqn, set()).add((call.block, state_name))
        for fqn in {fqn for fqn, _ in own}:
            num_calls[fqn] = num_calls.get(fqn, 0) + 1
    groups: list[set[tuple[int, str]]] = []
    for fqn, states in uses.items():
        if num_calls[fqn] > 1:
            touching = [group for group in groups if group & states]
            groups = [group for group in groups if not group & states]
            groups.append(states.union(*touching))
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def shared_slices(
    trace: Trace, degree: int, stored: Callable[[int], Mapping[str, str]]
) -> Iterator[tuple[tuple[int, str, str], ...]]:
    """Yield slices in which shared states may lie, each along one dimension, the last one first.

    Where the fastest decisions of all classes that have a state, each taken by itself, store it in
    the same slices (a block that is called again and again), these are the ones, and what such
    classes store whole stays whole.

    Args:
        trace: of any micro-batch size.
        degree: above 1.
        stored: returns the placements in which the fastest decision of a class stores its states.
    """
    offered = {group: _offered(trace, group, degree) for group in _shared_groups(trace)}
    own = {group: _own_slices(group, stored) for group in offered}
    settled = {block for group, text in own.items() if text for block, _ in group}
    for dim in sorted({p.dim for found in offered.values() for p in found}, reverse=True):
        slices = []
        for group, found in offered.items():
            along = [own[group]] if own[group] else []
            if not settled & {block for block, _ in group}:
                along = sorted(str(p) for p in found if p.dim == dim)
            slices += [(block, state, along[0]) for block, state in group if along]
        yield tuple(slices)


def _own_slices(group: Group, stored: Callable[[int], Mapping[str, str]]) -> str:
    """Return the slices that all classes of a group take by themselves; empty for none."""
    placements = {stored(block)[state] for block, state in group}
    text = placements.pop()
    return text if not placements and text.startswith("S") else ""


def _offered(trace: Trace, group: Group, degree: int) -> frozenset[Placement]:
    """Return the slices in which all ops that read a group of states can read them."""
    found = [
        _readable(block, state, degree)
        for index, name in group
        for block in (trace.blocks[index],)
        for state in block.states
        if state.name == name
    ]
    return frozenset.intersection(*found)


def _readable(block: BlockTrace, state: ParameterTrace, degree: int) -> frozenset[Placement]:
    """Return the slices in which all ops of a block can read a state; none if nothing reads it."""
    found = [
        frozenset(
            Placement.parse(option.inputs[op.inputs.index(state.name)])
            for option in legal_options(op, degree, frozenset())
        )
        for op in block.ops
        if state.name in op.inputs
    ]
    common = frozenset.intersection(*found) if found else frozenset()
    return frozenset(
        placement
        for placement in common
        if placement.kind == "shard" and (len(state.shape) > 1 or placement.outer == 1)
    )
