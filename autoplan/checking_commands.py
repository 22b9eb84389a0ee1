"""Commands that write a plan down for torch, or check it: emit, verify."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoplan import codec
from autoplan.cluster import Cluster
from autoplan.dry_run_result import DryRun, LayoutNumerics, TwinRun
from autoplan.plan import Plan
from autoplan.planning_commands import torch_dtype

if TYPE_CHECKING:
    from autoplan.models import LoadedModel

__all__ = ["VerifyResult", "emit", "verify"]

_TOLERANCE = 0.1


def emit(
    plan_file: Annotated[Path, typer.Argument(help="A plan that `autoplan plan --out` wrote.")],
    out: Annotated[Path | None, typer.Option(help="File to write; default: print.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model that was planned; a script needs it.")
    ] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per row, as planned.")] = None,
    format: Annotated[
        str,
        typer.Option(
            help="script (stand-alone, for torchrun), torchtitan, megatron, deepspeed, accelerate."
        ),
    ] = "script",
) -> None:
    """Write a plan as a training script without autoplan, or as another framework's config."""
    from autoplan.framework_configs import FORMATS, framework_config

    plan = Plan.load(plan_file)
    if format == "script":
        text = _script(plan, model, seq)
    elif format in FORMATS:
        text = str(framework_config(plan, format))
    else:
        raise ValueError(f"--format {format!r}: allowed are script, {', '.join(FORMATS)}")
    if out is None:
        typer.echo(text, nl=False)
        return
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(text)
    partial.replace(out)
    typer.echo(f"written to {out}")


