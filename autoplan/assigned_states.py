"""Assignments to buffers in a forward, made writes that a captured program has.

`self.mean = 0.9 * self.mean + 0.1 * x.mean(0)` gives a module another tensor. A program knows the
tensor that was there, and writes to it; torch's export sees such assignments in the outermost
module only, and forgets them elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoplan.errors import TraceError

__all__ = ["call_and_keep_states"]


def call_and_keep_states(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a call of `model` returns; what it assigns to buffers is written into them.

    Raises:
        TraceError: a buffer gets another shape or dtype, or a tensor that is no buffer is replaced
            by another, which the next forward would read.
    """
    before = [
        (f"{fqn}.{name}" if fqn else name, module, name, value)
        for fqn, module in model.named_modules()
        for states in (module._buffers, vars(module))
        for name, value in states.items()
        if isinstance(value, torch.Tensor)
    ]
    output = model(*args, **kwargs)
    for fqn, module, name, value in before:
        if name not in module._buffers:
            if vars(module).get(name) is not value:
                raise TraceError(
                    f"{fqn} is a tensor that the forward replaces by another, and no buffer: what "
                    "a plan keeps from step to step must be one (register_buffer)"
                )
            continue
        now = module._buffers[name]
        if now is value:
            continue
        if now is None or now.shape != value.shape or now.dtype != value.dtype:
            got = "None" if now is None else f"{now.dtype} of shape {tuple(now.shape)}"
            raise TraceError(
                f"the forward replaces the buffer {fqn}, {value.dtype} of shape "
                f"{tuple(value.shape)}, by {got}: it must keep its shape and dtype"
            )
        with torch.no_grad():
            value.copy_(now.detach())
        module._buffers[name] = value
    return output
