"""The blocks of a trace as one rank runs them: each layout is made and timed once."""

from __future__ import annotations

from dataclasses import dataclass, field

from autoplan.block_work import LayoutWork, layout_work
from autoplan.cluster import Cluster
from autoplan.frontiers import Decision
from autoplan.graph import Trace
from autoplan.local import localize
from autoplan.settings import Workload, shared_states
from autoplan.times import Tally, Timer

__all__ = ["BlockLayouts"]


@dataclass(slots=True)
class BlockLayouts:
    """The blocks of one trace on one rank of a cluster.

    Attributes:
        trace: of one micro-batch size.
        cluster: the devices.
        workload: optimizer and precision.
        tally: counts look-ups of times.
        works: cache: what decisions that slice a block alike have in common, by class, degree and
            layout.
    """

    trace: Trace
    cluster: Cluster
    workload: Workload
    tally: Tally
    works: dict[tuple[int, int, object], LayoutWork] = field(default_factory=dict)
    _timers: dict[tuple[int, bool], Timer] = field(default_factory=dict)
    _shared: dict[int, frozenset[str]] | None = None

    def of(self, block: int, decision: Decision, tp: int) -> LayoutWork:
        """Return what a decision has in common with others that slice the block alike."""
        key = (block, tp, decision.layout)
        if key not in self.works:
            local = localize(
                self.trace.blocks[block],
                decision.axes,
                tp,
                self.whole_states(block).difference(decision.slices),
                borders=decision.borders,
                regathers=self.workload.engine.regathers_sequence,
            )
            timer = self.timer(tp, is_glue=local.block.is_glue)
            self.works[key] = layout_work(local, timer, self.workload)
        return self.works[key]

    def whole_states(self, block: int) -> frozenset[str]:
        """Return the states of a block class that several calls share."""
        if self._shared is None:
            self._shared = shared_states(self.trace)
        return self._shared.get(block, frozenset())

    def timer(self, tp: int, *, is_glue: bool = False) -> Timer:
        """Return the timer of a tensor-parallel degree; glue multiplies in the trace's dtype."""
        key = (tp, is_glue)
        if key not in self._timers:
            self._timers[key] = self.new_timer(tp, is_glue, self.tally)
        return self._timers[key]

    def new_timer(self, tp: int, is_glue: bool, tally: Tally) -> Timer:
        """Return a timer that counts its look-ups in a tally of its own."""
        dtype = None if is_glue else self.workload.product_dtype
        workload = self.workload
        return Timer(
            self.cluster, tp, tally, dtype, workload.attention_kernel, experts=workload.experts
        )
