"""Shorten runs of equal blocks before capture, so that depth costs nothing.

Only the last run of a list is cut, and two of its blocks stay, so every block that remains
keeps its index. Equality is decided by a fingerprint of everything that `forward` can read: class,
mode, plain attributes, parameter and buffer specifications, hooks, children. What the two blocks
that stay do is compared again after capture.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["ShortRun", "Shortening", "find_runs", "fingerprint"]

_KEPT = 2
_INDEX_WORDS = ("idx", "index", "layer_id", "layer_number", "block_id")
_LISTS = (nn.ModuleList, nn.Sequential)
_PRIVATE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    """A list whose last `count` entries are equal, from index `start`; two of them were kept."""

    container: str
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortening:
    """The runs that may be cut."""

    runs: tuple[ShortRun, ...]

    def dropped(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks that `cut` leaves out."""
        return [
            block
            for run in self.runs
            for block in list(model.get_submodule(run.container).children())[run.start + _KEPT :]
        ]

    def cut(self, model: nn.Module) -> None:
        """Leave two blocks of every run in `model`, a copy."""
        for run in self.runs:
            blocks: Any = model.get_submodule(run.container)
            del blocks[run.start + _KEPT :]


def find_runs(model: nn.Module) -> Shortening:
    """Return the last run of equal blocks of every outermost list; `model` stays as it is."""
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    runs: list[ShortRun] = []
    for fqn, module in list(model.named_modules()):
        inside = any(fqn.startswith(run.container + ".") for run in runs)
        if inside or type(module) not in _LISTS or len(module) <= _KEPT:
            continue
        prints = [fingerprint(block, uses) for block in module.children()]
        start = len(prints) - 1
        while start > 0 and prints[start - 1] == prints[-1]:
            start -= 1
        count = len(prints) - start
        if count > _KEPT:
            runs.append(ShortRun(container=fqn, start=start, count=count))
    return Shortening(runs=tuple(runs))


def fingerprint(module: nn.Module, uses: Counter[int] | None = None) -> Any:
    """Return a comparable value that is equal for modules that compute the same thing.

    Args:
        module: any module.
        uses: how many modules own each parameter (by `id`); a shared one is told by identity.
    """
    states: list[tuple[Any, ...]] = []
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is None:
            states.append((name, None))
            continue
        shared = id(tensor) if uses is not None and uses[id(tensor)] > 1 else 0
        states.append((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, shared))
    read = {name: value for name, value in vars(module).items() if _is_read(name, value)}
    attributes = tuple((name, _plain(read[name], 3)) for name in sorted(read))
    children = tuple((name, fingerprint(child, uses)) for name, child in module.named_children())
    return (type(module), tuple(states), attributes, children)


def _is_read(name: str, value: Any) -> bool:
    """Return whether an attribute can change what `forward` does; empty hooks cannot."""
    is_empty = not value if isinstance(value, dict) else False
    return not is_empty and not _is_left_out(name)


@functools.cache
def _is_left_out(name: str) -> bool:
    return name in _PRIVATE or any(word in name for word in _INDEX_WORDS)


def _plain(value: Any, depth: int) -> Any:
    """Return `value` in comparable form; an opaque object is told by identity."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, type)):
        return value
    if isinstance(value, torch.device):
        return str(value)
    if depth > 0 and isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return ("partial", tuple(_plain(part, depth - 1) for part in parts))
    if depth > 0 and isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return (type(value), tuple(_plain(item, depth - 1) for item in items))
    if depth > 0 and isinstance(value, dict):
        return (dict, tuple((str(k), _plain(v, depth - 1)) for k, v in value.items()))
    return (type(value).__name__, id(value))
