"""What a transformers model needs before it is captured; does nothing to any other module.

In an export the stock attention always materialises its mask, and then repeats key-value heads,
which an eager run on the same inputs does not. The public mask interface lets us register, for the
time of the export, a function that leaves the mask out where the eager model does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["exact_masks", "is_transformers_model", "prepare"]

CACHE_NOTE = (
    "config.use_cache is on: the trace assumes it off; with it on, training keeps a copy of keys "
    "and values in every layer; set model.config.use_cache = False"
)


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether `model` is a transformers model (without importing transformers)."""
    module = sys.modules.get("transformers")
    return module is not None and isinstance(model, module.PreTrainedModel)


def prepare(model: nn.Module) -> tuple[str, ...]:
    """Switch off the caches of the (copied) transformers models in `model`.

    Returns:
        Notes on what was switched that the user's own model still does.
    """
    notes: list[str] = []
    for module in _transformers_models(model):
        if getattr(module.config, "use_cache", False):
            module.config.use_cache = False
            notes.append(CACHE_NOTE)
    return tuple(dict.fromkeys(notes))


@contextlib.contextmanager
def exact_masks(model: nn.Module, batch: Any) -> Iterator[None]:
    """Make the masks of transformers models those of an eager run while the context is active."""
    needs_mask = isinstance(batch, Mapping) and (
        "attention_mask" in batch or "position_ids" in batch
    )
    if needs_mask or not _transformers_models(model):
        yield
        return
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    stock = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    AttentionMaskInterface.register("sdpa", functools.partial(_mask, stock))
    try:
        yield
    finally:
        AttentionMaskInterface.register("sdpa", stock)


def _transformers_models(model: nn.Module) -> list[Any]:
    if "transformers" not in sys.modules:
        return []
    return [module for module in model.modules() if is_transformers_model(module)]


def _mask(stock: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return no mask where an eager run would take none, which stock code never does in an export.

    Source: `_ignore_causal_mask_sdpa` and `_ignore_bidirectional_mask_sdpa` of transformers.
    """
    local_size = kwargs.get("local_size")
    is_local = local_size is not None and kwargs["kv_length"] >= local_size
    # Under an export, transformers takes any positions for those of packed sequences and forbids
    # the skip; a pattern of the model's own is told by use_vmap.
    is_custom = kwargs.get("use_vmap", False)
    is_square = kwargs["q_length"] == kwargs["kv_length"]
    may_skip = is_square or kwargs.get("allow_is_bidirectional_skip", False)
    if may_skip and not is_local and not is_custom and kwargs.get("attention_mask") is None:
        return None
    return stock(**kwargs)  # type: ignore[no-any-return]
