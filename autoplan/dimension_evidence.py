"""What the ops of a graph tell of their dimensions: evidence, ranked by how much it tells.

    batch      the dimension that the user's batch has there
    spatial    a convolution, pooling or resampling slides over it, together with others
    sequence   positions along one line: attended, looked up, scanned, or slid over alone
    experts    a stack of weights is multiplied one by one, or a router chooses from it
    heads      products of two activations run side by side along it
    features   weights contract it, make it or normalise over it
    sequence   (last resort) the only dimension besides along which weights are the same

A size is never evidence. Where one axis has several, the first of the list holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from autoplan.axes import RESULT, Analysis, Atom, Dim, Link, Rule, leaves
from autoplan.axis_labels import arguments, op_name, reference
from autoplan.dimension_rules import spatial_rank
from autoplan.graph import DimensionKind
from autoplan.program import BlockGraph, Op

__all__ = ["BATCH", "LAST_RESORT", "Evidence", "Told", "evidence_of"]

Told = tuple[int, DimensionKind, Dim]
"""Rank (the lowest holds), kind, and the dimension that it is told of."""

BATCH, _SPATIAL, _SEQUENCE, _EXPERTS, _HEADS, _FEATURES, _ATTENDED, LAST_RESORT = range(8)


@dataclass(slots=True)
class Evidence:
    """Evidence of one graph.

    Attributes:
        told: of dimensions.
        shared: per product with a weight, the dimensions along which the weight is the same.
    """

    told: list[Told] = field(default_factory=list)
    shared: list[list[Dim]] = field(default_factory=list)

    def add(self, rank: int, kind: DimensionKind, *dims: Dim) -> None:
        """Add evidence of a kind for each of some dimensions."""
        self.told += [(rank, kind, dim) for dim in dims]


def evidence_of(graph: BlockGraph, found: Analysis) -> Evidence:
    """Return what the ops of a graph tell of their dimensions; autocast is taken off the ops."""
    evidence = Evidence()
    weights = _weights(graph)
    softmaxed = {
        atom
        for op in graph.ops
        if op_name(op) in ("softmax", "_softmax") and op.name in found.rules
        for atom in leaves(found.dims[op.name][arguments(op)["dim"]])
    }
    read = {name for op in graph.ops for name in op.inputs()}
    for op in graph.ops:
        rule = found.rules.get(op.name)
        if rule is None:
            continue
        _product(evidence, op, rule, found, weights, softmaxed)
        _named(evidence, op, found, weights)
        _window(evidence, op, found)
        if op_name(op) == "topk":
            _routing(evidence, graph, op, found, read)
    return evidence


def _weights(graph: BlockGraph) -> set[str]:
    """Return the parameters, and what is made of nothing else."""
    weights = {state.name for state in graph.states if state.is_parameter}
    for op in graph.ops:
        inputs = op.inputs()
        if inputs and set(inputs) <= weights:
            weights.add(op.name)
    return weights


_PRODUCTS = frozenset({"linear", "addmm", "matmul", "mm", "bmm", "baddbmm", "einsum"})
_STACKED = frozenset({"_grouped_mm", "transformers::grouped_mm_fallback"})


def _product(
    evidence: Evidence,
    op: Op,
    rule: Rule,
    found: Analysis,
    weights: set[str],
    softmaxed: set[Atom],
) -> None:
    name = op_name(op)
    if name in _STACKED:
        stack = found.result(rule.operands[1])
        evidence.add(_EXPERTS, "experts", stack[0])
        evidence.add(_FEATURES, "features", *stack[1:])
    if name not in _PRODUCTS:
        return
    factors = [i for i, n in enumerate(rule.operands) if i != rule.added_once]
    if name == "baddbmm":
        factors = [1, 2]
    is_weight = {i: rule.operands[i] in weights for i in factors}
    if any(is_weight.values()) and not all(is_weight.values()):
        _weighted(evidence, rule, found, is_weight)
    elif not any(is_weight.values()) and len(factors) == 2:
        _attention_product(evidence, rule, found, factors, softmaxed)


def _dim_of(link: Link, operand: int, rule: Rule, found: Analysis) -> Dim:
    side = next(side for side in link.sides if side.operand == operand)
    return found.result(rule.operands[operand])[side.dims[0]]


def _weighted(evidence: Evidence, rule: Rule, found: Analysis, is_weight: dict[int, bool]) -> None:
    """A product of activations with a weight."""
    shared: list[Dim] = []
    for link in rule.links:
        places = {side.operand for side in link.sides}
        of_weight = [i for i in places if is_weight.get(i, False)]
        of_value = [i for i in places if i in is_weight and not is_weight[i]]
        if of_weight and of_value and RESULT in places:
            evidence.add(_EXPERTS, "experts", _dim_of(link, of_weight[0], rule, found))
        elif of_weight:
            evidence.add(_FEATURES, "features", _dim_of(link, of_weight[0], rule, found))
        elif of_value:
            shared.append(_dim_of(link, of_value[0], rule, found))
    evidence.shared.append(shared)


def _attention_product(
    evidence: Evidence, rule: Rule, found: Analysis, factors: list[int], softmaxed: set[Atom]
) -> None:
    """A product of two activations; where one side is a softmax of it, positions attend."""
    first, second = factors
    only = {first: list[Dim](), second: list[Dim](), RESULT: list[Dim]()}
    for link in rule.links:
        places = {side.operand for side in link.sides}
        if {first, second, RESULT} <= places:
            evidence.add(_HEADS, "heads", _dim_of(link, first, rule, found))
        elif RESULT in places and (first in places) != (second in places):
            own = first if first in places else second
            only[own].append(_dim_of(link, own, rule, found))
        elif {first, second} <= places:
            only[RESULT].append(_dim_of(link, first, rule, found))

    def is_softmaxed(dims: list[Dim]) -> bool:
        atoms = [atom for dim in dims for atom in leaves(dim)]
        return bool(atoms) and all(atom in softmaxed for atom in atoms)

    if is_softmaxed(only[RESULT]):
        evidence.add(_ATTENDED, "sequence", *only[RESULT], *only[first])
        evidence.add(_ATTENDED, "features", *only[second])
    elif is_softmaxed(only[second]):
        evidence.add(_ATTENDED, "sequence", *only[second], *only[first])
        evidence.add(_ATTENDED, "features", *only[RESULT])


def _named(evidence: Evidence, op: Op, found: Analysis, weights: set[str]) -> None:
    """Operators whose schema tells what the dimensions are."""
    name = op_name(op)
    if name == "scaled_dot_product_attention":
        a = arguments(op)
        dims = [found.result(n) for key in ("query", "key", "value") if (n := reference(a[key]))]
        for own in dims:
            evidence.add(_SEQUENCE, "sequence", own[-2])
            evidence.add(_HEADS, "heads", own[-3])
            evidence.add(_FEATURES, "features", own[-1])
        mask = reference(a["attn_mask"])
        if mask is not None:
            evidence.add(_SEQUENCE, "sequence", *found.result(mask)[-2:])
    elif name == "embedding":
        a = arguments(op)
        table, ids = reference(a["weight"]), reference(a["indices"])
        if table is not None and ids is not None:
            evidence.add(_FEATURES, "features", *found.result(table))
            evidence.add(_SEQUENCE, "sequence", *(dim for dim in found.result(ids) if leaves(dim)))
    elif name in ("layer_norm", "rms_norm"):
        count = len(arguments(op)["normalized_shape"])
        evidence.add(_FEATURES, "features", *found.dims[op.name][-count:])
    elif name in ("batch_norm", "group_norm", "instance_norm"):
        evidence.add(_FEATURES, "features", found.dims[op.name][1])
        _slid(evidence, found.dims[op.name][2:])
    elif name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        made = found.tuples[op.name][0]
        evidence.add(_SEQUENCE, "sequence", made[1 if arguments(op)["batch_first"] else 0])
        evidence.add(_FEATURES, "features", made[2], *_weight_dims(op, found, weights))
        evidence.add(_FEATURES, "features", found.result(op.inputs()[0])[2])
    elif name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
        evidence.add(_FEATURES, "features", *found.result(op.inputs()[0])[1:2])


def _weight_dims(op: Op, found: Analysis, weights: set[str]) -> Iterator[Dim]:
    for name in op.inputs():
        if name in weights:
            yield from found.result(name)


def _window(evidence: Evidence, op: Op, found: Analysis) -> None:
    count = spatial_rank(op)
    if not count:
        return
    _slid(evidence, found.result(op.inputs()[0])[-count:])
    _slid(evidence, found.dims[op.name][-count:])
    if op_name(op).startswith("conv"):
        weight = found.result(op.inputs()[1])
        _slid(evidence, weight[-count:])
        evidence.add(_FEATURES, "features", *weight[:-count])
        for name in (op.inputs()[0], op.name):
            evidence.add(_FEATURES, "features", found.result(name)[-count - 1])


def _slid(evidence: Evidence, dims: list[Dim]) -> None:
    """Positions along one line are a sequence, along several a space."""
    if len(dims) == 1:
        evidence.add(_SEQUENCE, "sequence", *dims)
    else:
        evidence.add(_SPATIAL, "spatial", *dims)


def _routing(
    evidence: Evidence, graph: BlockGraph, op: Op, found: Analysis, read: set[str]
) -> None:
    """A choice whose indices are used, among the outputs of a weight: a router's experts."""
    a = arguments(op)
    source = reference(a["self"])
    picks = [o.name for o in graph.ops if op.name in o.inputs() and o.args[-1] == 1]
    if source is not None and any(name in read for name in picks):
        evidence.add(_EXPERTS, "experts", found.result(source)[a["dim"]])
