"""Let activations enter and leave a pipeline stage."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Entry", "leaving"]


class Entry(torch.autograd.Function):
    """Let an activation enter a stage; its gradient leaves contiguous, as sending needs it.

    It leaves alone, too: a slice of a larger tensor, such as the gradient of a part of a
    concatenation, would keep all of that until it has been sent.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        sent = gradients[0].contiguous()
        return sent if sent.nbytes == sent.untyped_storage().nbytes() else sent.clone()


def leaving(value: torch.Tensor, is_split: bool) -> torch.Tensor:
    """Return an activation as it leaves a stage: contiguous, as sending needs it.

    Torch's split backward detaches in place what left, which no view can be.
    """
    sent = value.contiguous()
    # Contiguous dimensions of size 1 may have any stride, which torch 2.11 refuses to send.
    if sent.stride() != torch.empty(sent.shape, device="meta").stride():
        sent = sent.view(-1).view(sent.shape)
    return sent.clone() if is_split and sent._is_view() else sent
