"""Whether the loss of a batch is the mean of the losses of its parts, told from the program.

Micro-batches and data-parallel ranks each compute the loss of their rows, and a step averages it.
That is the loss of the whole batch where every number that is made of all rows (a sum or a mean
over them) only ever is added up and scaled. A product of two such numbers, as of the shares of
tokens and of probabilities of experts, or a root of one, differs between parts and whole. So does
what compares each row with every other, as contrastive losses do: a value in which the batch stands
twice, an op along it that leaves it, such as a softmax over rows, or rows that are picked by
numbers that no row made, such as the next ones or a random order. (Rows that rows choose, as
experts do theirs, are put back where they were.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from math import prod
from typing import Literal

from autoplan.autocast import bare
from autoplan.axis_labels import arguments, op_name
from autoplan.batch_sums import SUM_NOTE, is_row_sum
from autoplan.graph import OpDimensions
from autoplan.program import BlockGraph, Call, Op, Program, Ref
from autoplan.step_means import find_denominators

__all__ = ["linearity_notes"]

# What a value is made of: nothing of the batch, rows one by one, or all rows together.
_Made = Literal["free", "rows", "all"]
_Levels = dict[str, _Made]

_LINEAR = frozenset((
    "add", "sub", "rsub", "neg", "sum", "mean", "view", "reshape", "_unsafe_view", "squeeze",
    "unsqueeze", "permute", "transpose", "t", "expand", "expand_as", "select", "slice", "index",
    "narrow", "cat", "stack", "split", "split_with_sizes", "chunk", "unbind", "getitem", "clone",
    "detach", "alias", "to", "_to_copy", "type_as", "contiguous", "flatten", "unflatten", "copy",
    "masked_fill", "movedim", "diagonal", "trace",
))  # fmt: skip
_PRODUCTS = frozenset(("mul", "div", "matmul", "mm", "bmm", "dot", "mv", "linear", "einsum"))
_NOT_ADDITIVE = frozenset((
    "max", "min", "amax", "amin", "aminmax", "std", "var", "std_mean", "var_mean", "norm",
    "linalg_vector_norm", "logsumexp", "median", "prod", "argmax", "argmin", "any", "all",
    "quantile",
))  # fmt: skip


_ALONG = frozenset((
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp",
    "roll", "flip", "sort", "argsort", "cummax", "cummin", "topk",
))  # fmt: skip
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_SAME_VALUES = frozenset((
    "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "expand", "expand_as", "clone",
    "detach", "alias", "to", "_to_copy", "type_as", "contiguous",
))  # fmt: skip


def linearity_notes(
    program: Program, dimensions: Sequence[Mapping[str, OpDimensions]]
) -> tuple[str, ...]:
    """Return notes on what makes a loss another one when the batch is split; empty if nothing.

    Args:
        program: a model with its loss.
        dimensions: of its graphs; see `autoplan.dimensions`. Where they are not known, a value is
            taken to be made of rows one by one.
    """
    denominators = {(d.call, d.op) for d in find_denominators(program, range(len(program.calls)))}
    levels = _entering(program)
    ranges = _ranges(program.side_ops, set())
    sums: set[str] = set()
    found: dict[tuple[str, str], str] = {}
    mixed: dict[tuple[str, str], str] = {}
    known: dict[object, _Told] = {}  # equal blocks are told the same of what enters alike
    for index, call in enumerate(program.calls):
        graph = program.graphs[call.graph]
        entering = tuple((levels.get(arg, "free"), arg in ranges, arg in sums) for arg in call.args)
        if (call.graph, entering) not in known:
            known[call.graph, entering] = _told(graph, entering, dimensions[call.graph])
        told = known[call.graph, entering]
        for op in told.other_than_linear:
            if (index, op.name) not in denominators:
                found[_where(call, op), op.name] = op.target_name
        for op in told.mixing:
            mixed[_where(call, op), op.name] = op.target_name
        levels.update(zip(call.outs, told.levels, strict=True))
        ranges.update(o for o, is_range in zip(call.outs, told.ranges, strict=True) if is_range)
        sums.update(o for o, is_sum in zip(call.outs, told.sums, strict=True) if is_sum)
    notes = [SUM_NOTE] if program.loss in sums else []
    if found:
        notes.append(
            f"{_first_of(found)} makes the loss other than linear in the batch (a product or root "
            "of means over all rows, such as an auxiliary loss that balances experts): a plan that "
            "splits the batch (dp or num_microbatches above 1) computes it for each micro-batch of "
            "each rank and averages, which differs from one device"
        )
    if mixed:
        notes.append(
            f"{_first_of(mixed)} compares rows of the batch with each other, as contrastive losses "
            "do: a plan that splits the batch (dp or num_microbatches above 1) compares only the "
            "rows of a micro-batch of a rank, which trains something else than one device; pin "
            "dp=1 and num_microbatches=1 to compare all, or tell batch_dim where the batch does "
            "not lie in dimension 0"
        )
    return tuple(notes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What is told of a call of a graph.

    Attributes:
        other_than_linear: ops that are not linear in what all rows made.
        mixing: ops that mix rows with each other.
        levels, ranges, sums: per output, what it is made of, and whether it is a range or a sum.
    """

    other_than_linear: tuple[Op, ...]
    mixing: tuple[Op, ...]
    levels: tuple[_Made, ...]
    ranges: tuple[bool, ...]
    sums: tuple[bool, ...]


