"""The state of a parallel module and its optimizer under the names that a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoplan import checkpoints
from autoplan.checkpoints import State
from autoplan.chunks import Chunked, chunked
from autoplan.errors import EmitError
from autoplan.plan import Mesh
from autoplan.random_state import random_keys, restore_random_state, saved_random_state
from autoplan.stage_parts import JoinedRoots
from autoplan.stages import StageRoot

__all__ = ["load_checkpoint", "save_checkpoint"]

_STATE = "optimizer.state."
_GROUPS = "optimizer.groups"
_COUNTER = "step"  # the key under which torch's optimizers count their steps


Root = StageRoot | JoinedRoots


def save_checkpoint(
    root: Root,
    aliases: Mapping[str, str],
    path: str | Path,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    *,
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Write what `ParallelModule.save_checkpoint` says."""
    state: State = dict(_model(root, aliases))
    if optimizer is not None:
        names, scalars = _names(root, aliases), _scalars(root, aliases)
        state[_GROUPS] = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        for parameter, values in optimizer.state.items():
            name = _name_of(parameter, names)
            state |= {
                f"{_STATE}{name}.{key}": _as_saved(value, parameter, name in scalars)
                for key, value in values.items()
            }
    state["extra"] = extra
    state |= saved_random_state(mesh, device)
    checkpoints.save(state, path)


def load_checkpoint(
    root: Root,
    aliases: Mapping[str, str],
    path: str | Path,
    optimizer: torch.optim.Optimizer | None,
    *,
    mesh: Mesh,
    device: torch.device,
) -> Any:
    """Read what `ParallelModule.load_checkpoint` says."""
    model = _model(root, aliases)
    made: dict[str, tuple[torch.Tensor, str, Any]] = {}
    names, scalars = _names(root, aliases), _scalars(root, aliases)

    def make(known: Mapping[str, Any]) -> State:
        state: State = dict(model) | dict.fromkeys(random_keys(known))
        if "extra" in known:
            state["extra"] = None
        if optimizer is None:
            return state
        state[_GROUPS] = None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            name = _name_of(parameter, names)
            prefix = f"{_STATE}{name}."
            for key, meta in known.items():
                if not key.startswith(prefix):
                    continue
                own = key.removeprefix(prefix)
                value = None if meta is None else _empty(parameter, meta, own)
                state[key] = _as_saved(value, parameter, name in scalars)
                made[key] = (parameter, own, value)
        return state

    state = checkpoints.load(make, path)
    if optimizer is not None:
        _set_groups(optimizer, state[_GROUPS], path)
        optimizer.state.clear()
        for key, (parameter, own, value) in made.items():
            optimizer.state[parameter][own] = state[key] if value is None else value
    restore_random_state(state, mesh, device)
    return state.get("extra")


def _model(root: Root, aliases: Mapping[str, str]) -> dict[str, torch.Tensor | Chunked]:
    """Return parameters and persistent buffers by key, each shared one once."""
    found: dict[str, torch.Tensor | Chunked] = {}
    scalars = root.scalars
    for name, tensor in root.state_dict().items():
        own = chunked(tensor).without_dimension() if name in scalars else tensor
        found.setdefault(f"model.{aliases.get(name, name)}", own)
    return found


def _as_saved(value: Any, parameter: torch.Tensor, is_scalar: bool) -> Any:
    """Return a state of a parameter in the shape that the user's parameter has."""
    if not is_scalar or getattr(value, "shape", None) != parameter.shape:
        return value
    return chunked(value).without_dimension()


def _names(root: Root, aliases: Mapping[str, str]) -> dict[int, str]:
    named = root.named_parameters(remove_duplicate=False)
    return {id(parameter): aliases.get(name, name) for name, parameter in named}


def _scalars(root: Root, aliases: Mapping[str, str]) -> set[str]:
    """Return the first names of the scalars that are stored with a dimension."""
    return {aliases.get(name, name) for name in root.scalars}


def _name_of(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise EmitError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of this "
            "module's: make the optimizer over module.parameters() after parallelize"
        )
    return names[id(parameter)]


def _empty(parameter: torch.Tensor, meta: Any, key: str) -> torch.Tensor:
    """Return memory for a state: placed as its parameter if it has its elements, else whole.

    A counter of steps has one element, as a scalar parameter has.
    """
    dtype = meta.properties.dtype
    is_scalar = meta.size.numel() == parameter.numel() == 1 and key != _COUNTER
    if (meta.size == parameter.shape and parameter.dim() > 0) or is_scalar:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # Counters of steps stay on the CPU, where optimizers keep them.
    device = torch.device("cpu") if meta.size.numel() == 1 else _device(parameter)
    return torch.empty(meta.size, dtype=dtype, device=device)


def _device(parameter: torch.Tensor) -> torch.device:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.device


def _set_groups(optimizer: torch.optim.Optimizer, saved: Any, path: str | Path) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise EmitError(
            f"{path} was saved with {len(saved)} groups of parameters, the optimizer has "
            f"{len(optimizer.param_groups)}: make it with the same groups"
        )
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update(values)
