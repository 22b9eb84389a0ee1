"""Meter the kernels inside one op: FLOPs, bytes, matrix products, storages made and freed.

Runs on fake tensors, so nothing is computed. The mode sits below autograd and above the fake
tensors: it sees the kernels that the device would be asked to run.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from autoplan.graph import Gemm

__all__ = ["Meter", "kernel_flops", "storage_bytes", "storage_key", "tensors_in"]


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; unique while the storage lives."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the whole storage that a tensor views."""
    return int(tensor.untyped_storage().nbytes())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a nested value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in (
        "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    )
)  # fmt: skip

_OVERWRITES = frozenset(
    f"aten::{name}" for name in ("zero_", "fill_", "copy_", "bernoulli_", "normal_", "uniform_")
)
"""In-place kernels that do not read the tensor they write."""

_GATHERS = frozenset(
    f"aten::{name}" for name in ("embedding", "index_select", "gather", "index", "take")
)
"""Kernels that read of their first argument only as much as they return."""


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
    batch, heads, rows, width = query.shape
    return 2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])


def _grouped_flops(tokens: torch.Tensor, weight: torch.Tensor) -> int:
    return 2 * tokens.shape[0] * weight.shape[-1] * weight.shape[-2]


def _convolution_backward_flops(*args: Any) -> int:
    """Each gradient costs what the forward does; torch's own law forgets the groups."""
    gradient, image, weight, is_transposed, wanted = *args[:3], args[7], args[10]
    moved = image if is_transposed else gradient
    forward = 2 * moved.shape[0] * math.prod(moved.shape[2:]) * weight.numel()
    return int(forward) * (bool(wanted[0]) + bool(wanted[1]))


def _recurrent_flops(tokens: torch.Tensor, *weights: torch.Tensor) -> int:
    return 2 * tokens.shape[0] * tokens.shape[1] * sum(weight.numel() for weight in weights[:2])


