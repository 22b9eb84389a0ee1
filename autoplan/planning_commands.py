"""Commands that need no device: plan, explain, compare, dimensions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from autoplan.cluster import Cluster
from autoplan.collecting import without_collections
from autoplan.limits import LIMITED_KEYS
from autoplan.plan import Plan
from autoplan.units import format_seconds

if TYPE_CHECKING:
    from autoplan.search.mesh import Progress as SearchProgress

__all__ = [
    "compare",
    "dimensions",
    "explain",
    "parse_batch_dim",
    "parse_limits",
    "parse_pins",
    "plan",
    "torch_dtype",
]

_console = Console(stderr=True)
ModelArgument = Annotated[
    str, typer.Argument(help="Preset, transformers config.json, or file.py:function.")
]


def parse_pins(texts: Sequence[str]) -> dict[str, Any]:
    """Return pins from texts such as `tp=4` or `tp=4,pp=2`.

    Raises:
        ValueError: a text is no `name=value`, or the value no number where one is needed.
    """
    pins: dict[str, Any] = {}
    for text in (part for item in texts for part in item.split(",") if part):
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--pin {text!r}: write name=value, for example --pin tp=4")
        if name in LIMITED_KEYS:
            if not value.isdigit():
                raise ValueError(f"--pin {text!r}: {name} needs a whole number")
            pins[name] = int(value)
        else:
            pins[name] = value
    return pins


def parse_limits(
    within: Sequence[str], forbid: Sequence[str]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int | str, ...]]]:
    """Return bounds from texts such as `tp=1..4` and forbidden values from ones such as `tp=8`.

    A forbidden schedule is a word, as in `schedule=zero_bubble`.

    Raises:
        ValueError: a text has another form; says which it should have.
    """
    bounds: dict[str, tuple[int, ...]] = {}
    for text in within:
        found = re.fullmatch(r"(\w+)=(\d+)\.\.(\d+)", text)
        if found is None:
            raise ValueError(f"--within {text!r}: write name=least..largest, as in tp=1..4")
        bounds[found[1]] = (int(found[2]), int(found[3]))
    forbidden: dict[str, tuple[int | str, ...]] = {}
    for text in forbid:
        found = re.fullmatch(r"(\w+)=(\d+(?:,\d+)*)|(schedule)=(\w+(?:,\w+)*)", text)
        if found is None:
            raise ValueError(f"--forbid {text!r}: write name=value or name=value,value as in tp=8")
        name, values = found[1] or found[3], (found[2] or found[4]).split(",")
        several = tuple(int(value) if found[1] else value for value in values)
        forbidden[name] = (*forbidden.get(name, ()), *several)
    return bounds, forbidden


def parse_batch_dim(text: str) -> Any:
    """Return what `1`, `1,0` or `ids=0,position_ids=1,mask=none` tells of a batch.

    Raises:
        ValueError: a part is no number and not `none`, or only some parts have names.
    """
    parts = [part.strip() for part in text.split(",")]
    named = {name: value for name, equals, value in (p.partition("=") for p in parts) if equals}
    if named and len(named) != len(parts):
        raise ValueError(f"--batch-dim {text!r}: name every part, as in ids=0,mask=none, or none")

    def one(value: str) -> int | None:
        if value.lower() == "none":
            return None
        if not value.removeprefix("-").isdigit():
            raise ValueError(
                f"--batch-dim {text!r}: {value!r} is no dimension; write 1 for all inputs, 1,0 for "
                "the parts of a tuple, or ids=0,mask=none for the keys of a mapping"
            )
        return int(value)

    if named:
        return {name: one(value) for name, value in named.items()}
    return one(parts[0]) if len(parts) == 1 else tuple(map(one, parts))


def plan(
    model: ModelArgument,
    cluster: Annotated[
        str, typer.Option(help="nodes x GPUs : profile, such as 2x8:a100_sxm_80gb; or a YAML file.")
    ],
    global_batch: Annotated[int, typer.Option(help="Rows of one step over all devices.")],
    seq: Annotated[int | None, typer.Option(help="Tokens per row of presets and configs.")] = None,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory per device instead of the profile's: 40GiB.")
    ] = None,
    pin: Annotated[list[str] | None, typer.Option(help="Fix a setting: tp=4. Repeatable.")] = None,
    within: Annotated[
        list[str] | None, typer.Option(help="Bound a setting: tp=1..4. Repeatable.")
    ] = None,
    forbid: Annotated[
        list[str] | None, typer.Option(help="Rule out values: tp=8 or pp=2,4. Repeatable.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="AdamW, Adam, SGD.")] = "AdamW",
    dtype: Annotated[
        str, typer.Option(help="Of presets and configs; auto: bfloat16 on GPUs without autocast.")
    ] = "auto",
    autocast: Annotated[
        str, typer.Option(help="Run the forward under torch.autocast: none or bfloat16.")
    ] = "none",
    offload: Annotated[
        list[str] | None,
        typer.Option(help="What may lie in host memory: optimizer, activations. Repeatable."),
    ] = None,
    batch_dim: Annotated[
        str, typer.Option(help="Where the batch lies in the inputs: 1, or 1,0, or x=1,mask=none.")
    ] = "0",
    time_limit: Annotated[float, typer.Option(help="Seconds; then the best so far.")] = 300.0,
    workers: Annotated[
        int | None, typer.Option(help="Processes that search at once; default: one per core.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the plan as JSON.")] = None,
) -> None:
    """Find the fastest plan that fits, and prove how far from optimal it can be."""
    with without_collections():
        from autoplan.models import load_model
        from autoplan.optimizing import optimize

    pins = parse_pins(pin or ())
    bounds, forbidden = parse_limits(within or (), forbid or ())
    target = Cluster.parse(cluster)
    if device_memory is not None:
        target = target.with_memory(device_memory)
    loaded = load_model(model, seq=seq, dtype=torch_dtype(dtype, target, autocast))
    try:
        with _search_bar() as (bar, task):

            def show(state: SearchProgress) -> None:
                best = (
                    "none yet"
                    if state.objective is None
                    else format_seconds(state.objective * 1e-9)
                )
                total = state.num_settled + state.num_open
                bar.update(task, completed=state.num_settled, total=total, best=best)

            found = optimize(
                loaded.model,
                target,
                loaded.batch,
                batch_dim=parse_batch_dim(batch_dim),
                global_batch_size=global_batch,
                optimizer=optimizer,
                loss_fn=loaded.loss_fn,
                autocast=_autocast(autocast),
                name=loaded.name,
                time_limit_s=time_limit,
                progress=show,
                offload=offload or (),
                within=bounds,
                forbid=forbidden,
                workers=workers,
                **pins,
            )
    except KeyboardInterrupt:
        typer.echo("autoplan: stopped before any plan that fits was found", err=True)
        raise typer.Exit(130) from None
    typer.echo(found.report())
    if out is not None:
        found.save(out)
        typer.echo(f"\nwritten to {out}")


class _search_bar:
    """A progress bar on stderr, shown as a bar on a terminal and not at all elsewhere."""

    def __enter__(self) -> tuple[Progress, Any]:
        self._bar = Progress(
            TextColumn("search"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} settings, best {task.fields[best]}"),
            TimeElapsedColumn(),
            console=_console,
            transient=True,
            disable=not _console.is_terminal,
        )
        self._bar.start()
        return self._bar, self._bar.add_task("search", total=None, best="none yet")

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def torch_dtype(name: str, cluster: Cluster, autocast: str) -> Any:
    """Return the dtype of presets and configs that a command line means."""
    import torch

    if name == "auto":
        is_wide = cluster.is_cpu or autocast != "none"
        name = "float32" if is_wide else "bfloat16"
    allowed = ("float32", "bfloat16", "float16", "float64")
    if name not in allowed:
        raise ValueError(f"--dtype {name!r}; allowed are auto, {', '.join(allowed)}")
    return getattr(torch, name)


def _autocast(name: str) -> Any:
    from autoplan.autocast import dtype_of

    if name not in ("none", "bfloat16"):
        raise ValueError(f"--autocast {name!r}; allowed are none, bfloat16")
    return dtype_of(name)


def explain(
    plan_file: Annotated[Path, typer.Argument(help="A plan that `autoplan plan --out` wrote.")],
    settings: Annotated[bool, typer.Option(help="Also say why each setting lost.")] = False,
    why_not: Annotated[
        list[str] | None, typer.Option(help="Also say why not these settings: tp=8,pp=1.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Write the predicted step as a Chrome trace (chrome://tracing, Perfetto)."
        ),
    ] = None,
) -> None:
    """Print the report of a saved plan."""
    loaded = Plan.load(plan_file)
    typer.echo(loaded.report())
    if timeline is not None:
        loaded.timeline().save(timeline)
        typer.echo(f"\npredicted timeline written to {timeline}")
    for text in why_not or ():
        typer.echo(f"\nwhy not {text}? {loaded.why_not(**parse_pins([text]))}")
    if settings:
        for name, reason in loaded.search.outcomes.items():
            typer.echo(f"  {name}: {reason}")


def compare(
    plan_files: Annotated[list[Path], typer.Argument(help="Plans that were saved.")],
) -> None:
    """Print saved plans side by side: what each decides, and what it is predicted to take."""
    from autoplan.comparison import side_by_side

    typer.echo(side_by_side({str(path): Plan.load(path) for path in plan_files}))


def dimensions(
    model: ModelArgument,
    seq: Annotated[int | None, typer.Option(help="Tokens per row of presets and configs.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of a micro-batch.")] = 2,
    batch_dim: Annotated[
        str, typer.Option(help="Where the batch lies in the inputs: 1, or 1,0, or x=1,mask=none.")
    ] = "0",
) -> None:
    """Print what each dimension of every op of a model is, and what may be sharded."""
    from autoplan.models import load_model
    from autoplan.tracer import trace

    loaded = load_model(model, seq=seq)
    traced = trace(
        loaded.model,
        loaded.batch,
        loaded.loss_fn,
        microbatch_size=rows,
        batch_dim=parse_batch_dim(batch_dim),
    )
    typer.echo(traced.dimension_report())
