"""Measure the bytes of live tensor storages, on any device, by watching every operator.

Each storage counts once, from the op that made it until its last tensor dies. FSDP frees by
resizing a storage to zero, which is no operator, so `UntypedStorage.resize_` is watched too.
What a kernel allocates inside itself, and what communication libraries allocate, is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = ["StorageMeter"]

Event = Callable[[int, str], None]


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages while it is entered.

    Attributes:
        live_bytes: now.
        peak_bytes: largest since the start or the last `reset_peak`.
    """

    _entered: ClassVar[list[StorageMeter]] = []
    _resize: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, on_change: Event | None = None) -> None:
        """Make a meter; `on_change(live_bytes, operator)` is called when the count changes."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_change = on_change
        self._bytes_by_key: dict[int, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def baseline(
        self,
        module: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        tensors: Iterable[torch.Tensor] = (),
    ) -> int:
        """Count tensors that live already; returns their bytes, shared storages once."""
        before = self.live_bytes
        found: list[Any] = list(tensors)
        if module is not None:
            found += [*module.parameters(), *module.buffers()]
            found += [p.grad for p in module.parameters() if p.grad is not None]
        if optimizer is not None:
            found += pytree.tree_leaves(list(optimizer.state.values()))
        for tensor in found:
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, "baseline")
        return self.live_bytes - before

    def reset_peak(self) -> None:
        """Let the peak start at what lives now."""
        self.peak_bytes = self.live_bytes

    def __enter__(self) -> StorageMeter:
        if not StorageMeter._entered:
            StorageMeter._resize = torch.UntypedStorage.resize_
            torch.UntypedStorage.resize_ = _watched_resize  # type: ignore[method-assign, assignment]
        StorageMeter._entered.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        StorageMeter._entered.remove(self)
        if not StorageMeter._entered and StorageMeter._resize is not None:
            torch.UntypedStorage.resize_ = StorageMeter._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, str(func))
        return result

    def _see(self, tensor: torch.Tensor, operator: str) -> None:
        if isinstance(tensor, DTensor):
            self._see(tensor.to_local(), operator)
            return
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            for name in names:
                self._see(getattr(tensor, name), operator)
            return
        if tensor.is_meta:
            return
        self._see_storage(tensor.untyped_storage(), operator)

    def _see_storage(self, storage: torch.UntypedStorage, operator: str) -> None:
        key = storage._cdata
        if key not in self._bytes_by_key:
            self._bytes_by_key[key] = 0
            weakref.finalize(storage, self._forget, key).atexit = False
        self._set(key, storage.nbytes(), operator)

    def _set(self, key: int, nbytes: int, operator: str) -> None:
        change = nbytes - self._bytes_by_key[key]
        if change:
            self._bytes_by_key[key] = nbytes
            self.live_bytes += change
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            if self._on_change is not None:
                self._on_change(self.live_bytes, operator)

    def _forget(self, key: int) -> None:
        self._set(key, 0, "free")
        del self._bytes_by_key[key]


def _watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
    assert StorageMeter._resize is not None, "resize_ is watched only inside a meter"
    result = StorageMeter._resize(storage, size)
    for meter in StorageMeter._entered:
        meter._see_storage(storage, "resize_")
    return result
