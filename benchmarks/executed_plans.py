"""How near predicted step times and peaks are to executed ones, over all ways to run two models.

    python benchmarks/executed_plans.py [--json FILE] [--budget SECONDS] [--only TEXT]
    python benchmarks/executed_plans.py --again FILE

A small GPT and a small CNN are trained under every plan of a grid on 1, 2 and 4 gloo processes of
this machine. First the machine is profiled, as `autoplan profile` does. Then every plan is priced,
executed and measured: steps under a meter of live tensor bytes, then steps without it for the time.
Several plans are there at once and step in turn, in rounds, and of each the least round counts, so
that what else the machine has to do hits all alike, and little. Before each timed step all ranks
run a yardstick, a fixed load that runs during profiling too: a step counts in yardsticks, of which
the least counts too, so that a machine that is slower now than it was then cancels out. Where there
are more processes than cores, the simulated step is as long as their work on those cores at least
(`Timeline.on_cores_s`). Even so, give it a quiet machine: on a busy one the profile itself is off.
Ratios are predicted / measured. `--again` predicts once more for a file that `--json` wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("AUTOPLAN_CACHE", "off")  # predict from what this run measures

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import autoplan
from autoplan import codec
from autoplan.meter import StorageMeter
from autoplan.models import LoadedModel
from autoplan.plan import Plan
from autoplan.processes import run_worker
from autoplan.profiles import DeviceProfile
from autoplan.profiles.measure import measure_device
from autoplan.report import table
from autoplan.training import global_batch, make_optimizer
from autoplan.units import format_bytes, format_seconds
from benchmarks.launched_plans import launch_plans, work_through_all
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn

__all__ = [
    "CNN",
    "Case",
    "Measured",
    "Row",
    "cases",
    "predicted_again",
    "rank_correlation",
    "rows_of",
    "summary",
]

ROWS = 8
METERED_STEPS, ROUNDS = 8, 8  # of metered steps up to half may find a buffer let go of late
AT_ONCE = 6  # plans that take turns: each has process groups, and their threads, of its own
YARDSTICK_PRODUCTS, YARDSTICK_SIZE = 12, 384  # about 30 ms of one idle core
GPT_CONFIG = GPTConfig(vocab_size=512, max_tokens=128, num_layers=4, num_heads=4, width=192)
MODELS = ("gpt", "cnn")


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(x + inner)


class CNN(nn.Module):
    """Residual convolutions over small images, classified; the loss is the caller's."""

    def __init__(self, width: int = 48, depth: int = 6, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(_Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for block in self.blocks:
            x = block(x)
        classes: torch.Tensor = self.head(x.mean(dim=(2, 3)))
        return classes


def _entropy(output: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, torch.zeros(output.shape[0], dtype=torch.long))


def load(name: str) -> LoadedModel:
    """Return a model of the benchmark with its weights and a batch."""
    torch.manual_seed(0)
    if name == "gpt":
        batch: Any = batch_like(GPT_CONFIG, ROWS, GPT_CONFIG.max_tokens)
        return LoadedModel(model=GPT(GPT_CONFIG), batch=batch, loss_fn=loss_fn, name="GPT")
    return LoadedModel(
        model=CNN(), batch=torch.randn(ROWS, 3, 24, 24), loss_fn=_entropy, name="CNN"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to run one model.

    Attributes:
        model: `gpt` or `cnn`.
        world_size: processes.
        options: of `autoplan.estimate`.
    """

    model: str
    world_size: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the row's name."""
        parts = " ".join(f"{_SHORT.get(k, k)}={v}" for k, v in self.options.items())
        return f"{self.model} x{self.world_size} {parts}"


_SHORT = {"zero_stage": "zero", "microbatch_size": "mbs"}


def cases() -> tuple[Case, ...]:
    """Return every plan of the grid: degrees, ZeRO stages, micro-batches, recompute.

    Data-parallel ranks take equal shares of 8 rows, in one or several micro-batches; a pipeline has
    at least as many micro-batches as stages. The CNN has no tensor parallelism.
    """
    found = []
    for model in MODELS:
        for world in (1, 2, 4):
            for dp, tp, pp in _meshes(world, 1 if model == "cnn" else world):
                rows = ROWS // dp
                sizes = [s for s in (rows, rows // 2, 1) if s >= 1 and rows // s >= pp]
                for size in dict.fromkeys((sizes[0], sizes[-1])):
                    for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                        for recompute in ("none", "full"):
                            # recompute changes a stage alike under each ZeRO stage: not all twice
                            if recompute == "full" and (zero in (1, 2) or size != sizes[0]):
                                continue
                            options: dict[str, Any] = {
                                "dp": dp,
                                "tp": tp,
                                "pp": pp,
                                "zero_stage": zero,
                            }
                            options |= {"microbatch_size": size, "recompute": recompute}
                            found.append(Case(model=model, world_size=world, options=options))
    return tuple(found)


def _meshes(world: int, most_tp: int) -> Iterator[tuple[int, int, int]]:
    for dp in (1, 2, 4):
        for tp in (1, 2, 4):
            if world % (dp * tp) == 0 and tp <= most_tp:
                yield dp, tp, world // (dp * tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one rank measured.

    Attributes:
        step_time_s: least seconds of a step.
        step_yardsticks: the same in yardsticks, of which the least counts too.
        peak_bytes: most bytes of live tensors in a step; the least of some steps.
    """

    step_time_s: float
    step_yardsticks: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A case with predictions and measurements.

    Attributes:
        predicted_s: seconds of a step by the search's formula, with a core for every process.
        simulated_s: simulated, on the cores that there are.
        measured_s: of the slowest rank, as fast as the machine was when it was profiled.
        clock_s: as the clock saw it.
        predicted_bytes, measured_bytes: peak of each stage's fullest rank.
    """

    name: str
    model: str
    world_size: int
    predicted_s: float
    simulated_s: float
    measured_s: float
    clock_s: float
    predicted_bytes: tuple[int, ...]
    measured_bytes: tuple[int, ...]


def make_plan(case: Case, profile: DeviceProfile) -> Plan:
    """Return the priced plan of a case on processes with this profile."""
    cluster = autoplan.Cluster.from_device(profile, gpus_per_node=case.world_size)
    loaded = load(case.model)
    return autoplan.estimate(
        loaded.model,
        cluster.with_memory("4GiB", reserve_bytes=0),
        loaded.batch,
        loss_fn=loaded.loss_fn,
        name=case.model,
        **case.options,
    ).plan


@dataclass(slots=True)
class _Running:
    """A plan on this rank, ready to train, and what was measured of it so far."""

    step: Callable[[], None]
    peak_bytes: int
    seconds: list[float] = field(default_factory=list)


def _prepared(plan: Plan) -> _Running:
    """Return a plan on this rank after some steps under a meter.

    The peak is the least over the steps after the first, which makes the optimizer's states: on
    gloo a background thread lets go of buffers now and then later than the plan does. (Where ranks
    sleep for 5 ms after each gather and reduction of a layer, every step has that least peak.)
    """
    loaded = load(plan.model)
    module = plan.parallelize(loaded.model, loaded.batch, loaded.loss_fn)
    optimizer = make_optimizer(plan.optimizer, module.parameters())
    share = module.shard_batch(global_batch(loaded.batch, plan.global_batch_size, 0))

    def step() -> None:
        module.train_step(share)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with StorageMeter() as meter:
        # Of stages that do not read the batch too.
        meter.baseline(module, optimizer, pytree.tree_leaves(share))
        step()
        peaks = []
        for _ in range(METERED_STEPS):
            dist.barrier()
            meter.reset_peak()
            step()
            peaks.append(meter.peak_bytes)
    return _Running(step=step, peak_bytes=min(peaks))


def execute(plans: Sequence[Plan]) -> list[Measured]:
    """Train plans on this rank: each under a meter, then step by step in turn for the time.

    What else the machine does comes and goes. So the plans take turns, and of every plan, and of
    the yardstick, the least of many rounds counts: what it takes when little else runs.
    """
    running = [_prepared(plan) for plan in plans]
    yardsticks = []
    for _ in range(ROUNDS):
        for one in running:
            dist.barrier()
            yardsticks.append(sum(_yardstick()))
            dist.barrier()
            start = time.perf_counter()
            one.step()
            one.seconds.append(time.perf_counter() - start)
    yardstick_s = min(yardsticks)
    return [
        Measured(
            step_time_s=min(one.seconds),
            step_yardsticks=min(one.seconds) / yardstick_s,
            peak_bytes=one.peak_bytes,
        )
        for one in running
    ]


def _yardstick() -> list[float]:
    """Return the seconds of each piece of a fixed load now."""
    square = torch.ones(YARDSTICK_SIZE, YARDSTICK_SIZE)
    seconds = []
    for _ in range(YARDSTICK_PRODUCTS):
        start = time.perf_counter()
        torch.mm(square, square)
        seconds.append(time.perf_counter() - start)
    return seconds


def profile(budget_s: float) -> tuple[DeviceProfile, float]:
    """Return the profile of one core of this machine, and the yardstick's seconds on one."""
    seconds: list[float] = []

    def measured(message: str, fraction: float) -> None:
        seconds.extend(_yardstick())

    torch.set_num_threads(1)
    found = measure_device("cpu", budget_s=budget_s, progress=measured)
    return found, YARDSTICK_PRODUCTS * statistics.median(seconds)


def rows_of(
    listed: Sequence[Case],
    plans: Mapping[str, Plan],
    measured: Mapping[str, Sequence[Measured]],
    yardstick_s: float,
    num_cores: int,
) -> list[Row]:
    """Return one row per case; the step is that of the slowest rank."""
    rows = []
    for case in listed:
        plan, ranks = plans[case.name], measured[case.name]
        per_stage = plan.mesh.dp * plan.mesh.tp
        rows.append(
            Row(
                name=case.name,
                model=case.model,
                world_size=case.world_size,
                predicted_s=plan.predicted.step_time_s,
                simulated_s=_simulated_s(plan, num_cores),
                measured_s=max(r.step_yardsticks for r in ranks) * yardstick_s,
                clock_s=max(rank.step_time_s for rank in ranks),
                predicted_bytes=plan.predicted.peak_memory_bytes,
                measured_bytes=tuple(
                    max(r.peak_bytes for r in ranks[s * per_stage : (s + 1) * per_stage])
                    for s in range(plan.mesh.pp)
                ),
            )
        )
    return rows


def _simulated_s(plan: Plan, num_cores: int) -> float:
    return plan.timeline().on_cores_s(num_cores, plan.mesh.dp * plan.mesh.tp)


def predicted_again(document: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a kept run with predictions of now, from its profile and its cores."""
    used = codec.decode(DeviceProfile, document["profile"], "profile")
    kept = {row.name: row for row in codec.decode(tuple[Row, ...], document["rows"], "rows")}
    rows = []
    for case in cases():
        if case.name in kept:
            plan = make_plan(case, used)
            rows.append(
                replace(
                    kept[case.name],
                    predicted_s=plan.predicted.step_time_s,
                    simulated_s=_simulated_s(plan, document["num_cores"]),
                    predicted_bytes=plan.predicted.peak_memory_bytes,
                )
            )
    return rows


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's coefficient: the correlation of ranks, equal values sharing theirs."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    below = [sum(other < value for other in values) for value in values]
    equal = [sum(other == value for other in values) for value in values]
    return [b + (e - 1) / 2 for b, e in zip(below, equal, strict=True)]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the numbers that are claimed, over all rows and by model and processes."""
    groups = {"all": list(rows)}
    for row in rows:
        groups.setdefault(row.model, []).append(row)
        groups.setdefault(f"{row.model} x{row.world_size}", []).append(row)
    return {name: _summary(group) for name, group in groups.items()}


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    measured = [row.measured_s for row in rows]
    simulated = [row.simulated_s for row in rows]
    ratios = [
        p / m for row in rows for p, m in zip(row.predicted_bytes, row.measured_bytes, strict=True)
    ]
    errors = [abs(s / m - 1) for s, m in zip(simulated, measured, strict=True)]
    return {
        "plans": len(rows),
        "time_rank_correlation": rank_correlation(simulated, measured) if len(rows) > 2 else None,
        "time_rank_correlation_of_search": (
            rank_correlation([row.predicted_s for row in rows], measured) if len(rows) > 2 else None
        ),
        "time_mape": statistics.mean(errors),
        "time_bias": statistics.mean(s / m for s, m in zip(simulated, measured, strict=True)) - 1,
        "memory_mape": statistics.mean(abs(ratio - 1) for ratio in ratios),
        "memory_worst_under": min(0.0, min(ratios) - 1),
    }


def report(rows: Sequence[Row]) -> str:
    """Return the tables as text."""
    lines = [
        (
            "plan",
            "predicted",
            "simulated",
            "measured",
            "clock",
            "ratio",
            "peak",
            "measured",
            "ratio",
        )
    ]
    for row in rows:
        stage = max(
            range(len(row.measured_bytes)),
            key=lambda s, r=row: abs(r.predicted_bytes[s] / r.measured_bytes[s] - 1),  # type: ignore[misc]
        )
        predicted, peak = row.predicted_bytes[stage], row.measured_bytes[stage]
        lines.append(
            (
                row.name,
                format_seconds(row.predicted_s),
                format_seconds(row.simulated_s),
                format_seconds(row.measured_s),
                format_seconds(row.clock_s),
                f"{row.simulated_s / row.measured_s:.2f}",
                format_bytes(predicted),
                format_bytes(peak),
                f"{predicted / peak:.3f}",
            )
        )
    heading = ("group", "plans", "rank correlation", "time error", "memory error", "worst under")
    totals = [heading]
    for name, numbers in summary(rows).items():
        correlation = numbers["time_rank_correlation"]
        totals.append(
            (
                name,
                str(numbers["plans"]),
                "-" if correlation is None else f"{correlation:.3f}",
                f"{numbers['time_mape']:.0%}",
                f"{numbers['memory_mape']:.2%}",
                f"{numbers['memory_worst_under']:.2%}",
            )
        )
    return f"{table(lines)}\n\n{table(totals)}"


def main() -> None:
    """Profile, plan, execute, and print the tables."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--json", type=Path, default=None, help="also write rows and summary")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of profiling")
    parser.add_argument("--only", default="", help="only plans whose name contains this")
    parser.add_argument("--again", type=Path, default=None, help="a file written by --json")
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        run_worker(lambda: work_through_all(options.worker, execute))
    if options.again is not None:
        print(report(predicted_again(json.loads(options.again.read_text()))))
        return
    listed = [case for case in cases() if options.only in case.name]
    num_cores = len(os.sched_getaffinity(0))
    measured, yardstick_s = profile(options.budget)
    plans = {case.name: make_plan(case, measured) for case in listed}
    ranks = launch_plans(__file__, plans, Measured, timeout_s=1800, at_once=AT_ONCE)
    rows = rows_of(listed, plans, ranks, yardstick_s, num_cores)
    print(report(rows))
    if options.json is not None:
        document = {
            "summary": summary(rows),
            "num_cores": num_cores,
            "profile": codec.encode(measured),
            "rows": [codec.encode(row) for row in rows],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
