"""Capture the model of a plan again: to run the plan, and for batches of other shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoplan.autocast import dtype_of
from autoplan.batches import BatchDims
from autoplan.capturer import capture
from autoplan.errors import EmitError, PlanError
from autoplan.layout_check import check_layouts
from autoplan.matching import explain_mismatch
from autoplan.plan import Plan
from autoplan.program import Program
from autoplan.runner import true_metas

__all__ = ["captured_at_shape", "captured_for", "with_true_metas"]

LossFn = Callable[..., torch.Tensor] | None


def captured_for(plan: Plan, model: nn.Module, batch: Any, loss_fn: LossFn) -> Program:
    """Return the program of a model that a plan was made for; see `parallelize`.

    Raises:
        PlanError: the plan is of another model, or its layouts cannot run.
        TraceError: the model cannot be captured.
    """
    program = _captured(plan, model, batch, loss_fn)
    if program.fingerprint != plan.fingerprint:
        raise PlanError(explain_mismatch(plan, program, type(model).__name__))
    check_layouts(plan, program)
    return program


def captured_at_shape(
    plan: Plan, planned: Program, model: nn.Module, batch: Any, loss_fn: LossFn
) -> Program:
    """Return the program of a plan's model for a batch of another shape than the plan's.

    Args:
        plan: its decisions must be possible at this shape too.
        planned: the program that the plan is of.
        model: on any device, in the modes of `planned`.
        batch: rows of the form of the plan's.
        loss_fn: as given to the planner.

    Raises:
        EmitError: the model runs other blocks at this shape, or the plan cannot run there.
        TraceError: the model cannot be captured.
    """
    program = _captured(plan, model, batch, loss_fn)
    shapes = ", ".join(
        f"{key} {tuple(meta.shape)}"
        for key, meta in zip(program.input_keys, program.input_metas, strict=True)
    )
    remedy = "pad batches to a shape that can, or plan again with such a batch"
    then, now = ([(c.fqn, c.states) for c in one.calls] for one in (planned, program))
    if then != now:
        raise EmitError(
            f"the plan cannot run micro-batches of {shapes}: the model runs other blocks then; "
            f"{remedy}"
        )
    try:
        check_layouts(plan, program)
    except PlanError as error:
        raise EmitError(f"the plan cannot run micro-batches of {shapes}: {error}; {remedy}") from (
            error
        )
    return program


def with_true_metas(program: Program, device: torch.device) -> Program:
    """Return a program with the metas that its values have on a device."""
    return replace(program, metas=true_metas(program, "cuda" if device.type == "cuda" else "cpu"))


def _captured(plan: Plan, model: nn.Module, batch: Any, loss_fn: LossFn) -> Program:
    return capture(
        model,
        batch,
        loss_fn,
        microbatch_size=plan.microbatch_size,
        batch_dim=BatchDims(plan.batch_dims) if plan.batch_dims else 0,
        autocast=dtype_of(plan.autocast),
    )
