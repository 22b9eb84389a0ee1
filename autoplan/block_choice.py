"""A block class as a choice problem: one option per op, with what it costs in time and memory.

Ops of the problem: first the block's inputs and states (one option per placement in which they may
lie), then its ops (option of sharding, times keep or redo in a region), last a reader of every
output, with an option for each way to hand them over. How activations enter and leave is settled by
fixing the options of inputs and reader (`ChoiceModel.fixed`). A link's states are the placements of
its value; a partial result that is kept has a state of its own, since its reduction then runs once
only. Memory is a sum here; what is chosen is walked exactly by `autoplan.liveness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from autoplan.block_options import border_ways, legal_options, may_keep
from autoplan.graph import BlockTrace, OpTrace, ParameterTrace, Placement, ShardOption
from autoplan.liveness import redone_ops
from autoplan.local import localize, value_bytes
from autoplan.plan import Recompute
from autoplan.redistribution import transition
from autoplan.search.problem import ChoiceOption, ChoiceProblem, ChoiceSolution, Consumer, Link
from autoplan.tensor_layout import (
    WHOLE_BORDERS,
    Border,
    Borders,
    boundary_of,
    leaving_placement,
)
from autoplan.times import OpTime, Timer
from autoplan.units import to_ticks

__all__ = ["ChoiceModel", "Decision"]

_STATIC_FACTOR = 4  # parameter, gradient and two moments; steers the choice only
_MAX_UNITS = 2**22
_KEPT_PARTIAL = "P!"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One way to run a block class: axes of its ops and what it recomputes.

    `inner` is priced but not searched: `estimate` sets it.

    Attributes:
        axes: op name to axis, for ops that are not whole.
        recompute: what the whole block keeps.
        inner: ops that alone run again in backward, from what enters them.
        borders: how activations enter the block, and how they leave it.
        slices: states that other calls share, of those that may be stored in slices all the same.
    """

    axes: dict[str, str] = field(default_factory=dict)
    recompute: Recompute = field(default_factory=lambda: Recompute(mode="none"))
    inner: tuple[str, ...] = ()
    borders: Borders = WHOLE_BORDERS
    slices: tuple[str, ...] = ()

    @property
    def is_sequence_parallel(self) -> bool:
        """Return whether activations enter as slices of tokens."""
        return self.borders[0] == "tokens"

    @cached_property
    def layout(self) -> tuple[object, ...]:
        """Return what decides how ops and states are sliced, hashable."""
        return tuple(sorted(self.axes.items())), self.borders, self.slices

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Return a hashable form."""
        return (*self.layout, self.recompute.mode, self.recompute.keep, self.inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pick:
    """What one option of one op of the problem stands for; `option` is None for a source."""

    axis: str
    keep: bool
    option: ShardOption | None

    @property
    def produces(self) -> str:
        """Return the placement of the result."""
        if self.option is None:
            return self.axis
        return _KEPT_PARTIAL if self.option.output == "P" and self.keep else self.option.output


class ChoiceModel:
    """The problem of one class, degree and mode (with a recompute region or without).

    Attributes:
        problem: to be solved; `fixed` says how activations cross the borders.
        ways: to hand activations over that differ for this class, the simplest first.
        fixed: per borders, the option of every op of the problem that they settle.
    """

    def __init__(
        self,
        block: BlockTrace,
        timer: Timer,
        whole: frozenset[str],
        region: bool,
        *,
        slices: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Pose the problem.

        Args:
            block, timer: the class, and what prices it at the degree.
            whole: states that are stored whole.
            region: it runs again in backward.
            slices: (state, placement) of the states that are stored in that placement.
        """
        self.block = block
        self.timer = timer
        self.slices = dict(slices)
        whole = whole - self.slices.keys()
        self.ways = border_ways(block, timer.degree)
        self.entering = {
            v.name: tuple(boundary_of(v, timer.degree, way) for way in self.ways)
            for v in block.inputs
        }
        self.leaving = {name: self._leaving(name) for name in block.outputs}
        self.region = region
        self.ops = {op.name: op for op in block.ops}
        self.states = {state.name for state in block.states}
        self.options = {
            op.name: legal_options(op, timer.degree, whole, self.slices) for op in block.ops
        }
        self.readers = _readers(block)
        self.saved = {t.value for op in block.ops for t in op.saved if t.value}
        self.read_for_backward = _read_for_backward(block)
        self.bytes_of = {v.name: v.nbytes for v in block.inputs}
        self.bytes_of |= {s.name: s.nbytes for s in block.states}
        for op in block.ops:
            self.bytes_of[op.name] = value_bytes(op, self.bytes_of)
        self.names = list(self.bytes_of)
        self.index = {name: index for index, name in enumerate(self.names)}
        self.unit = max(1, self._total_bytes() // _MAX_UNITS)
        self.read_as = {name: self._read_as(name) for name in self.names}
        self.picks = self._all_picks(whole)
        self.problem = self._build()
        self.fixed = {
            (entering, leaving): self._fixed(entering, leaving)
            for entering in self.ways
            for leaving in self.ways
        }

    def nearest(self, borders: Borders) -> Borders:
        """Return borders that are the same for this class, of the ways that differ for it."""
        entering, leaving = (way if way in self.ways else "whole" for way in borders)
        return entering, leaving

    def read(self, solution: ChoiceSolution, borders: Borders) -> Decision:
        """Return the decision that a solution under these borders stands for."""
        axes: dict[str, str] = {}
        keep: list[str] = []
        first = len(self.block.inputs) + len(self.block.states)
        for op, index in zip(self.block.ops, solution.options[first:], strict=False):
            pick = self.picks[op.name][index]
            if pick.axis != "whole":
                axes[op.name] = pick.axis
            if pick.keep:
                keep.append(op.name)
        mode = "none" if not self.region else ("selective" if keep else "full")
        return Decision(
            axes=axes,
            recompute=Recompute(mode=mode, keep=tuple(keep)),  # type: ignore[arg-type]
            borders=borders,
            slices=tuple(sorted(self.slices)),
        )

    def _leaving(self, name: str) -> tuple[str, ...]:
        """Return the placement in which an output leaves the block, for each way."""
        for op in self.block.ops:
            if op.name == name:
                placed = (leaving_placement(op.shape, self.timer.degree, way) for way in self.ways)
                return tuple(placement if op.needs_grad else "R" for placement in placed)
        return self.entering.get(name, ("R",) * len(self.ways))

    def _fixed(self, entering: Border, leaving: Border) -> dict[int, int]:
        """Return the options of inputs and reader under borders, where there are several."""
        place = self.ways.index(entering)
        fixed = {
            self.index[name]: [pick.axis for pick in self.picks[name]].index(placements[place])
            for name, placements in self.entering.items()
            if len(self.picks[name]) > 1
        }
        if len(self.ways) > 1:
            fixed[len(self.names)] = self.ways.index(leaving)
        return fixed

    def _total_bytes(self) -> int:
        saved = sum(t.nbytes for op in self.block.ops for t in op.saved)
        marks = sum(op.mark_bytes for op in self.block.ops)
        return saved + marks + _STATIC_FACTOR * sum(s.nbytes for s in self.block.states)

    def _read_as(self, name: str) -> tuple[str, ...]:
        """Return the placements in which a value is read."""
        read = [
            option.inputs[op.inputs.index(name)]
            for op in self.readers.get(name, ())
            for option in self.options[op.name]
        ]
        return tuple(dict.fromkeys(read))

    def _all_picks(self, whole: frozenset[str]) -> dict[str, tuple[_Pick, ...]]:
        picks: dict[str, tuple[_Pick, ...]] = {
            v.name: tuple(
                _Pick(axis=placement, keep=False, option=None)
                for placement in dict.fromkeys(self.entering[v.name])
            )
            for v in self.block.inputs
        }
        for state in self.block.states:
            picks[state.name] = tuple(
                _Pick(axis=placement, keep=False, option=None)
                for placement in self._stored_as(state, whole)
            )
        for op in self.block.ops:
            picks[op.name] = tuple(
                _Pick(axis=option.axis, keep=keep, option=option)
                for option in self.options[op.name]
                for keep in ((False, True) if self.region and may_keep(op, option) else (False,))
            )
        return picks

    def _stored_as(self, state: ParameterTrace, whole: frozenset[str]) -> list[str]:
        """Return the placements in which a state may be stored."""
        if state.name in self.slices:
            return [self.slices[state.name]]
        if state.name in whole or not state.is_parameter:
            return ["R"]
        stored = sorted(p for p in self.read_as[state.name] if p.startswith("S"))
        if len(state.shape) == 1:
            stored = [p for p in stored if Placement.parse(p).outer == 1]
        return ["R", *stored]

    def _build(self) -> ChoiceProblem:
        redone = self._redone()
        states = {name: self._value_states(name) for name in self.names}
        ops: list[tuple[ChoiceOption, ...]] = []
        for name in self.names:
            if name in self.ops:
                ops.append(self._op_options(self.ops[name], states[name], name in redone))
            else:
                ops.append(self._source_options(name, states[name]))
        sink = len(ops)
        ops.append((ChoiceOption(produces=0, time=0, memory=0),) * len(self.ways))
        links = [self._link(name, states[name], sink) for name in self.names]
        return ChoiceProblem(ops=tuple(ops), links=tuple(x for x in links if x is not None))

    def _redone(self) -> set[str]:
        if not self.region:
            return set()
        local = localize(self.block, {}, 1)
        return {op.name for op in redone_ops(local, Recompute(mode="full"))}

    def _value_states(self, name: str) -> dict[str, int]:
        """Return the placements of a value, as made and as read, with their index."""
        made = [pick.produces for pick in self.picks[name]]
        read = (*self.read_as[name], *self.leaving.get(name, ()))
        return {state: index for index, state in enumerate(dict.fromkeys((*made, *read)))}

    def _source_options(self, name: str, states: dict[str, int]) -> tuple[ChoiceOption, ...]:
        degree = self.timer.degree
        is_counted = degree > 1 and any(s.name == name for s in self.block.states)
        return tuple(
            ChoiceOption(
                produces=states[pick.produces],
                time=0,
                memory=self._units(
                    _STATIC_FACTOR
                    * is_counted
                    * (self.bytes_of[name] // (degree if pick.axis.startswith("S") else 1))
                ),
            )
            for pick in self.picks[name]
        )

    def _op_options(
        self, op: OpTrace, states: dict[str, int], is_redone: bool
    ) -> tuple[ChoiceOption, ...]:
        found = []
        for pick in self.picks[op.name]:
            option = pick.option
            assert option is not None, "an op has options"
            time = self.timer.traced_time(op, option)
            seconds, nbytes = self._op_cost(op, option, pick.keep, time, is_redone)
            found.append(
                ChoiceOption(
                    produces=states[pick.produces],
                    time=to_ticks(seconds),
                    memory=self._units(nbytes),
                )
            )
        return tuple(found)

    def _op_cost(
        self, op: OpTrace, option: ShardOption, keep: bool, time: OpTime, is_redone: bool
    ) -> tuple[float, int]:
        """Return seconds, redoing included, and bytes kept."""
        degree = self.timer.degree
        out_split = degree if option.output.startswith("S") else 1
        if self.region:
            redo_s = 0.0 if keep or not is_redone else time.forward_s
            memory = op.mark_bytes // out_split if keep and option.output != "P" else 0
            return time.total_s + redo_s, memory
        split = degree if option.is_split else 1
        inside = {"", *(cast.value for cast in op.casts)}
        memory = sum(t.nbytes for t in op.saved if t.value in inside) // split
        if op.name in self.saved and option.output != "P":
            memory += op.nbytes // out_split
        return time.total_s, memory

    def _units(self, nbytes: int) -> int:
        return -(-nbytes // self.unit)

    def _link(self, name: str, states: dict[str, int], sink: int) -> Link | None:
        consumers = []
        for op in self.readers.get(name, ()):
            position = op.inputs.index(name)
            required = tuple(
                states[pick.option.inputs[position]]
                for pick in self.picks[op.name]
                if pick.option is not None
            )
            consumers.append(Consumer(op=self.index[op.name], requires=required))
        if name in self.block.outputs:
            requires = tuple(states[placement] for placement in self.leaving[name])
            consumers.append(Consumer(op=sink, requires=requires))
        if not consumers:
            return None
        needs_grad = self._needs_grad(name)
        rows = tuple(
            tuple(self._transition(name, made, read, needs_grad) for read in states)
            for made in states
        )
        return Link(producer=self.index[name], consumers=tuple(consumers), transitions=rows)

    def _transition(
        self, name: str, made: str, read: str, needs_grad: bool
    ) -> tuple[int, int] | None:
        if read == _KEPT_PARTIAL:
            return (0, 0) if made == _KEPT_PARTIAL else None
        moved = transition(Placement.parse(made.rstrip("!")), Placement.parse(read))
        if moved is None or (made == _KEPT_PARTIAL and read == "P"):
            return None
        if name in self.states and made.startswith("S") and made != read:
            return None  # a state that is not read as one shard everywhere is stored whole
        nbytes = self.bytes_of[name]
        forward = self.timer.collective_s(moved[0], nbytes)
        backward = self.timer.collective_s(moved[1], nbytes) if needs_grad else 0.0
        local = nbytes // self.timer.degree if read.startswith("S") else nbytes
        memory = 0
        if self.region:
            if made == _KEPT_PARTIAL:
                memory = local
            else:
                forward *= 2
        elif name in self.read_for_backward and (moved[0] == "all_gather" or made == "P" != read):
            memory = local
        return to_ticks(forward + backward), self._units(memory)

    def _needs_grad(self, name: str) -> bool:
        if name in self.ops:
            return self.ops[name].needs_grad
        for value in self.block.inputs:
            if value.name == name:
                return value.is_activation and value.needs_grad
        return next(s.is_trained for s in self.block.states if s.name == name)


def _read_for_backward(block: BlockTrace) -> set[str]:
    """Return the values that some op saves as they come to it; views of a storage one by one."""
    owners = {op.name: op.storage for op in block.ops}
    return {
        name
        for op in block.ops
        for tensor in op.saved
        for name in op.inputs
        if tensor.value and owners.get(name, name) == tensor.value
    }


def _readers(block: BlockTrace) -> dict[str, list[OpTrace]]:
    readers: dict[str, list[OpTrace]] = {}
    for op in block.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
    return readers
