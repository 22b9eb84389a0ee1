"""Writes of a chain of calls that others must see: to memory that enters a call, and to states.

A call that would write to what enters it writes to a copy of it where a plan makes its values cross
borders that autograd lets nobody write through (see `autoplan.written_inputs`). Nobody else sees
what is written to a copy. And a stage has its own copy of the states that its calls read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.graph import ChangedState, LostWrite
from autoplan.op_facts import storage_owners, written_values
from autoplan.program import BlockGraph, Call, Program

__all__ = ["changed_parameter_text", "changed_states", "lost_under", "lost_writes", "why_copied"]


def changed_parameter_text(fqn: str) -> str:
    """Return why a parameter that the forward writes to cannot lie in slices, and what to do."""
    return (
        f"the forward changes the parameter {fqn}, which tensor parallelism, ZeRO and mixed "
        "precision store in slices of their own: pin tp=1 and zero_stage=0, make it a buffer, or "
        "change it after the optimizer's step"
    )


def lost_under(
    lost: Iterable[LostWrite],
    modes: Mapping[int, str],
    *,
    pp: int,
    zero_stage: int,
    is_mixed: bool,
) -> Iterator[tuple[LostWrite, str]]:
    """Yield the writes that a plan loses, and which of its decisions does.

    Args:
        lost: those that some plan loses.
        modes: recomputation per call; a call that is not in it is not recomputed.
        pp, zero_stage: of the plan.
        is_mixed: it trains in mixed precision.
    """
    for one in lost:
        reason = why_copied(
            modes.get(one.writer, "none"), pp=pp, zero_stage=zero_stage, is_mixed=is_mixed
        )
        if reason:
            yield one, reason


def why_copied(mode: str, *, pp: int, zero_stage: int, is_mixed: bool) -> str:
    """Return which decision makes a block write to copies of its inputs; empty if none does.

    Args:
        mode: of the block's recomputation.
        pp, zero_stage, is_mixed: as in `lost_under`.
    """
    if pp > 1:
        return f"pp={pp}"
    if zero_stage:
        return f"zero_stage={zero_stage}"
    if is_mixed:
        return "mixed precision"
    return f"recompute={mode}" if mode in ("full", "selective") else ""


def lost_writes(program: Program) -> tuple[LostWrite, ...]:
    """Return the writes to what enters a call that somebody misses if they are made to copies."""
    memory = _Memory.of(program)
    if not any(memory.written):
        return ()
    writers: dict[str, list[int]] = {}  # the calls that wrote to a memory
    made: dict[str, int] = {}
    found: dict[LostWrite, None] = {}
    for index, call in enumerate(program.calls):
        writes = memory.written_arguments(call)
        changed = {memory.first(arg) for arg in writes}
        for arg in call.args:
            first = memory.first(arg)
            own = [index] if first in changed and arg not in writes else []
            for writer in (*writers.get(first, ()), *own):
                if made.get(arg, -1) < writer:
                    found[LostWrite(writer=writer, reader=index, value=arg)] = None
        for fqn in sorted(memory.states[first] for first in changed & memory.states.keys()):
            found[LostWrite(writer=index, reader=None, value=fqn)] = None
        for first in changed:
            writers.setdefault(first, []).append(index)
        made.update(dict.fromkeys(call.outs, index))
        memory.add(call)
    return tuple(found)


def changed_states(program: Program) -> tuple[ChangedState, ...]:
    """Return the states that the forward writes to, each with the calls that read or write it."""
    memory = _Memory.of(program)
    if not any(memory.written):
        return ()
    changed: dict[str, None] = {}
    users: dict[str, list[int]] = {}
    for index, call in enumerate(program.calls):
        graph = program.graphs[call.graph]
        written = memory.written[call.graph]
        for state, fqn in zip(graph.states, call.states, strict=True):
            users.setdefault(fqn, []).append(index)
            if state.name in written:
                changed[fqn] = None
        for arg in memory.written_arguments(call):
            fqn = memory.states.get(memory.first(arg), "")
            if fqn:
                changed[fqn] = None
                users[fqn].append(index)
        memory.add(call)
    return tuple(ChangedState(fqn=fqn, calls=tuple(dict.fromkeys(users[fqn]))) for fqn in changed)


@dataclass(slots=True)
class _Memory:
    """Which values of a program lie in the same memory.

    Attributes:
        graphs: of the program.
        written: per graph, the values whose memory its ops write to.
        owners: per graph, `storage_owners` of its ops.
        firsts: per value that has it in common with an earlier one: the first of them.
        states: such first values that lie in the memory of a state: its FQN.
    """

    graphs: Sequence[BlockGraph]
    written: Sequence[set[str]]
    owners: Sequence[dict[str, str]]
    firsts: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program) -> _Memory:
        """Return what is known before the first call."""
        written = [written_values(graph.ops) for graph in program.graphs]
        owners = [storage_owners(graph.ops) for graph in program.graphs]
        return cls(graphs=program.graphs, written=written, owners=owners)

    def written_arguments(self, call: Call) -> set[str]:
        """Return the values of the program that a call writes to."""
        inner = dict(zip(self.graphs[call.graph].inputs, call.args, strict=True))
        return {inner[name] for name in self.written[call.graph] & set(inner)}

    def first(self, value: str) -> str:
        """Return the first value in the memory of a value."""
        return self.firsts.get(value, value)

    def add(self, call: Call) -> None:
        """Take in what a call returns."""
        graph, owners = self.graphs[call.graph], self.owners[call.graph]
        inner = dict(zip(graph.inputs, call.args, strict=True))
        fqns = dict(zip((s.name for s in graph.states), call.states, strict=True))
        own: dict[str, str] = {}
        for name, out in zip(graph.outputs, call.outs, strict=True):
            owner = owners.get(name, name)
            source = inner.get(owner)
            own.setdefault(owner, out)
            self.firsts[out] = self.first(source) if source is not None else own[owner]
            if owner in fqns:
                self.states[self.firsts[out]] = fqns[owner]
