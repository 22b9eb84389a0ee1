"""Cut a flat captured program into a chain of calls of block graphs.

Blocks are told by the module stack that export leaves on every op, see `autoplan.blocks`; what runs
outside of them is glue. Ops that depend on no parameter are side ops. Equal segments share one
block graph, and shortened runs are put back as calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from autoplan.blocks import Segment, find_segments
from autoplan.op_facts import (
    is_random,
    mutates_input,
    storage_owners,
    written_inputs,
    written_values,
)
from autoplan.program import (
    BlockGraph,
    Call,
    Op,
    Program,
    State,
    TensorMeta,
    text_hash,
)
from autoplan.shortening import Shortening, ShortRun

__all__ = ["FlatProgram", "NotAChain", "build_program"]


class NotAChain(Exception):
    """A shortened run did not come back as a chain of equal calls; capture it in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatProgram:
    """The exported graph as a flat list of ops with absolute state names."""

    inputs: tuple[str, ...]
    input_metas: tuple[TensorMeta, ...]
    input_keys: tuple[str, ...]
    states: Mapping[str, str]
    state_metas: Mapping[str, TensorMeta]
    parameters: frozenset[str]
    constants: Mapping[str, torch.Tensor]
    constant_metas: Mapping[str, TensorMeta]
    ops: tuple[Op, ...]
    stacks: Mapping[str, tuple[tuple[str, str], ...]]
    loss: str
    notes: tuple[str, ...]


def build_program(
    flat: FlatProgram,
    model: nn.Module,
    shortening: Shortening | None,
    rows: int,
    notes: Sequence[str] = (),
    autocast: torch.dtype | None = None,
) -> Program:
    """Return the chain of calls of a flat program.

    Args:
        flat: the exported graph.
        model: the (shortened) copy that was exported; tells which parameters are one.
        shortening: runs to put back at full length, or None.
        rows: micro-batch size.
        notes: what a reader must know, beside the notes of `flat`.
        autocast: dtype of the autocast around the step, or None.

    Raises:
        NotAChain: a shortened run cannot be put back.
    """
    flat = _writing_states(flat)
    side, body = _alive(*_merge_equal(*_split_side(flat)), flat.loss)
    segments = find_segments(body, flat.stacks, flat.parameters, model)
    graphs: list[BlockGraph] = []
    calls: list[Call] = []
    index_by_key: dict[str, int] = {}
    used_later = _used_later(segments, flat.loss)
    for segment, needed in zip(segments, used_later, strict=True):
        graph, call = _make_call(segment, needed, flat)
        if graph.fingerprint not in index_by_key:
            index_by_key[graph.fingerprint] = len(graphs)
            kind = "glue" if graph.is_glue else "block"
            number = sum(g.is_glue == graph.is_glue for g in graphs)
            graphs.append(replace(graph, name=f"{kind}{number}"))
        calls.append(replace(call, graph=index_by_key[graph.fingerprint]))
    aliases = _aliases(model)
    for run in shortening.runs if shortening else ():
        calls, aliases = _lengthen(calls, run, aliases)
    metas = _metas(flat, side, graphs, calls)
    return Program(
        inputs=flat.inputs,
        input_metas=flat.input_metas,
        input_keys=flat.input_keys,
        graphs=tuple(graphs),
        calls=tuple(calls),
        side_ops=side,
        side_states={n: flat.states[n] for op in side for n in op.inputs() if n in flat.states},
        constants=flat.constants,
        loss=flat.loss,
        aliases=aliases,
        microbatch_size=rows,
        metas=metas,
        autocast=autocast,
        notes=(*notes, *flat.notes, *_state_notes(flat)),
    )


def _writing_states(flat: FlatProgram) -> FlatProgram:
    """Return the program with writes to what an op in place made of a state as writes to the state.

    It is the same tensor. A buffer that several blocks change (of one norm in all of them) would
    enter all but the first as a value, and these would write to a copy of it under some plans.
    """
    same: dict[str, str] = {}
    ops = []
    for op in flat.ops:
        written = written_inputs(op)
        op = _renamed(op, {name: same[name] for name in written if name in same})
        ops.append(op)
        first = same.get(written[0], written[0]) if len(written) == 1 else ""
        is_result = first in flat.states and storage_owners([op]).get(op.name) == first
        if is_result and op.meta == flat.state_metas[first]:
            same[op.name] = first
    return replace(flat, ops=tuple(ops))


