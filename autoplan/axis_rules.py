"""The rule of every operator whose dimensions we understand, and the analysis that applies them.

Most rules are einsum-like (`autoplan.axis_labels`); views and splits (`autoplan.view_rules`) and
grouped attention heads have their own. An unknown operator has no rule and is only ever run whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import torch

from autoplan import view_rules
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
from autoplan.axis_labels import (
    Labels,
    aligned,
    along,
    arguments,
    labelled,
    op_name,
    rank_of,
    reference,
)
from autoplan.op_facts import is_random
from autoplan.program import BlockGraph, Op

__all__ = ["RuleFunction", "analyse", "pointwise", "reduction"]


RuleFunction = Callable[[Analysis, Op], Rule | None]


def analyse(graph: BlockGraph, more: Mapping[str, RuleFunction] | None = None) -> Analysis:
    """Return the logical axes of a block graph; a pure function of the graph.

    Args:
        graph: the block graph.
        more: rules by operator name that come before those of this module.
    """
    found = Analysis()
    for name, meta in zip(graph.inputs, graph.input_metas, strict=True):
        if meta is not None:
            found.dims[name] = [fresh(size) for size in meta.shape]
    for state in graph.states:
        found.dims[state.name] = [fresh(size) for size in state.meta.shape]
    for op in graph.ops:
        rule = _apply_rule(found, op, more or {})
        if rule is not None and set(op.inputs()) <= set(rule.operands):
            found.rules[op.name] = rule
        elif op.meta is not None:
            found.dims[op.name] = [fresh(size) for size in op.meta.shape]
    return found


def _apply_rule(found: Analysis, op: Op, more: Mapping[str, RuleFunction]) -> Rule | None:
    name = op_name(op)
    if any(n not in found.dims and n not in found.tuples for n in op.inputs()):
        return None
    known = more[name](found, op) if name in more else None
    if known is not None:
        return known
    if is_random(op) and name not in ("dropout", "dropout_", "scaled_dot_product_attention"):
        return None
    rule = _RULES.get(name)
    if rule is None and isinstance(op.target, torch._ops.OpOverload):
        rule = pointwise if torch.Tag.pointwise in op.target.tags else None
    if rule is None or (op.meta is None and name not in _TUPLE_OPS):
        return None
    return rule(found, op)


def pointwise(found: Analysis, op: Op) -> Rule | None:
    """Align the operands at the last dimension."""
    assert op.meta is not None
    names = [reference(value) for value in (*op.args, *op.kwargs.values())]
    operands = [name for name in names if name is not None]
    rank = len(op.meta.shape)
    labels = [(name, aligned(rank_of(found, name), rank)) for name in operands]
    return labelled(found, op, labels, list(range(rank))) if operands else None


def _follow(found: Analysis, op: Op) -> Rule | None:
    """Apply the rule of a unary op that keeps the shape: dropout, casts."""
    return along(found, op, set(), is_view=False)


def _cast(found: Analysis, op: Op) -> Rule | None:
    """Follow the first operand; a second one lends its dtype, and its dims if they are alike."""
    names = op.inputs()
    assert op.meta is not None
    if reference(op.args[0]) != names[0] or len(names) > 2:
        return None
    labels = list(range(len(op.meta.shape)))
    sizes = [[prod(a.size for a in leaves(dim)) for dim in found.result(n)] for n in names]
    if sizes[0] != list(op.meta.shape):
        return None
    operands: list[tuple[str, Labels]] = [
        (name, labels if size == sizes[0] else [None] * len(size))
        for name, size in zip(names, sizes, strict=True)
    ]
    return labelled(found, op, operands, labels)


def _copy(found: Analysis, op: Op) -> Rule | None:
    return along(found, op, set(), is_view=True)


def _linear(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    x, w, b = reference(a["input"]), reference(a["weight"]), reference(a["bias"])
    if x is None or w is None or rank_of(found, w) != 2:
        return None
    lead: list[int | str | None] = list(range(rank_of(found, x) - 1))
    operands: list[tuple[str, Labels]] = [(x, [*lead, "k"]), (w, ["n", "k"])]
    if b is not None:
        operands.append((b, ["n"]))
    gemm: dict[int | str, GemmDim] = {d: "m" for d in lead if d is not None}
    gemm["n"] = "n"
    rule = labelled(found, op, operands, [*lead, "n"], contracts={"k": "k"}, gemm=gemm)
    rule.added_once = 2 if b is not None else None
    return rule


def _addmm(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    b, x, w = reference(a["self"]), reference(a["mat1"]), reference(a["mat2"])
    if b is None or x is None or w is None or a["beta"] != 1 or a["alpha"] != 1:
        return None
    bias: Labels = ["n"] if rank_of(found, b) == 1 else ["m", "n"]
    operands: list[tuple[str, Labels]] = [(b, bias), (x, ["m", "k"]), (w, ["k", "n"])]
    gemm: dict[int | str, GemmDim] = {"m": "m", "n": "n"}
    rule = labelled(found, op, operands, ["m", "n"], contracts={"k": "k"}, gemm=gemm)
    rule.added_once = 0
    return rule


def _matmul(found: Analysis, op: Op) -> Rule | None:
    x, w = reference(op.args[0]), reference(op.args[1])
    if x is None or w is None or min(rank_of(found, x), rank_of(found, w)) < 2:
        return None
    assert op.meta is not None
    rank = len(op.meta.shape)
    first = [*aligned(rank_of(found, x) - 2, rank - 2), "m", "k"]
    second = [*aligned(rank_of(found, w) - 2, rank - 2), "k", "n"]
    lead: list[int | str | None] = list(range(rank - 2))
    role: GemmDim = "m" if rank_of(found, w) == 2 else "batch"
    gemm: dict[int | str, GemmDim] = {d: role for d in lead if d is not None}
    gemm |= {"m": "m", "n": "n"}
    operands: list[tuple[str, Labels]] = [(x, first), (w, second)]
    rule = labelled(found, op, operands, [*lead, "m", "n"], contracts={"k": "k"}, gemm=gemm)
    _note_heads(found, op, rule)
    return rule


def _baddbmm(found: Analysis, op: Op) -> Rule | None:
    """A batched product and an addend; its contraction stays whole, for the addend counts once."""
    names = [reference(value) for value in op.args[:3]]
    labels: list[Labels] = [["b", "m", "n"], ["b", "m", None], ["b", None, "n"]]
    if any(name is None or rank_of(found, name) != 3 for name in names):
        return None
    operands = [(n, label) for n, label in zip(names, labels, strict=True) if n is not None]
    gemm: dict[int | str, GemmDim] = {"b": "batch", "m": "m", "n": "n"}
    rule = labelled(found, op, operands, ["b", "m", "n"], gemm=gemm)
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
    names = [reference(value) for value in op.args[1]]
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
    rule = labelled(found, op, operands, list(out), contracts=contracts, gemm=gemm)
    _note_heads(found, op, rule)
    return rule


def _norm(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    x = reference(a["input"])
    if x is None:
        return None
    rank = rank_of(found, x)
    lead = rank - len(a["normalized_shape"])
    labels = [dim if dim < lead else None for dim in range(rank)]
    operands: list[tuple[str, Labels]] = [(x, labels)]
    operands += [(n, [None] * rank_of(found, n)) for n in op.inputs() if n != x]
    return labelled(found, op, operands, labels)


def _softmax(found: Analysis, op: Op) -> Rule | None:
    assert op.meta is not None
    dim = arguments(op)["dim"]
    return along(found, op, {dim % max(len(op.meta.shape), 1)}, is_view=False)


def reduction(found: Analysis, op: Op) -> Rule | None:
    """mean, sum, var, ... over dims: those are needed whole, the others follow."""
    a = arguments(op)
    x = reference(op.args[0])
    if x is None:
        return None
    rank = rank_of(found, x)
    given = a.get("dim")
    over = [given] if isinstance(given, int) else list(given or range(rank))
    whole = {dim % rank for dim in over} if rank else set()
    labels = [None if dim in whole else dim for dim in range(rank)]
    keep = bool(a.get("keepdim", False))
    result = labels if keep else [label for label in labels if label is not None]
    return labelled(found, op, [(x, labels)], result)


def _attention(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    q, k, v, mask = (reference(a[n]) for n in ("query", "key", "value", "attn_mask"))
    if q is None or k is None or v is None:
        return None
    rank = rank_of(found, q)
    if rank != rank_of(found, k) or rank != rank_of(found, v) or rank < 3:
        return None
    lead: list[int | str | None] = list(range(rank - 2))
    grouped = a["enable_gqa"] and _differ(found.dims[q][rank - 3], found.dims[k][rank - 3])
    if grouped:
        lead[-1] = None
    whole = [None, None]
    operands: list[tuple[str, Labels]] = [(name, [*lead, *whole]) for name in (q, k, v)]
    if mask is not None:
        operands.append((mask, [*aligned(rank_of(found, mask) - 2, rank - 2), *whole]))
        if grouped and rank_of(found, mask) >= 3 and leaves(found.dims[mask][-3]):
            return None
    keys, queries = found.dims[k][rank - 3], found.dims[q][rank - 3]
    heads = keys if leaves(keys) else queries
    rule = labelled(found, op, operands, [*lead, *whole])
    if grouped:
        _group_heads(found, rule, op.name, rank - 3)
        is_distinct = len({q, k, v}) == 3
        if is_distinct and (mask is None or _is_headless(found, mask)):
            size = prod(atom.size for atom in leaves(found.dims[q][rank - 3]))
            rule.query_heads = (size, rank - 3)
    found.heads.append(heads)
    return rule


def _is_headless(found: Analysis, mask: str) -> bool:
    return rank_of(found, mask) < 3 or not found.dims[mask][rank_of(found, mask) - 3]


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


def _grouped_mm(found: Analysis, op: Op) -> Rule | None:
    """Rows sorted by expert times one matrix per expert: rows and experts stay whole."""
    a = arguments(op)
    x, w, offsets = reference(a["self"]), reference(a["mat2"]), reference(a["offs"])
    if x is None or w is None or offsets is None or a["bias"] is not None:
        return None
    if rank_of(found, x) != 2 or rank_of(found, w) != 3:
        return None
    operands: list[tuple[str, Labels]] = [
        (x, [None, "k"]),
        (w, [None, "k", "n"]),
        (offsets, [None]),
    ]
    contracts: dict[int | str, GemmDim] = {"k": "k"}
    gemm: dict[int | str, GemmDim] = {"n": "n"}
    return labelled(found, op, operands, [None, "n"], contracts=contracts, gemm=gemm)


def _embedding(found: Analysis, op: Op) -> Rule | None:
    a = arguments(op)
    w, ids = reference(a["weight"]), reference(a["indices"])
    if w is None or ids is None or a["scale_grad_by_freq"] or a["sparse"]:
        return None
    lead: list[int | str | None] = list(range(rank_of(found, ids)))
    operands: list[tuple[str, Labels]] = [(w, ["vocabulary", "n"]), (ids, lead)]
    found.vocabulary.append(found.dims[w][0])
    rule = labelled(found, op, operands, [*lead, "n"], contracts={"vocabulary": ""})
    rule.in_one_piece = True
    return rule


def _cross_entropy(found: Analysis, op: Op) -> Rule | None:
    """Logits may be sliced along the classes: the loss then communicates inside."""
    a = arguments(op)
    logits, target = reference(a["self"]), reference(a["target"])
    if logits is None or target is None or a["weight"] is not None or a["label_smoothing"]:
        return None
    if rank_of(found, logits) != 2 or rank_of(found, target) != 1:
        return None
    assert op.meta is not None
    operands: list[tuple[str, Labels]] = [(logits, [None, "vocabulary"]), (target, [None])]
    result: Labels = [None] * len(op.meta.shape)
    rule = labelled(found, op, operands, result, contracts={"vocabulary": ""})
    rule.reduces_itself = rule.in_one_piece = True
    found.vocabulary.append(found.dims[logits][1])
    return rule


_TUPLE_OPS = frozenset({"split", "split_with_sizes", "chunk", "unbind"})
_RULES: dict[str, RuleFunction] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), view_rules.view),
    "unsqueeze": view_rules.unsqueeze,
    "squeeze": view_rules.squeeze,
    **dict.fromkeys(("transpose", "t", "swapaxes"), view_rules.transpose),
    **dict.fromkeys(("contiguous", "clone", "alias"), _copy),
    **dict.fromkeys(("dropout", "dropout_", "detach"), _follow),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _cast),
    **dict.fromkeys(("masked_fill", "rsub", "where", "hardswish", "log_sigmoid"), pointwise),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), view_rules.split),
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum"), _softmax),
    **dict.fromkeys(("mean", "sum", "var", "std", "amax", "amin", "logsumexp", "norm"), reduction),
    "permute": view_rules.permute,
    "expand": view_rules.expand,
    "slice": view_rules.slice_of,
    "select": view_rules.select,
    "cat": view_rules.cat,
    "stack": view_rules.stack,
    "unbind": view_rules.unbind,
    "getitem": view_rules.getitem,
    "linear": _linear,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "_grouped_mm": _grouped_mm,
    "index": view_rules.index,
    "repeat_interleave": view_rules.repeat_interleave,
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
}
