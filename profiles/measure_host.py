"""Measure what the host takes beside kernels: dispatch, autograd, recomputed regions, optimizer.

Everything runs on tensors so small that their kernels take no time. The least of many repeats is
what an undisturbed run takes; on a CPU, where this thread runs the backward too, its own time
counts, so that other work of the machine does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["host_seconds", "least_s"]

ROWS, WIDTH = 4, 8
MIXES = 8  # of OPS_PER_MIX ops each, in one graph
OPS_PER_MIX = 10
TENSORS = 64  # of an optimizer step


def host_seconds(device: Any, *, slice_s: float) -> dict[str, float]:
    """Return seconds by name, for `DeviceProfile.measurements`; see `HostSeconds`.

    Args:
        device: a `torch.device`.
        slice_s: seconds for the repeats of one number.
    """
    import torch

    mix = _Mix(torch, device)
    num_ops = MIXES * OPS_PER_MIX
    forward_s = least_s(lambda: mix.run(), device, slice_s=slice_s)
    both_s = least_s(lambda: mix.run().backward(), device, slice_s=slice_s)
    again_s = least_s(lambda: mix.again(False).backward(), device, slice_s=slice_s)
    marked_s = least_s(lambda: mix.again(True).backward(), device, slice_s=slice_s)
    tensors = [torch.zeros(1, device=device, requires_grad=True) for _ in range(TENSORS)]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    optimizer = torch.optim.AdamW(tensors)
    step_s = least_s(lambda: optimizer.step(), device, slice_s=slice_s)
    seconds = {
        "op_forward": forward_s / num_ops,
        "op_backward": (both_s - forward_s) / num_ops,
        "region": (again_s - both_s - forward_s) / MIXES,
        "marked_op": (marked_s - again_s) / num_ops / 2,
        "optimizer_tensor": step_s / TENSORS,
    }
    return {f"host.{name}.seconds": max(value, 1e-9) for name, value in seconds.items()}


def least_s(
    run: Callable[[], object], device: Any, *, slice_s: float = 0.0, repeats: int = 3
) -> float:
    """Return the least seconds in which this thread issued one call.

    Args:
        run: what is timed.
        device: a `torch.device`; on a CPU the thread's own time counts.
        slice_s: repeat for so long.
        repeats: at least so often.
    """
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    run()
    end = time.perf_counter() + slice_s
    least, done = float("inf"), 0
    while done < repeats or time.perf_counter() < end:
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
        begin = clock()
        run()
        least = min(least, clock() - begin)
        done += 1
    return least


class _Mix:
    """A chain of small ops as they occur in models: products, norms, views, elementwise ones."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        self._weight = torch.randn(WIDTH, WIDTH, device=device, requires_grad=True)
        self._bias = torch.zeros(WIDTH, device=device, requires_grad=True)

    def run(self) -> Any:
        """Return the loss of all mixes."""
        x = self._x
        for _ in range(MIXES):
            x = self._part(x)
        return x.sum()

    def again(self, marked: bool) -> Any:
        """Return the loss where every mix is a recomputed region of its own."""
        from torch.utils.checkpoint import checkpoint

        x = self._x
        options: dict[str, Any] = {"context_fn": _contexts} if marked else {}
        for _ in range(MIXES):
            x = checkpoint(self._part, x, use_reentrant=False, **options)
        return x.sum()

    def _part(self, x: Any) -> Any:
        aten, weight, bias = self._torch.ops.aten, self._weight, self._bias
        inner = aten.layer_norm.default(x, [WIDTH], bias, bias, 1e-5)
        inner = aten.linear.default(inner, weight, bias)
        inner = aten.view.default(inner, [ROWS, 2, WIDTH // 2])
        inner = aten.transpose.int(inner, 0, 1)
        inner = aten.transpose.int(inner, 0, 1)
        inner = aten.reshape.default(inner, [ROWS, WIDTH])
        inner = aten.gelu.default(inner)
        inner = aten.linear.default(inner, weight, bias)
        inner = aten.mul.Tensor(inner, x)
        return aten.add.Tensor(inner, x)


def _contexts() -> tuple[Any, Any]:
    """Return two dispatch modes that look at every op, as regions that keep results have them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    return Look(), Look()  # type: ignore[no-untyped-call]
