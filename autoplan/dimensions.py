"""What each dimension of every value is, and along which dimensions every op can be sliced.

The axes of all block graphs (`autoplan.axes`) are joined where a value leaves one and enters
another. Evidence (`autoplan.dimension_evidence`) tells what some are, starting from where the batch
enters; dimensions that mean the same at another extent pass it on. What nothing tells is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from autoplan.autocast import bare
from autoplan.axes import Analysis, Atom, Dim, equate, leaves, singles
from autoplan.axis_rules import analyse
from autoplan.dimension_evidence import BATCH, LAST_RESORT, Evidence, Told, evidence_of
from autoplan.dimension_rules import MORE_RULES
from autoplan.graph import DimensionKind, OpDimensions
from autoplan.program import BlockGraph, Program, State
from autoplan.sharding import needs_gradient, sliced_options

__all__ = ["program_dimensions"]


def program_dimensions(program: Program) -> tuple[dict[str, OpDimensions], ...]:
    """Return the dimensions of every op, by block graph and op name.

    A block graph that is called several times is told by what enters its first call.
    """
    graphs = [_bare(graph) for graph in (_side_graph(program), *program.graphs)]
    analyses = [analyse(graph, MORE_RULES) for graph in graphs]
    kinds = _Kinds(alike=_joined(program, analyses))
    evidence = [evidence_of(g, a) for g, a in zip(graphs, analyses, strict=True)]
    told = [item for one in evidence for item in one.told] + _batch(program, analyses[0])
    kinds.tell(told)
    kinds.tell(_last_resort(evidence, kinds))
    kinds.find_products(dim for found in analyses for dim in _all_dims(found))
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
        known: rank and kind by axis.
        products: axes by their two factors.
        lines: axes that are one line of a space, also where a view splits them.
    """

    alike: list[tuple[Dim, Dim]]
    known: dict[Atom, tuple[int, DimensionKind]] = field(default_factory=dict)
    products: dict[tuple[Atom, Atom], Atom] = field(default_factory=dict)
    lines: set[Atom] = field(default_factory=set)

    def tell(self, told: Sequence[Told]) -> None:
        """Take evidence, and pass it on between dimensions that mean the same."""
        for rank, kind, dim in told:
            self._offer(dim, rank, kind)
            if kind == "spatial" and len(dim) == 1:
                self.lines.add(dim[0].root())
        while self._pass_on():
            pass

    def _offer(self, dim: Dim, rank: int, kind: DimensionKind) -> bool:
        is_new = False
        for atom in leaves(dim) or singles(dim)[:1]:
            if atom not in self.known or self.known[atom][0] > rank:
                self.known[atom] = (rank, kind)
                is_new = True
        return is_new

    def _pass_on(self) -> bool:
        is_new = False
        for source, target in self.alike:
            found = [self.known.get(atom) for atom in leaves(source) or singles(source)[:1]]
            ranks = [item[0] for item in found if item is not None]
            names = {item[1] for item in found if item is not None}
            if len(ranks) == len(found) and len(names) == 1:
                is_new |= self._offer(target, max(ranks), names.pop())
        return is_new

    def find_products(self, dims: Iterator[Dim]) -> None:
        """Note which axes were split, so that their factors side by side are told to be one."""
        pending = [atom for dim in dims for atom in dim]
        while pending:
            atom = pending.pop().root()
            if atom.factors is not None:
                first, second = (factor.root() for factor in atom.factors)
                if (first, second) not in self.products:
                    self.products[first, second] = atom
                    pending += [first, second]

    def _line(self, first: Atom, second: Atom) -> Atom | None:
        product = self.products.get((first, second))
        return product if product in self.lines else None

    def label(self, dim: Dim) -> str:
        """Return what a dimension is; of several axes the kinds, outermost first."""
        axes: list[tuple[Atom, DimensionKind]] = []
        for atom in leaves(dim) or singles(dim)[:1]:
            axes.append((atom, self.known.get(atom, (0, "unknown"))[1]))
            while len(axes) > 1 and (line := self._line(axes[-2][0], axes[-1][0])) is not None:
                axes[-2:] = [(line, axes[-2][1])]
        kinds = [kind for _, kind in axes]
        if len(kinds) > 1 and set(kinds) == {"spatial"}:
            return "sequence"  # a space in one line: the patches of an image
        return "*".join(kind for kind, _ in groupby(kinds)) or "unknown"


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
        result[op.name] = OpDimensions(
            inputs=tuple(labels(name) for name in op.inputs()),
            output=labels(op.name),
            slices=tuple(dict.fromkeys(slices)),
        )
    return result
