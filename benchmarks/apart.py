"""Run one case of a benchmark in a process of its own, so that its memory and start are its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_apart"]

_ROOT = Path(__file__).resolve().parent.parent


def run_apart(
    script: str, *arguments: str, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Return how a script ended and what it printed.

    Args:
        script: a file; it can import what stands beside this folder.
        arguments: of the script.
        timeout_s: after which it is ended.

    Raises:
        subprocess.TimeoutExpired: it was.
    """
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, str(Path(script).resolve()), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=_ROOT,
        check=False,
    )
