"""Expert parallelism: what one rank runs of a block that multiplies rows by a matrix per expert.

Each rank of a group holds some of the experts. Rows that were routed are exchanged before the
experts and back after them, one all-to-all each, and the same again for their gradients (Lepikhin
et al. 2021, GShard, section 3.2). Routing is taken as balanced, so that a rank receives as many
rows as it sends; with several experts it puts what it receives into their order by a copy.

    ranks of a pipeline stage = tensor_parallel * degree * copies

Neighbours in rank numbers share an expert's matrices (`tensor_parallel`), then come the ranks with
other experts (`degree`), then those with the same (`copies`), over which the gradients of experts
are reduced and their optimizer states are sharded (Megatron-LM, `expert_decoder_rank_generator` in
`parallel_state.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.graph import BlockTrace, Gemm, OpTrace, ParameterTrace, ShardOption, Trace

__all__ = [
    "EXCHANGE",
    "REORDER",
    "STACKED",
    "UNDIVIDED",
    "ExpertParallel",
    "divided",
    "expert_states",
]

EXCHANGE = "autoplan.exchange_rows.default"
REORDER = "autoplan.reorder_rows.default"

STACKED = (
    "aten.bmm.default",
    "aten._grouped_mm.default",
    "transformers.grouped_mm_fallback.default",
)
"""Products whose second operand is a stack of matrices."""

_STACK_DIMS = 3
_ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel:
    """How experts lie over the ranks of a pipeline stage.

    Attributes:
        degree: ranks that hold different experts.
        tensor_parallel: ranks that share the matrices of an expert: 1, or the degree of the layers
            around.
    """

    degree: int = 1
    tensor_parallel: int = 1

    def copies(self, dp: int, tp: int) -> int:
        """Return how many ranks of a stage hold the same experts."""
        return dp * tp // (self.degree * self.tensor_parallel)


UNDIVIDED = ExpertParallel()
"""Every rank holds all experts."""


def expert_states(block: BlockTrace) -> frozenset[str]:
    """Return the parameters of a block that have a matrix per expert: operands of `STACKED`."""
    owners = {state.name: state.name for state in block.states}
    for op in block.ops:
        if op.kind == "view" and op.inputs and op.inputs[0] in owners:
            owners[op.name] = owners[op.inputs[0]]
    stacks = {s.name for s in block.states if s.is_parameter and len(s.shape) == _STACK_DIMS}
    read = (owners.get(name, "") for op in block.ops if op.target in STACKED for name in op.inputs)
    return frozenset(stacks.intersection(read))


def divided(trace: Trace, experts: ExpertParallel, tp: int) -> Trace:
    """Return the trace of what one rank runs, with experts divided and rows exchanged.

    Args:
        trace: of the whole model.
        experts: degrees; a degree of 1 changes nothing.
        tp: tensor-parallel degree of the layers around.

    Raises:
        ValueError: no block has experts, or their number does not divide; says which.
    """
    if experts.degree == 1:
        return trace
    found = [expert_states(block) for block in trace.blocks]
    if not any(found):
        raise ValueError(
            f"expert_parallel={experts.degree}: the model has no product of rows with a matrix per "
            "expert (a parameter of three dimensions in torch.bmm or torch._grouped_mm)"
        )
    blocks = tuple(
        _Division(block, states, experts, tp).block() if states else block
        for block, states in zip(trace.blocks, found, strict=True)
    )
    return replace(trace, blocks=blocks)


class _Division:
    """One block whose experts are divided."""

    def __init__(
        self, block: BlockTrace, states: frozenset[str], experts: ExpertParallel, tp: int
    ) -> None:
        self.source = block
        self.states = states
        self.degree = experts.degree
        self.is_whole = experts.tensor_parallel < tp
        self.weights = _made_of_states(block)
        self.readers = {
            op.name
            for op in block.ops
            if op.target in STACKED and any(self.weights.get(n) in states for n in op.inputs)
        }
        self.region = self.readers | _between(block, self.readers)
        counts = {s.shape[0] for s in block.states if s.name in states}
        for count in counts:
            if count % self.degree:
                raise ValueError(
                    f"expert_parallel={self.degree} does not divide the {count} experts of "
                    f"{block.name}"
                )
        self.is_sorted = max(counts) > self.degree

    def block(self) -> BlockTrace:
        """Return the block with exchanges and a rank's share of its experts."""
        leaving = self._leaving()
        entered: dict[str, str] = {}
        left: dict[str, str] = {}
        ops: list[OpTrace] = []
        values = {v.name: (v.shape, v.dtype, v.needs_grad) for v in self.source.inputs}
        for op in self.source.ops:
            if op.name in self.region:
                for name in op.inputs:
                    is_made = name in self.region or name in self.weights or name in entered
                    if not is_made and values[name][2]:
                        moved = self._moved(name, *values[name][:2], is_entering=True)
                        ops += moved
                        entered[name] = moved[-1].name
                ops.append(self._inside(op, entered))
            else:
                ops.append(_renamed(op, left, self._owners(left)))
            values[op.name] = (op.shape, op.dtype, op.needs_grad)
            if op.name in leaving:
                moved = self._moved(op.name, op.shape, op.dtype, is_entering=False)
                ops += moved
                left[op.name] = moved[-1].name
        return replace(
            self.source,
            states=tuple(self._share(state) for state in self.source.states),
            ops=tuple(ops),
            outputs=tuple(left.get(name, name) for name in self.source.outputs),
        )

    def _leaving(self) -> set[str]:
        """Return the results of the region that others read."""
        read = {n for op in self.source.ops if op.name not in self.region for n in op.inputs}
        return self.region & (read | set(self.source.outputs))

    def _share(self, state: ParameterTrace) -> ParameterTrace:
        if state.name not in self.states:
            return state
        shape = (state.shape[0] // self.degree, *state.shape[1:])
        return replace(state, shape=shape, nbytes=state.nbytes // self.degree)

    def _owners(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return the new owner of what is kept of each value, by the old owner."""
        storage = {op.name: op.storage for op in self.source.ops}
        return {storage.get(old, old): new for old, new in names.items()}

    def _inside(self, op: OpTrace, entered: Mapping[str, str]) -> OpTrace:
        op = _renamed(op, entered, self._owners(entered))
        if op.name not in self.readers:
            return op
        rows = len(op.shape) - 2
        if self.is_whole:
            inputs = tuple("R" if n in self.weights else f"S({rows})" for n in op.inputs)
            sliced = ShardOption(
                axis="rows",
                size=op.shape[rows],
                inputs=inputs,
                output=f"S({rows})",
                is_split=True,
                gemm_dim="m",
            )
            options = (*(o for o in op.options if o.axis == "whole"), sliced)
        else:
            options = tuple(o for o in op.options if o.gemm_dim in ("", "n", "k"))
        gemm = op.gemm
        if gemm is not None and gemm.batch > 1:
            batch = gemm.batch // self.degree
            gemm = Gemm(batch=batch, m=gemm.m * self.degree, n=gemm.n, k=gemm.k)
        return replace(op, gemm=gemm, options=options, signature="")

    def _moved(
        self, name: str, shape: tuple[int, ...], dtype: str, *, is_entering: bool
    ) -> list[OpTrace]:
        """Return the ops that exchange a value, and the copies that put rows into order."""
        targets = [EXCHANGE, REORDER] if self.is_sorted else [EXCHANGE]
        nbytes = math.prod(shape) * _ITEM_BYTES.get(dtype, 4)
        ops: list[OpTrace] = []
        for target in targets if is_entering else reversed(targets):
            word = "exchanged" if target == EXCHANGE else "ordered"
            op = OpTrace(
                name=f"{name}__{word}",
                target=target,
                fqn="",
                kind="memory",
                inputs=(name if not ops else ops[-1].name,),
                shape=shape,
                dtype=dtype,
                nbytes=nbytes,
                storage=f"{name}__{word}",
                forward_bytes=2 * nbytes,
                backward_bytes=2 * nbytes,
                mark_bytes=nbytes,
                options=_slices(shape),
            )
            ops.append(op)
        return ops


def _slices(shape: Sequence[int]) -> tuple[ShardOption, ...]:
    """Return the options of an op that may run on slices of any dimension but the last."""
    whole = ShardOption(axis="whole", size=1, inputs=("R",), output="R", is_split=False)
    sliced = (
        ShardOption(
            axis=f"dim{dim}", size=size, inputs=(f"S({dim})",), output=f"S({dim})", is_split=True
        )
        for dim, size in enumerate(shape[:-1])
    )
    return (whole, *sliced)


def _made_of_states(block: BlockTrace) -> dict[str, str]:
    """Return the states and what is made of one of them alone, each with that state."""
    made = {state.name: state.name for state in block.states}
    for op in block.ops:
        if op.inputs and all(name in made for name in op.inputs):
            made[op.name] = made[op.inputs[0]]
    return made


def _between(block: BlockTrace, names: Collection[str]) -> set[str]:
    """Return the ops that lie on a way from one of these ops to another."""
    after = _reached(block.ops, names)
    readers: dict[str, list[str]] = {}
    for op in block.ops:
        for name in op.inputs:
            readers.setdefault(name, []).append(op.name)
    before: set[str] = set()
    for op in reversed(block.ops):
        if any(r in names or r in before for r in readers.get(op.name, ())):
            before.add(op.name)
    return after & before


def _reached(ops: Iterable[OpTrace], names: Collection[str]) -> set[str]:
    found: set[str] = set()
    for op in ops:
        if any(name in names or name in found for name in op.inputs):
            found.add(op.name)
    return found


def _renamed(op: OpTrace, names: Mapping[str, str], owners: Mapping[str, str]) -> OpTrace:
    """Return an op that reads, views and keeps the new values of some names."""
    if not any(name in names for name in op.inputs):
        return op
    return replace(
        op,
        inputs=tuple(names.get(name, name) for name in op.inputs),
        storage=owners.get(op.storage, op.storage) if op.storage != op.name else op.storage,
        saved=tuple(replace(s, value=owners.get(s.value, s.value)) for s in op.saved),
    )
