"""Commands that use the devices of this machine: profile, run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from autoplan import codec
from autoplan.plan import Plan

__all__ = ["profile", "run"]

_console = Console(stderr=True)


def profile(
    gpu: Annotated[str, typer.Option(help="cpu, cuda, or a profile name that must be there.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default NAME.json.")] = None,
    budget: Annotated[float, typer.Option(help="Seconds to spend.")] = 20.0,
    links: Annotated[bool, typer.Option(help="Also measure collectives.")] = True,
) -> None:
    """Measure the device that is here and write its profile."""
    from autoplan.profiles.measure import profile_command

    with Progress(console=_console, transient=True, disable=not _console.is_terminal) as bar:
        task = bar.add_task("measuring", total=1.0)

        def show(message: str, fraction: float) -> None:
            bar.update(task, completed=fraction, description=message)

        path = profile_command(gpu, out, budget_s=budget, with_links=links, progress=show)
    typer.echo(f"written to {path}")


def run(
    plan_file: Annotated[Path, typer.Argument(help="A plan that `autoplan plan --out` wrote.")],
    model: Annotated[str, typer.Option(help="The model that was planned.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 10,
    seq: Annotated[int | None, typer.Option(help="Tokens per row, as planned.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds before everything is ended.")] = 3600.0,
) -> None:
    """Train a plan on processes of this machine, started with torchrun."""
    from autoplan.launcher import launch

    if steps < 1:
        raise ValueError(f"--steps {steps}: must be at least 1")
    loaded = Plan.load(plan_file)
    arguments = ["-m", "autoplan.training", str(plan_file), "--model", model]
    arguments += ["--steps", str(steps)]
    if seq is not None:
        arguments += ["--seq", str(seq)]
    with tempfile.TemporaryDirectory() as folder:
        launch(
            [*arguments, "--results", folder],
            nproc=loaded.mesh.world_size,
            timeout_s=timeout,
        )
        typer.echo(_measured(loaded, Path(folder)))


def _measured(plan: Plan, folder: Path) -> str:
    from autoplan.report import table
    from autoplan.training import RankResult
    from autoplan.units import format_bytes

    rows = [("rank", "stage", "measured peak", "predicted peak")]
    for rank in range(plan.mesh.world_size):
        result = codec.loads(RankResult, (folder / f"rank{rank}.json").read_text())
        predicted = plan.predicted.peak_memory_bytes[result.stage]
        rows.append(
            (
                str(rank),
                str(result.stage),
                format_bytes(result.peak_bytes),
                format_bytes(predicted),
            )
        )
    return table(rows)
