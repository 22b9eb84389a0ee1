"""Recompute a block in its backward, keeping the results of chosen ops.

`torch.utils.checkpoint` runs the region again; two dispatch modes of our own decide what is stored
in the first run and handed out in the second. Torch's own selective contexts hand a stored result
out only once, which fails where a backward is split in two; ours do not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoplan.autocast import is_cast
from autoplan.collectives import Redistribute
from autoplan.errors import EmitError
from autoplan.program import Op

__all__ = ["KeepPlan", "Nowhere", "Region", "keep_plan", "run_region"]

# Autograd adds these differently in the two runs.
_IGNORED = (torch.ops.aten.detach.default,)
_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepPlan:
    """Which ops of a graph a selective region stores, by index in the graph.

    Attributes:
        stored: kernels of these ops are stored, and not run again.
        skipped: kernels of these ops are not run again and return stand-ins without memory,
            because only their redistributed result, which is stored, is read.
        names: op names by index, for messages.
        recast: ops whose casts are not theirs but autocast's; these always run again.
    """

    stored: frozenset[int]
    skipped: frozenset[int]
    names: tuple[str, ...]
    recast: frozenset[int] = frozenset()


def keep_plan(ops: Sequence[Op], keep: Sequence[str], *, is_autocast: bool = False) -> KeepPlan:
    """Return what a region over `ops` stores for the marks `keep`.

    An op whose result is an addend over tensor-parallel ranks is kept as what its redistributions
    make of it, so that their collectives do not run again. Copies of operands that autocast makes
    are not stored: they are as large as weights, and its cache decides which op makes one.

    Raises:
        EmitError: a kept op is not in the graph.
    """
    index_by_name = {op.name: index for index, op in enumerate(ops)}
    sums: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        if isinstance(op.target, Redistribute) and op.target.produced.kind == "partial":
            sums.setdefault(op.inputs()[0], []).append(index)
    stored: set[int] = set()
    skipped: set[int] = set()
    for name in keep:
        if name not in index_by_name:
            raise EmitError(f"recompute keeps {name}, which is no op of the graph: plan again")
        (skipped if name in sums else stored).add(index_by_name[name])
        stored.update(sums.get(name, ()))
    recast = [index for index, op in enumerate(ops) if is_autocast and not is_cast(op)]
    return KeepPlan(
        stored=frozenset(stored),
        skipped=frozenset(skipped),
        names=tuple(op.name for op in ops),
        recast=frozenset(recast),
    )


@dataclass(slots=True)
class _Stored:
    """One kernel of a kept op: its stored results with their versions, or that it runs again."""

    kernel: Callable[..., Any]
    runs_again: bool
    leaves: list[Any] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    spec: Any = None


@dataclass(slots=True)
class Region:
    """One run of a selective region: which op runs now, and what was stored.

    Generated code calls `at` before each op, and runs redistributions by `through`.
    """

    plan: KeepPlan
    current: int = -1
    is_again: bool = False
    kernels: dict[int, list[_Stored]] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)

    def at(self, index: int) -> None:
        """Note that the op at `index` runs next."""
        self.current = index

    def through(self, index: int, target: Redistribute, value: Any) -> Any:
        """Return what `target` makes of `value`; a stored result needs no collective again."""
        self.current = -1
        if index not in self.plan.stored:
            return target(value)
        if self.is_again:
            return target.recall(value, self.results[index])
        result = target(value)
        self.results[index] = pytree.tree_map(torch.Tensor.detach, result)
        return result


class Nowhere:
    """Takes the place of a region where no gradient is wanted."""

    def at(self, index: int) -> None:
        """Ignore which op runs."""

    def through(self, index: int, target: Redistribute, value: Any) -> Any:
        """Run the redistribution."""
        return target(value)


class _Save(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """First run: store what the kept ops' kernels return."""

    def __init__(self, region: Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region

    def __enter__(self) -> _Save:
        self._region.current = -1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        region = self._region
        plan, current = region.plan, region.current
        if func in _IGNORED or (current not in plan.stored and current not in plan.skipped):
            return result
        if func is _CAST and current in plan.recast:
            return result
        if _shares_storage(result, (args, kwargs)):
            entry = _Stored(kernel=func, runs_again=True)
        else:
            entry = (_store if current in plan.stored else _stand_in)(func, result)
        region.kernels.setdefault(current, []).append(entry)
        return result


class _Load(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Second run: hand out what was stored in place of running kernels of kept ops."""

    def __init__(self, region: Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region
        self._next: dict[int, int] = {}

    def __enter__(self) -> _Load:
        self._next.clear()
        # Kernels before the first op, such as reading parameters, belong to none; the first run
        # ended in the last op.
        self._region.current = -1
        self._region.is_again = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        region = self._region
        entries = region.kernels.get(region.current)
        is_recast = func is _CAST and region.current in region.plan.recast
        if entries is None or func in _IGNORED or is_recast:
            return func(*args, **(kwargs or {}))
        position = self._next.get(region.current, 0)
        self._next[region.current] = position + 1
        name = region.plan.names[region.current]
        if position >= len(entries) or entries[position].kernel is not func:
            raise EmitError(f"{name} ran other kernels when recomputed ({func}) than at first")
        entry = entries[position]
        return func(*args, **(kwargs or {})) if entry.runs_again else _restore(entry, name)


def _storages(value: Any) -> set[int]:
    leaves = pytree.tree_leaves(value)
    return {x.untyped_storage()._cdata for x in leaves if isinstance(x, torch.Tensor)}


def _shares_storage(result: Any, inputs: Any) -> bool:
    return bool(_storages(result) & _storages(inputs))


def _store(kernel: Callable[..., Any], result: Any) -> _Stored:
    leaves, spec = pytree.tree_flatten(result)
    kept = [x.detach() if isinstance(x, torch.Tensor) else x for x in leaves]
    versions = [x._version if isinstance(x, torch.Tensor) else None for x in kept]
    return _Stored(kernel=kernel, runs_again=False, leaves=kept, versions=versions, spec=spec)


def _stand_in(kernel: Callable[..., Any], result: Any) -> _Stored:
    leaves, spec = pytree.tree_flatten(result)
    empty = [
        x.new_empty((1,) * x.dim()).expand(x.shape) if isinstance(x, torch.Tensor) else x
        for x in leaves
    ]
    versions: list[int | None] = [None] * len(empty)
    return _Stored(kernel=kernel, runs_again=False, leaves=empty, versions=versions, spec=spec)


def _restore(entry: _Stored, name: str) -> Any:
    leaves = []
    for leaf, version in zip(entry.leaves, entry.versions, strict=True):
        if version is not None and leaf._version != version:
            raise EmitError(
                f"the kept result of {name} was changed in place before its backward: "
                "take it out of the recompute entry's keep list"
            )
        leaves.append(leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    return pytree.tree_unflatten(leaves, entry.spec)


def _contexts(region: Region) -> tuple[_Save, _Load]:
    return _Save(region), _Load(region)


def run_region(
    function: Callable[..., tuple[torch.Tensor, ...]],
    keep: KeepPlan | None,
    *inputs: Any,
) -> tuple[torch.Tensor, ...]:
    """Run `function` as a recomputed region.

    Args:
        function: `function(region, *inputs)` if `keep` is given, else `function(*inputs)`.
        keep: what to store; None stores nothing but the inputs.
        inputs: values that enter; they are kept.
    """
    if keep is None:
        result = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=True)
    else:
        region = Region(keep)
        result = checkpoint(
            functools.partial(function, region),
            *inputs,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=functools.partial(_contexts, region),
        )
    assert isinstance(result, tuple), "a block returns a tuple"
    return result
