"""Run a captured program on real tensors, as the emitted module would on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoplan.program import Program, map_refs

__all__ = ["gradients_of", "run_program"]


def run_program(
    program: Program, model: nn.Module, batch: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of a program, with the states of `model`."""
    states: dict[str, Any] = dict(model.named_parameters(remove_duplicate=False))
    states |= dict(model.named_buffers(remove_duplicate=False))
    values: dict[str, Any] = dict(zip(program.inputs, batch, strict=True))
    values |= program.constants
    values |= {name: states[fqn] for name, fqn in program.side_states.items()}
    for op in program.side_ops:
        args, kwargs = map_refs((op.args, dict(op.kwargs)), values.__getitem__)
        values[op.name] = op.target(*args, **kwargs)
    for call in program.calls:
        graph = program.graphs[call.graph]
        local = dict(zip(graph.inputs, (values[name] for name in call.args), strict=True))
        local |= {s.name: states[f] for s, f in zip(graph.states, call.states, strict=True)}
        for op in graph.ops:
            args, kwargs = map_refs((op.args, dict(op.kwargs)), local.__getitem__)
            local[op.name] = op.target(*args, **kwargs)
        outs = (local[name] for name in graph.outputs)
        values.update(zip(call.outs, outs, strict=True))
    loss: torch.Tensor = values[program.loss]
    return loss.detach(), gradients_of(loss, model)


def gradients_of(loss: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of every trained parameter; zeros where there is none."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(trained.items(), gradients, strict=True)
    }