def _state_notes(flat: FlatProgram) -> tuple[str, ...]:
    """Return the note on states that the forward changes, such as running statistics."""
    changed = sorted(flat.states[n] for n in written_values(flat.ops) & set(flat.states))
    if not changed:
        return ()
    others = f" and {len(changed) - 1} other buffers" if len(changed) > 1 else ""
    return (
        f"the forward changes {changed[0]}{others}: a plan changes them once a step, to the mean "
        "over micro-batches and ranks. Batch statistics are those of a micro-batch on one rank, so "
        "a plan that splits the batch (dp or num_microbatches above 1) differs from one device",
    )


def _split_side(flat: FlatProgram) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Return the side ops and the others; a mutating or random op is never a side op."""
    plain = set(flat.inputs) | set(flat.constants)
    plain |= {name for name in flat.states if name not in flat.parameters}
    owners = storage_owners(flat.ops)
    written = written_values(flat.ops)
    side, body = [], []
    for op in flat.ops:
        inputs = op.inputs()
        touched = {owners.get(name, name) for name in (op.name, *inputs)}
        is_pure = not mutates_input(op) and not is_random(op) and not (touched & written)
        if is_pure and all(name in plain for name in inputs):
            plain.add(op.name)
            side.append(op)
        else:
            body.append(op)
    return tuple(side), tuple(body)


def _merge_equal(side: Sequence[Op], body: Sequence[Op]) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Keep one of each set of equal side ops, so that equal blocks read the same values."""
    names: dict[str, str] = {}
    first: dict[str, str] = {}
    kept: list[Op] = []
    for op in side:
        op = _renamed(op, names)
        key = f"{op.target_name}{op.args}{sorted(op.kwargs.items())}"
        if key in first:
            names[op.name] = first[key]
        else:
            first[key] = op.name
            kept.append(op)
    return tuple(kept), tuple(_renamed(op, names) for op in body)


