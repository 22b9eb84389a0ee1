"""The cost of one op, measured alone on fake tensors: forward once, backward once.

Ops with the same operator, constants, shapes, strides and dtypes cost the same; `OpMeter` remembers
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoplan.autocast import bare, is_cast
from autoplan.backends import Backend, replacement, workspace_bytes
from autoplan.cuda_autocast import CudaAutocast
from autoplan.custom_ops import custom_op
from autoplan.graph import Gemm, OpKind
from autoplan.kernels import Meter, storage_key, tensors_in
from autoplan.op_facts import mutates_input
from autoplan.opaque import OpaqueCall
from autoplan.program import Op

__all__ = ["RECURRENT_PREFIXES", "OpCost", "OpMeter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCost:
    """What one op costs; the fields mean what they mean in `OpTrace`.

    Attributes:
        cast_bytes, backward_cast_bytes: read and written by the copies that autocast makes.
        workspaces: bytes kept for backward by kernels in tensors that fake ones show as empty.
        note: why a number is a stated guess, or empty.
    """

    kind: OpKind
    gemm: Gemm | None
    attention: tuple[int, int, int, int, int, int] | None
    forward_flops: int
    backward_flops: int
    forward_bytes: int
    backward_bytes: int
    forward_temp_bytes: int
    backward_temp_bytes: int
    mark_bytes: int
    cast_bytes: int = 0
    backward_cast_bytes: int = 0
    workspaces: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    flops: int = 0
    nbytes: int = 0
    cast_bytes: int = 0
    temp_bytes: int = 0
    note: str = ""


class OpMeter:
    """Measures ops under an active `FakeTensorMode` and remembers what it measured."""

    def __init__(self, backend: Backend, autocast: torch.dtype | None = None) -> None:
        self._backend = backend
        self._autocast = autocast
        self._known: dict[Any, OpCost] = {}

    def measure(self, op: Op, args: Any, kwargs: Mapping[str, Any]) -> OpCost:
        """Return the cost of `op` on fake arguments; they are not written to."""
        key = (op.target_name, _signature((args, dict(kwargs))))
        if key not in self._known:
            self._known[key] = _measure(op, args, kwargs, self._backend, self._autocast)
        return self._known[key]


def _signature(value: Any) -> Any:
    """Return a hashable value that is equal for arguments with which an op costs the same."""
    leaves, spec = pytree.tree_flatten(value)
    seen: dict[int, int] = {}
    parts: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            place = seen.setdefault(storage_key(leaf), len(seen))
            layout = (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad)
            parts.append((layout, place))
        else:
            parts.append((type(leaf).__name__, repr(leaf)))
    return (str(spec), tuple(parts))


def _measure(
    op: Op,
    args: Any,
    kwargs: Mapping[str, Any],
    backend: Backend,
    autocast: torch.dtype | None,
) -> OpCost:
    leaves, (own_args, own_kwargs) = _detached((args, dict(kwargs)), mutates_input(op))
    inputs = tensors_in((own_args, own_kwargs))
    function = replacement(op.target, backend)
    if autocast is not None and backend == "cuda":
        function = CudaAutocast(autocast).around(function, op)
    has_casts = autocast is not None and not is_cast(op)
    meter = Meter(inputs, has_casts=has_casts)
    with meter:
        result = function(*own_args, **own_kwargs)
    backward = _backward(op, inputs, leaves, tensors_in(result), meter, has_casts=has_casts)
    kind, gemm = _kind(bare(op), meter)
    forward_flops, backward_flops = meter.flops, backward.flops
    told = custom_op(bare(op).target)
    if told is not None:
        forward_flops = int(told.flops(*own_args, **own_kwargs))
        backward_flops = 2 * forward_flops if leaves else 0
        if told.backward_flops is not None and leaves:
            backward_flops = int(told.backward_flops(*own_args, **own_kwargs))
    return OpCost(
        kind=kind,
        gemm=gemm,
        attention=_attention(op, inputs) if kind == "attention" else None,
        forward_flops=forward_flops,
        backward_flops=backward_flops,
        forward_bytes=meter.nbytes,
        backward_bytes=backward.nbytes,
        forward_temp_bytes=meter.temp_bytes() + workspace_bytes(meter.kernels, inputs),
        backward_temp_bytes=backward.temp_bytes,
        mark_bytes=meter.made_bytes,
        cast_bytes=meter.cast_bytes,
        backward_cast_bytes=backward.cast_bytes,
        workspaces=tuple(meter.workspaces) if leaves else (),
        note=backward.note,
    )


def _detached(value: Any, is_mutating: bool) -> tuple[list[torch.Tensor], Any]:
    """Return the leaves that want a gradient, and `value` rebuilt on them."""
    wanted: list[torch.Tensor] = []
    copies: dict[int, torch.Tensor] = {}

    def detach(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            copied = leaf.detach()
            if leaf.requires_grad:
                wanted.append(copied.requires_grad_())
            copies[id(leaf)] = copied.clone() if is_mutating else copied
        return copies[id(leaf)]

    return wanted, pytree.tree_map(detach, value)


def _backward(
    op: Op,
    inputs: list[torch.Tensor],
    leaves: list[torch.Tensor],
    results: list[torch.Tensor],
    forward: Meter,
    *,
    has_casts: bool,
) -> _Backward:
    roots = [result for result in results if result.requires_grad and result.grad_fn is not None]
    if not leaves or not roots:
        return _Backward()
    seeds = [torch.empty_like(root) for root in roots]
    meter = Meter([*inputs, *leaves, *results, *seeds], has_casts=has_casts)
    try:
        with meter:
            gradients = torch.autograd.grad(
                roots, leaves, seeds, retain_graph=True, allow_unused=True
            )
    except Exception as error:
        note = (
            f"{op.target_name}: its backward does not run on fake tensors ({error}); "
            "priced as twice its forward"
        )
        return _Backward(flops=2 * forward.flops, nbytes=2 * forward.nbytes, note=note)
    temp_bytes = meter.temp_bytes()
    del gradients
    temp_bytes += workspace_bytes(meter.kernels, inputs)
    return _Backward(
        flops=meter.flops,
        nbytes=meter.nbytes,
        cast_bytes=meter.cast_bytes,
        temp_bytes=temp_bytes,
    )


_HEAVY_PREFIXES = ("aten::linalg_", "aten::fft_", "aten::_fft", "aten::cholesky", "aten::cdist")
RECURRENT_PREFIXES = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")


def _kind(op: Op, meter: Meter) -> tuple[OpKind, Gemm | None]:
    """Return which cost law prices the op, and its matrix product."""
    if isinstance(op.target, OpaqueCall):
        return "opaque", None
    if not isinstance(op.target, torch._ops.OpOverload):
        return ("view" if not meter.kernels else "opaque"), None
    name = op.target._schema.name
    if name == "aten::scaled_dot_product_attention":
        return "attention", None
    if len(meter.gemms) == 1 and meter.num_laws == 1:
        return "gemm", meter.gemms[0]
    if not meter.kernels:
        return "view", None
    is_known = op.target.namespace in ("aten", "prims", "autoplan")
    is_heavy = name.startswith(_HEAVY_PREFIXES) or meter.num_laws > 0
    is_heavy = is_heavy or op.target_name.startswith(RECURRENT_PREFIXES)
    return ("memory" if is_known and not is_heavy else "opaque"), None


def _attention(op: Op, inputs: list[torch.Tensor]) -> tuple[int, int, int, int, int, int]:
    """Return (batch, heads, seq_q, seq_k, head_dim, is causal) of an attention op.

    Where queries and values are not of one width, head_dim is their mean: it has the same FLOPs.
    """
    query, key, value = inputs[:3]
    heads = query.shape[1] if query.dim() == 4 else 1
    batch = query.shape[:-2].numel() // heads
    is_causal = op.args[5] if len(op.args) > 5 else op.kwargs.get("is_causal", False)
    width = (query.shape[-1] + value.shape[-1]) // 2
    return (batch, heads, query.shape[-2], key.shape[-2], width, int(is_causal))
