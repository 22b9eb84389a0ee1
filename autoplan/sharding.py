"""The ways to run every op of a block graph under tensor parallelism, found from the graph alone.

    options[op] = whole, partial (views), and one per logical axis that the op can be sliced along

An axis is offered if it touches a parameter, or is the sequence. The batch axis is never offered:
data parallelism slices it. See `autoplan.axes` for how axes are found, `autoplan.lowering` for how
a choice of options is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count

from autoplan.axes import RESULT, Analysis, Atom, Dim, Rule, cuts_of, leaves
from autoplan.axis_rules import analyse
from autoplan.custom_ops import custom_op
from autoplan.graph import Placement, ShardOption
from autoplan.op_facts import mutates_input
from autoplan.program import BlockGraph, Op
from autoplan.redistribution import transition

__all__ = [
    "check_axes",
    "chosen_options",
    "layout_parameters",
    "needs_gradient",
    "shard_options",
    "sliced_options",
    "told_options",
    "transition",
]


def shard_options(graph: BlockGraph) -> dict[str, tuple[ShardOption, ...]]:
    """Return the options of every op of a block graph; the first of each is `whole`."""
    found = analyse(graph)
    trained = needs_gradient(graph)
    names = _axis_names(graph, found)
    options: dict[str, tuple[ShardOption, ...]] = {}
    for op in graph.ops:
        inputs = op.inputs()
        whole = ShardOption(
            axis="whole", size=1, inputs=("R",) * len(inputs), output="R", is_split=False
        )
        listed = [whole]
        rule = found.rules.get(op.name)
        if rule is not None:
            if rule.is_view and len(inputs) == 1 and inputs[0] in trained:
                listed.append(_partial(whole))
            listed += sliced_options(op, rule, found, trained, names)
            if rule.query_heads is not None:
                listed.append(_query_heads(op, rule, trained))
        listed += told_options(op, graph)
        options[op.name] = _distinct(listed)
    return options


def told_options(op: Op, graph: BlockGraph) -> list[ShardOption]:
    """Return the slices that the user registered for an operator."""
    told = custom_op(op.target)
    inputs = op.inputs()
    options = []
    for number, rule in enumerate(told.shardings if told is not None else ()):
        if len(rule.inputs) != len(inputs):
            continue
        pairs = zip((*inputs, op.name), (*rule.inputs, rule.output), strict=True)
        sizes = []
        for name, text in pairs:
            meta, placement = graph.meta(name), Placement.parse(text)
            if meta is not None and placement.kind == "shard":
                sizes.append(meta.shape[placement.dim])
        if sizes:
            axis = f"told{number}"
            option = ShardOption(
                axis=axis, size=min(sizes), inputs=rule.inputs, output=rule.output, is_split=True
            )
            options.append(option)
    return options


def _partial(whole: ShardOption) -> ShardOption:
    inputs = tuple("P" for _ in whole.inputs)
    return ShardOption(axis="partial", size=1, inputs=inputs, output="P", is_split=False)


def _query_heads(op: Op, rule: Rule, trained: frozenset[str]) -> ShardOption:
    """Return the slice along query heads of attention whose fewer key-value heads stay whole."""
    assert rule.query_heads is not None
    size, dim = rule.query_heads
    required = {name: "R*" if name in trained else "R" for name in rule.operands}
    required[rule.operands[0]] = f"S({dim})"
    return ShardOption(
        axis="query_heads",
        size=size,
        inputs=tuple(required[name] for name in op.inputs()),
        output=f"S({dim})",
        is_split=True,
    )


def _distinct(listed: Sequence[ShardOption]) -> tuple[ShardOption, ...]:
    """Drop options that ask for and give the same as an earlier one; tell equal names apart."""
    seen: set[tuple[tuple[str, ...], str]] = set()
    used: set[str] = set()
    kept: list[ShardOption] = []
    for option in listed:
        key = (option.inputs, option.output)
        if key in seen and option.axis != "whole":
            continue
        seen.add(key)
        axis = next(
            name
            for i in count()
            if (name := option.axis if i == 0 else f"{option.axis}.{i}") not in used
        )
        used.add(axis)
        kept.append(
            ShardOption(
                axis=axis,
                size=option.size,
                inputs=option.inputs,
                output=option.output,
                is_split=option.is_split,
                gemm_dim=option.gemm_dim,
            )
        )
    return tuple(kept)


def needs_gradient(graph: BlockGraph) -> frozenset[str]:
    """Return the names of the values that a gradient flows to."""
    trained = {
        name
        for name, meta in zip(graph.inputs, graph.input_metas, strict=True)
        if meta is not None and meta.requires_grad
    }
    trained |= {state.name for state in graph.states if state.meta.requires_grad}
    for op in graph.ops:
        is_float = op.meta is None or op.meta.dtype.is_floating_point
        is_cut = op.target_name.startswith("aten.detach")
        if is_float and not is_cut and any(name in trained for name in op.inputs()):
            trained.add(op.name)
    return frozenset(trained)


def sliced_options(
    op: Op, rule: Rule, found: Analysis, trained: frozenset[str], names: Mapping[Atom, str]
) -> list[ShardOption]:
    """Return the options that slice an op along one of the axes in `names`."""
    options: list[ShardOption] = []
    for piece in cuts_of(op.name, rule, found):
        if piece.atom not in names:
            continue
        is_contracted = RESULT not in piece.places
        required: dict[str, str] = {}
        is_possible = True
        for index, name in enumerate(rule.operands):
            if index in piece.places:
                text = _shard(piece.places[index])
            elif is_contracted and index == rule.added_once:
                text = "R"
            else:
                text = "R*" if name in trained else "R"
            is_possible &= required.setdefault(name, text) == text
        if is_contracted and rule.in_one_piece:
            is_possible &= all(outer == 1 for _, outer in piece.places.values())
        if mutates_input(op) and required[op.inputs()[0]][0] != "S":
            is_possible = False
        if not is_possible:
            continue
        output = "P" if is_contracted else _shard(piece.places[RESULT])
        options.append(
            ShardOption(
                axis=names[piece.atom],
                size=piece.extent(names),
                inputs=tuple(required[name] for name in op.inputs()),
                output="R" if rule.reduces_itself else output,
                is_split=True,
                gemm_dim=piece.link.gemm_dim,
            )
        )
    return options


def _shard(place: tuple[int, int]) -> str:
    return str(Placement(kind="shard", dim=place[0], outer=place[1]))


def _axis_names(graph: BlockGraph, found: Analysis) -> dict[Atom, str]:
    """Return the axes that are offered, with names that only depend on the graph."""
    batch, sequence, features = _activation_axes(graph, found)
    parameters = [found.dims[state.name] for state in graph.states if state.is_parameter]
    touched = {atom for dims in parameters for dim in dims for atom in leaves(dim)}
    touched -= _dominated(graph, found, [dim for dims in parameters for dim in dims])
    if sequence is not None:
        touched.add(sequence)
    touched -= {batch}
    heads = {atom for dim in found.heads for atom in leaves(dim)}
    vocabulary = {atom for dim in found.vocabulary for atom in leaves(dim)}
    names: dict[Atom, str] = {}
    used: set[str] = set()
    numbers = count()
    for atom in _in_order(graph, found):
        if atom not in touched or atom in names:
            continue
        number = next(numbers)
        if atom is sequence:
            hint = "sequence"
        elif atom is features:
            hint = "features"
        else:
            hint = "heads" if atom in heads else "vocabulary" if atom in vocabulary else ""
        names[atom] = hint if hint and hint not in used else f"a{number}"
        used.add(names[atom])
    return names


def _in_order(graph: BlockGraph, found: Analysis) -> list[Atom]:
    values = [*graph.inputs, *(state.name for state in graph.states)]
    values += [op.name for op in graph.ops]
    dims = [dim for name in values if name in found.dims for dim in found.dims[name]]
    return [atom for dim in dims for atom in leaves(dim)]


def _activation_axes(
    graph: BlockGraph, found: Analysis
) -> tuple[Atom | None, Atom | None, Atom | None]:
    """Return the batch, sequence and feature axes of the block's first activation input."""
    candidates = [
        (name, meta)
        for name, meta in zip(graph.inputs, graph.input_metas, strict=True)
        if meta is not None and len(meta.shape) >= 2
    ]
    candidates.sort(key=lambda c: (not c[1].requires_grad, not c[1].dtype.is_floating_point))
    if not candidates:
        return None, None, None
    name, meta = candidates[0]
    per_dim = [leaves(dim) for dim in found.dims[name]]
    is_float = meta.dtype.is_floating_point
    has_sequence = len(per_dim) == (3 if is_float else 2)
    batch = per_dim[0][0] if per_dim[0] else None
    features = per_dim[-1][0] if is_float and len(per_dim[-1]) == 1 else None
    if len(per_dim[0]) > 1:
        return batch, per_dim[0][1], features
    sequence = per_dim[1][0] if has_sequence and len(per_dim[1]) == 1 else None
    return batch, sequence, features


