"""One rank's share of a block: the ops it runs under a tensor-parallel layout, with local sizes.

`localize` turns a `BlockTrace` and a choice of axes into a flat list of local ops, conversions
between placements included, named as the emitter names them (`<value>__<placement>`). Time and
memory are both computed on this list, so that what is priced is what runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoplan.expert_parallel import STACKED
from autoplan.graph import BlockTrace, OpTrace, Placement, ShardOption
from autoplan.local_blocks import LocalBlock, LocalOp
from autoplan.redistribution import transition
from autoplan.tensor_layout import (
    SEQUENCE,
    WHOLE_BORDERS,
    Borders,
    boundary_of,
    leaving_placement,
)

__all__ = ["axis_option", "localize", "value_bytes"]

_WHOLE = ShardOption(axis="whole", size=1, inputs=(), output="R", is_split=False)


def axis_option(op: OpTrace, axes: Mapping[str, str]) -> ShardOption:
    """Return the shard option of `op` under `axes` (op name to axis; a missing one is whole).

    Raises:
        ValueError: names the op and the axes that it has.
    """
    wanted = axes.get(op.name, "whole")
    for option in op.options:
        if option.axis == wanted:
            return option
    if wanted == "whole":
        return ShardOption(
            axis="whole", size=1, inputs=("R",) * len(op.inputs), output="R", is_split=False
        )
    have = ", ".join(option.axis for option in op.options)
    raise ValueError(f"{op.name} has no axis {wanted!r}: it has {have}")


class _Builder:
    def __init__(
        self,
        block: BlockTrace,
        axes: Mapping[str, str],
        degree: int,
        whole: frozenset[str],
        *,
        borders: Borders = WHOLE_BORDERS,
        regathers: bool = False,
    ) -> None:
        self.block = block
        self.axes = axes
        self.degree = degree
        self.regathers = regathers and "tokens" in borders
        self.slice_of: dict[str, str] = {}
        self.options = {op.name: axis_option(op, axes) for op in block.ops}
        self.full = {v.name: v.nbytes for v in block.inputs}
        self.full |= {s.name: s.nbytes for s in block.states}
        self.grad = {v.name: v.is_activation and v.needs_grad for v in block.inputs}
        self.trained = {s.name: s.is_trained for s in block.states}
        self.placements = {v.name: boundary_of(v, degree, borders[0]) for v in block.inputs}
        self.placements |= state_placements(block, self.options, whole)
        self.storage = {name: name for name in self.full}
        self.value_bytes = {n: self._local(b, self.placements[n]) for n, b in self.full.items()}
        self.owners = {op.name: op.storage for op in block.ops}
        self.ops: list[LocalOp] = []
        self.made: set[str] = set()

    def _local(self, nbytes: int, placement: str) -> int:
        return -(-nbytes // self.degree) if placement.startswith("S") else nbytes

    def require(self, name: str, placement: str) -> str:
        """Return the local name of a value in the placement, adding its conversion once."""
        have = self.placements[name]
        if have == placement:
            return name
        converted = f"{name}__{placement}"
        if converted in self.made:
            return converted
        moved = transition(Placement.parse(have), Placement.parse(placement))
        if moved is None:
            raise ValueError(f"{name}: {have} cannot become {placement}")
        self.made.add(converted)
        target = Placement.parse(placement)
        is_new = moved[0] != "" and not (moved[0] == "slice" and _is_leading(target))
        size = self._local(self.full[name], placement)
        owner = converted if is_new else self.storage[name]
        self.full[converted] = self.full[name]
        self.storage[converted] = owner
        if owner == converted:
            self.value_bytes[converted] = size
        if self.regathers and have == SEQUENCE and moved[0] == "all_gather":
            self.slice_of[converted] = self.storage[name]
        self.placements[converted] = placement
        self.grad[converted] = self.grad.get(name, False)
        self.trained[converted] = self.trained.get(name, False)
        self.ops.append(
            LocalOp(
                name=converted,
                op=None,
                option=_WHOLE,
                inputs=(name,),
                storage=owner,
                nbytes=size if owner == converted else 0,
                value_bytes=size,
                passes_gradient=moved[1] == "",
                forward_temp_bytes=_collective_temp(
                    moved[0], self.full[name], self.degree, target, Placement.parse(have)
                ),
                backward_temp_bytes=_collective_temp(
                    moved[1], self.full[name], self.degree, Placement.parse(have), target
                ),
                transition=moved,
                moved_bytes=self.full[name],
                grads=(name,) if self.grad.get(name) or self.trained.get(name) else (),
                mark_bytes=size if have == "P" else 0,
            )
        )
        return converted

    def add(self, op: OpTrace) -> None:
        option = self.options[op.name]
        required = option.inputs or ("R",) * len(op.inputs)
        inputs = tuple(
            self.require(name, placement) if name in self.placements else name
            for name, placement in zip(op.inputs, required, strict=True)
        )
        local_of = dict(zip(op.inputs, inputs, strict=True))
        split = self.degree if option.is_split else 1
        is_tuple = not op.dtype and op.nbytes == 0
        is_view = op.storage != op.name or is_tuple or self._is_reshaped_copy(op, inputs)
        out_split = self.degree if option.output.startswith("S") else 1
        self.full[op.name] = value_bytes(op, self.full)
        self.placements[op.name] = option.output
        self.grad[op.name] = op.needs_grad
        if is_view:
            source = next((n for n in op.inputs if self._owner(n) == op.storage), op.inputs[0])
            self.storage[op.name] = self.storage[local_of[source]]
        else:
            self.storage[op.name] = op.name
            self.value_bytes[op.name] = -(-op.nbytes // out_split)
        casts = tuple((cast.value, -(-cast.nbytes // split)) for cast in op.casts)
        self.storage |= {name: name for name, _ in casts}
        saved, internal = self._saved(op, local_of, split)
        again = [n for n in self._gathered_again(op, inputs) if self.slice_of[n] in saved]
        regathered = sum(self.value_bytes[n] for n in again)
        masked = -(-op.nbytes // out_split) if _is_vocabulary_embedding(op, option) else 0
        self.ops.append(
            LocalOp(
                name=op.name,
                op=op,
                option=option,
                inputs=inputs,
                storage=self.storage[op.name],
                nbytes=0 if is_view else -(-op.nbytes // out_split),
                value_bytes=-(-_view_bytes(op) // out_split) if op.dtype else 0,
                passes_gradient=self._passes_gradient(op, is_view),
                saved=saved,
                casts=casts,
                internal_bytes=internal,
                forward_temp_bytes=-(-op.forward_temp_bytes // split) + masked,
                backward_temp_bytes=regathered
                + (0 if _is_vocabulary_loss(op, option) else -(-op.backward_temp_bytes // split)),
                mark_bytes=-(-op.mark_bytes // out_split) if op.may_mark and not is_view else 0,
                grads=tuple(n for n in inputs if op.needs_grad and self.grad.get(n)),
                parameter_grads=tuple(
                    (n, self.value_bytes[self.storage[n]])
                    for n in inputs
                    if op.needs_grad and self.trained.get(n)
                ),
                is_partial=option.output == "P",
                regathered_bytes=regathered,
            )
        )

    def _gathered_again(self, op: OpTrace, inputs: Sequence[str]) -> list[str]:
        """Return the inputs of which the slice is kept; what enters experts is kept as it is.

        A dispatcher gathers it before it puts rows into the order of experts.
        """
        return [] if op.target in STACKED else [n for n in inputs if n in self.slice_of]

    def _is_reshaped_copy(self, op: OpTrace, inputs: Sequence[str]) -> bool:
        """Return whether a reshape that copies in the trace finds its input in order here.

        A converted value is contiguous, so reshaping it is a view.
        """
        is_reshape = op.target in ("aten.reshape.default", "aten.contiguous.default")
        return is_reshape and any(
            self.storage[n] == n != o for n, o in zip(inputs, op.inputs, strict=True)
        )

    def _passes_gradient(self, op: OpTrace, is_view: bool) -> bool:
        """Return whether the gradient of the result serves as that of the inputs, uncopied."""
        if op.target == "getitem":
            return True
        sizes = {self.full[n] for n in op.inputs if self.grad.get(n) or self.trained.get(n)}
        is_plain = is_view or op.target in ("aten.add.Tensor", "aten.alias.default")
        return is_plain and bool(op.dtype) and sizes == {_view_bytes(op)}

    def _owner(self, name: str) -> str:
        return self.owners.get(name, name)

    def _saved(
        self, op: OpTrace, local_of: Mapping[str, str], split: int
    ) -> tuple[tuple[str, ...], int]:
        owners: list[str] = []
        internal = 0
        for tensor in op.saved:
            sources = [n for n in op.inputs if self._owner(n) == tensor.value]
            if tensor.value and sources:
                local = [local_of[source] for source in sources]
                again = self._gathered_again(op, local)
                owners += [self.slice_of[n] if n in again else self.storage[n] for n in local]
            elif tensor.value == op.name:
                owners.append(op.name)
            elif tensor.value in self.storage:
                owners.append(self.storage[tensor.value])
            else:
                internal += -(-tensor.nbytes // split)
        return tuple(dict.fromkeys(owners)), internal


def _is_leading(placement: Placement) -> bool:
    """Return whether a slice is one contiguous piece, so that taking it copies nothing."""
    return placement.dim == 0 and placement.outer == 1


def _collective_temp(
    name: str, full: int, degree: int, target: Placement, source: Placement
) -> int:
    """Return the transient bytes of a conversion beside its result.

    A gather or scatter along another dimension than the first copies the whole value once more to
    put the pieces in order; a reduce-scatter on gloo works on a copy.
    """
    if name == "all_gather":
        return 0 if _is_leading(source) else full
    if name == "reduce_scatter":
        return full if _is_leading(target) else 2 * full
    return 2 * full // degree if name == "all_to_all" else 0


def _is_vocabulary_embedding(op: OpTrace, option: ShardOption) -> bool:
    return op.target == "aten.embedding.default" and option.output == "P"


def _is_vocabulary_loss(op: OpTrace, option: ShardOption) -> bool:
    return op.target == "aten.cross_entropy_loss.default" and option.is_split


def value_bytes(op: OpTrace, known: Mapping[str, int]) -> int:
    """Return the bytes of an op's whole result, which a view shares with its storage.

    Of a tuple those of the op's first input, by `known`.
    """
    if not op.dtype and op.nbytes == 0:
        return sum(known[name] for name in op.inputs[:1])
    return op.nbytes or _view_bytes(op)


def _view_bytes(op: OpTrace) -> int:
    count = 1
    for size in op.shape:
        count *= size
    return count * _ITEM_BYTES.get(op.dtype, 4)


_ITEM_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "bfloat16": 2,
    "float16": 2, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1,
}  # fmt: skip


def state_placements(
    block: BlockTrace,
    options: Mapping[str, ShardOption],
    whole: frozenset[str] = frozenset(),
) -> dict[str, str]:
    """Return how each state is stored: sharded if all its uses require that one shard, else R.

    States named in `whole` stay whole: parameters that several calls share. So do buffers.

    One-dimensional states with separate pieces (fused biases) stay whole: FSDP shards their only
    dimension too, and the two do not compose.
    """
    required: dict[str, set[str]] = {state.name: set() for state in block.states}
    for op in block.ops:
        option = options[op.name]
        for name, text in zip(op.inputs, option.inputs or (), strict=False):
            if name in required:
                required[name].add(text)
    stored = {}
    for state in block.states:
        wanted = required[state.name]
        text = next(iter(wanted)) if len(wanted) == 1 else "R"
        placement = Placement.parse(text)
        is_fused_vector = len(state.shape) == 1 and placement.outer > 1
        is_whole = is_fused_vector or not state.is_parameter or state.name in whole
        stored[state.name] = text if placement.kind == "shard" and not is_whole else "R"
    return stored


def localize(
    block: BlockTrace,
    axes: Mapping[str, str],
    degree: int,
    whole: frozenset[str] = frozenset(),
    *,
    borders: Borders = WHOLE_BORDERS,
    regathers: bool = False,
) -> LocalBlock:
    """Return one rank's share of `block`.

    Args:
        block: the traced class.
        axes: op name to axis, for ops that are not whole.
        degree: tensor-parallel degree, at least 1; with 1 no axis may be given.
        whole: states that must be stored whole (shared between calls).
        borders: how activations enter and leave, where they can be sliced so.
        regathers: what is gathered from slices of tokens is kept as the slice, and gathered again.

    Raises:
        ValueError: an op has no such axis, or a value cannot take the placement required.
    """
    builder = _Builder(
        block,
        axes,
        degree,
        whole,
        borders=borders,
        regathers=regathers,
    )
    for op in block.ops:
        builder.add(op)
    leaving = {v.name: boundary_of(v, degree, borders[1]) for v in block.inputs}
    leaving |= {
        op.name: leaving_placement(op.shape, degree, borders[1] if op.needs_grad else "whole")
        for op in block.ops
    }
    outputs = tuple(builder.require(name, leaving.get(name, "R")) for name in block.outputs)
    stored = {s.name: builder.placements[s.name] for s in block.states}
    return LocalBlock(
        block=block,
        degree=degree,
        ops=tuple(builder.ops),
        inputs={v.name: builder.value_bytes[v.name] for v in block.inputs if v.is_activation},
        side_inputs={v.name: v.nbytes for v in block.inputs if not v.is_activation},
        outputs=outputs,
        value_bytes=builder.value_bytes,
        state_bytes={s.name: builder.value_bytes[s.name] for s in block.states},
        state_placements=stored,
        axes=dict(axes),
    )
