"""Rules of operators that regroup, permute, split and join dimensions without arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from math import prod
from typing import Any

from autoplan.axes import (
    RESULT,
    Analysis,
    Atom,
    Dim,
    Link,
    Rule,
    Side,
    cut,
    fresh,
    leaves,
    singles,
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
from autoplan.program import Op

__all__ = [
    "cat",
    "expand",
    "getitem",
    "index",
    "permute",
    "repeat_interleave",
    "select",
    "slice_of",
    "split",
    "squeeze",
    "stack",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
]


def view(found: Analysis, op: Op) -> Rule | None:
    """Regroup dimensions by equal products: view, reshape, flatten, unflatten."""
    name = reference(op.args[0])
    assert op.meta is not None
    if name is None or not (len(op.args) == 1 or isinstance(op.args[1], (list, tuple, int))):
        return None
    dims = found.result(name)
    sizes = [prod(atom.size for atom in leaves(dim)) for dim in dims]
    rule = Rule(operands=(name,), is_view=True)
    made: list[Dim] = [fresh(size) if size == 1 else [] for size in op.meta.shape]
    groups = list(_groups(sizes, op.meta.shape))
    for ins, outs in groups:
        joined = [atom for dim in ins for atom in dims[dim]]
        ends = [prod(op.meta.shape[o] for o in outs[: i + 1]) for i in range(len(outs))]
        if not all(cut(joined, end) for end in ends):
            rule.blocked += [dims[dim] for dim in ins]
            for out in outs:
                made[out] = fresh(op.meta.shape[out])
            continue
        atoms = [a for atom in joined for a in leaves([atom]) or singles([atom])]
        start = 1
        for out, end in zip(outs, ends, strict=True):
            made[out] = []
            while atoms and (start < end or atoms[0].size == 1):
                atom = atoms.pop(0)
                made[out].append(atom)
                start *= atom.size
        if ends[-1] > 1:
            sides = (Side(0, tuple(ins)), Side(RESULT, tuple(outs)))
            rule.links.append(Link(size=ends[-1], sides=sides))
    _carry_singles(found, dims, made, groups)
    found.dims[op.name] = made
    return rule


def _carry_singles(
    found: Analysis,
    dims: Sequence[Dim],
    made: Sequence[Dim],
    groups: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> None:
    """Follow dimensions of size 1 through a view, in each gap between the others.

    As many before as after are the same in order. Those that vanish hide at the end of the
    neighbour, where a later view finds them; between two neighbours they may be in either.
    """
    ends_in = [(-1, -1), *((min(ins), max(ins)) for ins, _ in groups), (len(dims), len(dims))]
    ends_out = [(-1, -1), *((min(o), max(o)) for _, o in groups), (len(made), len(made))]
    for gap in range(len(groups) + 1):
        (_, left), (right, _) = ends_in[gap], ends_in[gap + 1]
        (_, left_out), (right_out, _) = ends_out[gap], ends_out[gap + 1]
        before = [dim for dim in dims[left + 1 : right] if singles(dim)]
        after = list(made[left_out + 1 : right_out])
        hidden = _trailing(dims[left]) if left >= 0 else []
        hidden = hidden or (_trailing(dims[right][::-1]) if right < len(dims) else [])
        if not before and len(hidden) == len(after):
            before = [[atom] for atom in hidden]
            for out in (left_out, right_out):
                if 0 <= out < len(made):
                    made[out][:] = [atom for atom in made[out] if atom not in hidden]
        if len(before) == len(after):
            found.alike += zip(before, after, strict=True)
        elif not after:
            vanished = [atom for dim in before for atom in dim]
            if left_out >= 0 and right_out < len(made):
                vanished = [_possible(found, atom) for atom in vanished]
            if left_out >= 0:
                made[left_out].extend(vanished)
            if right_out < len(made):
                made[right_out][:0] = vanished


def _possible(found: Analysis, atom: Atom) -> Atom:
    (proxy,) = fresh(1)
    found.alike.append(([atom], [proxy]))
    found.possible.add(proxy)
    return proxy


def _trailing(dim: Dim) -> list[Atom]:
    """Return the atoms of size 1 at the end of a dimension."""
    return list(takewhile(lambda atom: atom.root().size == 1, reversed(dim)))[::-1]


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
    name = reference(op.args[0])
    if name is None:
        return None
    rank = rank_of(found, name)
    labels = [dim % rank for dim in order]
    return labelled(found, op, [(name, list(range(rank)))], labels, is_view=True)


def transpose(found: Analysis, op: Op) -> Rule | None:
    """Swap two dimensions, or the only two."""
    rank = rank_of(found, op.inputs()[0])
    order = list(range(rank))
    a, b = (op.args[1], op.args[2]) if len(op.args) > 2 else (0, rank - 1)
    if rank:
        order[a], order[b] = order[b], order[a]
    return _permuted(found, op, order)


def permute(found: Analysis, op: Op) -> Rule | None:
    """Permute dimensions."""
    return _permuted(found, op, op.args[1])


def unsqueeze(found: Analysis, op: Op) -> Rule | None:
    """Add a dimension of size 1."""
    name = reference(op.args[0])
    assert op.meta is not None
    if name is None:
        return None
    at = arguments(op)["dim"] % len(op.meta.shape)
    kept = [dim for dim in range(len(op.meta.shape)) if dim != at]
    rule = Rule(operands=(name,), is_view=True)
    made = list(found.result(name))
    for dim, out in enumerate(kept):
        _link_whole(rule, made[dim], dim, out)
    made.insert(at, fresh(1))
    found.dims[op.name] = made
    return rule


def squeeze(found: Analysis, op: Op) -> Rule | None:
    """Drop dimensions of size 1: those that are told, or all."""
    name = reference(op.args[0])
    if name is None:
        return None
    dims = found.result(name)
    told = arguments(op).get("dim", range(len(dims)))
    told = {dim % len(dims) for dim in ([told] if isinstance(told, int) else told)} if dims else ()
    kept = [dim for dim, atoms in enumerate(dims) if dim not in told or leaves(atoms)]
    rule = Rule(operands=(name,), is_view=True)
    for out, dim in enumerate(kept):
        _link_whole(rule, dims[dim], dim, out)
    found.dims[op.name] = [dims[dim] for dim in kept]
    return rule


def expand(found: Analysis, op: Op) -> Rule | None:
    """Repeat dimensions of size 1; new ones are their own axes."""
    name = reference(op.args[0])
    assert op.meta is not None
    if name is None:
        return None
    rank = len(op.meta.shape)
    labels = aligned(rank_of(found, name), rank)
    return labelled(found, op, [(name, labels)], list(range(rank)), is_view=True, may_invent=True)


def slice_of(found: Analysis, op: Op) -> Rule | None:
    """Take a range of one dimension, which is needed whole unless all of it is taken."""
    a = arguments(op)
    name = reference(a["self"])
    assert op.meta is not None
    if name is None:
        return None
    dim = a["dim"] % len(op.meta.shape)
    size = prod(atom.size for atom in leaves(found.result(name)[dim]))
    is_all = op.meta.shape[dim] == size and a["step"] == 1
    return along(found, op, set() if is_all else {dim}, is_view=True)


def select(found: Analysis, op: Op) -> Rule | None:
    """Take one index of a dimension, which is needed whole."""
    a = arguments(op)
    name = reference(a["self"])
    if name is None:
        return None
    rank = rank_of(found, name)
    labels = [None if d == a["dim"] % rank else d for d in range(rank)]
    rest = [d for d in range(rank) if d != a["dim"] % rank]
    return labelled(found, op, [(name, labels)], rest, is_view=True)


def cat(found: Analysis, op: Op) -> Rule | None:
    """Join values along a dimension, which is needed whole."""
    a = arguments(op)
    names = [reference(value) for value in a["tensors"]]
    assert op.meta is not None
    rank = len(op.meta.shape)
    operands = [name for name in names if name is not None]
    if len(operands) != len(names) or any(rank_of(found, n) != rank for n in operands):
        return None
    labels = [None if d == a["dim"] % rank else d for d in range(rank)]
    return labelled(found, op, [(name, labels) for name in operands], labels)


def stack(found: Analysis, op: Op) -> Rule | None:
    """Join values along a new dimension."""
    a = arguments(op)
    assert op.meta is not None
    operands = [value.name for value in a["tensors"]]
    rank = len(op.meta.shape) - 1
    labels: list[int | str | None] = list(range(rank))
    result = list(labels)
    result.insert(a["dim"] % (rank + 1), None)
    return labelled(found, op, [(name, labels) for name in operands], result)


def unbind(found: Analysis, op: Op) -> Rule | None:
    """Take a dimension apart into a tuple; it is needed whole."""
    a = arguments(op)
    name = reference(a["self"])
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


def split(found: Analysis, op: Op) -> Rule | None:
    """Equal parts make the dimension [count, part], so that all parts share their atoms."""
    a = arguments(op)
    name = reference(a["self"] if "self" in a else op.args[0])
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


def getitem(found: Analysis, op: Op) -> Rule | None:
    """Take a component of a tuple."""
    name = reference(op.args[0])
    if name is None or name not in found.tuples or op.meta is None:
        return None
    dims = found.tuples[name][op.args[1]]
    found.dims[op.name] = dims
    rule = Rule(operands=(name,), is_view=True)
    for dim, atoms in enumerate(dims):
        _link_whole(rule, atoms, dim, dim)
    return rule


def repeat_interleave(found: Analysis, op: Op) -> Rule | None:
    """Repeat along one dimension, which stays whole."""
    a = arguments(op)
    x = reference(a["self"])
    if x is None or not isinstance(a.get("repeats"), int) or a["dim"] is None:
        return None
    rank = rank_of(found, x)
    labels = [None if dim == a["dim"] % rank else dim for dim in range(rank)]
    return labelled(found, op, [(x, labels)], labels)


def index(found: Analysis, op: Op) -> Rule | None:
    """Take rows by number, as experts are chosen: dimension 0 stays whole, the others follow."""
    a = arguments(op)
    x = reference(a["self"])
    names = [reference(value) for value in a["indices"]]
    if x is None or len(names) != 1 or names[0] is None or names[0] == x:
        return None
    lead = rank_of(found, names[0])
    if op.meta is None or len(op.meta.shape) != lead + rank_of(found, x) - 1:
        return None  # a mask
    rest: list[int | str | None] = list(range(1, rank_of(found, x)))
    operands: list[tuple[str, Labels]] = [(x, [None, *rest]), (names[0], [None] * lead)]
    return labelled(found, op, operands, [*([None] * lead), *rest])
