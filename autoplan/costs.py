"""Price the ways to run a block: seconds by category, and the parameters that it holds.

One `Pricer` serves one trace (one micro-batch size) on one cluster. It caches what depends on the
block class, the tensor-parallel degree and the decision only (`block_work`); what the setting adds
is in `call_prices`, bytes of stages in `stage_bytes`, whole plans in `plan_prices`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoplan.block_work import BlockWork, LayoutWork, layout_work, make_work
from autoplan.call_prices import (
    BlockPrice,
    GroupPrice,
    call_price,
    group_price,
    overlaps,
    split_seconds,
)
from autoplan.cluster import Cluster
from autoplan.conventions import WHOLE, Convention, StateSlices, possible_conventions
from autoplan.deferral import graph_nodes
from autoplan.detours import DetourDecisions, hands_to_alike
from autoplan.expert_parallel import expert_states
from autoplan.frontiers import Decision, Frontiers
from autoplan.graph import Trace
from autoplan.local import localize
from autoplan.search.problem import BlockOption
from autoplan.settings import Setting, Workload, shared_states
from autoplan.stage_costs import GroupBytes
from autoplan.step_costs import tie_s, transfer_s
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
        options: what `search_options` has made, by kind of call.
        least_kept: what `held` has found, likewise.
        alike: what `search_options.alike` has found, with one stage and with several.
    """

    trace: Trace
    cluster: Cluster
    workload: Workload
    recompute: str | None = None
    reference: Pricer | None = None
    tally: Tally = field(default_factory=Tally)
    frontiers: Frontiers = field(default_factory=Frontiers)
    _plain: dict[tuple[int, int, StateSlices, bool], Decision] = field(default_factory=dict)
    _decisions: dict[_Asked, tuple[Decision, ...]] = field(default_factory=dict)
    _conventions: dict[int, tuple[Convention, ...]] = field(default_factory=dict)
    _detours: dict[tuple[int, int, StateSlices], Mapping[Border, tuple[Border, ...]]] = field(
        default_factory=dict
    )
    _layouts: dict[tuple[int, int, object], LayoutWork] = field(default_factory=dict)
    _bases: dict[tuple[int, int, object], BlockWork] = field(default_factory=dict)
    _groups: dict[tuple[object, ...], GroupBytes] = field(default_factory=dict)
    _own: dict[tuple[int, bool], tuple[bool, ...]] = field(default_factory=dict)
    _zero: dict[tuple[object, ...], GroupPrice] = field(default_factory=dict)
    _names: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _num_calls: Counter[str] = field(default_factory=Counter)
    _fastest_s: dict[_Asked, float] = field(default_factory=dict)
    _timers: dict[tuple[int, bool], Timer] = field(default_factory=dict)
    _shared: dict[int, frozenset[str]] | None = None
    options: dict[tuple[object, ...], BlockOption] = field(default_factory=dict)
    least_kept: dict[tuple[object, ...], dict[GroupBytes, int]] = field(default_factory=dict)
    alike: dict[bool, list[list[int]]] = field(default_factory=dict)
    _held: list[frozenset[str]] | None = None
    _num_nodes: int | None = None
    _slowness: dict[tuple[Cluster, Setting], float] = field(default_factory=dict)
    _by_device: dict[Cluster, Pricer] = field(default_factory=dict)

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
        return Pricer(
            trace=self.trace,
            cluster=cluster,
            workload=workload,
            recompute=recompute,
            reference=self,
            _layouts=self._layouts,
            _bases=self._bases,
            _groups=self._groups,
            least_kept=self.least_kept,
        )

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
                self.timer(tp),
                whole=self.whole_states(block),
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
                    self.timer(tp),
                    whole=self.whole_states(block),
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
                self.timer(tp),
                whole=self.whole_states(block),
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
                self.timer(tp),
                whole=self.whole_states(block),
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

    def whole_states(self, block: int) -> frozenset[str]:
        """Return the states of a block class that several calls share."""
        if self._shared is None:
            self._shared = shared_states(self.trace)
        return self._shared.get(block, frozenset())

    def timer(self, tp: int, *, is_glue: bool = False) -> Timer:
        """Return the timer of a tensor-parallel degree; glue multiplies in the trace's dtype."""
        key = (tp, is_glue)
        if key not in self._timers:
            self._timers[key] = self._new_timer(tp, is_glue, self.tally)
        return self._timers[key]

    def _new_timer(self, tp: int, is_glue: bool, tally: Tally) -> Timer:
        dtype = None if is_glue else self.workload.product_dtype
        workload = self.workload
        return Timer(
            self.cluster, tp, tally, dtype, workload.attention_kernel, experts=workload.experts
        )

    def lookups(self, block: int, decision: Decision, tp: int) -> Counter[str]:
        """Return how the times of a block's ops are found, forward and backward each."""
        tally = Tally()
        is_glue = self.trace.blocks[block].is_glue
        timer = self._new_timer(tp, is_glue, tally)
        for op in self.base(block, decision, tp).local.ops:
            if op.op is not None:
                timer.traced_time(op.op, op.option)
        return tally.counts

    def base(self, block: int, decision: Decision, tp: int) -> BlockWork:
        """Return what a decision costs by itself."""
        key = (block, tp, decision.key)
        if key not in self._bases:
            timer = self.timer(tp, is_glue=self.trace.blocks[block].is_glue)
            layout = self._layout(block, decision, tp)
            self._bases[key] = make_work(layout, decision, timer, self.workload)
        return self._bases[key]

    def _layout(self, block: int, decision: Decision, tp: int) -> LayoutWork:
        """Return what a decision has in common with others that slice the block alike."""
        key = (block, tp, decision.layout)
        if key not in self._layouts:
            local = localize(
                self.trace.blocks[block],
                decision.axes,
                tp,
                self.whole_states(block).difference(decision.slices),
                borders=decision.borders,
                regathers=self.workload.engine.regathers_sequence,
            )
            timer = self.timer(tp, is_glue=local.block.is_glue)
            self._layouts[key] = layout_work(local, timer, self.workload)
        return self._layouts[key]

    def group(self, call: int, decision: Decision, setting: Setting, held: set[str]) -> GroupBytes:
        """Return the parameter bytes of a call; parameters in `held` are there already.

        Args:
            call: index into the chain.
            decision: how the block runs.
            setting: degrees.
            held: canonical FQNs that earlier calls of the stage hold; the call's own are added.
        """
        is_new = self._new_states(call, held)
        held.update(self._canonical(call))
        return self._group_of(call, decision, setting, is_new)

    def _new_states(self, call: int, held: Collection[str]) -> tuple[bool, ...]:
        """Return for each state of a call whether no earlier one, nor another call, has it."""
        names = self._canonical(call)
        return tuple(
            name not in held and name not in names[:place] for place, name in enumerate(names)
        )

    def _group_of(
        self, call: int, decision: Decision, setting: Setting, is_new: tuple[bool, ...]
    ) -> GroupBytes:
        block, tp, experts = self.trace.calls[call].block, setting.tp, self.workload.experts
        copies = experts.copies(setting.dp, tp) if experts.degree > 1 else 0
        key = (block, tp, decision.layout, is_new, copies)
        if key not in self._groups:
            group = self._make_group(block, decision, tp, is_new)
            states = expert_states(self.trace.blocks[block]) if copies else frozenset()
            if states:
                names = (state.name for state in self.trace.blocks[block].states)
                own = [new and n in states for n, new in zip(names, is_new, strict=True)]
                part = replace(self._make_group(block, decision, tp, own), copies=copies)
                group = replace(group, experts=part)
            self._groups[key] = group
        return self._groups[key]

    def _canonical(self, call: int) -> tuple[str, ...]:
        """Return one name for each state of a call, the same wherever a parameter is shared."""
        if call not in self._names:
            canonical = self.trace.first_names()
            states = self.trace.calls[call].states
            self._names[call] = tuple(canonical.get(fqn, fqn) for fqn in states)
        return self._names[call]

    def _make_group(
        self, block: int, decision: Decision, tp: int, is_new: Sequence[bool]
    ) -> GroupBytes:
        """Return the bytes of those states of a block that are new to a stage."""
        local = self._layout(block, decision, tp).local
        ratio = self.workload.parameter_bytes_per_traced_byte
        stored = trained = gathered = grads = largest = tensors = 0
        for state, is_own in zip(self.trace.blocks[block].states, is_new, strict=True):
            if not is_own:
                continue
            nbytes = local.state_bytes[state.name]
            if not state.is_parameter:
                stored += nbytes
                continue
            stored += nbytes * ratio
            gathered += nbytes
            largest = max(largest, nbytes * ratio)
            if state.is_trained:
                trained += nbytes * ratio
                grads += nbytes
                tensors += 1
        return GroupBytes(
            stored=stored,
            trained=trained,
            gathered=gathered,
            gathered_grads=grads,
            largest=largest,
            trained_tensors=tensors,
        )

    def own_group(self, call: int, decision: Decision, setting: Setting) -> GroupBytes:
        """Return the parameters that a call gathers, reduces and updates.

        Without a pipeline a parameter of several calls counts with the first; with one, calls that
        share it usually lie on different stages, and each counts it.
        """
        key = (call, setting.pp == 1)
        if key not in self._own:
            self._own[key] = self._new_states(call, self.shared_before(call) if key[1] else ())
        return self._group_of(call, decision, setting, self._own[key])

    def price(self, call: int, decision: Decision, setting: Setting) -> BlockPrice:
        """Return the seconds of a call under a setting."""
        work = self.base(self.trace.calls[call].block, decision, setting.tp)
        timer, split_s = self.timer(setting.tp), sum(self.split_s(work, setting))
        ties_s = self._ties_s(call, decision, setting)
        zero = self._zero_of(call, decision, setting, timer)
        return call_price(work, zero, setting, self.workload, timer, split_s, ties_s)

    def _zero_of(self, call: int, decision: Decision, setting: Setting, timer: Timer) -> GroupPrice:
        """Return what a call's parameters add, which micro-batches do not change."""
        group = self.own_group(call, decision, setting)
        is_glue = self.trace.blocks[self.trace.calls[call].block].is_glue
        degrees = (setting.dp, setting.tp, setting.pp, setting.dp_replicate, setting.axis_order)
        key = (group, is_glue, degrees, setting.zero_stage, setting.offload, setting.schedule)
        if key not in self._zero:
            self._zero[key] = group_price(group, setting, self.workload, timer, is_glue=is_glue)
        return self._zero[key]

    def _ties_s(self, call: int, decision: Decision, setting: Setting) -> float:
        """Return seconds in which gradients that other stages have too are summed, once a step."""
        block = self.trace.calls[call].block
        if setting.pp == 1 or not self.whole_states(block):
            return 0.0
        if not self._num_calls:
            calls = range(len(self.trace.calls))
            self._num_calls.update(name for c in calls for name in set(self._canonical(c)))
        nbytes = self._layout(block, decision, setting.tp).local.state_bytes
        names = zip(self.trace.blocks[block].states, self._canonical(call), strict=True)
        return sum(
            tie_s(nbytes[state.name], self._num_calls[name], setting, self.workload, self.cluster)
            for state, name in names
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

    def shared_before(self, call: int) -> frozenset[str]:
        """Return the parameters of a call that earlier calls read too."""
        if self._held is None:
            seen: set[str] = set()
            self._held = []
            for index in range(len(self.trace.calls)):
                own = set(self._canonical(index))
                self._held.append(frozenset(own & seen))
                seen |= own
        return self._held[call]

    @property
    def memory_unit(self) -> int:
        """Return the bytes of one unit of memory in the search: about 2**-20 of the capacity."""
        return max(1, self.cluster.capacity_bytes >> 20)

    def boundary_s(
        self, setting: Setting, cut: int, *, stage: int | None = None, is_sliced: bool = False
    ) -> float:
        """Return the seconds of sending one micro-batch's activations over a cut, one way.

        Args:
            setting: degrees and their order.
            cut: index of the first call after it.
            stage: before it; None: whichever is farthest from the next.
            is_sliced: as in `transfer_s`.
        """
        nbytes = self.trace.crossing_bytes[cut - 1]
        return transfer_s(
            nbytes, setting, self.workload, self.cluster, stage=stage, is_sliced=is_sliced
        )

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

    def action_s(self, setting: Setting) -> float:
        """Return seconds of the host in a forward or a backward of a pipeline stage, ops apart."""
        return self.timer(setting.tp).host.pipeline_action if setting.pp > 1 else 0.0

    def actions_s(self, setting: Setting) -> float:
        """Return seconds of the host in all actions of a stage for one micro-batch, ops apart."""
        return (3 if setting.schedule == "zero_bubble" else 2) * self.action_s(setting)

    def sent_s(self, setting: Setting, cut: int, stage: int, is_sliced: bool) -> float:
        """Return the seconds of sending what a stage hands on; the last rank sends to the first."""
        rank = stage % setting.pp
        sender = rank if rank < setting.pp - 1 else None
        return self.boundary_s(setting, cut, stage=sender, is_sliced=is_sliced)
