"""Measure classes of ops that are no products: norms, softmax, losses, embeddings, activations.

A point is (rows, width): an input of `rows` rows of `width` numbers, which for an embedding is the
result and for a cross entropy the logits. Forward and backward are timed apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoplan.profiles.budgets import Deadline
from autoplan.profiles.grids import class_grid
from autoplan.profiles.rotation import rotating
from autoplan.profiles.tables import ATTENTION_DIRECTIONS, OpClassTable
from autoplan.profiles.timing import Stopwatch

__all__ = ["measure_classes"]

Progress = Callable[[str], None]
Inputs = Sequence[Any]

CPU_VOCABULARY, CUDA_VOCABULARY = 8192, 131072


def measure_classes(
    device: Any,
    dtype: str,
    *,
    deadline: Deadline,
    slice_s: float,
    origin: str,
    known: Sequence[OpClassTable] = (),
    sizes: tuple[Sequence[int], Sequence[int]] | None = None,
    progress: Progress = lambda message: None,
) -> tuple[OpClassTable, ...]:
    """Return the tables of every class in both directions.

    Args:
        device: a `torch.device`.
        dtype: name such as `float32`.
        deadline: when to stop.
        slice_s: seconds for one direction of one point.
        origin: id of the origin of the rows.
        sizes: rows and widths; None: those of the device's kind.
        known: tables whose points are not measured again, and stay.
        progress: told about each point.
    """
    import torch

    watch = Stopwatch(device=device, slice_s=slice_s)
    rows: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    for table in known:
        if table.dtype == dtype:
            rows[table.op_class, table.direction] = {(r, w): rate for r, w, rate in table.rows}
    makers = _makers(torch, device, getattr(torch, dtype))
    grid = class_grid(device.type, sizes)
    left = [p for p in grid if p[0] not in rows.get((p[1], "forward"), {})]
    for (count, width), name in deadline.points(left):
        progress(f"{dtype} {name} {count} x {width}")
        runs = _directions(torch, device, makers[name], count, width)
        for direction, run in zip(ATTENTION_DIRECTIONS, runs, strict=True):
            if run is not None:
                rate = count * width / watch.median_s(run)
                rows.setdefault((name, direction), {})[count, width] = float(f"{rate:.4g}")
    return tuple(
        OpClassTable(
            op_class=name,
            dtype=dtype,
            direction=direction,  # type: ignore[arg-type]
            origin=origin,
            rows=tuple((*size, rate) for size, rate in sorted(found.items())),
        )
        for (name, direction), found in rows.items()
    )


def _directions(
    torch: Any, device: Any, maker: Callable[[int, int], Any], count: int, width: int
) -> tuple[Callable[[], object], Callable[[], object] | None]:
    """Return functions that run forward and backward on rotating inputs."""

    def made() -> tuple[Callable[[], Any], Any, Sequence[Any], Any]:
        run, leaves = maker(count, width)
        out = run()
        return run, out, leaves, torch.ones_like(out)

    nbytes = 4 * count * width
    forward = rotating(device, nbytes, lambda: maker(count, width)[0], lambda run: run())
    backward = rotating(
        device,
        nbytes,
        made,
        lambda m: torch.autograd.grad(m[1], m[2], m[3], retain_graph=True, allow_unused=True),
    )
    return forward, backward


def _makers(
    torch: Any, device: Any, dtype: Any
) -> Mapping[str, Callable[[int, int], tuple[Callable[[], Any], Sequence[Any]]]]:
    """Return per class what makes a run on new inputs, and the leaves of its gradient."""
    functional = torch.nn.functional

    def numbers(*shape: int) -> Any:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    def unary(function: Callable[[Any], Any]) -> Callable[[int, int], Any]:
        def make(count: int, width: int) -> Any:
            x = numbers(count, width)
            return (lambda: function(x)), [x]

        return make

    def norm(function: Callable[[Any, Any, int], Any]) -> Callable[[int, int], Any]:
        def make(count: int, width: int) -> Any:
            x, weight = numbers(count, width), numbers(width)
            return (lambda: function(x, weight, width)), [x, weight]

        return make

    def group_norm(count: int, width: int) -> Any:
        x, weight = numbers(max(1, count // 64), width, 64), numbers(width)
        return (lambda: functional.group_norm(x, 8, weight)), [x, weight]

    def batch_norm(count: int, width: int) -> Any:
        x, weight = numbers(count, width), numbers(width)
        return (lambda: functional.batch_norm(x, None, None, weight, training=True)), [x, weight]

    def cross_entropy(count: int, width: int) -> Any:
        x = numbers(count, width)
        target = torch.randint(0, width, (count,), device=device)
        return (lambda: functional.cross_entropy(x, target)), [x]

    def embedding(count: int, width: int) -> Any:
        vocabulary = CUDA_VOCABULARY if device.type == "cuda" else CPU_VOCABULARY
        table = numbers(vocabulary, width)
        ids = torch.randint(0, vocabulary, (count,), device=device)
        return (lambda: functional.embedding(ids, table)), [table]

    def add(count: int, width: int) -> Any:
        x, y = numbers(count, width), numbers(count, width)
        return (lambda: x * y), [x, y]

    return {
        "layer_norm": norm(lambda x, w, n: functional.layer_norm(x, (n,), w)),
        "rms_norm": norm(lambda x, w, n: functional.rms_norm(x, (n,), w)),
        "batch_norm": batch_norm,
        "group_norm": group_norm,
        "softmax": unary(lambda x: x.softmax(-1)),
        "cross_entropy": cross_entropy,
        "embedding": embedding,
        "dropout": unary(lambda x: functional.dropout(x, 0.1)),
        "gelu": unary(functional.gelu),
        "silu": unary(functional.silu),
        "relu": unary(functional.relu),
        "mul": add,
    }
