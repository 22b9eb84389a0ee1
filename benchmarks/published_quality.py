"""Our plan beside the published one: `python benchmarks/published_quality.py FILE.csv ...`.

A row of published measurements gives a model, a cluster, a batch and the configuration that its
authors tuned. Rows that ask the same (model, cluster, batch, optimizer) are one problem, which is
planned once, as `autoplan.optimize` does; rows of the same degrees, micro-batch and recomputation
are one configuration of it, which is priced by `autoplan.estimate`, both as autoplan's own engine
runs them. What only another engine has (`outside`) is left out on both sides: kernels of a
compiler, float8 products, tensor-parallel collectives in pieces beside products.

`ratio` is the predicted step time of our plan over that of the configuration, never above 1 where
that fits; `gain` is where it comes from, the parts of a step that differ most.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import autoplan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.cluster import Cluster
from autoplan.engines import engine_named
from autoplan.errors import AutoplanError
from autoplan.graph import Trace
from autoplan.optimizing import find_plan
from autoplan.plan import Plan
from autoplan.planner import make_planner
from autoplan.report import table
from autoplan.training_job import TrainingJob
from benchmarks.published_files import rows_of, texts_of
from benchmarks.published_models import Decoder, Shape, batch_of
from benchmarks.published_rows import Configuration, Skipped, configurations

__all__ = ["Problem", "compared", "is_beaten", "problems_of", "published_rows", "shown", "sources"]

_OUTSIDE = ("engine", "product_dtype", "is_compiled")
_UNPLANNED = ("context_parallel", "expert_parallel")
_MATCH = 1 + 1e-9
_TIME_LIMIT_S = 600.0  # of a search: what is proven does not depend on how busy a machine is
_SHOWN_PARTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is planned: everything of a configuration that its authors did not tune."""

    shape: Shape
    cluster: Cluster
    global_batch: int
    optimizer: str
    mixed_precision: str
    offload: str

    @classmethod
    def of(cls, configuration: Configuration) -> Problem:
        """Return the problem that a configuration answers."""
        options = configuration.options
        return cls(
            shape=configuration.shape,
            cluster=configuration.cluster,
            global_batch=configuration.global_batch,
            optimizer=options["optimizer"],
            mixed_precision=options["mixed_precision"],
            offload=options["offload"],
        )


@dataclass(slots=True)
class Published:
    """A configuration of a problem, under every row that states it.

    Attributes:
        source: of the first row.
        label: of the first row.
        options: of `estimate`, less what only another engine has.
        outside: what some row has of that.
        rows: how many state it.
    """

    source: str
    label: str
    options: Mapping[str, Any]
    outside: set[str] = field(default_factory=set)
    rows: int = 0


def problems_of(
    files: Sequence[Path], only: str = ""
) -> dict[Problem, dict[tuple[Any, ...], Published]]:
    """Return the configurations of files by problem; rows whose label lacks `only` are left out.

    A row that leaves something open is every configuration that it may mean.
    """
    found: dict[Problem, dict[tuple[Any, ...], Published]] = {}
    for path in files:
        for line, row in rows_of(path):
            label = f"{path.stem}:{line} {row.get('source_id', '')} {row.get('model', '')}"
            if only not in label:
                continue
            try:
                ways = configurations(texts_of(row))
            except Skipped as reason:
                print(f"{label}: left out: {reason}", file=sys.stderr)
                continue
            unplanned = [n for n in _UNPLANNED if any(w.options.get(n, 1) > 1 for w in ways)]
            if unplanned:
                what = " and ".join(unplanned)
                print(f"{label}: left out: no search chooses {what}", file=sys.stderr)
                continue
            for way in ways:
                options = {k: v for k, v in way.options.items() if k not in _OUTSIDE}
                key = tuple(sorted((name, str(value)) for name, value in options.items()))
                own = found.setdefault(Problem.of(way), {})
                source = f"{path.stem} {row.get('source_id', '')}"
                entry = own.setdefault(key, Published(source, label, options))
                entry.outside.update(_outside(way.options))
                entry.rows += 1
    return found


def _outside(options: Mapping[str, Any]) -> list[str]:
    """Return what a published run had that neither side is priced with."""
    found = []
    if options.get("is_compiled"):
        found.append("compiled")
    if options.get("product_dtype"):
        found.append("float8")
    if engine_named(options["engine"]).decomposes:
        found.append("async tensor parallelism")
    return found


def _in_words(options: Mapping[str, Any]) -> str:
    """Return a configuration as plans are named."""
    recompute = options["recompute"]
    words = [f"{k}={options[k]}" for k in ("dp", "tp", "pp")]
    words += [f"zero={options['zero_stage']}", f"mbs={options['microbatch_size']}"]
    words += [f"v={options['virtual_stages']}"] * (options["virtual_stages"] > 1)
    words += ["sequence-parallel"] * bool(options["sequence_parallel"])
    words.append("recompute=" + (recompute if isinstance(recompute, str) else "some"))
    return " ".join(words)


