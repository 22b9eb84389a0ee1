"""The rule of every operator whose dimensions we understand, and the analysis that applies them.

Most rules are einsum-like: a label per dimension of operands and result. Views, splits and grouped
attention heads have their own. An unknown operator has no rule and is only ever run whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from autoplan.axes import (
    RESULT,
    Analysis,
    Dim,
    GemmDim,
    Link,
    Rule,
    Side,
    cut,
    equate,
    fresh,
    leaves,
)
from autoplan.program import BlockGraph, Op, Ref
from autoplan.segments import is_random

__all__ = ["analyse", "arguments", "op_name"]


def analyse(graph: BlockGraph) -> Analysis:
    """Return the logical axes of a block graph; a pure function of the graph."""
    found = Analysis()
    for name, meta in zip(graph.inputs, graph.input_metas, strict=True):
        if meta is not None:
            found.dims[name] = [fresh(size) for size in meta.shape]
    for state in graph.states:
        found.dims[state.name] = [fresh(size) for size in state.meta.shape]
    for op in graph.ops:
        rule = _apply_rule(found, op)
        if rule is not None and set(op.inputs()) <= set(rule.operands):
            found.rules[op.name] = rule
        elif op.meta is not None:
            found.dims[op.name] = [fresh(size) for size in op.meta.shape]
    return found


def _apply_rule(found: Analysis, op: Op) -> Rule | None:
    name = op_name(op)
    if any(n not in found.dims and n not in found.tuples for n in op.inputs()):
        return None
    if is_random(op) and name not in ("dropout", "dropout_", "scaled_dot_product_attention"):
        return None
    rule = _RULES.get(name)
    if rule is None and isinstance(op.target, torch._ops.OpOverload):
        rule = _pointwise if torch.Tag.pointwise in op.target.tags else None
    if rule is None or (op.meta is None and name not in _TUPLE_OPS):
        return None
    return rule(found, op)


def op_name(op: Op) -> str:
    """Return the operator's name without namespace and overload, such as `linear`."""
    if isinstance(op.target, torch._ops.OpOverload):
        namespace, _, name = op.target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}::{name}"
    return "getitem" if op.target is operator.getitem else op.target_name


def arguments(op: Op) -> dict[str, Any]:
    """Return the op's arguments by the names of its schema, defaults filled in."""
    assert isinstance(op.target, torch._ops.OpOverload), op.target_name
    bound: dict[str, Any] = {}
    for index, argument in enumerate(op.target._schema.arguments):
        if index < len(op.args):
            bound[argument.name] = op.args[index]
        elif argument.name in op.kwargs:
            bound[argument.name] = op.kwargs[argument.name]
        else:
            bound[argument.name] = argument.default_value
    return bound


Labels = Sequence[int | str | None]


def _labelled(
    found: Analysis,
    op: Op,
    operands: Sequence[tuple[str, Labels]],
    result: Labels,
    *,
    contracts: Mapping[int | str, GemmDim] | None = None,
    gemm: Mapping[int | str, GemmDim] | None = None,
    is_view: bool = False,
    may_invent: bool = False,
) -> Rule:
    """Apply an einsum-like rule: dims with one label are one axis, None is needed whole.

    Args:
        operands: per operand its value name and a label per dim; dims of size 1 join no label.
        result: label per dim of the result.
        contracts: labels that may be sliced although the result lacks them, with their gemm dim.
        gemm: gemm dim of the other labels.
        is_view: see `Rule`.
        may_invent: whether a label may stand in the result only (expand).
    """
    assert op.meta is not None
    rule = Rule(operands=tuple(name for name, _ in operands), is_view=is_view)
    dims = [found.result(name) for name, _ in operands]
    sides: dict[int | str, list[Side]] = {}
    for index, (_, labels) in enumerate(operands):
        for dim, label in enumerate(labels):
            if label is None:
                rule.blocked.append(dims[index][dim])
            elif dims[index][dim]:
                sides.setdefault(label, []).append(Side(index, (dim,)))
    agreed: dict[int | str, Dim] = {}
    for label, places in sides.items():
        first = dims[places[0].operand][places[0].dims[0]]
        if all(equate(first, dims[p.operand][p.dims[0]]) for p in places[1:]):
            agreed[label] = first
        else:
            rule.blocked += [dims[p.operand][p.dims[0]] for p in places]
    made: list[Dim] = []
    for dim, (label, size) in enumerate(zip(result, op.meta.shape, strict=True)):
        known = label is not None and label in agreed
        made.append(agreed[label] if known and label is not None else fresh(size))
        if label is not None and made[-1] and (known or (may_invent and label not in sides)):
            sides.setdefault(label, []).append(Side(RESULT, (dim,)))
            agreed.setdefault(label, made[-1])
        elif not known:
            rule.blocked.append(made[-1])
    found.dims[op.name] = made
    roles = {**(gemm or {}), **(contracts or {})}
    for label, dim_atoms in agreed.items():
        in_result = any(side.operand == RESULT for side in sides[label])
        if in_result or label in (contracts or {}):
            size = prod(atom.size for atom in leaves(dim_atoms))
            link = Link(size=size, sides=tuple(sides[label]), gemm_dim=roles.get(label, ""))
            rule.links.append(link)
    return rule


