"""The trace: what the planner knows of a model, as plain frozen values without torch.

A `Trace` mirrors a captured `Program` (same graph, op and value names) and adds the numbers: FLOPs,
bytes, the tensors that autograd keeps, and for every op the ways in which tensor parallelism may
run it. It prints and round-trips through JSON.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from autoplan import codec

__all__ = [
    "BlockTrace",
    "CallTrace",
    "ChangedState",
    "DimensionKind",
    "Gemm",
    "LostWrite",
    "OpDimensions",
    "OpTrace",
    "ParameterTrace",
    "Placement",
    "SavedTensor",
    "ShardOption",
    "Trace",
    "ValueTrace",
]

OpKind = Literal["gemm", "attention", "memory", "view", "opaque"]
DimensionKind = Literal["batch", "sequence", "heads", "features", "experts", "spatial", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Placement:
    """How a value lies over the tensor-parallel axis, for itself and for its gradient.

    Attributes:
        kind: `replicate`: whole on every rank, gradient too. `partial_gradient`: whole on every
            rank, each rank's gradient is an addend (what a column-parallel product requires of its
            input). `shard`: each rank has a slice, gradient too. `partial`: each rank has an addend
            of the value, the gradient is whole (what a row-parallel product gives).
        dim: the dimension that is sliced, for `shard`; otherwise 0.
        outer: for `shard`: the dimension is `[outer, axis, inner]` and the axis in the middle is
            sliced, so a rank has `outer` separate pieces (fused qkv: 3); 1 for a plain slice.
    """

    kind: Literal["replicate", "partial_gradient", "shard", "partial"]
    dim: int = 0
    outer: int = 1

    def __str__(self) -> str:
        if self.kind != "shard":
            return {"replicate": "R", "partial_gradient": "R*", "partial": "P"}[self.kind]
        return f"S({self.dim})" if self.outer == 1 else f"S({self.dim},{self.outer})"

    @staticmethod
    def parse(text: str) -> Placement:
        """Return the placement whose `str` is `text`: R, R*, P, S(dim) or S(dim,outer)."""
        return _parsed(text)


@functools.cache
def _parsed(text: str) -> Placement:
    fixed = {"R": "replicate", "R*": "partial_gradient", "P": "partial"}
    if text in fixed:
        return Placement(kind=fixed[text])  # type: ignore[arg-type]
    if not (text.startswith("S(") and text.endswith(")")):
        raise ValueError(f"{text!r} is no placement: R, R*, P, S(dim) or S(dim,outer)")
    dim, _, outer = text[2:-1].partition(",")
    return Placement(kind="shard", dim=int(dim), outer=int(outer or 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOption:
    """One way to run an op under tensor parallelism.

    Attributes:
        axis: `whole`: every rank computes all of it; `partial`: a linear op (a view) applied to
            addends; otherwise the name of the logical axis that is sliced (`heads`, `a7`, ...).
        size: extent of that axis; the degree must divide it. 1 for `whole` and `partial`.
        inputs: required placement of each of the op's `inputs`, in order, as text (R, R*, S(d), P).
        output: placement of the result, as text.
        is_split: whether FLOPs and bytes of the op divide by the degree.
        gemm_dim: for a gemm, which of m, n, k, batch the degree divides; empty otherwise.
    """

    axis: str
    size: int
    inputs: tuple[str, ...]
    output: str
    is_split: bool
    gemm_dim: Literal["", "m", "n", "k", "batch"] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """A (batched) matrix product: `batch` times (m x k) @ (k x n)."""

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A storage that autograd keeps for the backward of an op, parameters excluded.

    Attributes:
        value: the value of the block graph that owns the storage (an input, or an op's result that
            is no view); empty for a storage made inside the op (statistics, masks, logsumexp).
        nbytes: size of the storage.
    """

    value: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDimensions:
    """What the dimensions of an op's tensors are, and along which it can be sliced.

    Attributes:
        inputs: per value that the op reads, in the order of `OpTrace.inputs`, a label per
            dimension: a `DimensionKind`, or several joined by `*`, outermost first, where axes are
            merged (`batch*sequence`, `heads*features`).
        output: of the result; of the first component where it is a tuple.
        slices: every way to run the op on slices of one axis, with the kind as `axis`: what may be
            sharded at all, by whichever parallelism. `OpTrace.options` are those that tensor
            parallelism is offered.
    """

    inputs: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]
    slices: tuple[ShardOption, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTrace:
    """The numbers of one op of a block graph, for the captured micro-batch size.

    Attributes:
        name: name of its result.
        target: operator, such as `aten.linear.default`.
        fqn: module relative to the block.
        kind: which cost law prices it.
        inputs: names of the values it reads, in order, each once; states included.
        shape: of the result; empty for a tuple.
        dtype: of the result, such as `float32`; empty for a tuple.
        nbytes: bytes of the result's own storage; 0 where it is a view.
        storage: name of the value that owns the result's storage (itself unless a view).
        gemm: for kind gemm.
        attention: for kind attention: (batch, heads, seq_q, seq_k, head_dim, causal 0/1).
        forward_flops: floating-point operations forward.
        backward_flops: backward, both gradients.
        forward_bytes: bytes read and written forward.
        backward_bytes: backward.
        accumulated_bytes: of those, what sums of gradients move.
        saved: what autograd keeps for it.
        casts: copies of states that autocast makes for it, in its own dtype and once a block; they
            live until the block's forward ends, and longer where `saved` names them.
        cast_bytes: read and written forward by the copies that autocast makes.
        backward_cast_bytes: and backward.
        mark_bytes: bytes that a keep mark holds: all results of kernels inside that are no views
            and no copies of autocast.
        may_mark: whether a keep mark is legal (no view, not random, not mutated later).
        is_random: draws from the random state.
        mutates: writes to one of its inputs.
        needs_grad: whether a gradient flows through it.
        forward_temp_bytes: largest transient inside the kernel forward, result excluded.
        backward_temp_bytes: largest transient inside its backward, result gradients excluded.
        signature: equal for ops that take the same time, see `autoplan.signatures`; empty for a
            view.
        options: ways to run it under tensor parallelism; the first is `whole`.
        dimensions: what its dimensions are; see `OpDimensions`.
    """

    name: str
    target: str
    fqn: str
    kind: OpKind
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    storage: str
    gemm: Gemm | None = None
    attention: tuple[int, int, int, int, int, int] | None = None
    forward_flops: int = 0
    backward_flops: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    accumulated_bytes: int = 0
    saved: tuple[SavedTensor, ...] = ()
    casts: tuple[SavedTensor, ...] = ()
    cast_bytes: int = 0
    backward_cast_bytes: int = 0
    mark_bytes: int = 0
    may_mark: bool = False
    is_random: bool = False
    mutates: bool = False
    needs_grad: bool = True
    forward_temp_bytes: int = 0
    backward_temp_bytes: int = 0
    signature: str = ""
    options: tuple[ShardOption, ...] = ()
    dimensions: OpDimensions = OpDimensions(inputs=(), output=(), slices=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTrace:
    """A parameter or buffer that a block graph reads.

    Attributes:
        name: value name in the block graph.
        fqn: relative to the block, or absolute when `is_absolute`.
        shape, dtype: of the full tensor.
        is_parameter: parameter, else buffer.
        is_trained: requires a gradient.
    """

    name: str
    fqn: str
    is_absolute: bool
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    is_parameter: bool
    is_trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTrace:
    """A value that enters or leaves a block.

    Attributes:
        is_activation: it depends on a parameter or another block (a gradient may flow); otherwise
            it is a batch input or a side value, the same for all blocks and rebuilt on each stage.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    is_activation: bool
    needs_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTrace:
    """A block class with its numbers; every call of the class has the same."""

    name: str
    is_glue: bool
    fingerprint: str
    inputs: tuple[ValueTrace, ...]
    states: tuple[ParameterTrace, ...]
    ops: tuple[OpTrace, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTrace:
    """One block of the chain: index of its class, module FQN, values in and out, state FQNs."""

    block: int
    fqn: str
    args: tuple[str, ...]
    outs: tuple[str, ...]
    states: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWrite:
    """A write to what enters a call that somebody misses where it is made to a copy.

    Attributes:
        writer: the call.
        reader: a call that reads another view of the same memory; None where the memory is that of
            a state.
        value: the view, or the FQN of the state.
    """

    writer: int
    reader: int | None
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedState:
    """A state that the forward writes to, and the calls that read or write it.

    They belong on one stage: each stage has a copy of its own.
    """

    fqn: str
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A model with its loss for one micro-batch size.

    Attributes:
        model: class name, for people.
        microbatch_size: size of the batch dimension at capture.
        inputs: batch leaves.
        batch_dims: per batch leaf its batch dimension, None for a leaf without a batch.
        blocks: block classes.
        calls: the chain, in execution order.
        side: side values that a stage may rebuild, with bytes (name, nbytes).
        shared: groups of FQNs that name one parameter, first name first.
        crossing_bytes: for each position between calls i and i+1: bytes of the activations that
            cross there, forward.
        num_parameters: elements, shared ones once.
        num_trained: of them trained.
        backend: whose rules the kept bytes follow: `cpu` or `cuda`.
        notes: what a reader must know (ignored checkpointing, opaque ops, extrapolated depth).
        fingerprint: of the captured program.
        versions: of torch and, where used, transformers.
        lost_writes: that a plan may make to copies, see `autoplan.shared_writes`.
        changed: states that the forward writes to.
    """

    schema_version: int = 1
    model: str
    microbatch_size: int
    inputs: tuple[ValueTrace, ...]
    batch_dims: tuple[int | None, ...] = ()
    blocks: tuple[BlockTrace, ...]
    calls: tuple[CallTrace, ...]
    side: tuple[tuple[str, int], ...]
    shared: tuple[tuple[str, ...], ...]
    crossing_bytes: tuple[int, ...]
    num_parameters: int
    num_trained: int
    backend: Literal["cpu", "cuda"]
    notes: tuple[str, ...]
    fingerprint: str
    versions: dict[str, str]
    lost_writes: tuple[LostWrite, ...] = ()
    changed: tuple[ChangedState, ...] = ()

    def first_names(self) -> dict[str, str]:
        """Return the first name of each parameter that has several, by each of its names."""
        return {fqn: group[0] for group in self.shared for fqn in group}

    def without(self, options: Collection[tuple[str, str, str]]) -> Trace:
        """Return the trace without some options of its ops: class, op and axis of each."""
        if not options:
            return self
        blocks = tuple(
            replace(
                block,
                ops=tuple(
                    replace(
                        op,
                        options=tuple(
                            o for o in op.options if (block.name, op.name, o.axis) not in options
                        ),
                    )
                    for op in block.ops
                ),
            )
            for block in self.blocks
        )
        return replace(self, blocks=blocks)

    def dimension_report(self) -> str:
        """Return as text what each dimension of every op is, and what may be sharded."""
        from autoplan.dimension_text import dimension_report

        return dimension_report(self)

    def to_json(self) -> str:
        """Return readable JSON text."""
        return codec.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Return the trace that `to_json` wrote; a ValueError names the wrong key."""
        return codec.loads(cls, text, "trace")
