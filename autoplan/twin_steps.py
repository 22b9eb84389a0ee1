"""A step of a twin under its plan, held against the single device.

In float64 both agree to rounding. In the plan's own precision the single device is itself an
approximation: how far it is from float64 says how far the plan may be. Where a loss of the whole
batch is another than the mean over its parts, as a plan's notes say, the single device runs the
parts that the plan runs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.autocast import around_step, dtype_of
from autoplan.batch_linearity import linearity_notes
from autoplan.batches import reduce_loss, split_batch
from autoplan.capturer import capture
from autoplan.dimensions import program_dimensions
from autoplan.dry_run_result import TwinRun
from autoplan.emitter import parallelize
from autoplan.models import LoadedModel
from autoplan.plan import Plan
from autoplan.program import Program
from autoplan.shared_writes import changed_states
from autoplan.training import global_batch

__all__ = ["TWIN_ROWS", "Step", "captured_twin", "compare_step", "in_dtype", "within_own_error"]

TWIN_ROWS = 2  # of a micro-batch of a twin
_TOLERANCE, _COARSE_TOLERANCE = 1e-9, 1e-4
_EPS = 2.0**-8  # of bfloat16
# Sums in another order round otherwise: how many times the single device's own error.
_TIMES_OWN_ERROR = 4.0


def captured_twin(twin: LoadedModel, autocast: str = "none") -> Program:
    """Return the captured program of a twin."""
    return capture(
        twin.model,
        twin.batch,
        twin.loss_fn,
        microbatch_size=TWIN_ROWS,
        autocast=dtype_of(autocast),
    )


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return a batch with its real tensors in `dtype`."""

    def cast(value: Any) -> Any:
        is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_real else value

    return pytree.tree_map(cast, batch)


def compare_step(plan: Plan, twin: LoadedModel) -> TwinRun:
    """Run a step of a twin plan on this rank and hold it against the single device."""
    batch = global_batch(twin.batch, plan.global_batch_size, 0)
    autocast = dtype_of(plan.autocast)
    program = captured_twin(twin)
    parts = plan.mesh.dp * plan.num_microbatches if _differs_in_parts(program) else 1
    batches = [_part(batch, program, index, parts) for index in range(parts)]
    alone = _single_device(twin, batches, autocast)
    module = parallelize(plan, copy.deepcopy(twin.model), twin.batch, twin.loss_fn, device="cpu")
    loss = float(module.train_step(module.shard_batch(batch)))
    got = Step(loss=loss, gradients=module.full_gradients())
    mesh = str(plan.mesh) + (f", beside one device in {parts} parts" if parts > 1 else "")
    if plan.mixed_precision == plan.autocast == "none":
        return _exact(mesh, got, alone, _COARSE_TOLERANCE if _is_coarse(program) else _TOLERANCE)
    wide = LoadedModel(
        model=copy.deepcopy(twin.model).double(),
        batch=twin.batch,
        loss_fn=twin.loss_fn,
        name=twin.name,
    )
    true = _single_device(wide, [in_dtype(one, torch.float64) for one in batches], None)
    return within_own_error(f"{mesh} in bfloat16", got, alone, true)


@dataclass(frozen=True, slots=True)
class Step:
    """What a forward and backward gave."""

    loss: float
    gradients: Mapping[str, torch.Tensor]


def _differs_in_parts(program: Program) -> bool:
    """Return whether the loss of a batch may be another than the mean over its parts."""
    if any(state.calls for state in changed_states(program)):
        return True  # statistics of a batch are those of a part
    return bool(linearity_notes(program, program_dimensions(program)))


def _part(batch: Any, program: Program, index: int, parts: int) -> Any:
    """Return one of so many equal parts of the rows of a batch."""
    dims = iter(program.batch_dims or (0,) * len(program.inputs))

    def cut(leaf: Any) -> Any:
        dim = next(dims) if isinstance(leaf, torch.Tensor) else None
        if dim is None:
            return leaf
        rows = leaf.shape[dim] // parts
        return leaf.narrow(dim, index * rows, rows)

    return pytree.tree_map(cut, batch)


def _single_device(twin: LoadedModel, batches: Sequence[Any], autocast: torch.dtype | None) -> Step:
    """Return a step of the user's own module and forward: the mean over batches."""
    model: nn.Module = copy.deepcopy(twin.model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    total = 0.0
    for batch in batches:
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        args, kwargs, target = split_batch(model, batch, twin.loss_fn)
        with around_step(autocast):
            loss = reduce_loss(model(*args, **kwargs), twin.loss_fn, target)
        loss = loss / len(batches)
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Step(total, gradients)


def _exact(mesh: str, got: Step, alone: Step, tolerance: float) -> TwinRun:
    errors = {n: _error(got.gradients.get(n), g) for n, g in alone.gradients.items()}
    worst = max(errors, key=lambda name: errors[name], default="")
    return TwinRun(
        mesh=mesh,
        loss_error=_relative(got.loss, alone.loss),
        gradient_error=errors.get(worst, 0.0),
        worst=worst,
        tolerance=tolerance,
    )


def within_own_error(mesh: str, got: Step, alone: Step, true: Step) -> TwinRun:
    """Return the run of the gradient that is farthest beyond the single device's own error.

    A gradient is right if it is near the true one, or near that of the single device: where a
    rounding decides, such as of which expert a token takes, both are far from the true one.
    """
    worst = ("", 0.0, _TIMES_OWN_ERROR * _EPS)  # name, error, allowed
    for name, expected in true.gradients.items():
        own = _error(alone.gradients.get(name), expected)
        error = _error(got.gradients.get(name), expected)
        if name in alone.gradients:
            error = min(error, _error(got.gradients.get(name), alone.gradients[name]))
        allowed = _TIMES_OWN_ERROR * max(own, _EPS)
        if error * worst[2] >= worst[1] * allowed:
            worst = (name, error, allowed)
    return TwinRun(
        mesh=mesh,
        loss_error=min(_relative(got.loss, one.loss) for one in (alone, true)),
        gradient_error=worst[1],
        worst=worst[0],
        tolerance=worst[2],
    )


def _is_coarse(program: Program) -> bool:
    """Return whether a twin computes in less than float64 somewhere."""
    narrow = {torch.float32, torch.bfloat16, torch.float16}
    metas = [op.meta for g in program.graphs for op in g.ops if op.meta is not None]
    return any(meta.dtype in narrow for meta in metas)


def _relative(got: float, expected: float) -> float:
    return abs(got - expected) / max(abs(expected), 1e-12)


def _error(got: torch.Tensor | None, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest entry, with a floor for zero gradients."""
    if got is None:
        return float("inf") if bool(expected.any()) else 0.0
    scale = max(float(expected.abs().max()), 1e-3)
    return float((got.double() - expected.double()).abs().max()) / scale