def _dominated(graph: BlockGraph, found: Analysis, dims: Sequence[Dim]) -> set[Atom]:
    """Return atoms beside which, in every parameter dim, stands one that reaches further.

    Head dimensions stand beside heads, the 3 of a fused projection too; attention and the split
    need them whole but can be sliced along the heads.
    """
    offered = {op.name: set[Atom]() for op in graph.ops}
    blocked = {op.name: set[Atom]() for op in graph.ops}
    for op in graph.ops:
        rule = found.rules.get(op.name)
        if rule is not None:
            offered[op.name] = {piece.atom for piece in cuts_of(op.name, rule, found)}
            blocked[op.name] = {atom for dim in rule.blocked for atom in leaves(dim)}

    def reaches_further(other: Atom, atom: Atom) -> bool:
        return any(
            other in offered[name] and other not in blocked[name] and atom in blocked[name]
            for name in offered
        )

    result: set[Atom] = set()
    for atom in {atom for dim in dims for atom in leaves(dim)}:
        holding = [leaves(dim) for dim in dims if atom in leaves(dim)]
        if all(any(o is not atom and reaches_further(o, atom) for o in h) for h in holding):
            result.add(atom)
    return result


def chosen_options(
    graph: BlockGraph,
    options: Mapping[str, tuple[ShardOption, ...]],
    axes: Mapping[str, str],
) -> dict[str, ShardOption]:
    """Return the option of every op under a choice of axes; ops that are missing run whole.

    Raises:
        ValueError: an op or an axis is unknown; says which there are.
    """
    names = {op.name for op in graph.ops}
    unknown = [name for name in axes if name not in names]
    if unknown:
        raise ValueError(f"{graph.name} has no op {unknown[0]}; the axes belong to another block")
    chosen: dict[str, ShardOption] = {}
    for op in graph.ops:
        axis = axes.get(op.name, "whole")
        found = [option for option in options[op.name] if option.axis == axis]
        if not found:
            allowed = ", ".join(option.axis for option in options[op.name])
            raise ValueError(f"{graph.name} {op.name} has no axis {axis}; it has {allowed}")
        chosen[op.name] = found[0]
    return chosen


