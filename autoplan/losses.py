"""What implementations of the cross entropy over a vocabulary hold, as they differ from torch's.

Logits come in the dtype of the computation and are cast to float32. `F.cross_entropy` makes log
probabilities beside them, and gradients beside those. Other software does better, or worse:

    in_place   Megatron-LM, `tensor_parallel/cross_entropy.py`: the float32 copy becomes the
               probabilities and then their gradient; the logits live until the loss is there.
    fused      Transformer Engine, `cross_entropy.py`: one kernel that writes the gradient over the
               logits, in their dtype (Megatron-LM, `--cross-entropy-loss-fusion`).
    cloned     Megatron-DeepSpeed: the same on a second float32 copy; the first lies in the buffers
               of the pipeline engine, whose last layer is the cast (`float16_to_fp32`).
    dtensor    torch, `distributed/tensor/parallel/loss.py`, where the vocabulary is split: three
               float32 tensors forward, four backward.
    compiled   one joint kernel (`torch.compile`): keeps the logits and a number a row, and makes
               their gradient in the same dtype.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.engines import LossKind
from autoplan.local_blocks import LocalBlock, LocalOp

__all__ = ["logits_bytes", "loss_of", "with_loss"]

_LOSS = "aten.cross_entropy_loss.default"
_CASTS = ("aten.to.dtype", "aten._to_copy.default")


def with_loss(local: LocalBlock, kind: LossKind) -> LocalBlock:
    """Return a block whose cross entropy holds what an implementation of that kind holds."""
    index = next((i for i, o in enumerate(local.ops) if o.op and o.op.target == _LOSS), None)
    if kind == "torch" or index is None:
        return local
    loss = local.ops[index]
    if kind == "dtensor":
        wide = _bytes_of(local, loss.inputs[0])
        if not loss.option.is_split:
            return local
        changed = replace(loss, forward_temp_bytes=wide, backward_temp_bytes=2 * wide)
        return _with(local, {loss.name: changed}, ())
    return _joined(local, loss, kind)


def loss_of(local: LocalBlock) -> LocalOp | None:
    """Return a block's cross entropy, None without one."""
    return next((op for op in local.ops if op.op and op.op.target == _LOSS), None)


def logits_bytes(local: LocalBlock) -> int:
    """Return the bytes of what a block's cross entropy reads, cast as it is; 0 without one."""
    loss = loss_of(local)
    return 0 if loss is None else _bytes_of(local, loss.inputs[0])


def _before_cast(local: LocalBlock, loss: LocalOp) -> list[str]:
    """Return the names from the loss's input back to the logits, a cast between them at most."""
    by_name = {op.name: op for op in local.ops}
    names = [loss.inputs[0]]
    while (op := by_name.get(names[-1])) is not None and op.op is not None:
        is_view = op.nbytes == 0
        if not is_view and op.op.target not in _CASTS:
            break
        names.append(op.inputs[0])
    return names


def _joined(local: LocalBlock, loss: LocalOp, kind: LossKind) -> LocalBlock:
    """Return the block with the cast of the logits and the loss as one op."""
    by_name = {op.name: op for op in local.ops}
    names = _before_cast(local, loss)
    logits = names[-1]
    wide = _bytes_of(local, loss.inputs[0])
    owner = by_name[logits].storage if logits in by_name else logits
    rows = sum(_bytes_of(local, name) for name in loss.inputs[1:]) // 2  # labels are int64
    joined = replace(
        loss,
        inputs=(logits, *loss.inputs[1:]),
        saved=(*loss.saved, *((owner,) if kind == "compiled" else ())),
        internal_bytes={"compiled": rows, "fused": 0}.get(kind, wide),
        forward_temp_bytes=0,
        backward_temp_bytes=0,
        grads=(logits,),
    )
    return _with(local, {loss.name: joined}, set(names[:-1]))


def _with(
    local: LocalBlock, changed: dict[str, LocalOp], removed: set[str] | tuple[()]
) -> LocalBlock:
    ops = [changed.get(op.name, op) for op in local.ops if op.name not in removed]
    return replace(local, ops=tuple(ops))


def _bytes_of(local: LocalBlock, name: str) -> int:
    for op in local.ops:
        if op.name == name:
            return op.value_bytes
    return local.value_bytes.get(name, 0) or local.side_inputs.get(name, 0)
