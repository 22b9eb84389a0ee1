"""Shapes of operators that torch cannot run on fake tensors, where a bound of them is known.

Registered when this module is imported, unless torch has come to know the operator itself.
"""

from __future__ import annotations

import contextlib

import torch

__all__ = ["ctc_loss_shapes"]


def ctc_loss_shapes(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors of the shapes of a CTC loss: one loss a row, and what its backward reads.

    The latter has two places for each label of the longest target and one more (Graves et al.
    2006, section 4.1). Only the lengths tell how long that is; here it is the width of `targets`,
    or all labels where they stand in one line.
    """
    steps, rows = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    places = 2 * targets.shape[-1] + 1
    return log_probs.new_empty((rows,)), log_probs.new_empty((rows, steps, places))


with contextlib.suppress(RuntimeError):  # torch has one
    torch.library.register_fake("aten::_ctc_loss.Tensor", ctc_loss_shapes)
