"""Run one op on real tensors of given shapes and time it, forward and backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoplan.autocast import around_step, bare
from autoplan.kernels import tensors_in
from autoplan.op_facts import mutates_input
from autoplan.profiles.op_times import MeasuredOp
from autoplan.profiles.timing import Stopwatch
from autoplan.program import Op

__all__ = ["OpCall", "TensorSpec", "measure_call", "spec_of"]

CACHE_BYTES = {"cpu": 2**26, "cuda": 2**27}  # twice the last-level cache of large devices
MOST_INPUT_SETS = 8
MOST_BYTES = 2**31  # of inputs on a CPU; a larger op is left to the tables


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be made: random numbers, or indices; None as stride is contiguous."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def spec_of(value: Any) -> Any:
    """Return `value` with every tensor in it replaced by its spec."""

    def spec(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return TensorSpec(
            tuple(leaf.shape),
            None if leaf.is_contiguous() else tuple(leaf.stride()),
            leaf.dtype,
            leaf.requires_grad,
        )

    return pytree.tree_map(spec, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """An operator with specs in the places of tensors, and the autocast that it runs under."""

    target: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    autocast: torch.dtype | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, TensorSpec))


def measure_call(call: OpCall, device: torch.device, slice_s: float) -> MeasuredOp | str:
    """Return the median seconds of an op on a device, or why it cannot be run.

    Inputs rotate through more bytes than the cache holds. Random numbers of the caller are left as
    they were.

    Args:
        call: what to run.
        device: where.
        slice_s: seconds for its repeats, forward and backward each.
    """
    limit = MOST_BYTES if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 4
    if call.nbytes > limit:
        return f"its tensors need {call.nbytes} bytes, more than {limit} that are set aside for one"
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            return _measured(call, device, slice_s)
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def _measured(call: OpCall, device: torch.device, slice_s: float) -> MeasuredOp:
    num_sets = -(-CACHE_BYTES[device.type] // max(1, call.nbytes))
    sets = [_inputs(call, device) for _ in range(min(MOST_INPUT_SETS, num_sets))]
    watch = Stopwatch(device=device, slice_s=slice_s)
    writes = mutates_input(_as_op(call))

    def run(arguments: tuple[Any, Any]) -> Any:
        with around_step(call.autocast, device.type):
            return call.target(*arguments[0], **arguments[1])

    def forward(arguments: tuple[Any, Any]) -> Any:
        # A leaf may not be written to while its gradient is recorded.
        with torch.set_grad_enabled(not writes):
            return run(arguments)

    forward_s = watch.median_s(_rotating(forward, sets))
    backwards = [found for found in (_backward(run, s, copies=writes) for s in sets) if found]
    backward_s = watch.median_s(_rotating(lambda go: go(), backwards)) if backwards else 0.0
    return MeasuredOp(forward_s=forward_s, backward_s=backward_s)


def _rotating(run: Callable[[Any], Any], items: list[Any]) -> Callable[[], Any]:
    turn = itertools.cycle(items)
    return lambda: run(next(turn))


def _backward(
    run: Callable[[tuple[Any, Any]], Any], arguments: tuple[Any, Any], *, copies: bool
) -> Callable[[], Any] | None:
    leaves = [leaf for leaf in tensors_in(arguments) if leaf.requires_grad]
    if not leaves:
        return None
    if copies:
        arguments = pytree.tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, arguments
        )
    roots = [out for out in tensors_in(run(arguments)) if out.requires_grad]
    if not roots:
        return None
    seeds = [torch.ones_like(root) for root in roots]
    return lambda: torch.autograd.grad(roots, leaves, seeds, retain_graph=True, allow_unused=True)


def _inputs(call: OpCall, device: torch.device) -> tuple[Any, Any]:
    bound = _index_bound(call)

    def make(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return device
        return _tensor(leaf, device, bound) if isinstance(leaf, TensorSpec) else leaf

    made: tuple[Any, Any] = pytree.tree_map(make, (call.args, dict(call.kwargs)))
    return made


def _tensor(spec: TensorSpec, device: torch.device, bound: int) -> torch.Tensor:
    if spec.dtype.is_floating_point:
        made = torch.randn(spec.shape, device=device).to(spec.dtype)
    elif spec.dtype is torch.bool:
        made = torch.rand(spec.shape, device=device) < 0.5
    elif spec.dtype.is_complex:
        made = torch.randn(spec.shape, device=device, dtype=spec.dtype)
    else:
        made = torch.randint(0, bound, spec.shape, device=device).to(spec.dtype)
    if spec.stride is not None:
        laid = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        made = laid if 0 in spec.stride else laid.copy_(made)
    return made.detach().requires_grad_(spec.requires_grad)


_TABLE_OPS = ("embedding", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "index_select")


def _index_bound(call: OpCall) -> int:
    """Return how large indices may be: rows of the table, classes of the loss, otherwise one."""
    name = bare(_as_op(call)).target_name.removeprefix("aten.").partition(".")[0]
    first = next((a for a in call.args if isinstance(a, TensorSpec)), None)
    if first is None or not first.shape:
        return 1
    if name in ("embedding", "vocabulary_embedding", "index_select"):
        return first.shape[0]
    if name in _TABLE_OPS and len(first.shape) > 1:
        return first.shape[1]
    if name == "gather" and isinstance(call.args[1], int):
        return first.shape[call.args[1]]
    return 1


def _as_op(call: OpCall) -> Op:
    return Op(
        name="", target=call.target, args=call.args, kwargs=call.kwargs, fqn="", line="", meta=None
    )