def _told(
    graph: BlockGraph,
    entering: Sequence[tuple[_Made, bool, bool]],
    dims: Mapping[str, OpDimensions],
) -> _Told:
    """Return what is told of a call, by what each of its arguments is: made of, a range, a sum."""
    given = dict(zip(graph.inputs, entering, strict=True))
    inner: _Levels = {name: made for name, (made, _, _) in given.items()}
    own = _ranges(graph.ops, {name for name, (_, is_range, _) in given.items() if is_range})
    summed = {name for name, (_, _, is_sum) in given.items() if is_sum}
    found, mixing = [], []
    for op in graph.ops:
        made, is_linear = _made(op, inner, dims.get(op.name), graph)
        operands = {inner.get(name, "free") for name in op.inputs()}
        if is_row_sum(
            op,
            reduces_rows=made == "all" and "all" not in operands,
            sums=summed,
            made_of_rows={name for name in op.inputs() if inner.get(name, "free") != "free"},
        ):
            summed.add(op.name)
        inner[op.name] = made
        if not is_linear:
            found.append(op)
        if _compares_rows(op, dims.get(op.name)) or _picks_rows(op, inner, own, dims):
            mixing.append(op)
    return _Told(
        other_than_linear=tuple(found),
        mixing=tuple(mixing),
        levels=tuple(inner.get(name, "free") for name in graph.outputs),
        ranges=tuple(name in own for name in graph.outputs),
        sums=tuple(name in summed for name in graph.outputs),
    )


def _where(call: Call, op: Op) -> str:
    return ".".join(part for part in (call.fqn, op.fqn) if part) or "the loss"


def _first_of(found: Mapping[tuple[str, str], str]) -> str:
    """Return where the first of some ops is and what it is, and how many others there are."""
    ((where, _), target), others = next(iter(found.items())), len(found) - 1
    more = f" and {others} other op{'s' if others > 1 else ''}" if others else ""
    return f"{where}: {target}{more}"


def _is_as_large(op: Op, levels: _Levels, graph: BlockGraph) -> bool:
    """Return whether a result has as many elements as what it is made of by rows.

    A batch of one row does not show in every dimension that it is part of.
    """
    sizes = [
        prod(meta.shape)
        for name in op.inputs()
        if levels.get(name) == "rows" and (meta := graph.meta(name)) is not None
    ]
    return op.meta is not None and bool(sizes) and 1 < max(sizes) <= prod(op.meta.shape)


def _compares_rows(op: Op, dims: OpDimensions | None) -> bool:
    """Return whether an op is the first to mix rows of the batch that its result still has."""
    if dims is None:
        return False
    if _batches(dims.output) > 1:
        return all(_batches(labels) < 2 for labels in dims.inputs)
    name = op_name(bare(op))
    if not dims.inputs or not dims.inputs[0]:
        return False
    if name == "scaled_dot_product_attention":
        return _batches(dims.inputs[0][-2:-1]) > 0  # queries attend to each other's keys
    if name in _RECURRENT:
        tokens = dims.inputs[0][1 if arguments(bare(op))["batch_first"] else 0]
        return _batches((tokens,)) > 0
    if name not in _ALONG:
        return False
    given = arguments(bare(op))
    along = given.get("dim", given.get("dims", -1))
    places = along if isinstance(along, (list, tuple)) else [along]
    labels = dims.inputs[0]
    return any(labels[place] == "batch" for place in places if place is not None)


