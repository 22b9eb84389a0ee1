"""What one device computes for an equality draw, and how a parallel run is held against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoplan.batches import split_batch
from tests.numerics import compare

__all__ = ["Result", "differences", "reference"]

CLIP_NORM = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run of two optimizer steps and a third forward and backward gave.

    Attributes:
        losses: of the three.
        norms: of the gradients before clipping, of the two steps.
        gradients: of the first step.
        clipped: of the first step, clipped.
        state: parameters and buffers at the end.
    """

    losses: Sequence[float]
    norms: Sequence[float]
    gradients: Mapping[str, torch.Tensor]
    clipped: Mapping[str, torch.Tensor]
    state: Mapping[str, torch.Tensor]


def reference(
    model: nn.Module,
    batches: Sequence[Mapping[str, torch.Tensor]],
    loss_fn: Callable[..., torch.Tensor],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    num_parts: int,
) -> Result:
    """Train the user's own module; `num_parts` > 1 runs equal parts of each batch by themselves.

    Every part starts from the buffers of the step's start, and the step ends with their mean: one
    update of running statistics a step, with the mean statistics of the parts.
    """
    optimizer = make_optimizer(model.parameters())
    losses, norms = [], []
    gradients: dict[str, torch.Tensor] = {}
    clipped: dict[str, torch.Tensor] = {}
    for step, batch in enumerate(batches):
        losses.append(_forward_backward(model, batch, loss_fn, num_parts))
        if step == 2:
            break
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if step == 0:
            gradients = {n: g.clone() for n, g in named.items()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        if step == 0:
            clipped = {n: g.clone() for n, g in named.items()}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    return Result(losses=losses, norms=norms, gradients=gradients, clipped=clipped, state=state)


def _forward_backward(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    loss_fn: Callable[..., torch.Tensor],
    num_parts: int,
) -> float:
    rows = len(next(iter(batch.values()))) // num_parts
    before = {n: b.clone() for n, b in model.named_buffers()}
    ends: list[dict[str, torch.Tensor]] = []
    total = 0.0
    for part in range(num_parts):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        own = {key: leaf[part * rows : (part + 1) * rows] for key, leaf in batch.items()}
        args, kwargs, target = split_batch(model, own, loss_fn)
        loss = loss_fn(model(*args, **kwargs), *target) / num_parts
        torch.autograd.backward(loss)
        total += float(loss.detach())
        ends.append({n: b.clone() for n, b in model.named_buffers()})
    for name, buffer in model.named_buffers():
        values = torch.stack([end[name] for end in ends])
        buffer.copy_(values.mean(0) if buffer.is_floating_point() else values[0])
    return total


def differences(got: Result, expected: Result, tolerance: float) -> list[str]:
    """Return what differs by more than the tolerance, relative to the largest entry."""
    problems = []
    for what, mine, theirs in (
        ("loss", got.losses, expected.losses),
        ("norm", got.norms, expected.norms),
    ):
        for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if not abs(a - b) <= tolerance * abs(b):
                problems.append(f"{what} of step {step}: {a!r} is not {b!r}")
    problems += compare(got.gradients, expected.gradients, tolerance)
    problems += [f"clipped {p}" for p in compare(got.clipped, expected.clipped, tolerance)]
    missing = [name for name in expected.state if name not in got.state]
    problems += [f"{name} is not in the state" for name in missing]
    for name, tensor in expected.state.items():
        if name in got.state:
            error = float((got.state[name].double() - tensor.double()).abs().max())
            if not error <= tolerance * max(1.0, float(tensor.double().abs().max())):
                problems.append(f"{name}: {error:.1e} off after two steps")
    return problems
