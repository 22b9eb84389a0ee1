"""What a transformers model needs before it is captured; does nothing to any other module.

In an export the stock attention always materialises its mask, and then repeats key-value heads,
which an eager run on the same inputs does not. The public mask interface lets us register a
function that leaves the mask out where the eager model does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
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
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(_NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(_NAME, _mask)


def _mask(**kwargs: Any) -> torch.Tensor | None:
    """Return no mask where an eager run would take none, which stock code never does in an export.

    Source: `_ignore_causal_mask_sdpa` and `_ignore_bidirectional_mask_sdpa` of transformers.
    """
    from transformers.masking_utils import sdpa_mask

    local_size = kwargs.get("local_size")
    is_local = local_size is not None and kwargs["kv_length"] >= local_size
    # Under an export, transformers takes any positions for those of packed sequences and forbids
    # the skip; a pattern of the model's own is told by use_vmap.
    is_custom = kwargs.get("use_vmap", False)
    is_square = kwargs["q_length"] == kwargs["kv_length"]
    may_skip = is_square or kwargs.get("allow_is_bidirectional_skip", False)
    if may_skip and not is_local and not is_custom and kwargs.get("attention_mask") is None:
        return None
    return sdpa_mask(**kwargs)  # type: ignore[no-any-return]
