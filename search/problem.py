"""The three search problems and their solutions: frozen values of plain integers.

Times are integers in ticks (the caller says how long a tick is), memory is integers in units of
the caller's choice. Uses and costs were rounded up and capacities down before they came here, so
that a solution feasible in integers is feasible in seconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "SLOWNESS_UNIT",
    "BlockOption",
    "ChoiceOption",
    "ChoiceProblem",
    "ChoiceSolution",
    "Consumer",
    "Detour",
    "Link",
    "PipelineProblem",
    "PipelineSolution",
    "Run",
    "Status",
]

SLOWNESS_UNIT = 1024  # of `PipelineProblem.slowness`

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOption:
    """One way to run one op: what it costs by itself and the state its result is in.

    Attributes:
        produces: index of the state its result has, into the link's `transitions` rows.
        time: ticks, at least 0.
        memory: units kept for the backward pass, at least 0.
        forbidden: the option may not be chosen (kept so that indices stay stable).
    """

    produces: int
    time: int
    memory: int
    forbidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """An op that reads a link, and the state that each of its options requires there."""

    op: int
    requires: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A value on its way from its producer to all its consumers.

    Attributes:
        producer: index of the op that makes the value.
        consumers: the ops that read it.
        transitions: `transitions[f][g]` is `(time, memory)` of having a value made in state f also
            in state g, paid once however many consumers require g; None where f cannot become g.
    """

    producer: int
    consumers: tuple[Consumer, ...]
    transitions: tuple[tuple[tuple[int, int] | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceProblem:
    """Level 1: choose one option per op; ops are in topological order."""

    ops: tuple[tuple[ChoiceOption, ...], ...]
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSolution:
    """One option index per op, with the objective, its lower bound and the memory it needs."""

    status: Status
    options: tuple[int, ...]
    time: int
    bound: int
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOption:
    """One way to run a block: a point of its frontier under one setting of the mesh.

    Attributes:
        forward: ticks of one micro-batch forward.
        backward: ticks of one micro-batch backward, recomputation included.
        once: ticks paid once per step (optimizer step, exposed gradient reduction).
        kept: memory units held per live micro-batch between forward and backward.
        static: memory units held all the time (parameters, gradients, optimizer state).
        working: memory units of the largest transient while this block runs; the stage needs the
            largest of its blocks'.
    """

    forward: int
    backward: int
    once: int
    kept: int
    static: int
    working: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Detour:
    """Options under which blocks of a run hand over to each other in another way for a while.

    Attributes:
        first: indices of options that leave the usual way.
        inner: that stay in the other one; may be empty.
        last: that come back.
    """

    first: range
    inner: range
    last: range


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`count` consecutive blocks that are alike and share their options.

    Attributes:
        count: at least 1.
        options: the plain ones, then those of one detour after the other: first, inner, last.
        detours: of which a stage may take one; see detours.py.
    """

    count: int
    options: tuple[BlockOption, ...]
    detours: tuple[Detour, ...] = ()

    @property
    def num_plain(self) -> int:
        """Return the number of options that belong to no detour."""
        return self.detours[0].first.start if self.detours else len(self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProblem:
    """Level 2: cut a chain of blocks into stages and choose an option for every block.

    minimise   sum_s t[s] + (num_microbatches - 1) * max_s t[s] + max_s once[s] + constant
    where      t[s] = slowness[s] * (forward + backward of the stage's blocks, rounded up to
                      `grain`) + boundary[s] + the crossing of each of its cuts
               once[s] = that of the stage's blocks, rounded up to `once_grain`
    subject to static + live[s] * kept + max working + fixed[s] <= capacity[s]   for every stage s

    Attributes:
        runs: the chain, first block first.
        num_microbatches: at least 1.
        live: micro-batches alive at once per stage (1F1B: min(m, pp - s)).
        capacity: memory units per stage.
        fixed: memory units each stage needs besides its blocks (reserve, communication buffers).
        boundary: ticks per micro-batch that each stage spends to send and receive, anywhere.
        crossing: for every position between two consecutive blocks the ticks per micro-batch that a
            cut there costs both of its stages besides; empty: none.
        constant: ticks added to the objective.
        cut_allowed: for every position between two consecutive blocks (`num_blocks - 1` of them),
            whether a stage may end there; empty allows all.
        together: groups of block indices that must share one stage (tied parameters that may not
            be split).
        min_blocks: least blocks per stage.
        slowness: per stage by how much its device is slower than the one whose times the options
            have, in units of 1 / `SLOWNESS_UNIT`; empty: all are as fast.
        grain, once_grain: ticks that count as no difference between stages.
        anchors: per block whether it can make a stage: every stage must have one that can; empty:
            every block can.
    """

    runs: tuple[Run, ...]
    num_microbatches: int
    live: tuple[int, ...]
    capacity: tuple[int, ...]
    fixed: tuple[int, ...]
    boundary: tuple[int, ...]
    constant: int = 0
    cut_allowed: tuple[bool, ...] = ()
    together: tuple[tuple[int, ...], ...] = ()
    min_blocks: int = 1
    grain: int = 1
    once_grain: int = 1
    anchors: tuple[bool, ...] = ()
    slowness: tuple[int, ...] = ()
    crossing: tuple[int, ...] = ()

    def border(self, stage: int, start: int, end: int) -> int:
        """Return the ticks that blocks start..end-1 as a stage spend to send and receive."""
        cuts = (cut for cut in (start, end) if 0 < cut <= len(self.crossing))
        return self.boundary[stage] + sum(self.crossing[cut - 1] for cut in cuts)

    def on_stage(self, time: int, stage: int) -> int:
        """Return the ticks of a stage's blocks on its own device, rounded up."""
        return -(-time * self.slowness[stage] // SLOWNESS_UNIT) if self.slowness else time

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the chain."""
        return sum(run.count for run in self.runs)

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSolution:
    """Stage ends and an option index per block.

    Attributes:
        ends: per stage the index after its last block; the last equals `num_blocks`.
        options: per block the index of its option; within a run and a stage, blocks with the
            smaller index come first.
        objective: ticks; `bound` is proven: no solution is below it.
        variant: which one of the caller's problems it solves, where there are several.
        is_final: more time would neither improve it nor raise the bound.
    """

    status: Status
    ends: tuple[int, ...]
    options: tuple[int, ...]
    objective: int
    bound: int
    variant: int = 0
    is_final: bool = False