def _ref(value: Any) -> str | None:
    return value.name if isinstance(value, Ref) else None


def _rank(found: Analysis, name: str) -> int:
    return len(found.result(name))


def _aligned(rank: int, out_rank: int) -> list[int | str | None]:
    return list(range(out_rank - rank, out_rank))


def _pointwise(found: Analysis, op: Op) -> Rule | None:
    assert op.meta is not None
    names = [_ref(value) for value in (*op.args, *op.kwargs.values())]
    operands = [name for name in names if name is not None]
    rank = len(op.meta.shape)
    labels = [(name, _aligned(_rank(found, name), rank)) for name in operands]
    return _labelled(found, op, labels, list(range(rank))) if operands else None


def _follow(found: Analysis, op: Op) -> Rule | None:
    """Apply the rule of a unary op that keeps the shape: dropout, casts."""
    return _along(found, op, set(), is_view=False)


def _cast(found: Analysis, op: Op) -> Rule | None:
    """Follow the first operand; a second one lends its dtype, and its dims if they are alike."""
    names = op.inputs()
    assert op.meta is not None
    if _ref(op.args[0]) != names[0] or len(names) > 2:
        return None
    labels = list(range(len(op.meta.shape)))
    sizes = [[prod(a.size for a in leaves(dim)) for dim in found.result(n)] for n in names]
    if sizes[0] != list(op.meta.shape):
        return None
    operands: list[tuple[str, Labels]] = [
        (name, labels if size == sizes[0] else [None] * len(size))
        for name, size in zip(names, sizes, strict=True)
    ]
    return _labelled(found, op, operands, labels)


def _copy(found: Analysis, op: Op) -> Rule | None:
    return _along(found, op, set(), is_view=True)


def _along(found: Analysis, op: Op, whole: set[int], *, is_view: bool) -> Rule | None:
    name = _ref(op.args[0])
    assert op.meta is not None
    if name is None or _rank(found, name) != len(op.meta.shape):
        return None
    labels = [None if dim in whole else dim for dim in range(len(op.meta.shape))]
    operands = [(name, labels)]
    operands += [(n, [None] * _rank(found, n)) for n in op.inputs() if n != name]
    return _labelled(found, op, operands, labels, is_view=is_view)


