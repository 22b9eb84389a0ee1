"""The devices of this machine: which one a name means, and what it says that it is."""

from __future__ import annotations

import os
import platform
import re
from typing import Any

from autoplan.errors import ProfileError
from autoplan.profiles.catalog import ALIASES, list_profiles

__all__ = ["describe", "driver_of", "find_device", "profile_name"]

_ANY_GPU = ("cuda", "gpu")


def find_device(name: str) -> Any:
    """Return the `torch.device` that a name means.

    Raises:
        ProfileError: it is not on this machine; says what is.
    """
    import torch

    key = name.lower().replace("-", "_")
    if key == "cpu":
        return torch.device("cpu")
    if key not in (*_ANY_GPU, *ALIASES, *list_profiles()):
        raise ProfileError(
            f"{name!r} is no device: write cpu, cuda (the GPU that is here), or the name of a "
            f"profile that must be here: {', '.join(list_profiles())}"
        )
    there = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if not there:
        raise ProfileError(
            f"cannot measure {name!r}, no CUDA device: this machine has cpu ({cores} cores); "
            "measure with cpu, or use a shipped profile without measuring"
        )
    if key in _ANY_GPU:
        return torch.device("cuda", 0)
    known = ALIASES.get(key, key)
    family = re.sub(r"^rtx_", "", known).split("_")[0]
    if known not in list_profiles() or family not in there[0].lower():
        raise ProfileError(
            f"cannot measure {name!r}: this machine has {', '.join(there)} and cpu "
            f"({cores} cores); measure with cuda or cpu"
        )
    return torch.device("cuda", 0)


def profile_name(device: Any, name: str) -> str:
    """Return the name of the profile of a device that was asked for by `name`."""
    if device.type == "cpu":
        return "cpu"
    key = name.lower().replace("-", "_")
    if key not in _ANY_GPU:
        return ALIASES.get(key, key)
    import torch

    return re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name(device).lower()).strip("_")


def describe(device: Any, num_threads: int = 1) -> str:
    """Return what a device says that it is; of a CPU also how many threads are measured."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"cpu: {cores} {platform.machine().replace('_', '-')} cores"
    return f"{text}, {num_threads} thread per process"


def driver_of(device: Any) -> str:
    """Return the driver of a device as text; empty for a CPU."""
    if device.type != "cuda":
        return ""
    import torch

    return f"CUDA {torch.version.cuda}"
