"""Forms of batches beyond tuples, lists and dictionaries: dataclasses, and mappings of other types.

Torch's pytrees take only types that are registered. What a batch or an output holds is registered
when it first comes: a dataclass by its fields, a mapping (what tokenizers return) by its keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["learn_forms", "parts_of"]


def learn_forms(value: Any) -> None:
    """Register the types of all dataclasses and mappings in a batch or an output with pytree."""
    if isinstance(value, torch.Tensor):
        return
    kind = type(value)
    if dataclasses.is_dataclass(value) and kind not in pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(kind)
    elif isinstance(value, Mapping) and kind not in pytree.SUPPORTED_NODES:
        _register_mapping(kind)
    for child in value if isinstance(value, (tuple, list)) else parts_of(value).values():
        learn_forms(child)


def parts_of(value: Any) -> Mapping[Any, Any]:
    """Return what a mapping or a dataclass holds by key; nothing for what is neither."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value if isinstance(value, Mapping) else {}


def _register_mapping(kind: type[Any]) -> None:
    def flatten(mapping: Any) -> tuple[list[Any], list[Any]]:
        return list(mapping.values()), list(mapping)

    def unflatten(values: Any, keys: Any) -> Any:
        return kind(dict(zip(keys, values, strict=True)))

    def flatten_with_keys(mapping: Any) -> tuple[list[Any], list[Any]]:
        return [(pytree.MappingKey(k), v) for k, v in mapping.items()], list(mapping)

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
