"""What each dimension of every value is, and along which dimensions every op can be sliced.

The axes of all block graphs (`autoplan.axes`) are joined where a value leaves one and enters
another. Evidence (`autoplan.dimension_evidence`) tells what some are, starting from where the batch
enters; dimensions that mean the same at another extent pass it on. What nothing tells is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from autoplan.autocast import bare
from autoplan.axes import Analysis, Atom, Dim, equate, leaves, singles
from autoplan.axis_rules import analyse
from autoplan.dimension_evidence import BATCH, LAST_RESORT, Evidence, Told, evidence_of
from autoplan.dimension_rules import MORE_RULES
from autoplan.graph import DimensionKind, OpDimensions, Placement, ShardOption
from autoplan.program import BlockGraph, Op, Program, State
from autoplan.sharding import needs_gradient, sliced_options, told_options

__all__ = ["program_dimensions"]


def program_dimensions(program: Program) -> tuple[dict[str, OpDimensions], ...]:
    """Return the dimensions of every op, by block graph and op name.

    A block graph that is called several times is told by what enters its first call.
    """
    graphs = [_bare(graph) for graph in (_side_graph(program), *program.graphs)]
    analyses = [analyse(graph, MORE_RULES) for graph in graphs]
    possible = {atom for found in analyses for atom in found.possible}
    kinds = _Kinds(alike=_joined(program, analyses), possible=possible)
    evidence = [evidence_of(g, a) for g, a in zip(graphs, analyses, strict=True)]
    told = [item for one in evidence for item in one.told] + _batch(program, analyses[0])
    kinds.tell(told)
    kinds.tell(_last_resort(evidence, kinds))
    return tuple(
        _op_dimensions(graph, found, kinds)
        for graph, found in zip(graphs[1:], analyses[1:], strict=True)
    )


def _bare(graph: BlockGraph) -> BlockGraph:
    return replace(graph, ops=tuple(bare(op) for op in graph.ops))


def _side_graph(program: Program) -> BlockGraph:
    """Return the side ops as a graph of batch inputs, constants and buffers."""
    inputs = (*program.inputs, *program.constants)
    states = tuple(
        State(name=name, fqn=fqn, is_absolute=True, is_parameter=False, meta=program.metas[name])
        for name, fqn in program.side_states.items()
    )
    return BlockGraph(
        name="side",
        is_glue=True,
        inputs=inputs,
        input_metas=tuple(program.metas.get(name) for name in inputs),
        states=states,
        ops=program.side_ops,
        outputs=(),
        fingerprint="",
    )


def _joined(program: Program, analyses: Sequence[Analysis]) -> list[tuple[Dim, Dim]]:
    """Join dimensions where values pass between graphs; returns all pairs that mean the same."""
    values = dict(analyses[0].dims)
    alike = [pair for found in analyses for pair in found.alike]
    seen: set[int] = set()
    for call in program.calls:
        graph, found = program.graphs[call.graph], analyses[call.graph + 1]
        if call.graph not in seen:
            seen.add(call.graph)
            for name, arg in zip(graph.inputs, call.args, strict=True):
                if name in found.dims and arg in values:
                    alike += _join(values[arg], found.dims[name])
        for name, out in zip(graph.outputs, call.outs, strict=True):
            if name in found.dims:
                values[out] = found.dims[name]
    return alike


def _join(outer: Sequence[Dim], inner: Sequence[Dim]) -> Iterator[tuple[Dim, Dim]]:
    for a, b in zip(outer, inner, strict=True):
        if not leaves(a) or not equate(a, b):
            yield a, b
            yield b, a


def _batch(program: Program, side: Analysis) -> list[Told]:
    dims = zip(program.inputs, program.batch_dims, strict=True)
    return [(BATCH, "batch", side.dims[name][dim]) for name, dim in dims if dim is not None]


def _last_resort(evidence: Sequence[Evidence], kinds: _Kinds) -> list[Told]:
    """Return the axes that alone are left unknown beside a weight that is the same along them."""
    told: list[Told] = []
    for dims in (dims for one in evidence for dims in one.shared):
        unknown = [atom for dim in dims for atom in leaves(dim) if atom not in kinds.known]
        if len(unknown) == 1:
            told.append((LAST_RESORT, "sequence", unknown))
    return told


@dataclass(slots=True)
class _Kinds:
    """What is known of the axes.

    Attributes:
        alike: pairs of dimensions, of which the second means what the first does.
        possible: axes of size 1 that are perhaps not where they stand.
        known: rank and kind by axis.
        lines: the axes of each dimension that is one line of a space, also where a view splits it.
    """

    alike: list[tuple[Dim, Dim]]
    possible: set[Atom]
    known: dict[Atom, tuple[int, DimensionKind]] = field(default_factory=dict)
    lines: set[tuple[Atom, ...]] = field(default_factory=set)

    def tell(self, told: Sequence[Told]) -> None:
        """Take evidence, and pass it on between dimensions that mean the same."""
        for rank, kind, dim in told:
            self._offer(dim, rank, kind)
        while self._pass_on():
            pass

    def _offer(self, dim: Dim, rank: int, kind: DimensionKind) -> bool:
        is_new = False
        atoms = leaves(dim) or singles(dim)[:1]
        for atom in atoms:
            if atom not in self.known or self.known[atom][0] > rank:
                self.known[atom] = (rank, kind)
                is_new = True
        if kind == "spatial":
            self.lines.add(tuple(atoms))
        return is_new

    def _pass_on(self) -> bool:
        is_new = False
        for source, target in self.alike:
            found = self._axes(source)
            if not found or (0, "unknown") in found:
                continue
            kinds = {kind for _, kind in found}
            if len(kinds) == 1:
                rank, kind = max(found)
                is_flat = kind == "spatial" and len(found) > 1
                is_new |= self._offer(target, rank, "sequence" if is_flat else kind)
        return is_new

    def _axes(self, dim: Dim) -> list[tuple[int, DimensionKind]]:
        """Return rank and kind of the axes of a dimension; a line counts as one.

        Beside others an axis of size 1 counts only as the batch, which may have one row.
        """
        atoms = [a for atom in dim for a in leaves([atom]) or singles([atom])]
        if all(atom.size == 1 for atom in atoms):
            atoms = atoms[:1]
        else:
            atoms = [atom for atom in atoms if atom.size > 1 or self._is_batch(atom)]
        axes: list[tuple[int, DimensionKind]] = []
        start = 0
        while start < len(atoms):
            ends = range(len(atoms), start, -1)
            end = next((e for e in ends if tuple(atoms[start:e]) in self.lines), start + 1)
            axes.append(self.known.get(atoms[start], (0, "unknown")))
            start = end
        return axes

    def _is_batch(self, atom: Atom) -> bool:
        return atom not in self.possible and self.known.get(atom, (0, "unknown"))[1] == "batch"

    def label(self, dim: Dim) -> str:
        """Return what a dimension is; of several axes the kinds, outermost first."""
        kinds = [kind for _, kind in self._axes(dim)]
        if len(kinds) > 1 and set(kinds) == {"spatial"}:
            return "sequence"  # a space in one line: the patches of an image
        return "*".join(kind for kind, _ in groupby(kinds)) or "unknown"


def _named(option: ShardOption, op: Op, labels: Callable[[str], tuple[str, ...]]) -> ShardOption:
    """Return an option that the user registered, with what it slices as its axis."""
    texts = zip((*op.inputs(), op.name), (*option.inputs, option.output), strict=True)
    name, placement = next(
        (n, p) for n, text in texts if (p := Placement.parse(text)).kind == "shard"
    )
    found = labels(name)
    return replace(option, axis=found[placement.dim] if found else "unknown")


def _all_dims(found: Analysis) -> Iterator[Dim]:
    for dims in found.dims.values():
        yield from dims
    for parts in found.tuples.values():
        for dims in parts:
            yield from dims


def _op_dimensions(graph: BlockGraph, found: Analysis, kinds: _Kinds) -> dict[str, OpDimensions]:
    trained = needs_gradient(graph)
    names: Mapping[Atom, str] = {
        atom: kinds.known.get(atom, (0, "unknown"))[1]
        for dim in _all_dims(found)
        for atom in leaves(dim)
    }

    def labels(name: str) -> tuple[str, ...]:
        is_known = name in found.dims or name in found.tuples
        return tuple(kinds.label(dim) for dim in found.result(name)) if is_known else ()

    result = {}
    for op in graph.ops:
        rule = found.rules.get(op.name)
        slices = sliced_options(op, rule, found, trained, names) if rule is not None else []
        slices += [_named(option, op, labels) for option in told_options(op, graph)]
        result[op.name] = OpDimensions(
            inputs=tuple(labels(name) for name in op.inputs()),
            output=labels(op.name),
            slices=tuple(dict.fromkeys(slices)),
        )
    return result
