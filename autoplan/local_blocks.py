"""A block as one rank runs it, as `autoplan.local` makes it: ops and values with local sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autoplan.graph import BlockTrace, OpTrace, ShardOption

__all__ = ["LocalBlock", "LocalOp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOp:
    """An op, or a conversion between placements, as one rank runs it.

    Attributes:
        name: of its result, as in the emitted graph.
        op: the traced op; None for a conversion.
        option: how it is sharded; for a conversion, `whole`.
        inputs: local value names it reads, states included.
        storage: name of the value that owns the result's storage.
        nbytes: bytes of the result's own storage; 0 where it shares another's.
        value_bytes: bytes of the result's elements, storage of its own or not; 0 for a tuple.
        passes_gradient: its backward hands the gradient of its result on without a copy.
        saved: storages that autograd keeps for its backward, by owner.
        casts: (name, bytes) of the copies of states that autocast makes for it.
        internal_bytes: bytes kept that were made inside.
        forward_temp_bytes: largest transient inside it forward.
        backward_temp_bytes: backward.
        mark_bytes: bytes a keep mark holds; 0 where none is legal.
        transition: for a conversion, the collectives forward and backward.
        moved_bytes: for a conversion, bytes of the whole value.
        grads: activation inputs that get a gradient.
        parameter_grads: (state name, bytes) of parameter gradients that its backward makes.
        is_partial: its result is an addend; a keep mark holds the converted results instead.
        regathered_bytes: of inputs that are kept as slices and gathered again in its backward.
        unkept_bytes: instead of `nbytes` while nothing keeps it; None: the same.
    """

    name: str
    op: OpTrace | None
    option: ShardOption
    inputs: tuple[str, ...]
    storage: str
    nbytes: int
    value_bytes: int = 0
    passes_gradient: bool = False
    saved: tuple[str, ...] = ()
    casts: tuple[tuple[str, int], ...] = ()
    internal_bytes: int = 0
    forward_temp_bytes: int = 0
    backward_temp_bytes: int = 0
    mark_bytes: int = 0
    transition: tuple[str, str] | None = None
    moved_bytes: int = 0
    grads: tuple[str, ...] = ()
    parameter_grads: tuple[tuple[str, int], ...] = ()
    is_partial: bool = False
    regathered_bytes: int = 0
    unkept_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class LocalBlock:
    """A block as one rank runs it.

    Attributes:
        block: the trace of the class.
        degree: tensor-parallel degree.
        ops: in execution order.
        inputs: bytes of each activation input by name.
        side_inputs: bytes of each input that is no activation.
        outputs: local names of the values that leave, whole on every rank or slices.
        value_bytes: local size of every value that owns a storage, inputs and states included.
        state_bytes: local size of each state as it is stored.
        state_placements: how each state is stored, as text.
        axes: the choice that it was made with.
        is_reentrant: recomputing runs it again in whole, and the outputs that that makes stay until
            its backward ends, and so do the gradients that came for them.
    """

    block: BlockTrace
    degree: int
    ops: tuple[LocalOp, ...]
    inputs: Mapping[str, int]
    side_inputs: Mapping[str, int]
    outputs: tuple[str, ...]
    value_bytes: Mapping[str, int]
    state_bytes: Mapping[str, int]
    state_placements: Mapping[str, str]
    axes: Mapping[str, str] = field(default_factory=dict)
    is_reentrant: bool = False

    @cached_property
    def storages(self) -> Mapping[str, str]:
        """Return the owner of the storage of each op's result."""
        return {op.name: op.storage for op in self.ops}

    @cached_property
    def saved(self) -> frozenset[str]:
        """Return the owners of what autograd saves, states excluded."""
        states = {state.name for state in self.block.states}
        return frozenset(owner for op in self.ops for owner in op.saved if owner not in states)

    @cached_property
    def last_readers(self) -> Mapping[str, int]:
        """Return, per storage owner, the index of the last op that reads any value of it."""
        last: dict[str, int] = {}
        for index, op in enumerate(self.ops):
            last[op.storage] = index
            for name in op.inputs:
                last[self.storages.get(name, name)] = index
        return last
