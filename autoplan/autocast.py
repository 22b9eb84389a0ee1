"""Autocast: around the whole step, told by `autocast=`, or inside `forward`, found in the graph.

Around the step nothing is written into the ops: they are captured and run under the same autocast,
as the user's step runs them. Inside `forward` every op of the region is wrapped, so that it casts
what eager would cast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from autoplan.program import Op

__all__ = [
    "FOREIGN_NOTE",
    "InAutocast",
    "around_step",
    "bare",
    "check_autocast",
    "choose_precision",
    "dtype_of",
    "in_autocast",
    "is_cast",
]

FOREIGN_NOTE = (
    "autocast inside forward is for another device, and the trace runs on the CPU, where it has no "
    "effect: bytes and times are those of the dtype without it; put autocast around the training "
    "step and pass autocast="
)


def around_step(
    dtype: torch.dtype | None, device_type: str = "cpu"
) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a step under autocast to `dtype` on a device; None is none."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=dtype)


def is_cast(op: Op) -> bool:
    """Return whether an op of the model is itself a cast, and not one that autocast makes."""
    name = bare(op).target_name.removeprefix("aten.").partition(".")[0]
    return name in ("to", "_to_copy", "type_as", "float", "bfloat16", "half", "double")


def in_autocast(op: Op, dtype: torch.dtype | None, device_type: str) -> Op:
    """Return `op` so that it runs under autocast, if there is one and no region decides already."""
    if dtype is None or not isinstance(op.target, torch._ops.OpOverload):
        return op
    return replace(op, target=InAutocast(op.target, device_type, dtype, True))


def dtype_of(name: str) -> torch.dtype | None:
    """Return the dtype that a plan calls by name; `none` is None."""
    return None if name == "none" else getattr(torch, name)


def check_autocast(
    model: nn.Module, dtype: torch.dtype | None, mixed_precision: str
) -> Literal["none", "bfloat16"]:
    """Return the name of the dtype that a plan may have autocast to.

    Raises:
        ValueError: the combination cannot be right; says why and what to do.
    """
    if dtype is None:
        return "none"
    if dtype is torch.float16:
        raise ValueError(
            "autocast=torch.float16 loses small gradients without a GradScaler, and a plan's step "
            "has none: use torch.bfloat16"
        )
    if dtype is not torch.bfloat16:
        raise ValueError(f"autocast={dtype}; a plan takes None or torch.bfloat16")
    if mixed_precision == "bfloat16":
        raise ValueError(
            "autocast and mixed_precision='bfloat16' both decide what dtype ops run in: leave out "
            "one (mixed_precision casts parameters once a step and all ops follow, autocast casts "
            "the operands of products)"
        )
    wide = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32}
    if wide:
        raise ValueError(
            "autocast is planned over float32 parameters, which it casts for products; this model "
            f"has {', '.join(sorted(map(str, wide)))}: keep it in float32, or leave autocast out"
        )
    return "bfloat16"


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


def choose_precision(model: nn.Module, wanted: str, is_gpu: bool) -> Any:
    """Return the precision: `auto` trains a bfloat16 model with float32 master parameters.

    Raises:
        ValueError: it is none of auto, none and bfloat16, or the model is not built in bfloat16.
    """
    if wanted not in ("auto", "none", "bfloat16"):
        raise ValueError(f"mixed_precision={wanted!r}; allowed are auto, none, bfloat16")
    dtypes = {p.dtype for p in model.parameters()}
    if wanted == "auto":
        return "bfloat16" if is_gpu and dtypes == {torch.bfloat16} else "none"
    if wanted == "bfloat16" and dtypes != {torch.bfloat16}:
        raise ValueError(
            "mixed_precision='bfloat16' plans a model built in bfloat16 with float32 master "
            f"parameters; this one has {', '.join(sorted(map(str, dtypes)))}: build it on the meta "
            "device in bfloat16 for planning"
        )
    return wanted
