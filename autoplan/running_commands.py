"""Commands that use the devices of this machine: profile, run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from autoplan import codec
from autoplan.plan import Plan
from autoplan.units import parse_seconds

__all__ = ["profile", "run"]

_console = Console(stderr=True)


def profile(
    gpu: Annotated[str, typer.Option(help="cpu, cuda, or a profile name that must be there.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default NAME.json.")] = None,
    budget: Annotated[str, typer.Option(help="Wall time to spend, such as 120s or 2min.")] = "60s",
    links: Annotated[bool, typer.Option(help="Also measure collectives.")] = True,
    model: Annotated[
        str | None,
        typer.Option(help="Measure the ops of this model instead; later searches use them."),
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per row of presets and configs.")] = None,
    global_batch: Annotated[
        int, typer.Option(help="Rows of a step: gives the micro-batches of --model.")
    ] = 8,
    cluster: Annotated[
        str | None, typer.Option(help="Gives the shardings of --model; default: this machine.")
    ] = None,
    autocast: Annotated[str, typer.Option(help="Of --model: none or bfloat16.")] = "none",
) -> None:
    """Measure the device that is here and write its profile, or the ops of a model.

    Ctrl-C keeps what was measured, and the same command goes on from there. Under torchrun every
    rank runs it: groups inside and over nodes are measured then.
    """
    budget_s = parse_seconds(budget)
    with Progress(console=_console, transient=True, disable=not _console.is_terminal) as bar:
        task = bar.add_task("measuring", total=1.0)

        def show(message: str, fraction: float) -> None:
            bar.update(task, completed=fraction, description=message[:60])

        if model is not None:
            text, is_stopped = _profile_model(
                gpu, model, cluster, seq, global_batch, autocast, budget_s, progress=show
            )
        else:
            path, is_stopped = _profile_device(gpu, out, budget_s, links, show)
            text = "" if path is None else f"written to {path}{_left_to_measure(path)}"
    if text:
        typer.echo(text)
    if is_stopped:
        typer.echo("stopped early: run it again to go on", err=True)
        raise typer.Exit(130)


def _profile_device(
    gpu: str,
    out: Path | None,
    budget_s: float,
    links: bool,
    progress: Callable[[str, float], None],
) -> tuple[Path | None, bool]:
    """Write the profile of this device, under torchrun with the links between all ranks.

    Returns the path of the file, None on ranks that write none, and whether somebody stopped it.
    """
    from autoplan.profiles.measure import profile_command
    from autoplan.profiles.measure_cluster import is_under_torchrun, profile_as_rank
    from autoplan.profiles.stopping import stoppable

    if links and is_under_torchrun():
        return profile_as_rank(gpu, out, budget_s=budget_s, progress=progress), False
    with stoppable() as stop:
        path = profile_command(gpu, out, budget_s=budget_s, with_links=links, progress=progress)
    return path, stop.is_asked


def _left_to_measure(path: Path) -> str:
    """Return in words what a profile that was written here lacks; empty where it lacks nothing."""
    from autoplan.profiles.catalog import load_profile
    from autoplan.profiles.grids import measured_points

    profile = load_profile(path)
    kind = "cpu" if profile.name == "cpu" else "cuda"
    there, wanted = measured_points(profile, kind)
    if there == wanted:
        return ""
    return (
        f"; {there} of {wanted} points of its tables are measured, the others are interpolated: "
        "the same command goes on, a larger --budget measures more at once"
    )


def _profile_model(
    gpu: str,
    model: str,
    cluster: str | None,
    seq: int | None,
    global_batch: int,
    autocast: str,
    budget_s: float,
    progress: Callable[[str, float], None],
) -> tuple[str, bool]:
    """Measure the ops of a model; return what was done, as text, and whether it was stopped."""
    import torch

    from autoplan.cluster import Cluster
    from autoplan.models import load_model
    from autoplan.op_profiler import candidates_of, measure_candidates
    from autoplan.profiles.here import describe, driver_of, find_device, profile_name
    from autoplan.profiles.op_times import CACHE_VARIABLE, OpTimesFile, cache_file
    from autoplan.profiles.stopping import stoppable

    if autocast not in ("none", "bfloat16"):
        raise ValueError(f"--autocast {autocast!r}; allowed are none, bfloat16")
    path = cache_file()
    if path is None:
        raise ValueError(f"{CACHE_VARIABLE} is off: set it to a folder to keep measurements in")
    device = find_device(gpu)
    name = profile_name(device, gpu)
    number = torch.cuda.device_count() if device.type == "cuda" else 4
    target = Cluster.parse(cluster or f"{number}:{name}")
    if target.device.name != name:
        raise ValueError(f"--cluster {cluster} is of {target.device.name}, --gpu is {name}")
    is_wide = device.type == "cpu" or autocast != "none"
    loaded = load_model(model, seq=seq, dtype=torch.float32 if is_wide else torch.bfloat16)
    progress("the ops of the model", 0.0)
    candidates = candidates_of(
        loaded.model, loaded.batch, loaded.loss_fn, target,
        global_batch_size=global_batch, autocast=autocast,
    )  # fmt: skip
    file = OpTimesFile(
        path=path,
        profile=name,
        device=describe(device),
        driver=driver_of(device),
        torch=str(torch.__version__),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as every process of a plan has
    try:
        with stoppable() as stop:
            outcome = measure_candidates(
                candidates, device, file, budget_s=budget_s,
                progress=lambda text, done, total: progress(text, done / max(1, total)),
            )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    lines = [
        f"{len(candidates)} ops: {outcome.measured} measured now, {outcome.known} before, "
        f"{outcome.left} left, {len(outcome.failed)} cannot run alone; kept in {path}"
    ]
    if outcome.left:
        lines.append("run it again to measure them")
    lines += [f"  {text}: {reason}" for text, reason in outcome.failed.items()]
    return "\n".join(lines), stop.is_asked


def run(
    plan_file: Annotated[Path, typer.Argument(help="A plan that `autoplan plan --out` wrote.")],
    model: Annotated[str, typer.Option(help="The model that was planned.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 10,
    seq: Annotated[int | None, typer.Option(help="Tokens per row, as planned.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds before everything is ended.")] = 3600.0,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder to resume from, if it is there, and to save to.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between saves; default: only after the last.")
    ] = None,
    compile: Annotated[
        str | None, typer.Option(help="Compile blocks: inductor or aot_eager; needs tp=1.")
    ] = None,
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
    if save_every is not None and (checkpoint is None or save_every < 1):
        raise ValueError(f"--save-every {save_every}: at least 1, and with --checkpoint")
    if checkpoint is not None:
        arguments += ["--checkpoint", str(checkpoint)]
    if save_every is not None:
        arguments += ["--save-every", str(save_every)]
    if compile is not None:
        arguments += ["--compile", compile]
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

    rows = [("rank", "stage", "measured peak", "predicted peak", "error")]
    reserves = set()
    for rank in range(plan.mesh.world_size):
        result = codec.loads(RankResult, (folder / f"rank{rank}.json").read_text())
        predicted = plan.predicted.tensor_peak_bytes(result.stage)
        reserves.add(plan.predicted.memory_by_category[result.stage].get("reserve", 0))
        sizes = (format_bytes(result.peak_bytes), format_bytes(predicted))
        error = predicted / result.peak_bytes - 1
        rows.append((str(rank), str(result.stage), *sizes, f"{error:+.1%}"))
    return f"{table(rows)}\n{_reserve_line(reserves)}"


def _reserve_line(reserves: set[int]) -> str:
    from autoplan.units import format_bytes

    return (
        f"both are of tensors; the plan keeps {format_bytes(max(reserves))} more for the context, "
        "the allocator and the communicators"
    )
