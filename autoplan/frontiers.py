"""Level 1: the ways to run a block class that are worth considering.

For a class and a tensor-parallel degree this builds the choice problems of `autoplan.search.choice`
(one without a recompute region, one with) from the trace, and reads back decisions: an axis for
every op, and what to keep. The problems approximate memory by a sum; every decision is afterwards
priced exactly by `autoplan.costs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autoplan.graph import BlockTrace, OpTrace, Placement, ShardOption
from autoplan.local import localize
from autoplan.plan import Recompute
from autoplan.redistribution import transition
from autoplan.search.choice import minimize_memory, solve_choice
from autoplan.search.frontier import choice_frontier
from autoplan.search.problem import ChoiceOption, ChoiceProblem, ChoiceSolution, Consumer, Link
from autoplan.times import OpTime, Timer

__all__ = ["Decision", "block_decisions", "fastest_ops_s", "plain_decision"]

_TICK_S = 1e-9
_STATIC_FACTOR = 4  # parameter, gradient and two moments; steers the choice only
_MAX_UNITS = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One way to run a block class: axes of its ops and what it recomputes.

    The last three are priced but not searched: `estimate` sets them.

    Attributes:
        axes: op name to axis, for ops that are not whole.
        recompute: what the whole block keeps.
        inner: ops that alone run again in backward, from what enters them.
        is_sequence_parallel: activations cross block borders as slices of tokens.
        slices_shared: parameters that several calls share may be sliced.
    """

    axes: dict[str, str] = field(default_factory=dict)
    recompute: Recompute = field(default_factory=lambda: Recompute(mode="none"))
    inner: tuple[str, ...] = ()
    is_sequence_parallel: bool = False
    slices_shared: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """Return a hashable form."""
        return (
            tuple(sorted(self.axes.items())),
            self.recompute.mode,
            self.recompute.keep,
            self.inner,
            self.is_sequence_parallel,
            self.slices_shared,
        )


def block_decisions(
    block: BlockTrace,
    timer: Timer,
    *,
    whole: frozenset[str] = frozenset(),
    points: int = 6,
    time_limit_s: float = 2.0,
    recompute: str | None = None,
) -> tuple[Decision, ...]:
    """Return the decisions on the frontier of time and memory of a block class, fastest first.

    Args:
        block: the class.
        timer: prices ops at the tensor-parallel degree in question.
        whole: states that must be stored whole.
        points: most points of each of the two frontiers.
        time_limit_s: of one solve.
        recompute: pins the mode: `none`, `full` or `selective`; None allows all. A class that has
            no decision of the pinned mode (nothing is saved, or nothing may be kept) recomputes
            nothing.
    """
    decisions: list[Decision] = []
    for region in (False, True):
        if (recompute == "none" and region) or (recompute in ("full", "selective") and not region):
            continue
        if region and not any(op.saved for op in block.ops):
            continue
        model = _ChoiceModel(block, timer, whole, region)
        count = points if region or timer.degree > 1 else 1
        for solution in choice_frontier(model.problem, points=count, time_limit_s=time_limit_s):
            if solution.status in ("optimal", "feasible"):
                decisions.append(model.read(solution))
    if recompute in (None, "full") and any(d.recompute.mode == "selective" for d in decisions):
        axes = [d for d in decisions if d.recompute.mode != "none"][-1].axes
        decisions.append(Decision(axes=axes, recompute=Recompute(mode="full")))
    unique = {d.key: d for d in decisions if recompute in (None, d.recompute.mode)}
    if not unique and recompute != "none":
        return block_decisions(
            block, timer, whole=whole, points=points, time_limit_s=time_limit_s, recompute="none"
        )
    return tuple(unique.values())


def plain_decision(
    block: BlockTrace, timer: Timer, *, whole: frozenset[str] = frozenset(), lean: bool = False
) -> Decision:
    """Return the fastest decision of a block class that recomputes nothing.

    With `lean`, the fastest among those that save most of the memory that sharding can save: within
    a quarter of the way from the leanest to the fastest.
    """
    model = _ChoiceModel(block, timer, whole, region=False)
    fastest = solve_choice(model.problem, None, time_limit_s=5.0)
    if lean and timer.degree > 1:
        leanest = minimize_memory(model.problem, time_limit_s=5.0)
        limit = leanest.memory + max(0, fastest.memory - leanest.memory) // 4
        return model.read(solve_choice(model.problem, limit, time_limit_s=5.0))
    return model.read(fastest)


def fastest_ops_s(block: BlockTrace, timer: Timer) -> float:
    """Return seconds below which no decision of the class is: each op at its fastest.

    Drops collectives and every constraint between ops: a bound of the frontier without a solve.
    """
    degree = timer.degree
    total = 0.0
    for op in block.ops:
        legal = [
            o
            for o in op.options
            if o.axis in ("whole", "partial") or (degree > 1 and o.size % degree == 0)
        ]
        total += min(
            (timer.traced_time(op, o.gemm_dim, o.is_split).total_s for o in legal), default=0.0
        )
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pick:
    """What one option of one op of the problem stands for."""

    axis: str
    keep: bool