def _view(found: Analysis, op: Op) -> Rule | None:
    """Regroup dimensions by equal products: view, reshape, flatten, unflatten."""
    name = _ref(op.args[0])
    assert op.meta is not None
    if name is None or not (len(op.args) == 1 or isinstance(op.args[1], (list, tuple, int))):
        return None
    dims = found.result(name)
    sizes = [prod(atom.size for atom in leaves(dim)) for dim in dims]
    rule = Rule(operands=(name,), is_view=True)
    made: list[Dim] = [[] for _ in op.meta.shape]
    for ins, outs in _groups(sizes, op.meta.shape):
        joined = [atom for dim in ins for atom in dims[dim]]
        ends = [prod(op.meta.shape[o] for o in outs[: i + 1]) for i in range(len(outs))]
        if not all(cut(joined, end) for end in ends):
            rule.blocked += [dims[dim] for dim in ins]
            for out in outs:
                made[out] = fresh(op.meta.shape[out])
            continue
        atoms, start = leaves(joined), 1
        for out, end in zip(outs, ends, strict=True):
            made[out] = []
            while start < end:
                atom = atoms.pop(0)
                made[out].append(atom)
                start *= atom.size
        if ends[-1] > 1:
            sides = (Side(0, tuple(ins)), Side(RESULT, tuple(outs)))
            rule.links.append(Link(size=ends[-1], sides=sides))
    found.dims[op.name] = made
    return rule


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the smallest runs of dims with equal products; dims of size 1 stand in no run."""
    ins = [i for i, size in enumerate(before) if size != 1]
    outs = [i for i, size in enumerate(after) if size != 1]
    while ins and outs:
        left, right = [ins.pop(0)], [outs.pop(0)]
        while (a := prod(before[i] for i in left)) != (b := prod(after[i] for i in right)):
            if a < b:
                left.append(ins.pop(0))
            else:
                right.append(outs.pop(0))
        yield tuple(left), tuple(right)


def _permuted(found: Analysis, op: Op, order: Sequence[int]) -> Rule | None:
    name = _ref(op.args[0])
    if name is None:
        return None
    rank = _rank(found, name)
    labels = [dim % rank for dim in order]
    return _labelled(found, op, [(name, list(range(rank)))], labels, is_view=True)


def _transpose(found: Analysis, op: Op) -> Rule | None:
    rank = _rank(found, op.inputs()[0])
    order = list(range(rank))
    a, b = (op.args[1], op.args[2]) if len(op.args) > 2 else (0, rank - 1)
    if rank:
        order[a], order[b] = order[b], order[a]
    return _permuted(found, op, order)


def _permute(found: Analysis, op: Op) -> Rule | None:
    return _permuted(found, op, op.args[1])


def _unsqueeze(found: Analysis, op: Op) -> Rule | None:
    return _view(found, op)


def _expand(found: Analysis, op: Op) -> Rule | None:
    name = _ref(op.args[0])
    assert op.meta is not None
    if name is None:
        return None
    rank = len(op.meta.shape)
    labels = _aligned(_rank(found, name), rank)
    return _labelled(found, op, [(name, labels)], list(range(rank)), is_view=True, may_invent=True)


def _slice(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    name = _ref(a["self"])
    assert op.meta is not None
    if name is None:
        return None
    dim = a["dim"] % len(op.meta.shape)
    size = prod(atom.size for atom in leaves(found.result(name)[dim]))
    is_all = op.meta.shape[dim] == size and a["step"] == 1
    return _along(found, op, set() if is_all else {dim}, is_view=True)


def _select(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    name = _ref(a["self"])
    if name is None:
        return None
    rank = _rank(found, name)
    labels = [None if d == a["dim"] % rank else d for d in range(rank)]
    rest = [d for d in range(rank) if d != a["dim"] % rank]
    return _labelled(found, op, [(name, labels)], rest, is_view=True)


def _cat(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    names = [_ref(value) for value in a["tensors"]]
    assert op.meta is not None
    rank = len(op.meta.shape)
    operands = [name for name in names if name is not None]
    if len(operands) != len(names) or any(_rank(found, n) != rank for n in operands):
        return None
    labels = [None if d == a["dim"] % rank else d for d in range(rank)]
    return _labelled(found, op, [(name, labels) for name in operands], labels)


def _stack(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    assert op.meta is not None
    operands = [value.name for value in a["tensors"]]
    rank = len(op.meta.shape) - 1
    labels: list[int | str | None] = list(range(rank))
    result = list(labels)
    result.insert(a["dim"] % (rank + 1), None)
    return _labelled(found, op, [(name, labels) for name in operands], result)


def _unbind(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    name = _ref(a["self"])
    if name is None:
        return None
    dims = found.result(name)
    whole = a["dim"] % len(dims)
    kept = [dim for dim in range(len(dims)) if dim != whole]
    rule = Rule(operands=(name,), is_view=True, blocked=[dims[whole]])
    for out, dim in enumerate(kept):
        _link_whole(rule, dims[dim], dim, out)
    count = prod(atom.size for atom in leaves(dims[whole]))
    found.tuples[op.name] = [[dims[dim] for dim in kept]] * count
    return rule


def _link_whole(rule: Rule, atoms: Dim, dim: int, out: int) -> None:
    size = prod(atom.size for atom in leaves(atoms))
    if size > 1:
        rule.links.append(Link(size=size, sides=(Side(0, (dim,)), Side(RESULT, (out,)))))


def _split(found: Analysis, op: Op) -> Rule | None:
    """Equal parts make the dimension [count, part], so that all parts share their atoms."""
    a = arguments(op)
    name = _ref(a["self"] if "self" in a else op.args[0])
    if name is None:
        return None
    dims = found.result(name)
    at = a["dim"] % len(dims)
    size = prod(atom.size for atom in leaves(dims[at]))
    parts = _part_sizes(op, a, size)
    rule = Rule(operands=(name,), is_view=True)
    if parts is None:
        return None
    for dim, atoms in enumerate(dims):
        if dim != at:
            _link_whole(rule, atoms, dim, dim)
    part: Dim | None = None
    if len(set(parts)) == 1 and cut(dims[at], len(parts)):
        atoms, seen = leaves(dims[at]), 1
        while seen < len(parts):
            leading = atoms.pop(0)
            seen *= leading.size
            rule.blocked.append([leading])
        part = list(atoms)
        if parts[0] > 1:
            sides = (Side(0, (at,), len(parts)), Side(RESULT, (at,)))
            rule.links.append(Link(size=parts[0], sides=sides))
    else:
        rule.blocked.append(dims[at])
    found.tuples[op.name] = [
        [atoms if dim != at else (fresh(n) if part is None else part)
         for dim, atoms in enumerate(dims)]
        for n in parts
    ]  # fmt: skip
    return rule


def _part_sizes(op: Op, a: Mapping[str, Any], size: int) -> list[int] | None:
    given = a.get("split_sizes", a.get("split_size"))
    if isinstance(given, (list, tuple)):
        return list(given)
    step = -(-size // a["chunks"]) if op_name(op) == "chunk" else given
    if not isinstance(step, int) or step < 1:
        return None
    return [min(step, size - start) for start in range(0, size, step)]


def _getitem(found: Analysis, op: Op) -> Rule | None:
    name = _ref(op.args[0])
    if name is None or name not in found.tuples or op.meta is None:
        return None
    dims = found.tuples[name][op.args[1]]
    found.dims[op.name] = dims
    rule = Rule(operands=(name,), is_view=True)
    for dim, atoms in enumerate(dims):
        _link_whole(rule, atoms, dim, dim)
    return rule


def _linear(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    x, w, b = _ref(a["input"]), _ref(a["weight"]), _ref(a["bias"])
    if x is None or w is None or _rank(found, w) != 2:
        return None
    lead: list[int | str | None] = list(range(_rank(found, x) - 1))
    operands: list[tuple[str, Labels]] = [(x, [*lead, "k"]), (w, ["n", "k"])]
    if b is not None:
        operands.append((b, ["n"]))
    gemm: dict[int | str, GemmDim] = {d: "m" for d in lead if d is not None}
    gemm["n"] = "n"
    rule = _labelled(found, op, operands, [*lead, "n"], contracts={"k": "k"}, gemm=gemm)
    rule.added_once = 2 if b is not None else None
    return rule


def _addmm(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    b, x, w = _ref(a["self"]), _ref(a["mat1"]), _ref(a["mat2"])
    if b is None or x is None or w is None or a["beta"] != 1 or a["alpha"] != 1:
        return None
    bias: Labels = ["n"] if _rank(found, b) == 1 else ["m", "n"]
    operands: list[tuple[str, Labels]] = [(b, bias), (x, ["m", "k"]), (w, ["k", "n"])]
    gemm: dict[int | str, GemmDim] = {"m": "m", "n": "n"}
    rule = _labelled(found, op, operands, ["m", "n"], contracts={"k": "k"}, gemm=gemm)
    rule.added_once = 0
    return rule


def _matmul(found: Analysis, op: Op) -> Rule | None:
    x, w = _ref(op.args[0]), _ref(op.args[1])
    if x is None or w is None or min(_rank(found, x), _rank(found, w)) < 2:
        return None
    assert op.meta is not None
    rank = len(op.meta.shape)
    first = [*_aligned(_rank(found, x) - 2, rank - 2), "m", "k"]
    second = [*_aligned(_rank(found, w) - 2, rank - 2), "k", "n"]
    lead: list[int | str | None] = list(range(rank - 2))
    role: GemmDim = "m" if _rank(found, w) == 2 else "batch"
    gemm: dict[int | str, GemmDim] = {d: role for d in lead if d is not None}
    gemm |= {"m": "m", "n": "n"}
    operands: list[tuple[str, Labels]] = [(x, first), (w, second)]
    rule = _labelled(found, op, operands, [*lead, "m", "n"], contracts={"k": "k"}, gemm=gemm)
    _note_heads(found, op, rule)
    return rule


def _baddbmm(found: Analysis, op: Op) -> Rule | None:
    """A batched product and an addend; its contraction stays whole, for the addend counts once."""
    names = [_ref(value) for value in op.args[:3]]
    labels: list[Labels] = [["b", "m", "n"], ["b", "m", None], ["b", None, "n"]]
    if any(name is None or _rank(found, name) != 3 for name in names):
        return None
    operands = [(n, label) for n, label in zip(names, labels, strict=True) if n is not None]
    gemm: dict[int | str, GemmDim] = {"b": "batch", "m": "m", "n": "n"}
    rule = _labelled(found, op, operands, ["b", "m", "n"], gemm=gemm)
    _note_heads(found, op, rule)
    return rule


def _note_heads(found: Analysis, op: Op, rule: Rule) -> None:
    """Take the batch axes of a product of two activations for heads."""
    for link in rule.links:
        side = link.sides[-1]
        if link.gemm_dim == "batch" and side.operand == RESULT:
            found.heads += [found.dims[op.name][dim] for dim in side.dims]


def _einsum(found: Analysis, op: Op) -> Rule | None:
    equation = op.args[0].replace(" ", "") if isinstance(op.args[0], str) else ""
    terms, arrow, out = equation.partition("->")
    names = [_ref(value) for value in op.args[1]]
    words = terms.split(",")
    if not arrow or "." in equation or len(words) != len(names):
        return None
    if any(len(set(word)) != len(word) for word in (*words, out)):
        return None
    operands = [(name, list(word)) for name, word in zip(names, words, strict=True) if name]
    gemm: dict[int | str, GemmDim] = {}
    if len(words) == 2:
        for letter in out:
            shared = letter in words[0] and letter in words[1]
            gemm[letter] = "batch" if shared else "m" if letter in words[0] else "n"
    joint = set(words[0]).intersection(*words[1:]) - set(out)
    contracts: dict[int | str, GemmDim] = dict.fromkeys(sorted(joint), "k")
    rule = _labelled(found, op, operands, list(out), contracts=contracts, gemm=gemm)
    _note_heads(found, op, rule)
    return rule


def _norm(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    x = _ref(a["input"])
    if x is None:
        return None
    rank = _rank(found, x)
    lead = rank - len(a["normalized_shape"])
    labels = [dim if dim < lead else None for dim in range(rank)]
    operands: list[tuple[str, Labels]] = [(x, labels)]
    operands += [(n, [None] * _rank(found, n)) for n in op.inputs() if n != x]
    return _labelled(found, op, operands, labels)


def _softmax(found: Analysis, op: Op) -> Rule | None:
    assert op.meta is not None
    dim = arguments(op)["dim"]
    return _along(found, op, {dim % max(len(op.meta.shape), 1)}, is_view=False)


def _reduction(found: Analysis, op: Op) -> Rule | None:
    """mean, sum, var, ... over dims: those are needed whole, the others follow."""
    a = arguments(op)
    x = _ref(op.args[0])
    if x is None:
        return None
    rank = _rank(found, x)
    given = a.get("dim")
    over = [given] if isinstance(given, int) else list(given or range(rank))
    whole = {dim % rank for dim in over} if rank else set()
    labels = [None if dim in whole else dim for dim in range(rank)]
    keep = bool(a.get("keepdim", False))
    result = labels if keep else [label for label in labels if label is not None]
    return _labelled(found, op, [(x, labels)], result)


def _attention(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    q, k, v, mask = (_ref(a[n]) for n in ("query", "key", "value", "attn_mask"))
    if q is None or k is None or v is None:
        return None
    rank = _rank(found, q)
    if rank != _rank(found, k) or rank != _rank(found, v) or rank < 3:
        return None
    lead: list[int | str | None] = list(range(rank - 2))
    grouped = a["enable_gqa"] and _differ(found.dims[q][rank - 3], found.dims[k][rank - 3])
    if grouped:
        lead[-1] = None
    whole = [None, None]
    operands: list[tuple[str, Labels]] = [(name, [*lead, *whole]) for name in (q, k, v)]
    if mask is not None:
        operands.append((mask, [*_aligned(_rank(found, mask) - 2, rank - 2), *whole]))
        if grouped and _rank(found, mask) >= 3 and found.dims[mask][_rank(found, mask) - 3]:
            return None
    heads = found.dims[k][rank - 3] or found.dims[q][rank - 3]
    rule = _labelled(found, op, operands, [*lead, *whole])
    if grouped:
        _group_heads(found, rule, op.name, rank - 3)
    found.heads.append(heads)
    return rule


def _differ(a: Dim, b: Dim) -> bool:
    return prod(x.size for x in leaves(a)) != prod(x.size for x in leaves(b))


def _group_heads(found: Analysis, rule: Rule, name: str, at: int) -> None:
    """Query heads are [key-value heads, group]: slice the first jointly, the second alone."""
    q, k, v = (found.dims[n][at] for n in rule.operands[:3])
    kv = prod(atom.size for atom in leaves(k))
    rule.blocked = [dim for dim in rule.blocked if not any(dim is d for d in (q, k, v))]
    if not (equate(k, v) and cut(q, kv)):
        rule.blocked += [q, k, v]
        return
    atoms, seen = leaves(q), 1
    leading: Dim = []
    while seen < kv:
        leading.append(atoms.pop(0))
        seen *= leading[-1].size
    if not equate(leading, k):
        rule.blocked += [q, k, v]
        return
    found.dims[name][at] = q
    group = prod(atom.size for atom in leaves(q)) // kv
    queries = (Side(0, (at,)), Side(RESULT, (at,)))
    if kv > 1:
        sides = (*queries, Side(1, (at,)), Side(2, (at,)))
        rule.links.append(Link(size=kv, sides=sides))
    rule.links.append(Link(size=group, sides=tuple(Side(s.operand, s.dims, kv) for s in queries)))


def _embedding(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    w, ids = _ref(a["weight"]), _ref(a["indices"])
    if w is None or ids is None or a["scale_grad_by_freq"] or a["sparse"]:
        return None
    lead: list[int | str | None] = list(range(_rank(found, ids)))
    operands: list[tuple[str, Labels]] = [(w, ["vocabulary", "n"]), (ids, lead)]
    found.vocabulary.append(found.dims[w][0])
    rule = _labelled(found, op, operands, [*lead, "n"], contracts={"vocabulary": ""})
    rule.in_one_piece = True
    return rule


def _cross_entropy(found: Analysis, op: Op) -> Rule | None:
    """Logits may be sliced along the classes: the loss then communicates inside."""
    a = arguments(op)
    logits, target = _ref(a["self"]), _ref(a["target"])
    if logits is None or target is None or a["weight"] is not None or a["label_smoothing"]:
        return None
    if _rank(found, logits) != 2 or _rank(found, target) != 1:
        return None
    assert op.meta is not None
    operands: list[tuple[str, Labels]] = [(logits, [None, "vocabulary"]), (target, [None])]
    result: Labels = [None] * len(op.meta.shape)
    rule = _labelled(found, op, operands, result, contracts={"vocabulary": ""})
    rule.reduces_itself = rule.in_one_piece = True
    found.vocabulary.append(found.dims[logits][1])
    return rule


_RuleFunction = Callable[[Analysis, Op], Rule | None]
_TUPLE_OPS = frozenset({"split", "split_with_sizes", "chunk", "unbind"})
_RULES: dict[str, _RuleFunction] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _view),
    **dict.fromkeys(("unsqueeze", "squeeze"), _unsqueeze),
    **dict.fromkeys(("transpose", "t", "swapaxes"), _transpose),
    **dict.fromkeys(("contiguous", "clone", "alias"), _copy),
    **dict.fromkeys(("dropout", "dropout_", "detach"), _follow),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _cast),
    **dict.fromkeys(("masked_fill", "rsub", "where", "hardswish", "log_sigmoid"), _pointwise),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum"), _softmax),
    **dict.fromkeys(("mean", "sum", "var", "std", "amax", "amin", "logsumexp", "norm"), _reduction),
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "cat": _cat,
    "stack": _stack,
    "unbind": _unbind,
    "getitem": _getitem,
    "linear": _linear,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
}
