"""Signatures of ops: texts that are equal for calls that take the same time on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoplan.autocast import bare
from autoplan.graph import OpTrace, ShardOption
from autoplan.opaque import OpaqueCall
from autoplan.program import Op, map_refs

__all__ = ["local_signature", "op_signature"]


def op_signature(op: Op, values: Mapping[str, Any], autocast: torch.dtype | None) -> str:
    """Return the signature of a call that runs whole.

    Operator and arguments: tensors as `float32[2, 16]`, with strides where they are not contiguous
    and `*` where they want a gradient; constants as they are; the dtype of autocast.

    Args:
        op: the call.
        values: tensors (fake ones will do) by the names that it reads.
        autocast: dtype of the autocast around the step, or None.
    """
    args, kwargs = map_refs((op.args, dict(op.kwargs)), values.__getitem__)
    parts = [_text(arg) for arg in args]
    parts += [f"{key}={_text(value)}" for key, value in sorted(kwargs.items())]
    target = bare(op).target
    name = op.target_name
    if isinstance(target, OpaqueCall):
        name = f"{name}{target.statics}"
    around = "" if autocast is None else f" in {str(autocast).removeprefix('torch.')}"
    return f"{name}({', '.join(parts)}){around}"


def local_signature(op: OpTrace, option: ShardOption, degree: int) -> str:
    """Return the signature of what one of `degree` ranks runs of an op; empty if it has none."""
    if not op.signature or option.axis == "whole" or degree == 1:
        return op.signature
    return f"{op.signature} tp {degree}: {' '.join(option.inputs)} -> {option.output}"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        layout = "" if value.is_contiguous() else f"/{list(value.stride())}"
        return kind + layout + "*" * value.requires_grad
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_text(item) for item in value)}]"
    return "device" if isinstance(value, torch.device) else repr(value)