def _plan_in_words(plan: Plan) -> str:
    blocks = [block for stage in plan.stages for block in stage.blocks if block.fqn]
    rerun = sum(plan.recompute[block.recompute].mode in ("full", "selective") for block in blocks)
    words = [str(plan.mesh), f"zero={plan.zero_stage}", f"mbs={plan.microbatch_size}"]
    chunks = len(plan.stages) // plan.mesh.pp
    words += [f"v={chunks}"] * (chunks > 1)
    words += [plan.schedule] * (plan.schedule in ("gpipe", "zero_bubble"))
    words += ["sequence-parallel"] * (plan.slices > 1)
    return " ".join([*words, f"recompute in {rerun} of {len(blocks)}"])


def compared(problem: Problem, published: Sequence[Published]) -> list[dict[str, Any]]:
    """Return the rows of all configurations of a problem beside its plan.

    Raises:
        AutoplanError, ValueError: nothing fits, or it cannot be planned.
    """
    model, batch = Decoder.on_meta(problem.shape), batch_of(problem.shape)
    traces: MutableMapping[int, Trace] = {}
    own: dict[str, Any] = {
        "global_batch_size": problem.global_batch,
        "optimizer": problem.optimizer,
        "mixed_precision": problem.mixed_precision,
    }
    offload = () if problem.offload == "none" else (problem.offload,)
    planner = make_planner(
        TrainingJob(model, problem.cluster, batch, offload=offload, **own), workers=1
    )
    planner.traces.captured = traces
    plan = find_plan(planner, _TIME_LIMIT_S, compare=False)
    rows = []
    for one in published:
        price = autoplan.estimate(
            model, problem.cluster, batch, traces=traces, **{**one.options, **own}
        )
        ratio = plan.predicted.step_time_s / price.step_time_s
        ours, theirs = plan.predicted.time_by_category, price.time_by_category
        rows.append(
            {
                "row": one.label + (f" and {one.rows - 1} more" if one.rows > 1 else ""),
                "source": one.source,
                "published": _in_words(one.options),
                "ours": _plan_in_words(plan),
                "published_s": price.step_time_s,
                "fits": price.fits,
                "ours_s": plan.predicted.step_time_s,
                "gap": plan.search.gap,
                "ratio": ratio,
                "gain": _gain(ours, theirs, price.step_time_s),
                "outside": ", ".join(sorted(one.outside)),
            }
        )
    return rows


def _gain(ours: Mapping[str, float], theirs: Mapping[str, float], step_s: float) -> str:
    """Return the parts of a step that differ most, in per cent of the published step."""
    more = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in {*ours, *theirs}}
    most = sorted(more, key=lambda name: (-abs(more[name]), name))[:_SHOWN_PARTS]
    return ", ".join(f"{name} {-100 * more[name] / step_s:+.1f} %" for name in most)


def is_beaten(row: Mapping[str, Any]) -> bool:
    """Return whether the published configuration fits and is faster than the plan."""
    return bool(row["fits"]) and row["ratio"] > _MATCH


def published_rows(files: Sequence[Path], only: str = "") -> list[dict[str, Any]]:
    """Return the rows of tables of published measurements whose label holds a text."""
    rows: list[dict[str, Any]] = []
    for problem, published in problems_of(files, only).items():
        entries = list(published.values())
        try:
            rows += compared(problem, entries)
        except (AutoplanError, ValueError) as error:
            reason = str(error).splitlines()[0][:200]
            print(f"{entries[0].label}: left out: {reason}", file=sys.stderr)
        else:
            print(f"{len(rows)} configurations, {entries[0].label}", file=sys.stderr, flush=True)
    return rows


_COLUMNS = ("row", "published", "ours", "published_s", "ours_s", "ratio", "gain", "outside")


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the configurations that fit as a table, and a line of those that do not."""
    fitting = [row for row in rows if row["fits"]]
    cells = [tuple(_text(row[name]) for name in _COLUMNS) for row in fitting]
    return f"{table([_COLUMNS, *cells])}\n\n{sources(rows)}"


def sources(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return, by source, how many configurations fit, and the ratios of these."""
    names = ("source", "configurations", "that fit", "least", "median", "largest")
    lines = [names]
    for source in dict.fromkeys(row["source"] for row in rows):
        own = [row for row in rows if row["source"] == source]
        ratios = [row["ratio"] for row in own if row["fits"]]
        numbers = [f(ratios) for f in (min, median, max)] if ratios else []
        texts = [f"{number:.3f}" for number in numbers] or ["-"] * 3
        lines.append((source, str(len(own)), str(len(ratios)), *texts))
    return table(lines)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Print the table; leave with 1 where a configuration that fits is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="tables of published measurements")
    parser.add_argument("--only", default="", help="rows whose label holds this text")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    arguments = parser.parse_args()
    rows = published_rows(arguments.files, arguments.only)
    if not rows:
        sys.exit("no row could be compared")
    print(shown(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if any(map(is_beaten, rows)):
        sys.exit(1)


if __name__ == "__main__":
    main()
