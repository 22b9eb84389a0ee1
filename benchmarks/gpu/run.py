"""Profile this GPU and run the saved plans on it: predicted against measured. Needs no solver.

    python benchmarks/gpu/run.py --out FOLDER      # about five minutes on one GPU

Writes `profile.json` (the measured profile) and `results.json` to the folder and prints a table.
`--tiny` runs tiny versions on the CPU, to test this script where there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from autoplan import codec
from autoplan.capturer import capture
from autoplan.errors import PlanError
from autoplan.matching import explain_mismatch
from autoplan.meter import StorageMeter
from autoplan.models import LoadedModel
from autoplan.plan import Plan
from autoplan.profiles import save_profile
from autoplan.profiles.measure import measure_device
from autoplan.report import table
from autoplan.training import make_optimizer
from autoplan.units import format_bytes, format_seconds
from benchmarks.gpu.models import build

__all__ = ["PLANS", "Results", "Row", "measure_plan", "table_of"]

PLANS = Path(__file__).parent / "plans"
WARM_UP_STEPS, TIMED_STEPS = 3, 8
PROFILE_S, ALL_S = 100.0, 280.0
# (m, n, k) of the linear layers of both models at 8 x 1024 and 4 x 2048 tokens, forward.
GEMM_SHAPES = (
    (8192, 3072, 1024),
    (8192, 1024, 1024),
    (8192, 4096, 1024),
    (8192, 1024, 4096),
    (8184, 50304, 1024),
    (8192, 2048, 2048),
    (8192, 512, 2048),
    (8192, 8192, 2048),
    (8192, 2048, 8192),
    (8192, 128256, 2048),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan: what was predicted and what was measured.

    Attributes:
        name: of the plan.
        predicted_s, measured_s: of a step; measured is a median after warm-up.
        predicted_bytes: peak without the reserve.
        measured_bytes: `max_memory_allocated`; on a CPU the most bytes of live tensors.
        reserved_bytes: `max_memory_reserved`; 0 on a CPU.
        note: what a reader must know.
    """

    name: str
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int
    reserved_bytes: int
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What one run of the benchmark measured, and on what."""

    device: str
    torch_version: str
    date: str
    rows: tuple[Row, ...]
    left_out: tuple[str, ...] = ()


def measure_plan(name: str, plan: Plan, device: torch.device, *, is_tiny: bool = False) -> Row:
    """Train a plan on this device and return its row."""
    loaded = build(plan.model, plan.global_batch_size, is_tiny=is_tiny, device=device.type)
    plan, note = _for_this_torch(plan, loaded)
    module = plan.parallelize(loaded.model, loaded.batch, loaded.loss_fn, device=device)
    optimizer = make_optimizer(plan.optimizer, module.parameters())
    batch = {key: value.to(device) for key, value in loaded.batch.items()}
    del loaded
    is_cuda = device.type == "cuda"

    def step() -> None:
        module.train_step(batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
        peak, reserved = 0, 0
        for _ in range(WARM_UP_STEPS):
            step()
        torch.cuda.synchronize()
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    else:
        with StorageMeter() as meter:
            meter.baseline(module, optimizer)
            for _ in range(WARM_UP_STEPS):
                step()
        peak, reserved = meter.peak_bytes, 0
    seconds = []
    for _ in range(TIMED_STEPS):
        start = time.perf_counter()
        step()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    own = plan.predicted
    return Row(
        name=name,
        predicted_s=own.step_time_s,
        measured_s=statistics.median(seconds),
        predicted_bytes=own.peak_memory_bytes[0] - own.memory_by_category[0].get("reserve", 0),
        measured_bytes=peak,
        reserved_bytes=reserved,
        note=note,
    )


def _for_this_torch(plan: Plan, loaded: LoadedModel) -> tuple[Plan, str]:
    """Return the plan for the program that this torch captures, and what was found.

    Another version of torch may write the same blocks with other constants. Where all blocks and
    every kept op have the names that the plan knows, the plan's decisions still say what to do.

    Raises:
        PlanError: a block or a kept op has no counterpart: solve again with this torch.
    """
    program = capture(
        loaded.model, loaded.batch, loaded.loss_fn, microbatch_size=plan.microbatch_size
    )
    if program.fingerprint == plan.fingerprint:
        return plan, ""
    blocks = [block for stage in plan.stages for block in stage.blocks]
    calls = [(call.fqn, program.graphs[call.graph]) for call in program.calls]
    found = [(fqn, graph.name) for fqn, graph in calls]
    if found != [(block.fqn, block.block) for block in blocks]:
        raise PlanError(explain_mismatch(plan, program, plan.model))
    for block, (_, graph) in zip(blocks, calls, strict=True):
        kept = {name.split("__")[0] for name in plan.recompute[block.recompute].keep}
        if not kept <= {op.name for op in graph.ops}:
            raise PlanError(explain_mismatch(plan, program, plan.model))
    made = plan.provenance.get("version_torch", "another version")
    note = f"planned with torch {made}, whose graphs differ in detail"
    return replace(plan, fingerprint=program.fingerprint), note


def table_of(results: Results, again_s: Mapping[str, float] | None = None) -> str:
    """Return the results as text, beside step times priced with the measured profile if given."""
    heading = ["plan", "predicted", "measured", "ratio", "peak", "measured", "ratio", "reserved"]
    rows = [(*heading, *(("with profile", "ratio") if again_s else ()))]
    for row in results.rows:
        cells = [
            row.name,
            format_seconds(row.predicted_s),
            format_seconds(row.measured_s),
            f"{row.predicted_s / row.measured_s:.3f}",
            format_bytes(row.predicted_bytes),
            format_bytes(row.measured_bytes),
            f"{row.predicted_bytes / row.measured_bytes:.3f}",
            format_bytes(row.reserved_bytes),
        ]
        if again_s:
            cells += [format_seconds(again_s[row.name])]
            cells += [f"{again_s[row.name] / row.measured_s:.3f}"]
        rows.append(tuple(cells))
    notes = [f"  {row.name}: {row.note}" for row in results.rows if row.note]
    notes += [f"  left out: {text}" for text in results.left_out]
    title = f"{results.device}, torch {results.torch_version}, {results.date}"
    return "\n".join([title, table(rows), *notes])


def run_all(
    plans: Mapping[str, Plan], device: torch.device, *, is_tiny: bool, until: float
) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """Return the rows of the plans, and the names of those for which no time was left."""
    rows, left_out = [], []
    for name, plan in plans.items():
        if time.monotonic() > until:
            left_out.append(f"{name}: the time was over")
            continue
        rows.append(measure_plan(name, plan, device, is_tiny=is_tiny))
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
    return tuple(rows), tuple(left_out)


def main() -> None:
    """Measure the profile, run the plans, write both, and print the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_results"))
    parser.add_argument("--plans", type=Path, default=PLANS, help="folder of saved plans")
    parser.add_argument("--profile-budget", type=float, default=PROFILE_S, help="seconds")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args()
    begin = time.monotonic()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit(
            "no GPU here: this benchmark measures one CUDA device; use --tiny to test it on the CPU"
        )
    plans = {path.stem: Plan.load(path) for path in sorted(options.plans.glob("*.json"))}
    if not plans:
        raise SystemExit(
            f"no plans in {options.plans}: make them with python benchmarks/gpu/solve.py"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cpu" if options.tiny else "cuda:0")
    rows, left_out = run_all(plans, device, is_tiny=options.tiny, until=begin + ALL_S)
    results = Results(
        device="cpu" if options.tiny else torch.cuda.get_device_name(device),
        torch_version=torch.__version__,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        rows=rows,
        left_out=left_out,
    )
    (options.out / "results.json").write_text(codec.dumps(results) + "\n")
    print(table_of(results), flush=True)
    budget_s: float = options.profile_budget
    shapes: tuple[tuple[int, int, int], ...] = ()
    if not options.tiny:
        budget_s = min(budget_s, max(20.0, begin + ALL_S - time.monotonic()))
        shapes = GEMM_SHAPES
    profile = measure_device(device.type, budget_s=budget_s, with_links=False, gemm_shapes=shapes)
    save_profile(profile, options.out / "profile.json")
    print(f"profile in {options.out / 'profile.json'}, {time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
