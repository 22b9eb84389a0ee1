"""Whether autograd has threads of its own, without which no fork of this process can run it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

__all__ = ["has_autograd_threads"]

_AUTOGRAD_THREAD = "pt_autograd_"  # torch/csrc/autograd/engine.cpp, Engine::thread_init


def has_autograd_threads(tasks: Path = Path("/proc/self/task")) -> bool:
    """Return whether autograd has started threads, without which no fork of this process runs it.

    It starts one for each accelerator in the first backward, also one on the CPU, and names them.
    Where a system does not tell the names, any accelerator counts.
    """
    if not tasks.is_dir():
        return bool(torch.accelerator.is_available())
    names = []
    for task in tasks.iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            names.append((task / "comm").read_text())
    return any(name.startswith(_AUTOGRAD_THREAD) for name in names)