class _ChoiceModel:
    """A block class as a choice problem.

    Ops of the problem: first the block's inputs and states (one option per placement in which they
    may lie), then its ops (option of sharding, times keep or redo in a region), last a reader that
    takes every output whole. A link's states are the placements of its value; a partial result that
    is kept has a state of its own, since its reduction then runs once only.
    """

    def __init__(
        self, block: BlockTrace, timer: Timer, whole: frozenset[str], region: bool
    ) -> None:
        self.block = block
        self.timer = timer
        self.whole = whole
        self.region = region
        self.options = {op.name: self._legal(op) for op in block.ops}
        self.readers = _readers(block)
        self.redone = self._redone()
        self.saved = {t.value for op in block.ops for t in op.saved if t.value}
        self.names = [v.name for v in block.inputs] + [s.name for s in block.states]
        self.names += [op.name for op in block.ops]
        self.unit = max(1, self._total_bytes() // _MAX_UNITS)
        self.states = {name: self._value_states(name) for name in self.names}
        self.picks: list[tuple[_Pick, ...]] = []
        self.problem = self._build()

    def read(self, solution: ChoiceSolution) -> Decision:
        """Return the decision that a solution stands for."""
        axes: dict[str, str] = {}
        keep: list[str] = []
        first = len(self.block.inputs) + len(self.block.states)
        for op, index in zip(self.block.ops, solution.options[first:], strict=False):
            pick = self.picks[self.names.index(op.name)][index]
            if pick.axis != "whole":
                axes[op.name] = pick.axis
            if pick.keep:
                keep.append(op.name)
        mode = "none" if not self.region else ("selective" if keep else "full")
        return Decision(axes=axes, recompute=Recompute(mode=mode, keep=tuple(keep)))  # type: ignore[arg-type]

    def _legal(self, op: OpTrace) -> tuple[ShardOption, ...]:
        degree = self.timer.degree
        whole = ShardOption(
            axis="whole", size=1, inputs=("R",) * len(op.inputs), output="R", is_split=False
        )
        options = op.options or (whole,)
        if degree == 1:
            return options[:1]
        return tuple(
            o
            for o in options
            if (o.axis in ("whole", "partial") or o.size % degree == 0)
            and not self._slices_whole_state(op, o)
        )

    def _slices_whole_state(self, op: OpTrace, option: ShardOption) -> bool:
        return any(
            name in self.whole and placement.startswith("S")
            for name, placement in zip(op.inputs, option.inputs, strict=True)
        )

    def _total_bytes(self) -> int:
        saved = sum(t.nbytes for op in self.block.ops for t in op.saved)
        marks = sum(op.mark_bytes for op in self.block.ops)
        return saved + marks + _STATIC_FACTOR * sum(s.nbytes for s in self.block.states)

    def _redone(self) -> dict[str, bool]:
        if not self.region:
            return {}
        from autoplan.liveness import redone_ops

        local = localize(self.block, {}, 1)
        again = {op.name for op in redone_ops(local, Recompute(mode="full"))}
        return {op.name: op.name in again for op in self.block.ops}

    def _value_states(self, name: str) -> tuple[str, ...]:
        """Return the placements of a value, as made and as read; `P!` is a kept partial result."""
        made = [self._produced(name, pick) for pick in self._all_picks(name)]
        read = [
            option.inputs[op.inputs.index(name)]
            for op in self.readers.get(name, ())
            for option in self.options[op.name]
        ]
        if name in self.block.outputs:
            read.append("R")
        return tuple(dict.fromkeys(made + read))

    def _all_picks(self, name: str) -> tuple[_Pick, ...]:
        state = next((s for s in self.block.states if s.name == name), None)
        if state is not None:
            wanted = {
                option.inputs[op.inputs.index(name)]
                for op in self.readers.get(name, ())
                for option in self.options[op.name]
            }
            is_whole = name in self.whole or not state.is_parameter
            stored = set() if is_whole else {p for p in wanted if p.startswith("S")}
            if len(state.shape) == 1:
                stored = {p for p in stored if Placement.parse(p).outer == 1}
            return tuple(_Pick(axis=p, keep=False) for p in ("R", *sorted(stored)))
        op = next((o for o in self.block.ops if o.name == name), None)
        if op is None:
            return (_Pick(axis="R", keep=False),)
        return tuple(
            _Pick(axis=option.axis, keep=keep)
            for option in self.options[name]
            for keep in ((False, True) if self.region and _may_keep(op, option) else (False,))
        )

    def _produced(self, name: str, pick: _Pick) -> str:
        if name not in self.options:
            return pick.axis
        output = next(o.output for o in self.options[name] if o.axis == pick.axis)
        return "P!" if output == "P" and pick.keep else output

    def _build(self) -> ChoiceProblem:
        ops: list[tuple[ChoiceOption, ...]] = []
        times = {op.name: self._times(op) for op in self.block.ops}
        bytes_of = {v.name: v.nbytes for v in self.block.inputs}
        bytes_of |= {s.name: s.nbytes for s in self.block.states}
        bytes_of |= {op.name: op.nbytes for op in self.block.ops}
        for name in self.names:
            picks = self._all_picks(name)
            self.picks.append(picks)
            ops.append(tuple(self._option(name, pick, times, bytes_of[name]) for pick in picks))
        sink = len(ops)
        ops.append((ChoiceOption(produces=0, time=0, memory=0),))
        links = [self._link(i, name, sink, bytes_of[name]) for i, name in enumerate(self.names)]
        return ChoiceProblem(ops=tuple(ops), links=tuple(x for x in links if x is not None))

    def _times(self, op: OpTrace) -> dict[str, OpTime]:
        timer = self.timer
        return {
            o.axis: timer.traced_time(op, o.gemm_dim, o.is_split) for o in self.options[op.name]
        }

    def _option(
        self, name: str, pick: _Pick, times: dict[str, dict[str, OpTime]], nbytes: int
    ) -> ChoiceOption:
        produces = self.states[name].index(self._produced(name, pick))
        degree = self.timer.degree
        if name not in self.options:
            is_state = any(s.name == name for s in self.block.states)
            local = nbytes // degree if pick.axis.startswith("S") else nbytes
            memory = _STATIC_FACTOR * local if is_state and degree > 1 else 0
            return ChoiceOption(produces=produces, time=0, memory=self._units(memory))
        op = next(o for o in self.block.ops if o.name == name)
        option = next(o for o in self.options[name] if o.axis == pick.axis)
        split = degree if option.is_split else 1
        out_split = degree if option.output.startswith("S") else 1
        time = times[name][pick.axis]
        seconds = time.total_s
        if self.region:
            seconds += 0.0 if pick.keep or not self.redone[name] else time.forward_s
            memory = op.mark_bytes // out_split if pick.keep and option.output != "P" else 0
        else:
            memory = sum(t.nbytes for t in op.saved if not t.value) // split
            if name in self.saved and option.output != "P":
                memory += nbytes // out_split
        return ChoiceOption(produces=produces, time=_ticks(seconds), memory=self._units(memory))

    def _units(self, nbytes: int) -> int:
        return -(-nbytes // self.unit)

    def _link(self, producer: int, name: str, sink: int, nbytes: int) -> Link | None:
        consumers = []
        states = self.states[name]
        for op in self.readers.get(name, ()):
            position = op.inputs.index(name)
            required = [
                states.index(option.inputs[position])
                for pick in self._all_picks(op.name)
                for option in self.options[op.name]
                if option.axis == pick.axis
            ]
            consumers.append(Consumer(op=self.names.index(op.name), requires=tuple(required)))
        if name in self.block.outputs:
            consumers.append(Consumer(op=sink, requires=(states.index("R"),)))
        if not consumers:
            return None
        rows = tuple(
            tuple(self._transition(name, made, read, nbytes) for read in states) for made in states
        )
        return Link(producer=producer, consumers=tuple(consumers), transitions=rows)

    def _transition(self, name: str, made: str, read: str, nbytes: int) -> tuple[int, int] | None:
        if read == "P!":
            return (0, 0) if made == "P!" else None
        moved = transition(Placement.parse(made.rstrip("!")), Placement.parse(read))
        if moved is None or (made == "P!" and read == "P"):
            return None
        forward = self.timer.collective_s(moved[0], nbytes)
        needs_grad = self._needs_grad(name)
        backward = self.timer.collective_s(moved[1], nbytes) if needs_grad else 0.0
        local = nbytes // self.timer.degree if read.startswith("S") else nbytes
        memory = 0
        if self.region:
            if made == "P!":
                memory = local
            else:
                forward *= 2
        elif name in self.saved and (moved[0] == "all_gather" or made == "P" != read):
            memory = local
        return _ticks(forward + backward), self._units(memory)

    def _needs_grad(self, name: str) -> bool:
        for value in self.block.inputs:
            if value.name == name:
                return value.is_activation and value.needs_grad
        for state in self.block.states:
            if state.name == name:
                return state.is_trained
        return next(op.needs_grad for op in self.block.ops if op.name == name)


def _may_keep(op: OpTrace, option: ShardOption) -> bool:
    """Return whether a mark is legal: never on an op that is run as several local kernels.

    The vocabulary-parallel embedding and loss save intermediate results, or reduce them in place.
    """
    is_many = op.kind != "gemm" and option.is_split and option.output in ("P", "R")
    return op.may_mark and op.mark_bytes > 0 and not is_many


def _ticks(seconds: float) -> int:
    return -int(-seconds // _TICK_S)


def _readers(block: BlockTrace) -> dict[str, list[OpTrace]]:
    readers: dict[str, list[OpTrace]] = {}
    for op in block.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op)
    return readers
