"""How good plans are: `python benchmarks/plan_quality.py [FILE.csv ...]`.

Files of published measurements: every configuration that their authors tuned beside the plan for
the same model, cluster and batch, by one simulator (`benchmarks.published_quality`). Then what each
dimension of the search is worth.

Every model is planned for every cluster by the joint search, and again with one freedom taken away:

joint        everything together
recompute    one mode for the whole model: nothing, or everything
cuts         stages with equal numbers of blocks
ZeRO-1/3     the ZeRO stage fixed, as Megatron-LM and FSDP fix it
sequence     placements first, as fast as can be, then recomputation under them

Cells are predicted step times over that of the joint plan, by the same cost model; `-` where none
fits, and why is said below the table. Every restricted plan is in the space of the joint search, so
none may be faster by more than that search leaves open (`_OPEN`): else the program ends with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.block_choice import ChoiceModel, Decision
from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError
from autoplan.frontiers import Frontiers
from autoplan.graph import BlockTrace, Trace
from autoplan.models import LoadedModel, load_model
from autoplan.optimizing import find_plan
from autoplan.planner import Planner, make_planner
from autoplan.report import table
from autoplan.search.frontier import frontier_cover
from autoplan.search.problem import ChoiceProblem
from autoplan.tensor_layout import WHOLE_BORDERS, Borders
from autoplan.times import Timer
from autoplan.training_job import TrainingJob
from autoplan.units import format_bytes
from benchmarks.published_quality import is_beaten, published_rows, shown

__all__ = [
    "CLUSTERS",
    "MODELS",
    "VARIANTS",
    "SequentialFrontiers",
    "ablation_row",
    "is_broken",
    "report",
]

_GPT_13B = {
    "model_type": "gpt2",
    "n_embd": 5120,
    "n_layer": 40,
    "n_head": 40,
    "vocab_size": 50257,
    "n_positions": 2048,
}


def _config(name: str, values: Mapping[str, Any], seq: int) -> Callable[[], LoadedModel]:
    def build() -> LoadedModel:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(values))
            return load_model(str(path), seq=seq)

    return build


MODELS: Mapping[str, Callable[[], LoadedModel]] = {
    "gpt2": lambda: load_model("gpt2"),
    "llama3-8b": lambda: load_model("llama3-8b", seq=4096),
    "gpt3-13b": _config("gpt3-13b", _GPT_13B, 2048),
    "mixtral-8x7b": lambda: load_model("mixtral-8x7b"),
    "llama3-70b": lambda: load_model("llama3-70b", seq=4096),
    "gpt3-175b": lambda: load_model("gpt3-175b"),
}

CLUSTERS = ("1x8:a100_sxm_80gb", "4x8:h100_sxm_80gb", "8x8:a100_sxm_40gb", "32x8:a100_sxm_80gb")
_ROWS_PER_DEVICE = 4
_TIME_LIMIT_S = 600.0  # of a search: what is proven does not depend on how busy a machine is
_OPEN = 0.005  # what covers of frontiers and rounds of stages may lose, see docs/search.md


class SequentialFrontiers(Frontiers):
    """Frontiers under which placements are chosen before recomputation, and stay."""

    __slots__ = ()

    def decisions(
        self,
        block: BlockTrace,
        timer: Timer,
        *,
        whole: frozenset[str] = frozenset(),
        recompute: str | None = None,
        borders: Borders = WHOLE_BORDERS,
        slices: Sequence[tuple[str, str]] = (),
        offloads: bool = False,
    ) -> tuple[Decision, ...]:
        """Return the plain decision, and the frontier of recomputation with its placements."""
        own: dict[str, Any] = {"borders": borders, "slices": slices}
        plain = self.plain(block, timer, whole=whole, **own)
        found = {plain.key: plain}
        if any(op.saved for op in block.ops):
            model = ChoiceModel(block, timer, whole, region=True, slices=slices)
            points = frontier_cover(
                _with_axes(model, plain.axes),
                tolerance=self.tolerance or 0.0,
                points=self.points,
                time_limit_s=self.time_limit_s,
                fixed=model.fixed[model.nearest(borders)],
            )
            for decision in (model.read(point, borders) for point in points):
                found[decision.key] = decision
        return tuple(found.values())


def _with_axes(model: ChoiceModel, axes: Mapping[str, str]) -> ChoiceProblem:
    """Return the problem of a model with every op on its given axis."""
    ops = list(model.problem.ops)
    for name in model.ops:
        index = model.index[name]
        ops[index] = tuple(
            replace(option, forbidden=pick.axis != axes.get(name, "whole"))
            for option, pick in zip(ops[index], model.picks[name], strict=True)
        )
    return replace(model.problem, ops=tuple(ops))


def _pinned(planner: Planner, **pins: Any) -> Planner:
    """Return the planner with more pins; prices stay, they do not depend on these."""
    return replace(planner, pins={**planner.pins, **pins})


def _of_mode(planner: Planner, mode: str) -> Planner:
    return planner.unpriced(pins={**planner.pins, "recompute": mode})


VARIANTS: Mapping[str, Callable[[Planner], Sequence[Planner]]] = {
    "joint": lambda p: [p],
    "recompute": lambda p: [_of_mode(p, mode) for mode in ("none", "full")],
    "cuts": lambda p: [replace(p, even_cuts=True)],
    "ZeRO-1": lambda p: [_pinned(p, zero_stage=1)],
    "ZeRO-3": lambda p: [_pinned(p, zero_stage=3)],
    "sequence": lambda p: [p.unpriced(frontiers=SequentialFrontiers())],
}


def _fastest(planners: Sequence[Planner]) -> tuple[float | None, str]:
    """Return the step time of the fastest plan of several problems; None with the reason."""
    best: float | None = None
    reasons = []
    for planner in planners:
        try:
            plan = find_plan(planner, _TIME_LIMIT_S, compare=False)
        except InfeasibleError as error:
            need, most = format_bytes(error.need_bytes), format_bytes(error.capacity_bytes)
            reasons.append(f"the leanest plan needs {need} of {most}, {error.category} most")
            continue
        seconds = plan.predicted.step_time_s
        best = seconds if best is None else min(best, seconds)
    return best, "" if best is not None else "; ".join(dict.fromkeys(reasons))


def ablation_row(
    name: str,
    loaded: LoadedModel,
    cluster: Cluster,
    variants: Sequence[str] = tuple(VARIANTS),
    traces: MutableMapping[int, Trace] | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Return the step time of each variant over that of the joint plan, and seconds taken.

    Args:
        name, loaded: the model.
        cluster: the devices.
        variants: keys of `VARIANTS`, `joint` first.
        traces: of the model on other clusters; what is traced here is added.
        workers: as in `autoplan.optimize`.
    """
    started = time.process_time()
    planner = make_planner(
        TrainingJob(
            loaded.model,
            cluster,
            loaded.batch,
            loss_fn=loaded.loss_fn,
            global_batch_size=_ROWS_PER_DEVICE * cluster.world_size,
            name=name,
        ),
        workers=workers,
    )
    if traces is not None:
        planner.traces.captured = traces
    ratios: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    joint, reasons["joint"] = _fastest(VARIANTS["joint"](planner))
    for variant in variants:
        if variant == "joint":
            continue
        ratios[variant] = None
        if joint is not None:  # else nothing fits under less freedom either
            own, reasons[variant] = _fastest(VARIANTS[variant](planner))
            ratios[variant] = None if own is None else own / joint
    return {
        "model": name,
        "cluster": str(cluster),
        "joint_s": joint,
        **ratios,
        "cpu_s": round(time.process_time() - started, 1),
        "reasons": {variant: text for variant, text in reasons.items() if text},
    }


