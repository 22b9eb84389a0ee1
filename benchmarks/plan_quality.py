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
fits. None is below 1 but by what covering a frontier within its tolerance misses.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.block_choice import ChoiceModel, Decision
from autoplan.errors import InfeasibleError, SearchLimitError
from autoplan.frontiers import Frontiers
from autoplan.graph import BlockTrace
from autoplan.models import LoadedModel, load_model
from autoplan.optimizing import find_plan
from autoplan.planner import Planner, make_planner
from autoplan.report import table
from autoplan.search.frontier import frontier_cover
from autoplan.search.problem import ChoiceProblem
from autoplan.times import Timer
from benchmarks.published_quality import is_beaten, published_rows, shown

__all__ = ["CLUSTERS", "MODELS", "VARIANTS", "SequentialFrontiers", "ablation_row"]

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
_SLACK = 0.995  # the tolerance of frontiers: a restriction may be luckier


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
        is_sequence_parallel: bool = False,
        slices: Sequence[tuple[str, str]] = (),
        offloads: bool = False,
    ) -> tuple[Decision, ...]:
        """Return the plain decision, and the frontier of recomputation with its placements."""
        own: dict[str, Any] = {"is_sequence_parallel": is_sequence_parallel, "slices": slices}
        plain = self.plain(block, timer, whole=whole, **own)
        found = {plain.key: plain}
        if any(op.saved for op in block.ops):
            model = ChoiceModel(block, timer, whole, region=True, **own)
            points = frontier_cover(
                _with_axes(model, plain.axes),
                tolerance=self.tolerance or 0.0,
                points=self.points,
                time_limit_s=self.time_limit_s,
            )
            for decision in map(model.read, points):
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


def _changed(planner: Planner, **changes: Any) -> Planner:
    """Return the planner with some fields changed, its traces kept."""
    made = replace(planner, **changes)
    made.forget_prices()
    return made


VARIANTS: Mapping[str, Callable[[Planner], Sequence[Planner]]] = {
    "joint": lambda p: [p],
    "recompute": lambda p: [
        _changed(p, pins={**p.pins, "recompute": mode}) for mode in ("none", "full")
    ],
    "cuts": lambda p: [_changed(p, even_cuts=True)],
    "ZeRO-1": lambda p: [_changed(p, pins={**p.pins, "zero_stage": 1})],
    "ZeRO-3": lambda p: [_changed(p, pins={**p.pins, "zero_stage": 3})],
    "sequence": lambda p: [_changed(p, frontiers=SequentialFrontiers())],
}


def _fastest_s(planners: Sequence[Planner]) -> float:
    """Return the step time of the fastest plan of several problems; infinite if none fits."""
    best = math.inf
    for planner in planners:
        try:
            plan = find_plan(planner, compare=False)
        except (InfeasibleError, SearchLimitError, ValueError):
            continue
        best = min(best, plan.predicted.step_time_s)
    return best


def ablation_row(
    name: str, loaded: LoadedModel, cluster: str, variants: Sequence[str] = tuple(VARIANTS)
) -> dict[str, Any]:
    """Return the step time of each variant over that of the joint plan, and seconds taken."""
    started = time.perf_counter()
    planner = make_planner(
        loaded.model,
        cluster,
        loaded.batch,
        loss_fn=loaded.loss_fn,
        global_batch_size=_batch(cluster),
        name=name,
    )
    seconds = {variant: _fastest_s(VARIANTS[variant](planner)) for variant in variants}
    joint = seconds["joint"]
    return {
        "model": name,
        "cluster": cluster,
        "joint_s": joint,
        **{v: s / joint if math.isfinite(joint) else s for v, s in seconds.items() if v != "joint"},
        "seconds": round(time.perf_counter() - started, 1),
    }


def _batch(cluster: str) -> int:
    nodes, gpus = (int(part) for part in cluster.partition(":")[0].split("x"))
    return nodes * gpus * _ROWS_PER_DEVICE


def _shown(row: Mapping[str, Any]) -> tuple[str, ...]:
    def text(name: str, value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        if not math.isfinite(value):
            return "-"
        return f"{value:.4g}" if name in ("joint_s", "seconds") else f"{value:.3f}"

    return tuple(text(name, value) for name, value in row.items())


def main() -> None:
    """Print the tables; leave with 1 where a published or a restricted plan beats the joint one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="*", help="published measurements, to compare with first"
    )
    parser.add_argument("--model", choices=MODELS, action="append", help="some models only")
    parser.add_argument("--cluster", action="append", help="other clusters")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    arguments = parser.parse_args()
    published = published_rows(arguments.files)
    if published:
        print(shown(published), end="\n\n")
    rows = []
    for name in arguments.model or MODELS:
        loaded = MODELS[name]()
        for cluster in arguments.cluster or CLUSTERS:
            rows.append(ablation_row(name, loaded, cluster))
            print("  ".join(_shown(rows[-1])), file=sys.stderr, flush=True)
    print(table([tuple(rows[0]), *map(_shown, rows)]))
    if arguments.json:
        tables = {"published": published, "ablation": rows}
        arguments.json.write_text(json.dumps(tables, indent=1) + "\n")
    ratios = [row[v] for row in rows for v in VARIANTS if v != "joint"]
    if min(ratios) < _SLACK or any(map(is_beaten, published)):
        sys.exit(1)


if __name__ == "__main__":
    main()