def recurrent_workspace_bytes(name: str, args: Any) -> int:
    """Return the bytes that oneDNN's LSTM of one layer keeps in its workspace; 0 for other kernels.

    Gates and hidden states of every step; states and their gradients of two layers (the one below
    counts) with a step before the first. Each array starts on a page; those that enter products
    have padded rows.
    Source: `set_conf` and `set_offsets` of `cpu/rnn/rnn_utils`, oneDNN 3, for float32.
    """
    if name != "aten::mkldnn_rnn_layer":
        return 0
    tokens, hidden = args[0], int(args[10])
    steps, rows, width = tokens.shape
    states, wide = 2 * (steps + 1) * rows, _padded(max(width, hidden))
    per_step = [_padded(4 * hidden), _padded(hidden)]
    arrays = [steps * rows * row for row in per_step] + [states * hidden] * 2 + [states * wide] * 3
    return sum(-(-4 * elements // _PAGE_BYTES) * _PAGE_BYTES for elements in arrays)


_PAGE_BYTES = 4096


def _padded(elements: int) -> int:
    """Return the float32 elements from row to row: whole cache lines, not in steps of 1 KiB."""
    aligned = -(-elements // 16) * 16
    return aligned + 16 if aligned % 256 == 0 else aligned


_OWN_FLOPS: dict[str, Callable[..., int]] = {
    "aten::convolution_backward": _convolution_backward_flops,
    "aten::mkldnn_rnn_layer": lambda *args: _recurrent_flops(*args[:3]),
    "aten::mkldnn_rnn_layer_backward": lambda *args: 2 * _recurrent_flops(args[0], *args[1:3]),
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_: _attention_flops(
        q, k, v
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda _, q, k, v, *__: (
        2 * _attention_flops(q, k, v)
    ),
    "autoplan::attention_cuda": lambda q, k, v, *_: _attention_flops(q, k, v),
    "autoplan::attention_cuda_backward": lambda _, q, k, v, *__: 2 * _attention_flops(q, k, v),
    "aten::_grouped_mm": lambda x, w, *_: _grouped_flops(x, w),
    "transformers::grouped_mm_fallback": lambda x, w, *_: _grouped_flops(x, w),
    "transformers::grouped_mm_fallback_backward": lambda x, w, *_: 2 * _grouped_flops(x, w),
}
"""Laws that torch's flop registry lacks. An attention backward counts the four products of its
gradients, not the scores that a flash kernel computes again: these are FLOPs of the model."""


def kernel_flops(kernel: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of one kernel; 0 where no law is known."""
    own = _OWN_FLOPS.get(kernel._schema.name)
    if own is not None:
        return own(*args)
    law = flop_registry.get(kernel._overloadpacket)
    return int(law(*args, **kwargs, out_val=result)) if law is not None else 0


def _gemm(kernel: Any, args: Any, result: Any) -> Gemm | None:
    """Return the matrix product that a kernel is, or None."""
    name = kernel._schema.name.removeprefix("aten::")
    if name in ("addmm", "baddbmm"):
        args = args[1:]
    if name in ("mm", "addmm"):
        (m, k), n = args[0].shape, args[1].shape[1]
        return Gemm(batch=1, m=m, n=n, k=k)
    if name in ("bmm", "baddbmm"):
        (batch, m, k), n = args[0].shape, args[1].shape[2]
        return Gemm(batch=batch, m=m, n=n, k=k)
    if name == "convolution" and not args[6]:
        weight = args[1]
        rows = result.shape[0] * math.prod(result.shape[2:])
        return Gemm(batch=1, m=rows, n=weight.shape[0], k=math.prod(weight.shape[1:]))
    if name == "convolution":
        image, weight = args[0], args[1]
        rows = image.shape[0] * math.prod(image.shape[2:])
        return Gemm(batch=1, m=rows, n=math.prod(weight.shape[1:]), k=weight.shape[0])
    if name in ("transformers::grouped_mm_fallback", "_grouped_mm"):
        return Gemm(batch=1, m=args[0].shape[0], n=args[1].shape[-1], k=args[1].shape[-2])
    return None


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the distinct elements of a tensor; an expanded dim is read once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride != 0) * tensor.itemsize


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sum up the kernels run while the mode is active.

    With `has_casts`, copies in another dtype are those of autocast.

    Attributes:
        flops: floating-point operations.
        nbytes: bytes read and written by kernels that are no views.
        workspaces: bytes of what kernels keep for backward in a form that no trace sees.
        made_bytes: bytes of all new results of kernels, whether they live on or not; copies of
            operands that autocast makes left out.
        cast_bytes: bytes read and written by such copies.
        gemms: the matrix products among the kernels.
        num_laws: kernels whose FLOP law is known.
        kernels: names of the kernels that are no views and no allocations.
        is_random: whether one of them draws from the random state.
    """

    def __init__(self, known: Iterable[torch.Tensor], *, has_casts: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.nbytes = 0
        self.made_bytes = 0
        self.cast_bytes = 0
        self._has_casts = has_casts
        self.workspaces: list[int] = []
        self.num_laws = 0
        self.is_random = False
        self.gemms: list[Gemm] = []
        self.kernels: list[str] = []
        self._known = {storage_key(tensor) for tensor in known}
        self._events: list[tuple[int, int]] = []
        self._bytes_by_serial: dict[int, int] = {}
        self._serial = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        inputs = tensors_in((args, kwargs))
        self._known.update(storage_key(tensor) for tensor in inputs if tensor.dim() > 0)
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        fresh = [out for out in outputs if storage_key(out) not in self._known]
        is_view = not fresh and not func._schema.is_mutable
        is_cast = self._has_casts and func is torch.ops.aten._to_copy.default
        for tensor in fresh:
            self._add_storage(tensor, is_cast=is_cast)
        if is_view or func._schema.name in _ALLOCATIONS:
            return result
        before = self.nbytes
        self._count(func, args, kwargs, inputs, outputs, result)
        self.cast_bytes += (self.nbytes - before) * is_cast
        return result

    def _count(
        self, func: Any, args: Any, kwargs: Any, inputs: Any, outputs: Any, result: Any
    ) -> None:
        name = func._schema.name
        read = inputs[1:] if name in _OVERWRITES or name in _GATHERS else inputs
        self.nbytes += sum(map(_touched_bytes, {id(t): t for t in read}.values()))
        self.nbytes += sum(map(_touched_bytes, outputs))
        if name in _GATHERS:
            self.nbytes += sum(map(_touched_bytes, outputs))
        self.kernels.append(name)
        workspace = recurrent_workspace_bytes(name, args)
        if workspace:
            self.workspaces.append(workspace)
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        flops = kernel_flops(func, args, kwargs, result)
        if flops:
            self.flops += flops
            self.num_laws += 1
            gemm = _gemm(func, args, result)
            if gemm is not None:
                self.gemms.append(gemm)

    def _add_storage(self, tensor: torch.Tensor, *, is_cast: bool) -> None:
        key, nbytes = storage_key(tensor), storage_bytes(tensor)
        if key in self._known:
            return
        self._known.add(key)
        self.made_bytes += nbytes * (not is_cast)
        serial = self._serial
        self._serial += 1
        self._bytes_by_serial[serial] = nbytes
        self._events.append((serial, nbytes))
        weakref.finalize(tensor.untyped_storage(), self._drop, key, serial).atexit = False

    def _drop(self, key: int, serial: int) -> None:
        self._known.discard(key)
        self._events.append((serial, -self._bytes_by_serial.pop(serial)))

    def temp_bytes(self) -> int:
        """Return the most bytes that were alive at once of storages that are dead by now."""
        alive = peak = 0
        for serial, nbytes in self._events:
            if serial not in self._bytes_by_serial:
                alive += nbytes
                peak = max(peak, alive)
        return peak
