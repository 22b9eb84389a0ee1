"""Price the ways to run a block: seconds by category.

One `Pricer` serves one trace (one micro-batch size) on one cluster. It caches what depends on the
block class, the tensor-parallel degree and the decision only (`block_work`); what the setting adds
is in `call_prices`, parameters in `parameter_groups`, borders of stages in `border_seconds`, their
bytes in `stage_bytes`, whole plans in `plan_prices`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoplan.block_layouts import BlockLayouts
from autoplan.block_work import BlockWork, make_work
from autoplan.call_prices import (
    BlockPrice,
    CallSeconds,
    GroupPrice,
    call_price,
    call_seconds,
    group_price,
    overlaps,
    split_seconds,
)
from autoplan.cluster import Cluster
from autoplan.conventions import WHOLE, Convention, StateSlices, possible_conventions
from autoplan.decision_tables import DecisionTable
from autoplan.deferral import graph_nodes
from autoplan.detours import DetourDecisions, hands_to_alike
from autoplan.frontiers import Decision, Frontiers
from autoplan.graph import Trace
from autoplan.parameter_groups import ParameterGroups
from autoplan.search.problem import BlockOption
from autoplan.settings import Setting, Workload
from autoplan.stage_costs import GroupBytes
from autoplan.step_costs import tie_s
from autoplan.tensor_layout import WHOLE_BORDERS, Border, Borders
from autoplan.times import Tally, Timer

__all__ = ["Pricer"]

_Asked = tuple[int, int, Borders, StateSlices]
"""A class: its index, degree, how activations enter and leave, its shared states."""


@dataclass(slots=True)
class Pricer:
    """Prices blocks of one trace on one cluster.

    Attributes:
        trace: of one micro-batch size.
        cluster: the devices.
        workload: optimizer and precision.
        recompute: pins the mode of every block.
        reference: whose frontiers are priced here, at this micro-batch size.
        tally: counts look-ups.
        frontiers: solves the problems of block classes.
        layouts: the blocks as one rank runs them.
        groups: the parameters of calls.
        options, least: what `search_options` has made, by kind of call.
        least_kept: what `held` has found, likewise.
        alone, fastest_calls: what `bounds` has found: of a setting, of a degree, by convention.
        alike: what `search_options.alike` has found, with one stage and with several.
    """

    trace: Trace
    cluster: Cluster
    workload: Workload
    recompute: str | None = None
    reference: Pricer | None = None
    tally: Tally = field(default_factory=Tally)
    frontiers: Frontiers = field(default_factory=Frontiers)
    layouts: BlockLayouts = field(init=False)
    groups: ParameterGroups = field(init=False)
    _plain: dict[tuple[int, int, StateSlices, bool], Decision] = field(default_factory=dict)
    _decisions: dict[_Asked, tuple[Decision, ...]] = field(default_factory=dict)
    _conventions: dict[int, tuple[Convention, ...]] = field(default_factory=dict)
    _detours: dict[tuple[int, int, StateSlices], Mapping[Border, tuple[Border, ...]]] = field(
        default_factory=dict
    )
    _bases: dict[tuple[int, int, object], BlockWork] = field(default_factory=dict)
    _tables: dict[tuple[int, ...], DecisionTable] = field(default_factory=dict)
    _zero: dict[tuple[object, ...], GroupPrice] = field(default_factory=dict)
    _fastest_s: dict[_Asked, float] = field(default_factory=dict)
    options: dict[tuple[object, ...], tuple[BlockOption, ...]] = field(default_factory=dict)
    least: dict[tuple[object, ...], BlockOption] = field(default_factory=dict)
    least_kept: dict[tuple[object, ...], dict[GroupBytes, int]] = field(default_factory=dict)
    alone: dict[tuple[Setting, Convention], int] = field(default_factory=dict)
    fastest_calls: dict[tuple[int, Convention], list[float]] = field(default_factory=dict)
    alike: dict[bool, list[list[int]]] = field(default_factory=dict)
    _num_nodes: int | None = None
    _slowness: dict[tuple[Cluster, Setting], float] = field(default_factory=dict)
    _by_device: dict[Cluster, Pricer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layouts = BlockLayouts(self.trace, self.cluster, self.workload, self.tally)
        self.groups = ParameterGroups(self.trace, self.workload, self.layouts)

    def of(self, trace: Trace) -> Pricer:
        """Return the pricer of another trace of the model; itself for its own."""
        if self.trace is trace:
            return self
        return Pricer(
            trace=trace, cluster=self.cluster, workload=self.workload, recompute=self.recompute
        )

    def only_for_memory(
        self, cluster: Cluster, workload: Workload, recompute: str | None
    ) -> Pricer:
        """Return a pricer that says what these decisions hold under another cluster or workload.

        Its seconds are not to be asked for. What blocks hold is found once for both.
        """
        other = Pricer(
            trace=self.trace,
            cluster=cluster,
            workload=workload,
            recompute=recompute,
            reference=self,
            _bases=self._bases,
            least_kept=self.least_kept,
        )
        other.layouts.works = self.layouts.works
        other.groups.made = self.groups.made
        return other

    def decisions(
        self, block: int, tp: int, convention: Convention = WHOLE
    ) -> tuple[Decision, ...]:
        """Return the frontier of a block class at a tensor-parallel degree, fastest first.

        Where activations cross borders whole, the lean layout of the simple strategies is among
        them. With a `reference` pricer they are its frontier, priced here at this micro-batch size.
        """
        if self.reference is not None:
            return self.reference.decisions(block, tp, convention)
        return self._frontier(block, tp, convention.borders, convention)

    def _frontier(
        self, block: int, tp: int, borders: Borders, convention: Convention
    ) -> tuple[Decision, ...]:
        """Return the frontier of a class whose activations enter and leave so, fastest first."""
        slices = convention.of(block)
        key = (block, tp, borders, slices)
        if key not in self._decisions:
            found = self.frontiers.decisions(
                self.trace.blocks[block],
                self.layouts.timer(tp),
                whole=self.layouts.whole_states(block),
                recompute=self._recompute_of(block),
                borders=borders,
                slices=slices,
                offloads="activations" in self.workload.offload,
            )
            is_whole = borders == WHOLE_BORDERS
            if is_whole and tp > 1 and self.recompute in (None, "none"):
                lean = self.plain_decision(block, tp, convention, lean=True)
                if all(lean.key != d.key for d in found):
                    found += (lean,)
            self._decisions[key] = found
        return self._decisions[key]

    def detours(self, block: int, tp: int, convention: Convention = WHOLE) -> tuple[Border, ...]:
        """Return the other ways that a stretch of blocks of a class may hand over in, with gain."""
        if self.reference is not None:
            return self.reference.detours(block, tp, convention)
        slices = convention.of(block)
        key = (block, tp, slices)
        if key not in self._detours:
            self._detours[key] = {}
            if tp > 1 and hands_to_alike(self.trace, block):
                self._detours[key] = self.frontiers.detours(
                    self.trace.blocks[block],
                    self.layouts.timer(tp),
                    whole=self.layouts.whole_states(block),
                    recompute=self._recompute_of(block),
                    slices=slices,
                )
        return self._detours[key].get(convention.borders[0], ())

    def detour_decisions(
        self, block: int, tp: int, convention: Convention = WHOLE
    ) -> tuple[DetourDecisions, ...]:
        """Return the frontiers of a class for each of its `detours`."""
        if self.reference is not None:
            return self.reference.detour_decisions(block, tp, convention)
        base = convention.borders[0]
        return tuple(
            DetourDecisions(
                first=self._frontier(block, tp, (base, way), convention),
                inner=self._frontier(block, tp, (way, way), convention),
                last=self._frontier(block, tp, (way, base), convention),
            )
            for way in self.detours(block, tp, convention)
        )

    def _recompute_of(self, block: int) -> str | None:
        return "none" if self.loses_writes(block) else self.recompute

    def loses_writes(self, block: int) -> bool:
        """Return whether somebody would miss what a class writes if it ran again."""
        return any(self.trace.calls[lost.writer].block == block for lost in self.trace.lost_writes)

    def plain_decision(
        self, block: int, tp: int, convention: Convention = WHOLE, *, lean: bool = False
    ) -> Decision:
        """Return the fastest (or leanest) decision of a class that recomputes nothing.

        Activations cross its borders whole, whatever the convention says about them.
        """
        if self.reference is not None:
            return self.reference.plain_decision(block, tp, convention, lean=lean)
        slices = convention.of(block)
        key = (block, tp, slices, lean)
        if key not in self._plain:
            self._plain[key] = self.frontiers.plain(
                self.trace.blocks[block],
                self.layouts.timer(tp),
                whole=self.layouts.whole_states(block),
                lean=lean,
                slices=slices,
            )
        return self._plain[key]

    def fastest_s(self, block: int, tp: int, convention: Convention = WHOLE) -> float:
        """Return seconds below which no block of a class is at this micro-batch size, on average.

        The first and the last of a stretch that hands over in another way count as their mean.
        """
        base = convention.borders[0]

        def fastest(entering: Border, leaving: Border) -> float:
            return self._fastest_under(block, tp, (entering, leaving), convention.of(block))

        others = [
            min(fastest(way, way), (fastest(base, way) + fastest(way, base)) / 2)
            for way in self.detours(block, tp, convention)
        ]
        return min([fastest(base, base), *others])

    def _fastest_under(self, block: int, tp: int, borders: Borders, slices: StateSlices) -> float:
        key = (block, tp, borders, slices)
        if key not in self._fastest_s:
            self._fastest_s[key] = self.frontiers.fastest_s(
                self.trace.blocks[block],
                self.layouts.timer(tp),
                whole=self.layouts.whole_states(block),
                borders=borders,
                slices=slices,
            )
        return self._fastest_s[key]

    def conventions(self, tp: int) -> tuple[Convention, ...]:
        """Return what blocks may agree on at a degree, the simplest first."""
        if self.reference is not None:
            return self.reference.conventions(tp)
        if tp not in self._conventions:
            self._conventions[tp] = possible_conventions(self, tp)
        return self._conventions[tp]

    def lookups(self, block: int, decision: Decision, tp: int) -> Counter[str]:
        """Return how the times of a block's ops are found, forward and backward each."""
        tally = Tally()
        is_glue = self.trace.blocks[block].is_glue
        timer = self.layouts.new_timer(tp, is_glue, tally)
        for op in self.base(block, decision, tp).local.ops:
            if op.op is not None:
                timer.traced_time(op.op, op.option)
        return tally.counts

    def base(self, block: int, decision: Decision, tp: int) -> BlockWork:
        """Return what a decision costs by itself."""
        key = (block, tp, decision.key)
        if key not in self._bases:
            timer = self.layouts.timer(tp, is_glue=self.trace.blocks[block].is_glue)
            layout = self.layouts.of(block, decision, tp)
            self._bases[key] = make_work(layout, decision, timer, self.workload)
        return self._bases[key]

    def table(self, block: int, decisions: Sequence[Decision], tp: int) -> DecisionTable:
        """Return what decisions of a class cost by themselves; made once for the same ones."""
        key = (block, tp, *map(id, decisions))
        if key not in self._tables:
            works = [self.base(block, decision, tp) for decision in decisions]
            self._tables[key] = DecisionTable(decisions=tuple(decisions), works=works)
        return self._tables[key]

    def price(self, call: int, decision: Decision, setting: Setting) -> BlockPrice:
        """Return the seconds of a call under a setting."""
        work = self.base(self.trace.calls[call].block, decision, setting.tp)
        timer, split_s = self.layouts.timer(setting.tp), sum(self.split_s(work, setting))
        ties_s = self._ties_s(call, decision, setting)
        zero = self._zero_of(call, self.groups.own(call, decision, setting), setting, timer)
        return call_price(work, zero, setting, self.workload, timer, split_s, ties_s)

    def seconds(self, call: int, decisions: Sequence[Decision], setting: Setting) -> CallSeconds:
        """Return the seconds of a call under a setting, arrays [decision]: those of `price`."""
        block, timer = self.trace.calls[call].block, self.layouts.timer(setting.tp)
        table = self.table(block, decisions, setting.tp)
        split_s: Any = 0.0
        ties_s: Any = 0.0
        if setting.schedule == "zero_bubble":
            split_s = np.array([sum(self.split_s(work, setting)) for work in table.works])
        if setting.pp > 1 and self.layouts.whole_states(block):
            ties_s = np.array([self._ties_s(call, d, setting) for d in decisions])
        groups = self.groups.own_of_each(call, table, setting)
        zero = groups.prices(lambda group: self._zero_of(call, group, setting, timer))
        extremes = np.maximum, np.minimum
        return call_seconds(
            table, zero, setting, self.workload, self.cluster, split_s, ties_s, extremes=extremes
        )

    def _zero_of(self, call: int, group: GroupBytes, setting: Setting, timer: Timer) -> GroupPrice:
        """Return what a call's parameters add, which micro-batches do not change."""
        is_glue = self.trace.blocks[self.trace.calls[call].block].is_glue
        degrees = (setting.dp, setting.tp, setting.pp, setting.dp_replicate, setting.axis_order)
        key = (group, is_glue, degrees, setting.zero_stage, setting.offload, setting.schedule)
        if key not in self._zero:
            self._zero[key] = group_price(group, setting, self.workload, timer, is_glue=is_glue)
        return self._zero[key]

    def _ties_s(self, call: int, decision: Decision, setting: Setting) -> float:
        """Return seconds in which gradients that other stages have too are summed, once a step."""
        block = self.trace.calls[call].block
        if setting.pp == 1 or not self.layouts.whole_states(block):
            return 0.0
        nbytes = self.layouts.of(block, decision, setting.tp).local.state_bytes
        states = zip(self.trace.blocks[block].states, self.groups.num_calls(call), strict=True)
        return sum(
            tie_s(nbytes[state.name], count, setting, self.workload, self.cluster)
            for state, count in states
            if state.is_trained
        )

    def split_s(self, work: BlockWork, setting: Setting) -> tuple[float, float]:
        """Return seconds of the host for a split of a block's backward: to the inputs, and later.

        Half the nodes of an even stage lie below the block. The first stage is priced like others.
        """
        if setting.schedule != "zero_bubble":
            return 0.0, 0.0
        if self._num_nodes is None:
            self._num_nodes = graph_nodes(self.trace)
        nodes = self._num_nodes / (2 * setting.pp * setting.virtual_stages)
        return split_seconds(work, nodes, self.cluster)

    def deferred_s(self, work: BlockWork, setting: Setting) -> float:
        """Return seconds of a block's backward that a split leaves for later, the host's included.

        A host beside the device is taken to be waited for at once.
        """
        host_s = 0.0 if overlaps(setting, self.cluster) else self.split_s(work, setting)[1]
        return work.deferred.backward_s + host_s

    @property
    def memory_unit(self) -> int:
        """Return the bytes of one unit of memory in the search: about 2**-20 of the capacity."""
        return max(1, self.cluster.capacity_bytes >> 20)

    def on_stage(self, setting: Setting, stage: int) -> Pricer:
        """Return the pricer of a stage's own type of device; this one where all are alike."""
        if not self.cluster.slower:
            return self
        own = self.cluster.on_stage(setting, stage)
        if own not in self._by_device:
            self._by_device[own] = Pricer(
                trace=self.trace,
                cluster=own,
                workload=self.workload,
                recompute=self.recompute,
                tally=self.tally,
                frontiers=self.frontiers,
            )
        return self._by_device[own]

    def slowness(self, setting: Setting, stage: int) -> float:
        """Return how many times longer a stage's type takes for all blocks than the first type."""
        own = self.on_stage(setting, stage)
        if own.cluster.device is self.cluster.device:
            return 1.0
        key = (own.cluster, setting)
        if key not in self._slowness:
            first = {
                call.block: index for index, call in reversed(list(enumerate(self.trace.calls)))
            }
            count = Counter(call.block for call in self.trace.calls)
            own_s, first_s = 0.0, 0.0
            for block, call in first.items():
                decision = self.plain_decision(block, setting.tp)
                theirs, ours = (x.price(call, decision, setting) for x in (own, self))
                own_s += count[block] * (theirs.forward_s + theirs.backward_s)
                first_s += count[block] * (ours.forward_s + ours.backward_s)
            self._slowness[key] = max(1.0, own_s / first_s)
        return self._slowness[key]