def check_axes(
    graph: BlockGraph,
    options: Mapping[str, tuple[ShardOption, ...]],
    axes: Mapping[str, str],
    degree: int,
) -> None:
    """Check that a choice of axes can run over `degree` ranks.

    Raises:
        ValueError: an axis is unknown or the degree does not divide it (names op, axis, size and
            the allowed degrees), or a value would need a redistribution that does not exist.
    """
    if degree < 1:
        raise ValueError(f"degree is {degree}; it must be at least 1")
    chosen = chosen_options(graph, options, axes)
    for name, option in chosen.items():
        if option.is_split and option.size % degree:
            allowed = ", ".join(str(d) for d in range(1, option.size + 1) if option.size % d == 0)
            raise ValueError(
                f"{graph.name} {name} cannot slice axis {option.axis} of size {option.size} over "
                f"tp={degree}; allowed degrees are {allowed}"
            )
    produced = {op.name: Placement.parse(chosen[op.name].output) for op in graph.ops}
    for op in graph.ops:
        for value, text in zip(op.inputs(), chosen[op.name].inputs, strict=True):
            before = produced.get(value, Placement(kind="replicate"))
            if transition(before, Placement.parse(text)) is None:
                raise ValueError(
                    f"{graph.name} {op.name} requires {value} as {text}, which cannot be made "
                    f"from {before}"
                )


def layout_parameters(
    graph: BlockGraph,
    options: Mapping[str, tuple[ShardOption, ...]],
    axes: Mapping[str, str],
) -> dict[str, str]:
    """Return the placement in which every state is stored, by FQN: R, S(dim) or S(dim,outer).

    A parameter is stored sliced if every op that reads it requires that one slice. Buffers are
    stored whole, as are one-dimensional parameters whose slice has several pieces: FSDP2 would
    reorder those silently.
    """
    chosen = chosen_options(graph, options, axes)
    required: dict[str, list[str]] = {state.name: [] for state in graph.states}
    for op in graph.ops:
        for name, text in zip(op.inputs(), chosen[op.name].inputs, strict=True):
            if name in required:
                required[name].append(text)
    stored: dict[str, str] = {}
    for state in graph.states:
        texts = set(required[state.name])
        text = texts.pop() if len(texts) == 1 else "R"
        placement = Placement.parse(text)
        is_slice = placement.kind == "shard" and state.is_parameter
        is_scattered = placement.outer > 1 and len(state.meta.shape) == 1
        stored[state.fqn] = text if is_slice and not is_scattered else "R"
    return stored
