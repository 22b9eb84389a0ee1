"""Autocast: around the whole step, told by `autocast=`, or inside `forward`, found in the graph.

Around the step nothing is written into the ops: they are captured and run under the same autocast,
as the user's step runs them. Inside `forward` every op of the region is wrapped, so that it casts
what eager would cast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from autoplan.program import Op

__all__ = ["FOREIGN_NOTE", "InAutocast", "around_step", "bare"]

FOREIGN_NOTE = (
    "autocast inside forward is for another device, and the trace runs on the CPU, where it has no "
    "effect: bytes and times are those of the dtype without it; put autocast around the training "
    "step and pass autocast="
)


def around_step(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which a step under autocast to `dtype` is traced; None is none."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=dtype)


class InAutocast:
    """An operator as it runs in an autocast region of the model.

    Attributes:
        inner: the operator.
        __name__: tells region and operator.
    """

    def __init__(
        self, inner: Callable[..., Any], device_type: str, dtype: torch.dtype | None, enabled: bool
    ) -> None:
        self.inner = inner
        self._device_type = device_type
        self._dtype = dtype
        self._enabled = enabled
        kind = str(dtype).removeprefix("torch.") if enabled else "off"
        self.__name__ = f"autocast_{kind}.{inner}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        if is_fake and self._device_type != "cpu":
            return self.inner(*args, **kwargs)
        with torch.autocast(self._device_type, dtype=self._dtype, enabled=self._enabled):
            return self.inner(*args, **kwargs)

    def arguments(self) -> tuple[str, ...]:
        """Return the text of what it is made of beside the operator."""
        return repr(self._device_type), str(self._dtype), str(self._enabled)

    def around(self, inner: Callable[..., Any]) -> InAutocast:
        """Return the same region around another operator."""
        return InAutocast(inner, self._device_type, self._dtype, self._enabled)


def bare(op: Op) -> Op:
    """Return `op` without the autocast region around it."""
    return replace(op, target=op.target.inner) if isinstance(op.target, InAutocast) else op
