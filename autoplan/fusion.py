"""Memory-bound ops that a compiler runs as one kernel.

`torch.compile` joins elementwise ops, casts and reductions over the last dimension that hand their
results to each other, so that only what enters and leaves the joint kernel moves through memory
(Ansel et al. 2024, PyTorch 2, section 5).
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.local import LocalBlock, LocalOp

__all__ = ["FusedKernel", "fused_kernels"]


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
