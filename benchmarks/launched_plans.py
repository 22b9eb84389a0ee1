"""Run many plans on processes of this machine, one launch per number of processes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from autoplan import codec
from autoplan.launcher import launch
from autoplan.plan import Plan

__all__ = ["launch_plans", "work_through", "work_through_all"]

Result = TypeVar("Result")


def launch_plans(
    script: str,
    plans: Mapping[str, Plan],
    kind: type[Result],
    *,
    timeout_s: float,
    at_once: int | None = None,
) -> dict[str, list[Result]]:
    """Return per name what each rank measured.

    Args:
        script: is started as `script --worker FOLDER` on every rank, and calls `work_through`.
        plans: by name.
        kind: of what a rank measures of a plan.
        timeout_s: of each launch.
        at_once: most plans of a launch; None: all of a number of processes.
    """
    found: dict[str, list[Result]] = {}
    for world in sorted({plan.mesh.world_size for plan in plans.values()}):
        mine = [name for name, plan in plans.items() if plan.mesh.world_size == world]
        most = at_once or len(mine)
        for first in range(0, len(mine), most):
            own = {name: plans[name] for name in mine[first : first + most]}
            found |= _launched(script, own, world, kind, timeout_s)
    return found


def _launched(
    script: str, plans: Mapping[str, Plan], world: int, kind: type[Result], timeout_s: float
) -> dict[str, list[Result]]:
    """Return what each rank of one launch measured, by name."""
    found: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for number, plan in enumerate(plans.values()):
            plan.save(folder / f"{number:03d}.plan")
        launch([script, "--worker", text], world, timeout_s=timeout_s, echo=False)
        for number, name in enumerate(plans):
            files = [folder / f"{number:03d}.{rank}" for rank in range(world)]
            found[name] = [codec.loads(kind, file.read_text()) for file in files]
    return found


def work_through(folder: Path, execute: Callable[[Plan], object]) -> None:
    """Execute every plan in a folder on this rank and write what was measured beside it."""
    work_through_all(folder, lambda plans: [execute(plan) for plan in plans])


def work_through_all(folder: Path, execute: Callable[[Sequence[Plan]], Sequence[object]]) -> None:
    """Execute all plans in a folder together on this rank, likewise."""
    rank = int(os.environ["RANK"])
    paths = sorted(folder.glob("*.plan"))
    found = execute([Plan.load(path) for path in paths])
    for path, measured in zip(paths, found, strict=True):
        path.with_suffix(f".{rank}").write_text(codec.dumps(measured))
