"""Memory-bound ops that a compiler runs as one kernel.

`torch.compile` joins elementwise ops, casts and reductions over the last dimension that hand their
results to each other, so that only what enters and leaves the joint kernel moves through memory
(Ansel et al. 2024, PyTorch 2, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoplan.local_blocks import LocalBlock, LocalOp
from autoplan.profiles.lookups import ITEM_BYTES
from autoplan.times import LINEAR

__all__ = ["FusedKernel", "fused_kernels", "joined", "with_narrow_operands"]

_NARROW_BYTES = 1  # float8


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernel:
    """Ops that run as one kernel, with bytes read and written in all.

    Attributes:
        ops: names, in order.
        forward_bytes: what enters and what leaves.
        backward_bytes: what enters is read again, gradients of what leaves are read, and gradients
            of what enters are written.
    """

    ops: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int


def fused_kernels(local: LocalBlock) -> tuple[FusedKernel, ...]:
    """Return the joint kernels of a block as one rank runs it."""
    groups: dict[str, int] = {}
    members: list[list[LocalOp]] = []
    for op in local.ops:
        joined = {groups[name] for name in op.inputs if name in groups}
        if op.op is not None and op.op.kind == "view":
            if len(joined) == 1:
                groups[op.name] = joined.pop()
            continue
        if not _is_joinable(op):
            continue
        target = min(joined, default=len(members))
        if target == len(members):
            members.append([])
        for other in joined - {target}:
            members[target] += members[other]
            members[other] = []
            groups = {n: target if g == other else g for n, g in groups.items()}
        members[target].append(op)
        groups[op.name] = target
    return tuple(_kernel(local, group) for group in members if group)


def _is_joinable(op: LocalOp) -> bool:
    """Return whether a compiler joins an op: memory-bound and no gather by index."""
    if op.op is None or op.op.target.startswith(("aten.embedding", "aten.index")):
        return False
    return op.op.kind == "memory" or (op.op.kind == "opaque" and op.op.forward_flops == 0)


def _kernel(local: LocalBlock, group: list[LocalOp]) -> FusedKernel:
    made = {op.name for op in group}
    owner = {op.name: op.storage for op in local.ops}
    states = {state.name for state in local.block.states}
    sizes = {op.name: op.value_bytes for op in local.ops}
    entering = {
        owner.get(name, name): sizes.get(name) or local.value_bytes.get(name, 0)
        for op in group
        for name in op.inputs
        if owner.get(name, name) not in made and name not in states
    }
    read_outside = {
        owner.get(name, name) for op in local.ops if op.name not in made for name in op.inputs
    }
    read_outside |= {owner.get(name, name) for name in local.outputs}
    leaving = sum(op.value_bytes for op in group if op.name in read_outside)
    entered = sum(entering.values())
    return FusedKernel(
        ops=tuple(op.name for op in group),
        forward_bytes=entered + leaving,
        backward_bytes=2 * entered + leaving,
    )


def joined(local: LocalBlock) -> LocalBlock:
    """Return a block whose joint kernels hold only what enters and leaves them.

    What lies inside takes no memory, forward or backward; an op that autograd would have keep it
    keeps what enters the kernel, from which it is made again (the partitioner of `torch.compile`
    recomputes elementwise ops).
    """
    changed: dict[str, LocalOp] = {}
    inside: set[str] = set()
    for kernel in fused_kernels(local):
        if len(kernel.ops) > 1:
            made = set(kernel.ops)
            interior = _interior(local, made)
            sources = _sources(local, made)
            inside |= interior
            for op in local.ops:
                if op.name in made:
                    changed[op.name] = _without(op, sources, interior)
    ops = tuple(changed.get(op.name, op) for op in local.ops)
    sizes = {n: 0 if n in inside else b for n, b in local.value_bytes.items()}
    return replace(local, ops=ops, value_bytes=sizes)


def with_narrow_operands(local: LocalBlock) -> LocalBlock:
    """Return a block whose kernels write what only linear layers read in their 8 bits.

    A compiler fuses the cast of an operand into the kernel that makes it, and the wide form is
    never written; where the backward needs that, it is kept as it is (torchao, `Float8Linear` saves
    its input in high precision).
    """
    storage = {op.name: op.storage for op in local.ops}
    readers: dict[str, list[LocalOp]] = {}
    for op in local.ops:
        if op.op is None or op.op.kind != "view":
            for name in op.inputs:
                readers.setdefault(storage.get(name, name), []).append(op)
    leaving = {storage.get(name, name) for name in local.outputs}
    ops = [
        replace(op, unkept_bytes=op.nbytes * _NARROW_BYTES // ITEM_BYTES[op.op.dtype])
        if op.op is not None
        and _is_joinable(op)
        and op.op.dtype in ITEM_BYTES
        and op.name not in leaving
        and all(_is_linear(reader) for reader in readers.get(op.name, [op]))
        else op
        for op in local.ops
    ]
    return replace(local, ops=tuple(ops))


def _is_linear(op: LocalOp) -> bool:
    return op.op is not None and op.op.target in LINEAR


def _interior(local: LocalBlock, made: set[str]) -> set[str]:
    """Return the results of a kernel's ops that nobody else reads."""
    owner = {op.name: op.storage for op in local.ops}
    outside = {owner.get(n, n) for op in local.ops if op.name not in made for n in op.inputs}
    return made - outside - {owner.get(name, name) for name in local.outputs}


def _sources(local: LocalBlock, made: set[str]) -> dict[str, tuple[str, ...]]:
    """Return for each result in a kernel the storages that enter it and that it is made from."""
    owner = {op.name: op.storage for op in local.ops}
    states = {state.name for state in local.block.states}
    found: dict[str, tuple[str, ...]] = {}
    for op in local.ops:
        if op.name in made:
            names: dict[str, None] = {}
            for storage in (owner.get(name, name) for name in op.inputs):
                if storage not in states:
                    names |= dict.fromkeys(found.get(storage, (storage,)))
            found[op.name] = tuple(names)
    return found


def _without(op: LocalOp, sources: dict[str, tuple[str, ...]], interior: set[str]) -> LocalOp:
    saved: dict[str, None] = {}
    for name in op.saved:
        saved |= dict.fromkeys(sources[name] if name in interior else (name,))
    is_inside = op.name in interior
    return replace(
        op,
        nbytes=0 if is_inside else op.nbytes,
        value_bytes=0 if is_inside else op.value_bytes,
        saved=tuple(saved),
        internal_bytes=0,
        forward_temp_bytes=0,
        backward_temp_bytes=0,
    )
