"""Answers to the questions about values that a fake tensor cannot answer itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoplan.errors import TraceError

__all__ = ["Answers"]

_MOST_QUESTIONS = 10_000
_QUESTIONS_BEFORE_TURNING = 64


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what a fake tensor cannot: values with `answer`, sizes with 1 or the largest."""

    def __init__(self, answer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answer = answer
        self._asked = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name == "aten::_local_scalar_dense":
            return self._value(args[0].dtype)
        if name == "aten::equal":
            return bool(self._value(torch.bool))
        if name == "aten::nonzero":
            return self._places(args[0])
        if name == "aten::masked_select":
            largest = max(args[0].numel(), args[1].numel())
            return args[0].new_empty(self._size(largest))
        if name.startswith(("aten::index", "aten::_index_put", "aten::_unsafe_index")):
            args = tuple(
                self._index(arg) if isinstance(arg, (list, tuple)) else arg for arg in args
            )
        return func(*args, **kwargs)

    def _value(self, dtype: torch.dtype) -> bool | int | float:
        self._asked += 1
        if self._asked > _MOST_QUESTIONS:
            raise TraceError("a loop in it does not end on fake tensors")
        turned = self._asked > _QUESTIONS_BEFORE_TURNING
        answer = 1 - self._answer if turned else self._answer
        if dtype is torch.bool:
            return bool(answer)
        return float(answer) if dtype.is_floating_point else answer

    def _size(self, largest: int) -> int:
        return largest if self._answer else min(1, largest)

    def _places(self, mask: torch.Tensor) -> torch.Tensor:
        rows = self._size(mask.numel())
        return mask.new_empty((rows, max(mask.dim(), 1)), dtype=torch.int64)

    def _index(self, indices: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        for index in indices:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                found.extend(self._places(index).unbind(1))
            else:
                found.append(index)
        return found
