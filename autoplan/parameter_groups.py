"""The parameters of the calls of a chain as ZeRO and the optimizer treat them: bytes on a rank.

The parameters of a call are gathered, reduced and updated together. One that several calls share
counts once on a stage, with the first of them there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoplan.block_layouts import BlockLayouts
from autoplan.decision_tables import DecisionTable, Groups
from autoplan.expert_parallel import expert_states
from autoplan.frontiers import Decision
from autoplan.graph import Trace
from autoplan.settings import Setting, Workload
from autoplan.stage_costs import GroupBytes

__all__ = ["ParameterGroups"]


@dataclass(slots=True)
class ParameterGroups:
    """The parameters of the calls of one trace.

    Attributes:
        trace: of one micro-batch size.
        workload: optimizer and precision.
        layouts: of the blocks of the trace.
        made: cache: by class, degree, layout, which states count, and how many ranks hold the same
            experts.
    """

    trace: Trace
    workload: Workload
    layouts: BlockLayouts
    made: dict[tuple[object, ...], GroupBytes] = field(default_factory=dict)
    _own: dict[tuple[int, bool], tuple[bool, ...]] = field(default_factory=dict)
    _names: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _num_calls: Counter[str] = field(default_factory=Counter)
    _before: list[frozenset[str]] | None = None

    def of(self, call: int, decision: Decision, setting: Setting, held: set[str]) -> GroupBytes:
        """Return the parameter bytes of a call; parameters in `held` are there already.

        Args:
            call: index into the chain.
            decision: how the block runs.
            setting: degrees.
            held: canonical FQNs that earlier calls of the stage hold; the call's own are added.
        """
        is_new = self._new_states(call, held)
        held.update(self._canonical(call))
        return self._group(call, decision, setting, is_new)

    def own(self, call: int, decision: Decision, setting: Setting) -> GroupBytes:
        """Return the parameters that a call gathers, reduces and updates.

        Without a pipeline a parameter of several calls counts with the first; with one, calls that
        share it usually lie on different stages, and each counts it.
        """
        return self._group(call, decision, setting, self._own_states(call, setting))

    def own_of_each(self, call: int, table: DecisionTable, setting: Setting) -> Groups:
        """Return `own` of each decision of a table."""
        is_new = self._own_states(call, setting)
        key = (is_new, self._expert_copies(setting))
        if key not in table.groups:
            groups = [self._group(call, d, setting, is_new) for d in table.decisions]
            places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
            table.groups[key] = Groups(
                distinct=tuple(places), places=np.array([places[group] for group in groups])
            )
        return table.groups[key]

    def shared_before(self, call: int) -> frozenset[str]:
        """Return the parameters of a call that earlier calls read too."""
        if self._before is None:
            seen: set[str] = set()
            self._before = []
            for index in range(len(self.trace.calls)):
                own = set(self._canonical(index))
                self._before.append(frozenset(own & seen))
                seen |= own
        return self._before[call]

    def num_calls(self, call: int) -> tuple[int, ...]:
        """Return for each state of a call how many calls have it."""
        if not self._num_calls:
            calls = range(len(self.trace.calls))
            self._num_calls.update(name for c in calls for name in set(self._canonical(c)))
        return tuple(self._num_calls[name] for name in self._canonical(call))

    def _own_states(self, call: int, setting: Setting) -> tuple[bool, ...]:
        """Return which states of a call are in `own`."""
        key = (call, setting.pp == 1)
        if key not in self._own:
            self._own[key] = self._new_states(call, self.shared_before(call) if key[1] else ())
        return self._own[key]

    def _new_states(self, call: int, held: Collection[str]) -> tuple[bool, ...]:
        """Return for each state of a call whether no earlier one, nor another call, has it."""
        names = self._canonical(call)
        return tuple(
            name not in held and name not in names[:place] for place, name in enumerate(names)
        )

    def _canonical(self, call: int) -> tuple[str, ...]:
        """Return one name for each state of a call, the same wherever a parameter is shared."""
        if call not in self._names:
            canonical = self.trace.first_names()
            states = self.trace.calls[call].states
            self._names[call] = tuple(canonical.get(fqn, fqn) for fqn in states)
        return self._names[call]

    def _expert_copies(self, setting: Setting) -> int:
        """Return how many ranks hold the same experts where those are divided, else 0."""
        experts = self.workload.experts
        return experts.copies(setting.dp, setting.tp) if experts.degree > 1 else 0

    def _group(
        self, call: int, decision: Decision, setting: Setting, is_new: tuple[bool, ...]
    ) -> GroupBytes:
        block, tp, copies = self.trace.calls[call].block, setting.tp, self._expert_copies(setting)
        key = (block, tp, decision.layout, is_new, copies)
        if key not in self.made:
            group = self._bytes_of(block, decision, tp, is_new)
            states = expert_states(self.trace.blocks[block]) if copies else frozenset()
            if states:
                names = (state.name for state in self.trace.blocks[block].states)
                own = [new and n in states for n, new in zip(names, is_new, strict=True)]
                part = replace(self._bytes_of(block, decision, tp, own), copies=copies)
                group = replace(group, experts=part)
            self.made[key] = group
        return self.made[key]

    def _bytes_of(
        self, block: int, decision: Decision, tp: int, is_new: Sequence[bool]
    ) -> GroupBytes:
        """Return the bytes of those states of a block that are new to a stage."""
        local = self.layouts.of(block, decision, tp).local
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
