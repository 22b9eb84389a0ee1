"""Rules of operators that tensor parallelism leaves whole, for telling what their dimensions are.

They come before those of `autoplan.axis_rules` and add two things: a dimension that an operator
needs whole is still the same axis before and after it, and a dimension of another extent (a slice,
a concatenation, what a convolution makes of an image) still means the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoplan import view_rules
from autoplan.axes import RESULT, Analysis, Dim, GemmDim, Link, Rule, Side, equate, fresh, leaves
from autoplan.axis_labels import (
    Labels,
    aligned,
    arguments,
    labelled,
    op_name,
    rank_of,
    reference,
)
from autoplan.axis_rules import RuleFunction, pointwise, reduction
from autoplan.program import Op

__all__ = ["MORE_RULES", "spatial_rank"]

_SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


def spatial_rank(op: Op) -> int:
    """Return over how many dimensions a convolution, pooling or resampling slides; else 0."""
    name = op_name(op)
    is_window = name.startswith(("conv", "max_pool", "avg_pool", "adaptive_", "upsample_"))
    found = [rank for text, rank in _SPATIAL.items() if text in name]
    return found[0] if is_window and found else 0


def _same(found: Analysis, first: Dim, second: Dim) -> None:
    found.alike += [(first, second), (second, first)]


def _whole(found: Analysis, rule: Rule, whole: Sequence[tuple[int, int]]) -> Rule:
    """Take back the links that hold one of `whole`: (operand, dim) pairs needed whole."""
    places = {
        (side.operand, dim) for link in rule.links for side in link.sides for dim in side.dims
    }
    for operand, dim in set(whole) & places:
        rule.blocked.append(found.result(rule.operands[operand])[dim])
    rule.links = [
        link
        for link in rule.links
        if not any((side.operand, dim) in whole for side in link.sides for dim in side.dims)
    ]
    return rule


def _keep(found: Analysis, op: Op, whole: set[int]) -> Rule | None:
    """Apply the rule of an op that keeps the shape, and all axes; those in `whole` it reads whole.

    Further operands (weights of norms) are aligned with the last dimensions and needed whole.
    """
    name = reference(op.args[0])
    if name is None or op.meta is None or rank_of(found, name) != len(op.meta.shape):
        return None
    rank = rank_of(found, name)
    operands: list[tuple[str, Labels]] = [(name, list(range(rank)))]
    others = [other for other in op.inputs() if other != name]
    for other in others:
        own = rank_of(found, other)
        fits = own <= rank and all(
            equate(*pair)
            for pair in zip(found.result(other), found.result(name)[rank - own :], strict=True)
            if leaves(pair[0])
        )
        operands.append((other, aligned(own, rank) if fits else [None] * own))
    rule = labelled(found, op, operands, list(range(rank)))
    found.dims[op.name] = list(found.result(name))
    return _whole(found, rule, [(0, dim) for dim in whole])


def _softmax(found: Analysis, op: Op) -> Rule | None:
    assert op.meta is not None
    return _keep(found, op, {arguments(op)["dim"] % max(len(op.meta.shape), 1)})


def _norm(found: Analysis, op: Op) -> Rule | None:
    assert op.meta is not None
    rank, own = len(op.meta.shape), len(arguments(op)["normalized_shape"])
    return _keep(found, op, set(range(rank - own, rank)))


def _moved(found: Analysis, op: Op) -> Rule | None:
    """roll, flip, tril, cumsum and the like: the shape stays, every dimension may be mixed."""
    assert op.meta is not None
    return _keep(found, op, set(range(len(op.meta.shape))))


def _like(found: Analysis, op: Op) -> Rule | None:
    return _keep(found, op, set())


def _written(found: Analysis, op: Op) -> Rule | None:
    """index_put_, scatter: the result has the axes of the first operand, and is made whole."""
    name = reference(op.args[0])
    if name is None:
        return None
    found.dims[op.name] = list(found.result(name))
    return Rule(operands=op.inputs(), blocked=[d for n in op.inputs() for d in found.result(n)])


def _channel_norm(found: Analysis, op: Op) -> Rule | None:
    """batch_norm and group_norm: weights belong to dimension 1; statistics need dims whole."""
    name = reference(op.args[0])
    if name is None or op.meta is None:
        return None
    rank = rank_of(found, name)
    others = [other for other in op.inputs() if other != name]
    operands: list[tuple[str, Labels]] = [(name, list(range(rank)))]
    operands += [(other, [1]) for other in others if rank_of(found, other) == 1]
    rule = labelled(found, op, operands, list(range(rank)))
    found.dims[op.name] = list(found.result(name))
    kind = op_name(op)
    whole = list(range(1 if kind == "group_norm" else 2, rank))
    if kind == "batch_norm":
        whole = [0, *whole] if op.args[5] else []
    return _whole(found, rule, [(0, dim) for dim in whole])


def _convolution(found: Analysis, op: Op) -> Rule | None:
    """Contract the input channels; channel by channel where every channel has its own filter."""
    a = arguments(op)
    x, weight, bias = (reference(a[key]) for key in ("input", "weight", "bias"))
    count = spatial_rank(op)
    if x is None or weight is None or op.meta is None or rank_of(found, x) != count + 2:
        return None
    window: list[int | str | None] = [None] * count
    is_transposed = "transpose" in op_name(op)
    sizes = [found.result(weight)[0], found.result(x)[1]]
    is_own = a["groups"] > 1 and all(_extent(dim) == a["groups"] for dim in sizes)
    out: str | None = "c" if is_own else "o"
    contracts: Mapping[int | str, GemmDim] = {} if a["groups"] > 1 else {"c": "k"}
    into: str | None = "c"
    if a["groups"] > 1 and not is_own:
        into = out = None
    filters: list[int | str | None] = [out, into if a["groups"] == 1 else None]
    if is_transposed:
        filters = [into, out if a["groups"] == 1 else None]
    operands: list[tuple[str, Labels]] = [(x, ["b", into, *window]), (weight, [*filters, *window])]
    if bias is not None:
        operands.append((bias, [out]))
    rule = labelled(
        found,
        op,
        operands,
        ["b", out, *window],
        contracts=contracts,
        gemm={"b": "m", "o": "n", "c": "k"},
    )
    rule.added_once = 2 if bias is not None else None
    for dim in range(2, count + 2):
        _same(found, found.dims[x][dim], found.dims[op.name][dim])
    return rule


def _extent(dim: Dim) -> int:
    size = 1
    for atom in leaves(dim):
        size *= atom.size
    return size


def _window(found: Analysis, op: Op) -> Rule | None:
    """Pooling and resampling: the last dimensions slide, the others follow."""
    name = reference(op.args[0])
    if name is None or op.meta is None or rank_of(found, name) != len(op.meta.shape):
        return None
    rank = rank_of(found, name)
    first = rank - spatial_rank(op)
    labels = [dim if dim < first else None for dim in range(rank)]
    rule = labelled(found, op, [(name, labels)], labels)
    for dim in range(first, rank):
        _same(found, found.dims[name][dim], found.dims[op.name][dim])
    return rule


def _resized(rule: RuleFunction, *, is_mutual: bool = True) -> RuleFunction:
    """Return `rule` for an op that changes extents, not what the dimensions mean.

    What is new in an expanded dimension may mean more than the single element that it repeats.
    """

    def apply(found: Analysis, op: Op) -> Rule | None:
        applied = rule(found, op)
        if applied is None or op.meta is None:
            return applied
        made = found.dims[op.name]
        for name in applied.operands:
            dims = found.result(name)
            for own, out in zip(reversed(dims), reversed(made), strict=False):
                if own is not out and _extent(own) != _extent(out):
                    found.alike.append((own, out))
                    found.alike += [(out, own)] * is_mutual
        return applied

    return apply


def _repeat(found: Analysis, op: Op) -> Rule | None:
    """repeat, pad, interleave: dimensions of the same extent follow, others are needed whole."""
    name = reference(op.args[0])
    if name is None or op.meta is None or len(op.inputs()) != 1:
        return None
    if op_name(op) == "repeat_interleave" and arguments(op)["dim"] is None:
        return None
    rank, out_rank = rank_of(found, name), len(op.meta.shape)
    if rank > out_rank:
        return None
    dims = found.result(name)
    labels: list[int | str | None] = [
        label if isinstance(label, int) and _extent(dim) == op.meta.shape[label] else None
        for label, dim in zip(aligned(rank, out_rank), dims, strict=True)
    ]
    return labelled(found, op, [(name, labels)], [*[None] * (out_rank - rank), *labels])


def _reduced(found: Analysis, op: Op) -> Rule | None:
    """mean, sum, amax over dimensions: those that are kept with size 1 mean what they did."""
    assert op.meta is not None
    is_kept = rank_of(found, op.inputs()[0]) == len(op.meta.shape)
    return (_resized(reduction) if is_kept else reduction)(found, op)


def _split(found: Analysis, op: Op) -> Rule | None:
    rule = view_rules.split(found, op)
    name = reference(op.args[0])
    if rule is not None and name is not None:
        for part in found.tuples[op.name]:
            for whole, own in zip(found.result(name), part, strict=True):
                if whole is not own:
                    found.alike.append((whole, own))
    return rule


def _chosen(found: Analysis, op: Op) -> Rule | None:
    """topk, sort, max over a dimension: (values, indices); that one is needed whole, no other."""
    a = arguments(op)
    name = reference(a["self"])
    if name is None or "dim" not in a or not isinstance(a["dim"], int):
        return None
    dims = list(found.result(name))
    at = a["dim"] % max(len(dims), 1)
    rule = Rule(operands=(name,), blocked=[dims[at]])
    made = list(dims)
    if op_name(op) == "topk":
        made[at] = fresh(a["k"])
        found.alike.append((dims[at], made[at]))
    elif op_name(op) in ("max", "min"):
        made = [*dims[:at], *([fresh(1)] if a.get("keepdim") else []), *dims[at + 1 :]]
    is_dropped = len(made) < len(dims)
    for dim, own in enumerate(dims):
        size = _extent(own)
        if dim != at and size > 1:
            result = Side(RESULT, (dim - (is_dropped and dim > at),))
            rule.links.append(Link(size=size, sides=(Side(0, (dim,)), result)))
    found.tuples[op.name] = [made, list(made)]
    return rule


def _one_hot(found: Analysis, op: Op) -> Rule | None:
    name = reference(op.args[0])
    if name is None or op.meta is None:
        return None
    lead: list[int | str | None] = list(range(rank_of(found, name)))
    return labelled(found, op, [(name, lead)], [*lead, None])


def _index(found: Analysis, op: Op) -> Rule | None:
    """x[..., indices, ...] with one index tensor: its dimensions take the place of the indexed."""
    name = reference(op.args[0])
    given = list(op.args[1])
    at = [i for i, value in enumerate(given) if value is not None]
    index = reference(given[at[0]]) if len(at) == 1 else None
    if name is None or index is None or op.meta is None:
        return None
    rank, own = rank_of(found, name), rank_of(found, index)
    if len(op.meta.shape) != rank + own - 1:
        return None
    labels: list[int | str | None] = [dim if dim != at[0] else None for dim in range(rank)]
    chosen: list[int | str | None] = [f"i{dim}" for dim in range(own)]
    result = [*labels[: at[0]], *chosen, *labels[at[0] + 1 :]]
    return labelled(found, op, [(name, labels), (index, chosen)], result)


def _gather(found: Analysis, op: Op) -> Rule | None:
    """gather: the result has the axes of the index."""
    a = arguments(op)
    name, index = reference(a["self"]), reference(a["index"])
    if name is None or index is None:
        return None
    found.dims[op.name] = list(found.result(index))
    pairs = zip(found.result(name), found.result(index), strict=True)
    for own, chosen in pairs:
        found.alike.append((own, chosen))
    return Rule(operands=(name, index), blocked=[*found.result(name), *found.result(index)])


def _grouped_product(found: Analysis, op: Op) -> Rule | None:
    """Rows sorted by expert times a stack of weights; groups end where the offsets say."""
    x, weight = reference(op.args[0]), reference(op.args[1])
    if x is None or weight is None or op.meta is None:
        return None
    if rank_of(found, x) != 2 or rank_of(found, weight) != 3 or len(op.meta.shape) != 2:
        return None
    operands: list[tuple[str, Labels]] = [(x, ["m", "k"]), (weight, ["e", "k", "n"])]
    operands += [(n, ["e"]) for n in op.inputs() if n not in (x, weight)]
    rule = labelled(
        found, op, operands, ["m", "n"], contracts={"k": "k", "e": ""}, gemm={"n": "n", "m": "m"}
    )
    return _whole(found, rule, [(0, 0), (1, 0)])


def _recurrent(found: Analysis, op: Op) -> Rule | None:
    """lstm, gru, rnn over (sequence, batch, features), or (batch, sequence, features)."""
    a: dict[str, Any] = arguments(op)
    name = reference(a.get("input"))
    if name is None or rank_of(found, name) != 3:
        return None
    dims = found.result(name)
    directions = 2 if a["bidirectional"] else 1
    states = [reference(state) for state in a["hx"]] if isinstance(a["hx"], (list, tuple)) else []
    widths = [found.result(state)[-1] for state in states if state is not None]
    width = fresh(_extent(widths[0]) * directions) if widths else fresh(1)
    batch = dims[0] if a["batch_first"] else dims[1]
    states_made: list[Dim] = [fresh(1), batch, fresh(1)]
    found.tuples[op.name] = [[dims[0], dims[1], width], states_made, list(states_made)]
    return Rule(operands=op.inputs(), blocked=[d for n in op.inputs() for d in found.result(n)])


def _loss(found: Analysis, op: Op) -> Rule | None:
    """cross_entropy, nll_loss: input and target have the same rows; otherwise the usual rule."""
    logits, target = (found.result(name) for name in op.inputs()[:2])
    rows = [*logits[:1], *logits[2:]]
    if len(rows) == len(target):
        for own, other in zip(rows, target, strict=True):
            equate(own, other)
    return None


def _reversed(found: Analysis, op: Op) -> Rule | None:
    name = reference(op.args[0])
    if name is None:
        return None
    labels = list(range(rank_of(found, name)))
    return labelled(found, op, [(name, labels)], labels[::-1], is_view=True)


_POOLS = ("max", "avg", "adaptive_avg", "adaptive_max")
_RESAMPLED = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d")
_WINDOWS = (
    *(f"{kind}_pool{n}d" for kind in _POOLS for n in (1, 2, 3)),
    *(f"upsample_{kind}" for kind in (*_RESAMPLED, "trilinear3d")),
)

MORE_RULES: Mapping[str, RuleFunction] = {
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("roll", "flip", "tril", "triu", "cumsum", "tril_", "triu_"), _moved),
    **dict.fromkeys(
        ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "fill_", "zero_"), _like
    ),
    **dict.fromkeys(
        ("index_put", "index_put_", "scatter", "scatter_", "scatter_add", "scatter_add_"), _written
    ),
    **dict.fromkeys(("index_add", "index_add_"), _written),
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm"), _channel_norm),
    **dict.fromkeys((f"conv{n}d" for n in (1, 2, 3)), _convolution),
    **dict.fromkeys((f"conv_transpose{n}d" for n in (1, 2, 3)), _convolution),
    **dict.fromkeys(_WINDOWS, _window),
    **dict.fromkeys(("repeat", "pad", "constant_pad_nd", "repeat_interleave"), _resized(_repeat)),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("topk", "sort", "max", "min"), _chosen),
    **dict.fromkeys(("gather", "take_along_dim"), _gather),
    **dict.fromkeys(("_grouped_mm", "transformers::grouped_mm_fallback"), _grouped_product),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd"), _loss),
    **dict.fromkeys(("mean", "sum", "var", "std", "amax", "amin", "logsumexp", "norm"), _reduced),
    "cat": _resized(view_rules.cat),
    "expand": _resized(view_rules.expand, is_mutual=False),
    "slice": _resized(view_rules.slice_of),
    "one_hot": _one_hot,
    "index": _index,
    "numpy_T": _reversed,
    **dict.fromkeys(("masked_fill_", "copy_", "floor_divide", "lift_fresh_copy"), pointwise),
}