def _picks_rows(
    op: Op, levels: _Levels, ranges: Set[str], dims: Mapping[str, OpDimensions]
) -> bool:
    """Return whether an op picks rows of the batch by numbers that no row made.

    A range from 0 counts the rows themselves: `x[arange(rows), last]` takes one token of each.

    Args:
        op: any.
        levels: what the values of its graph are made of.
        ranges: values that are 0, 1, 2 and so on.
        dims: of the graph.
    """
    name = op_name(bare(op))
    if name not in ("index", "index_select", "gather", "take_along_dim"):
        return False
    given = arguments(bare(op))
    picked = given["self"].name
    labels = dims[op.name].inputs[0] if op.name in dims else ()
    if not labels and picked in dims:
        labels = dims[picked].output
    by_place: dict[int, object] = {}
    if name == "index":
        by_place = dict(enumerate(given["indices"]))
    elif given["dim"] is not None:
        by_place = {given["dim"]: given["indices" if name == "take_along_dim" else "index"]}
    return bool(labels) and any(
        isinstance(index, Ref)
        and levels.get(index.name, "free") == "free"
        and index.name not in ranges
        and _batches((labels[place],)) > 0
        for place, index in by_place.items()
    )


def _ranges(ops: Sequence[Op], known: Set[str]) -> set[str]:
    """Return the values that are 0, 1, 2 and so on: those known, and what ops make of none."""
    found = set(known)
    for op in ops:
        name = op_name(bare(op))
        if name == "arange":
            given = arguments(op)
            if given.get("start", 0) == 0 and given.get("step", 1) == 1:
                found.add(op.name)
        elif name in _SAME_VALUES and op.inputs() and op.inputs()[0] in found:
            found.add(op.name)
    return found


def _batches(labels: Sequence[str]) -> int:
    """Return how many dimensions are made of the batch."""
    return sum("batch" in label.split("*") for label in labels)


def _entering(program: Program) -> _Levels:
    """Return what the inputs and side values of a program are made of."""
    dims = program.batch_dims or (0,) * len(program.inputs)
    levels: _Levels = {
        name: "free" if dim is None else "rows"
        for name, dim in zip(program.inputs, dims, strict=True)
    }
    for op in program.side_ops:
        is_free = all(levels.get(name, "free") == "free" for name in op.inputs())
        is_scalar = op.meta is not None and not op.meta.shape
        levels[op.name] = "free" if is_free else "all" if is_scalar else "rows"
    return levels


def _made(
    op: Op, levels: _Levels, dims: OpDimensions | None, graph: BlockGraph
) -> tuple[_Made, bool]:
    """Return what an op's result is made of, and whether it is linear in what all rows made."""
    operands: list[_Made] = [levels.get(name, "free") for name in op.inputs()]
    name = op_name(bare(op))
    if set(operands) <= {"free"} or name.endswith("_like") or name.startswith("new_"):
        return "free", True
    name = name.removesuffix("_")
    has_rows = _has_rows(op, dims) or (name not in _PRODUCTS and _is_as_large(op, levels, graph))
    if "all" not in operands:
        return ("rows", True) if has_rows else ("all", name not in _NOT_ADDITIVE)
    if name in _LINEAR:
        return "all", True
    if name in _PRODUCTS:
        divides = name == "div" and operands[-1] != "free" and len(operands) > 1
        return "all", sum(one != "free" for one in operands) == 1 and not divides
    # Counts and choices have no gradient; what is made of them with a product is told there.
    is_number = op.meta is None or op.meta.dtype.is_floating_point
    return "all", not is_number


def _has_rows(op: Op, dims: OpDimensions | None) -> bool:
    """Return whether a result has a dimension for the rows of the batch, or may have."""
    if op.meta is not None and not op.meta.shape:
        return False
    if dims is None or not dims.output:
        return True
    parts = {part for label in dims.output for part in label.split("*")}
    return bool(parts & {"batch", "unknown"})
