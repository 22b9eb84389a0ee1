"""Decide which module of the user's is the block that an op belongs to.

    numbered modules        `layers.3`, `h.0`: the outermost one, except
      lists of lists        `stages.2` that is a list of blocks, or mostly one: the inner blocks
      small sequences       `stem.0`, `stem.1`, ...: layers in a small named sequence: the sequence
    no numbered module      the outermost named modules with parameters; one that is most of the
                            model is taken apart further
    no module at all        pieces of equal length, cut where the fewest bytes cross

A module that is called several times is a block at each call. What runs between two blocks of one
container belongs to the earlier one, unless the cut after it is wider than the cut before it (a
skip connection that joins): then it stands alone, so that both cuts can be chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from autoplan.program import Op

__all__ = ["Segment", "find_segments"]

Entry = tuple[str, str]
"""The key of a module call, told apart from other calls of the module, and the module's FQN."""

_MOST_LAYERS = 8
_MOST_STAGES = 8
_MOST_PIECES = 32
_LEAST_PIECE_OPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Ops that become one call: the FQN of their block, or empty for glue."""

    fqn: str
    ops: tuple[Op, ...]


def find_segments(
    body: Sequence[Op],
    stacks: Mapping[str, Sequence[Entry]],
    parameters: frozenset[str],
    model: nn.Module,
) -> list[Segment]:
    """Cut ops into the segments that become calls.

    Args:
        body: the ops, in execution order.
        stacks: for each op the module calls that it ran in, outermost first.
        parameters: names of the values that are parameters.
        model: the module that was exported.
    """
    finder = _Finder(model)
    keys = [finder.numbered(stacks[op.name]) for op in body]
    if not any(keys):
        keys = _named(body, stacks, parameters, model)
    if not any(keys):
        return _pieces(body)
    return _joined(body, _filled(body, keys))


class _Finder:
    """Finds the numbered module that is an op's block."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._sizes = {fqn: _num_parameters(m) for fqn, m in self._modules.items()}

    def numbered(self, stack: Sequence[Entry]) -> Entry | None:
        """Return the entry of the block in an op's stack, or None for glue."""
        places = [i for i, (_, fqn) in enumerate(stack) if fqn.rpartition(".")[2].isdigit()]
        for place in places:
            fqn = stack[place][1]
            if not self._is_list_of_blocks(fqn):
                return self._sequence(stack, place) or stack[place]
        return None

    def _is_list_of_blocks(self, fqn: str) -> bool:
        module = self._modules[fqn]
        if type(module) in (nn.Sequential, nn.ModuleList):
            return bool(len(module)) and all(_is_composite(child) for child in module)
        siblings = self._modules[fqn.rpartition(".")[0]]
        if sum(1 for _ in siblings.children()) > _MOST_STAGES:
            return False
        for name, child in module.named_children():
            if type(child) not in (nn.ModuleList, nn.Sequential) or "expert" in name:
                continue
            entries = list(child.children())
            is_run = len(entries) > 1 and len({type(entry) for entry in entries}) == 1
            is_main = 2 * self._sizes[f"{fqn}.{name}"] > self._sizes[fqn]
            if is_run and is_main and all(_is_composite(entry) for entry in entries):
                return True
        return False

    def _sequence(self, stack: Sequence[Entry], place: int) -> Entry | None:
        """Return the small sequence of layers around a numbered layer, if there is one."""
        if place == 0:
            return None
        outer = stack[place - 1]
        fqn = outer[1]
        module = self._modules[fqn]
        if not fqn or type(module) is not nn.Sequential or len(module) > _MOST_LAYERS:
            return None
        is_small = 2 * self._sizes[fqn] <= self._sizes[""]
        return outer if is_small and not any(map(_is_composite, module)) else None


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _named(
    body: Sequence[Op],
    stacks: Mapping[str, Sequence[Entry]],
    parameters: frozenset[str],
    model: nn.Module,
) -> list[Entry | None]:
    """Return the call of a named module that each op belongs to, where that reads a parameter."""
    modules = dict(model.named_modules(remove_duplicate=False))
    depth = dict.fromkeys((op.name for op in body), 1)
    while True:
        keys = [_at(stacks[op.name], depth[op.name]) for op in body]
        counts = Counter(key for key in keys if key is not None)
        key, count = next(iter(counts.most_common(1)), (None, 0))
        if key is None or 2 * count <= len(body) or not _is_composite(modules[key[1]]):
            break
        deeper = {op.name for op, own in zip(body, keys, strict=True) if own == key}
        depth = {name: at + 1 if name in deeper else at for name, at in depth.items()}
    reads = {
        key
        for op, key in zip(body, keys, strict=True)
        if key is not None and any(name in parameters for name in op.inputs())
    }
    return [key if key in reads else None for key in keys]


def _at(stack: Sequence[Entry], depth: int) -> Entry | None:
    return stack[depth] if len(stack) > depth else None


def _filled(body: Sequence[Op], keys: Sequence[Entry | None]) -> list[Entry | None]:
    """Return the keys with what runs between two blocks of a container given to the earlier one."""
    widths = _widths(body)
    filled = list(keys)
    index = 0
    while index < len(keys):
        if keys[index] is not None:
            index += 1
            continue
        end = index
        while end < len(keys) and keys[end] is None:
            end += 1
        before = keys[index - 1] if index else None
        after = keys[end] if end < len(keys) else None
        if (
            before is not None
            and after is not None
            and _container(before[1]) == _container(after[1])
            and widths[end - 1] <= widths[index - 1]
        ):
            filled[index:end] = [before] * (end - index)
        index = end
    return filled


def _widths(body: Sequence[Op]) -> list[int]:
    """Return for each op the bytes of results that are read after it."""
    last_read = {name: i for i, op in enumerate(body) for name in op.inputs()}
    widths = []
    alive = 0
    ends: dict[int, int] = {}
    for index, op in enumerate(body):
        end = last_read.get(op.name, index)
        if op.meta is not None and end > index:
            alive += op.meta.nbytes
            ends[end] = ends.get(end, 0) + op.meta.nbytes
        alive -= ends.pop(index, 0)
        widths.append(alive)
    return widths


def _container(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _joined(body: Sequence[Op], keys: Sequence[Entry | None]) -> list[Segment]:
    segments: list[Segment] = []
    start = 0
    for index in range(1, len(body) + 1):
        if index == len(body) or keys[index] != keys[start]:
            key = keys[start]
            segments.append(Segment(fqn=key[1] if key else "", ops=tuple(body[start:index])))
            start = index
    return segments


def _pieces(body: Sequence[Op]) -> list[Segment]:
    """Cut a model without modules into pieces of about equal length, where it is narrowest."""
    widths = _widths(body)
    count = min(_MOST_PIECES, len(body) // _LEAST_PIECE_OPS)
    cuts: list[int] = []
    for number in range(1, count):
        low = max(cuts[-1] + 1 if cuts else 1, len(body) * (2 * number - 1) // (2 * count))
        high = len(body) * (2 * number + 1) // (2 * count)
        if low < high:
            cuts.append(min(range(low, high), key=lambda cut: widths[cut - 1]))
    ends = [*cuts, len(body)]
    starts = [0, *cuts]
    return [Segment(fqn="", ops=tuple(body[a:b])) for a, b in zip(starts, ends, strict=True)]