def verify(
    plan_file: Annotated[Path, typer.Argument(help="A plan that `autoplan plan --out` wrote.")],
    model: Annotated[str, typer.Option(help="The model that was planned.")],
    cluster: Annotated[str | None, typer.Option(help="Default: the plan's own.")] = None,
    seq: Annotated[int | None, typer.Option(help="Tokens per row, as planned.")] = None,
    rank: Annotated[
        list[int] | None,
        typer.Option(help="Rank of the dry run; repeatable. Default: the first of each stage."),
    ] = None,
    dry: Annotated[bool, typer.Option(help="Run ranks on fake tensors, measuring bytes.")] = True,
    numerics: Annotated[
        bool, typer.Option(help="Train a small twin on processes of this machine.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the result as JSON.")
    ] = None,
) -> None:
    """Check a saved plan: rules, layouts, a dry run of its ranks, and a small twin of its model.

    Exit code 1 when a rule is broken, a layout or the twin computes something else, or a dry run
    holds over a tenth more than was predicted.
    """
    from autoplan.dry_runner import dry_run, representative_ranks
    from autoplan.models import load_model

    plan = Plan.load(plan_file)
    target = Cluster.parse(cluster or plan.provenance["cluster"])
    loaded = load_model(model, seq=seq, dtype=torch_dtype("auto", target, plan.autocast))
    broken = _broken_rules(plan, target, loaded)
    for violation in broken:
        typer.echo(violation)
    if not broken:
        typer.echo("every rule holds")
    for note in plan.notes:
        typer.echo(f"note: {note}")
    layouts = _checked_layouts(plan, loaded) if not broken and plan.mesh.tp > 1 else ()
    for one in layouts:
        typer.echo(f"layout {one.layout} of {one.block}: {_verdict(one)}")
    runs: tuple[DryRun, ...] = ()
    if dry and not broken:
        runs = dry_run(plan, loaded, rank or representative_ranks(plan))
        typer.echo(_dry_table(runs))
        if not target.is_cpu:
            typer.echo("measured on the CPU's operators; attention on a GPU may keep other tensors")
    twins: tuple[TwinRun, ...] = ()
    reason = failure = ""
    if numerics and not broken:
        twins, reason, failure = _twins(plan, loaded, model, seq)
        typer.echo(_twin_text(twins, reason, failure))
    over = [run for run in runs if target.is_cpu and run.error < -_TOLERANCE]
    for run in over:
        typer.echo(f"rank {run.rank} holds {-run.error:.0%} more than predicted")
    is_wrong = any(one.is_wrong for one in layouts) or not all(one.is_equal for one in twins)
    is_wrong |= bool(failure)
    result = VerifyResult(
        broken=broken,
        notes=plan.notes,
        layouts=layouts,
        dry_runs=runs,
        twins=twins,
        twins_left_out=reason,
        twins_failed=failure,
        is_sound=not broken and not over and not is_wrong,
    )
    if json_file is not None:
        json_file.write_text(codec.dumps(result) + "\n")
    if not result.is_sound:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What `autoplan verify` found.

    Attributes:
        broken: rules that the plan breaks.
        notes: of the plan, what a reader must know.
        layouts: tensor-parallel layouts, each run in this process beside its whole block.
        dry_runs: what ranks would hold; empty where rules are broken or it was left out.
        twins: steps of a small twin beside the single device.
        twins_left_out: why there is none; empty where there is, or was not asked for.
        twins_failed: what a process of a twin raised; empty if none did.
        is_sound: whether nothing speaks against the plan.
    """

    broken: tuple[str, ...]
    notes: tuple[str, ...]
    layouts: tuple[LayoutNumerics, ...]
    dry_runs: tuple[DryRun, ...]
    twins: tuple[TwinRun, ...]
    twins_left_out: str
    twins_failed: str
    is_sound: bool


def _checked_layouts(plan: Plan, loaded: LoadedModel) -> tuple[LayoutNumerics, ...]:
    from autoplan.layout_numerics import check_plan_layouts
    from autoplan.recapture import captured_for

    program = captured_for(plan, loaded.model, loaded.batch, loaded.loss_fn)
    return check_plan_layouts(plan, program)


def _twins(
    plan: Plan, loaded: LoadedModel, model: str, seq: int | None
) -> tuple[tuple[TwinRun, ...], str, str]:
    """Return the runs of twins, or why there are none, or how they failed."""
    from autoplan.errors import EmitError
    from autoplan.twins import run_twins, shrink

    try:
        shrink(loaded)
    except Exception as error:  # a model that cannot be made small is no fault of the plan
        return (), f"{type(error).__name__}: {error}", ""
    try:
        return run_twins(plan, loaded, model, seq), "", ""
    except EmitError as error:
        return (), "", str(error)


def _twin_text(twins: tuple[TwinRun, ...], reason: str, failure: str) -> str:
    from autoplan.report import table

    if reason:
        return f"no twin was trained: {reason}"
    if failure:
        return f"the twin failed: {failure}"
    rows = [("small twin", "loss error", "gradient error", "of", "allowed")]
    for run in twins:
        errors = (f"{run.loss_error:.0e}", f"{run.gradient_error:.0e}")
        rows.append((run.mesh, *errors, run.worst, f"{run.tolerance:.0e}"))
    return table(rows)


def _verdict(one: LayoutNumerics) -> str:
    if one.error is None:
        return one.reason
    where = f", {one.reason}" if one.reason else ""
    return f"tp={one.degree}, run {one.form}, differs from the whole by {one.error:.0e}{where}"


def _broken_rules(plan: Plan, target: Cluster, loaded: LoadedModel) -> tuple[str, ...]:
    from autoplan.autocast import dtype_of
    from autoplan.batches import BatchDims
    from autoplan.tracer import trace
    from autoplan.verifier import verify_plan

    traced = trace(
        loaded.model,
        loaded.batch,
        loaded.loss_fn,
        microbatch_size=plan.microbatch_size,
        batch_dim=BatchDims(plan.batch_dims) if plan.batch_dims else 0,
        autocast=dtype_of(plan.autocast),
        backend="cpu" if target.is_cpu else "cuda",
    )
    return tuple(str(violation) for violation in verify_plan(plan, traced, target))


def _dry_table(runs: Sequence[DryRun]) -> str:
    from autoplan.report import table
    from autoplan.units import format_bytes

    rows = [("rank", "stage", "dry run", "predicted", "error")]
    for run in runs:
        sizes = (format_bytes(run.measured_bytes), format_bytes(run.predicted_bytes))
        rows.append((str(run.rank), str(run.stage), *sizes, f"{run.error:+.1%}"))
    return table(rows)


def _script(plan: Plan, model: str | None, seq: int | None) -> str:
    import torch

    from autoplan.models import load_model
    from autoplan.script_writer import write_script

    if model is None:
        raise ValueError("a script needs the model: pass --model, as to autoplan plan")
    loaded = load_model(model, seq=seq, dtype=torch.float32)
    return write_script(plan, loaded, model)
