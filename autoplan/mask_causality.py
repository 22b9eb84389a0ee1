"""The private torch interface of the capture, apart from those of running: these load slowly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn.modules import transformer

from autoplan.patching import replaced

__all__ = ["causality_as_told"]


@contextlib.contextmanager
def causality_as_told() -> Iterator[None]:
    """Let `nn.Transformer` take a mask as it is instead of reading whether it is causal.

    That is a hint with which the same result may come from a faster kernel; without `is_causal=`
    it is found by comparing the values of the mask, which an export does not have.
    """

    def told(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with replaced(transformer, _detect_is_causal_mask=told):
        yield
