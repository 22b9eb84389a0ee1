"""The state of a parallel module and its optimizer under the names that a checkpoint has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan import checkpoints
from autoplan.checkpoints import State
from autoplan.errors import EmitError
from autoplan.plan import Mesh
from autoplan.random_state import random_keys, restore_random_state, saved_random_state

__all__ = ["load_checkpoint", "save_checkpoint"]

_STATE = "optimizer.state."
_GROUPS = "optimizer.groups"


def save_checkpoint(
    root: nn.Module,
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
        names = _names(root, aliases)
        state[_GROUPS] = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        for parameter, values in optimizer.state.items():
            name = _name_of(parameter, names)
            state |= {f"{_STATE}{name}.{key}": value for key, value in values.items()}
    state["extra"] = extra
    state |= saved_random_state(mesh, device)
    checkpoints.save(state, path)


def load_checkpoint(
    root: nn.Module,
    aliases: Mapping[str, str],
    path: str | Path,
    optimizer: torch.optim.Optimizer | None,
    *,
    mesh: Mesh,
    device: torch.device,
) -> Any:
    """Read what `ParallelModule.load_checkpoint` says."""
    model = _model(root, aliases)
    made: dict[str, tuple[torch.Tensor, str]] = {}
    names = _names(root, aliases)

    def make(known: Mapping[str, Any]) -> State:
        state: State = dict(model) | dict.fromkeys(random_keys(known))
        if "extra" in known:
            state["extra"] = None
        if optimizer is None:
            return state
        state[_GROUPS] = None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            prefix = f"{_STATE}{_name_of(parameter, names)}."
            for key, meta in known.items():
                if not key.startswith(prefix):
                    continue
                state[key] = None if meta is None else _empty(parameter, meta)
                made[key] = (parameter, key.removeprefix(prefix))
        return state

    state = checkpoints.load(make, path)
    if optimizer is not None:
        _set_groups(optimizer, state[_GROUPS], path)
        optimizer.state.clear()
        for key, (parameter, name) in made.items():
            optimizer.state[parameter][name] = state[key]
    restore_random_state(state, mesh, device)
    return state.get("extra")


def _model(root: nn.Module, aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by key, each shared one once."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in root.state_dict().items():
        found.setdefault(f"model.{aliases.get(name, name)}", tensor)
    return found


def _names(root: nn.Module, aliases: Mapping[str, str]) -> dict[int, str]:
    named = root.named_parameters(remove_duplicate=False)
    return {id(parameter): aliases.get(name, name) for name, parameter in named}


def _name_of(parameter: torch.Tensor, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise EmitError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of this "
            "module's: make the optimizer over module.parameters() after parallelize"
        )
    return names[id(parameter)]


def _empty(parameter: torch.Tensor, meta: Any) -> torch.Tensor:
    """Return memory for a state: placed as its parameter if it has its shape, else whole."""
    dtype = meta.properties.dtype
    if meta.size == parameter.shape and parameter.dim() > 0:
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
