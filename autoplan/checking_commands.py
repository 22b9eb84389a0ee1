"""Commands that write a plan down for torch, or check it: emit, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoplan.plan import Plan

__all__ = ["emit"]


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


def _script(plan: Plan, model: str | None, seq: int | None) -> str:
    import torch

    from autoplan.models import load_model
    from autoplan.script_writer import write_script

    if model is None:
        raise ValueError("a script needs the model: pass --model, as to autoplan plan")
    loaded = load_model(model, seq=seq, dtype=torch.float32)
    return write_script(plan, loaded, model)
