"""A captured program as bytes, for another process that knows the same operators.

Operators are written by name and looked up again; everything else as pickle writes it. A program
with functions that have no name, such as modules that stay one op, has no such form.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor

from autoplan.program import Program

__all__ = ["packed", "unpacked"]


def packed(program: Program) -> bytes | None:
    """Return a program as bytes; None where it holds what only this process has."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(program)
    except Exception:  # whatever objects of the user's raise when they are written
        return None
    return buffer.getvalue()


def unpacked(data: bytes | None, fingerprint: str) -> Program | None:
    """Return the program that `packed` wrote, in the process itself or one forked from it.

    Args:
        data: what `packed` returned.
        fingerprint: of the program; None is returned where what is read is not that program.
    """
    if data is None:
        return None
    try:
        program = pickle.loads(data)
    except Exception:  # an operator that only the other process has met
        return None
    is_same = isinstance(program, Program) and program.fingerprint == fingerprint
    return program if is_same else None


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Return how an operator is found again; other objects are written as they are."""
        if isinstance(value, torch._ops.OpOverload):
            namespace, name = value._schema.name.split("::", 1)
            return _operator, (namespace, name, value._overloadname)
        if isinstance(value, FakeTensor):
            raise pickle.PicklingError("a tensor without values")
        return NotImplemented


def _operator(namespace: str, name: str, overload: str) -> Callable[..., Any]:
    packet = getattr(getattr(torch.ops, namespace), name)
    found: Callable[..., Any] = getattr(packet, overload)
    return found