def _alive(
    side: Sequence[Op], body: Sequence[Op], loss: str
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Drop ops whose result nobody reads and that write nothing."""
    needed = {loss}

    def keep(ops: Sequence[Op]) -> tuple[Op, ...]:
        kept = []
        for op in reversed(ops):
            if op.name in needed or mutates_input(op):
                needed.update(op.inputs())
                kept.append(op)
        return tuple(reversed(kept))

    alive_body = keep(body)
    return keep(side), alive_body


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    return op.reading(lambda name: names.get(name, name))


def _used_later(segments: Sequence[Segment], loss: str) -> list[set[str]]:
    needed = {loss}
    later: list[set[str]] = []
    for segment in reversed(segments):
        later.append(set(needed))
        needed |= {name for op in segment.ops for name in op.inputs()}
    return later[::-1]


def _make_call(segment: Segment, needed: set[str], flat: FlatProgram) -> tuple[BlockGraph, Call]:
    """Return the block graph of a segment in canonical names, and its call."""
    names: dict[str, str] = {}
    inputs: list[str] = []
    states: list[str] = []
    made = {op.name for op in segment.ops}
    for op in segment.ops:
        for name in op.inputs():
            if name in names or name in made:
                continue
            if name in flat.states:
                names[name] = f"s{len(states)}"
                states.append(name)
            else:
                names[name] = f"x{len(inputs)}"
                inputs.append(name)
    for index, op in enumerate(segment.ops):
        label = op.target_name.removeprefix("aten.").partition(".")[0]
        names[op.name] = f"v{index}_{label}"
    outs = tuple(op.name for op in segment.ops if op.name in needed)
    known = _known_metas(flat)
    graph = BlockGraph(
        name="",
        is_glue=not segment.fqn,
        inputs=tuple(names[name] for name in inputs),
        input_metas=tuple(known.get(name) for name in inputs),
        states=tuple(_state(names[name], name, segment.fqn, flat) for name in states),
        ops=tuple(_canonical(op, names, segment.fqn, flat) for op in segment.ops),
        outputs=tuple(names[name] for name in outs),
        fingerprint="",
    )
    call = Call(
        graph=-1,
        fqn=segment.fqn,
        args=tuple(inputs),
        outs=outs,
        states=tuple(flat.states[name] for name in states),
    )
    return replace(graph, fingerprint=_graph_fingerprint(graph)), call


def _known_metas(flat: FlatProgram) -> dict[str, TensorMeta]:
    known: dict[str, TensorMeta] = dict(zip(flat.inputs, flat.input_metas, strict=True))
    known |= flat.state_metas
    known |= flat.constant_metas
    known |= {op.name: op.meta for op in flat.ops if op.meta is not None}
    return known


def _state(name: str, flat_name: str, block_fqn: str, flat: FlatProgram) -> State:
    fqn = flat.states[flat_name]
    inside = bool(block_fqn) and fqn.startswith(block_fqn + ".")
    return State(
        name=name,
        fqn=fqn[len(block_fqn) + 1 :] if inside else fqn,
        is_absolute=not inside,
        is_parameter=flat_name in flat.parameters,
        meta=flat.state_metas[flat_name],
    )


def _canonical(op: Op, names: Mapping[str, str], block_fqn: str, flat: FlatProgram) -> Op:
    stack = flat.stacks[op.name]
    fqn = stack[-1][1] if stack else ""
    relative = fqn.removeprefix(block_fqn).removeprefix(".") if block_fqn else fqn
    return replace(op.reading(names.__getitem__), name=names[op.name], fqn=relative)


def _graph_fingerprint(graph: BlockGraph) -> str:
    lines = [repr((graph.is_glue, graph.inputs, graph.input_metas, graph.states, graph.outputs))]
    lines += [f"{op.name}={op.target_name}{op.args}{dict(op.kwargs)}:{op.meta}" for op in graph.ops]
    return text_hash(lines)


def _aliases(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), fqn)
        aliases[fqn] = first[id(parameter)]
    return aliases


def _lengthen(
    calls: list[Call], run: ShortRun, aliases: dict[str, str]
) -> tuple[list[Call], dict[str, str]]:
    """Return `calls` with a shortened run at full length.

    The two calls that stand for the run must be neighbours of one graph, and the second must take
    from the first what the first takes from its own predecessor; everything else they share.
    """
    fqns = [f"{run.container}.{run.start + i}" for i in range(run.count)]
    found = [i for i, call in enumerate(calls) if call.fqn in fqns[:2]]
    if len(found) != 2 or found[1] != found[0] + 1:
        raise NotAChain(run.container)
    first, second = calls[found[0]], calls[found[1]]
    if first.graph != second.graph or len(first.outs) != len(second.outs):
        raise NotAChain(run.container)
    carried: dict[int, int] = {}
    for position, (a, b) in enumerate(zip(first.args, second.args, strict=True)):
        if a == b and a not in first.outs:
            continue
        if b not in first.outs:
            raise NotAChain(run.container)
        carried[position] = first.outs.index(b)
    others = [c for i, c in enumerate(calls) if i not in found]
    if any(out in call.args for out in first.outs for call in others):
        raise NotAChain(run.container)
    chain = [first]
    for index in range(1, run.count):
        previous = chain[-1]
        is_last = index == run.count - 1
        outs = second.outs if is_last else tuple(f"{o}__{fqns[index]}" for o in first.outs)
        args = list(first.args)
        for position, out in carried.items():
            args[position] = previous.outs[out]
        states = tuple(_moved(s, fqns[0], fqns[index]) for s in first.states)
        call = replace(first, fqn=fqns[index], args=tuple(args), outs=outs, states=states)
        chain.append(call)
    calls = calls[: found[0]] + chain + calls[found[1] + 1 :]
    aliases = dict(aliases)
    own = [name for name in aliases if name.startswith(fqns[0] + ".")]
    for fqn in fqns[2:]:
        for name in own:
            aliases[_moved(name, fqns[0], fqn)] = _moved(aliases[name], fqns[0], fqn)
    return calls, aliases


def _moved(fqn: str, source: str, target: str) -> str:
    return target + fqn[len(source) :] if fqn.startswith(source + ".") else fqn


def _metas(
    flat: FlatProgram, side: Sequence[Op], graphs: Sequence[BlockGraph], calls: Sequence[Call]
) -> dict[str, TensorMeta]:
    metas = dict(zip(flat.inputs, flat.input_metas, strict=True))
    metas |= flat.constant_metas
    metas |= {op.name: op.meta for op in side if op.meta is not None}
    metas |= {n: flat.state_metas[n] for op in side for n in op.inputs() if n in flat.state_metas}
    for call in calls:
        graph = graphs[call.graph]
        for out, name in zip(call.outs, graph.outputs, strict=True):
            meta = graph.meta(name)
            if meta is not None:
                metas[out] = meta
    return metas
