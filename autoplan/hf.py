"""What a transformers model needs before it is captured; does nothing to any other module.

The stock attention exports a materialised mask and repeated key-value heads, which an eager run on
the same inputs does not have. The public attention interface lets us register a function that calls
`scaled_dot_product_attention` as the eager model does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["is_transformers_model", "prepare"]

_NAME = "autoplan"
CACHE_NOTE = (
    "config.use_cache is on: the trace assumes it off; with it on, training keeps a copy of keys "
    "and values in every layer; set model.config.use_cache = False"
)


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether `model` is a transformers model (without importing transformers)."""
    module = sys.modules.get("transformers")
    return module is not None and isinstance(model, module.PreTrainedModel)


def prepare(model: nn.Module, batch: Any) -> tuple[str, ...]:
    """Switch the (copied) transformers models in `model` to exact attention and no cache.

    Returns:
        Notes on what was switched that the user's own model still does.
    """
    if "transformers" not in sys.modules:
        return ()
    found = [m for m in model.modules() if is_transformers_model(m)]
    if not found:
        return ()
    notes: list[str] = []
    _register()
    needs_mask = isinstance(batch, Mapping) and (
        "attention_mask" in batch or "position_ids" in batch
    )
    for module in found:
        config: Any = module.config
        if getattr(config, "use_cache", False):
            config.use_cache = False
            notes.append(CACHE_NOTE)
        current = getattr(config, "_attn_implementation", None)
        if current == "sdpa" and not needs_mask:
            config._attn_implementation = _NAME
    return tuple(dict.fromkeys(notes))


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=causal and query.shape[2] > 1 and attention_mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Return no mask for plain causal or full attention; the real one for windows and padding."""
    from transformers.masking_utils import sdpa_mask

    if kwargs.get("attention_mask") is None and kwargs.get("local_size") is None:
        return None
    return sdpa_mask(*args, **kwargs)  # type: ignore[no-any-return]