def is_broken(row: Mapping[str, Any]) -> bool:
    """Return whether a restricted search found a faster plan than the joint one."""
    ratios = [row[name] for name in VARIANTS if row.get(name) is not None]
    return min(ratios, default=1.0) < 1 - _OPEN


def _shown(row: Mapping[str, Any]) -> tuple[str, ...]:
    def text(name: str, value: Any) -> str:
        if not isinstance(value, float):
            return "-" if value is None else str(value)
        return f"{value:.4g}" if name in ("joint_s", "cpu_s") else f"{value:.4f}"

    return tuple(text(name, value) for name, value in row.items() if name != "reasons")


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the ablation, what does not fit, and what breaks its law."""
    heading = tuple(name for name in rows[0] if name != "reasons")
    lines = [table([heading, *map(_shown, rows)])]
    for row in rows:
        for variant, reason in row["reasons"].items():
            lines.append(f"{row['model']} on {row['cluster']}, {variant}: {reason}")
        if is_broken(row):
            lines.append(f"{row['model']} on {row['cluster']}: a restricted plan is faster")
    return "\n".join(lines)


def main() -> None:
    """Print the tables; leave with 1 where a published or a restricted plan beats the joint one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="*", help="published measurements, to compare with first"
    )
    parser.add_argument("--only", default="", help="published rows whose label holds this text")
    parser.add_argument("--model", choices=MODELS, action="append", help="some models only")
    parser.add_argument("--cluster", action="append", help="other clusters")
    parser.add_argument("--workers", type=int, help="processes of a search; default: one per core")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    arguments = parser.parse_args()
    published = published_rows(arguments.files, arguments.only)
    if published:
        print(shown(published), end="\n\n", flush=True)
    rows = []
    for name in arguments.model or MODELS:
        loaded = MODELS[name]()
        traces: dict[int, Trace] = {}
        for text in arguments.cluster or CLUSTERS:
            cluster, workers = Cluster.parse(text), arguments.workers
            rows.append(ablation_row(name, loaded, cluster, traces=traces, workers=workers))
            print("  ".join(_shown(rows[-1])), file=sys.stderr, flush=True)
    print(report(rows))
    if arguments.json:
        tables = {"published": published, "ablation": rows}
        arguments.json.write_text(json.dumps(tables, indent=1) + "\n")
    if any(map(is_broken, rows)) or any(map(is_beaten, published)):
        sys.exit(1)


if __name__ == "__main__":
    main()
