"""Keep what autograd saves in host memory until its backward needs it.

    forward    each saved tensor is copied to the host, and its device memory is free once the
               forward does not need it
    backward   each is copied back when the node that saved it runs, and freed after it

Copies run on the stream that computes. On an accelerator the host memory is pinned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch._subclasses import FakeTensor

__all__ = ["on_host"]


@dataclass(frozen=True, slots=True)
class _Away:
    """A saved tensor on the host, and where it goes back to."""

    host: torch.Tensor
    device: torch.device


@contextlib.contextmanager
def on_host(staying: Iterable[torch.Tensor]) -> Iterator[None]:
    """Copy to the host what autograd saves inside, but for tensors that share memory with these.

    Parameters and the inputs of a block stay: something else holds them anyway.
    """
    held = {tensor.untyped_storage()._cdata for tensor in staying}

    def pack(tensor: torch.Tensor) -> torch.Tensor | _Away:
        if tensor.untyped_storage()._cdata in held or tensor.numel() == 0:
            return tensor
        if isinstance(tensor, FakeTensor):  # a dry run: the host's bytes are not the device's
            return _Away(torch.empty_like(tensor, device="meta"), tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
        host.copy_(tensor, non_blocking=True)
        return _Away(host, tensor.device)

    def unpack(packed: torch.Tensor | _Away) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        if packed.host.is_meta:
            return torch.empty_like(packed.host, device=packed.device)
        return packed.host.to(packed.device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
