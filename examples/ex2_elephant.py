"""The elephant: plan a GPT that does not fit in any simple way, and train it on four processes.

    python examples/ex2_elephant.py [--steps N]

Device_Memory is so small that one device, ZeRO-3 alone and recompute alone all fail. The script
measures plain training on one process, searches for a plan, trains it under torchrun, and ends with
exit code 0 only if the losses agree to 1e-5, every measured peak is within Device_Memory and every
predicted peak is within 10 % of the measured one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console

import autoplan
from autoplan import codec
from autoplan.launcher import launch
from autoplan.meter import StorageMeter
from autoplan.plan import MEMORY_CATEGORIES, Plan
from autoplan.report import table
from autoplan.search.mesh import Progress
from autoplan.training import RankResult, global_batch, make_optimizer
from autoplan.units import format_bytes, format_seconds

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn

DEVICE_MEMORY = "30MiB"
RESERVE_BYTES = 512 * 1024  # stays free: gloo now and then lets go of a buffer late
NUM_PROCESSES = 4
GLOBAL_BATCH = 8
LOSS_TOLERANCE = 1e-5
PEAK_TOLERANCE = 0.10
ALONE = ("one device", "ZeRO-3", "one device, recompute all")

CONFIG = GPTConfig(
    vocab_size=2048, max_tokens=256, num_layers=8, num_heads=8, width=192, is_head_tied=True
)


def gpt() -> tuple[GPT, Any, Any]:
    """Return the model, its batch and its loss: what `autoplan plan FILE:gpt` asks for."""
    torch.manual_seed(0)
    return GPT(CONFIG), batch_like(CONFIG, GLOBAL_BATCH, CONFIG.max_tokens), loss_fn


def train_alone(steps: int) -> tuple[list[float], int]:
    """Return the losses and the measured peak of plain training on this one process."""
    model, batch, loss = gpt()
    optimizer = make_optimizer("AdamW", model.parameters())
    losses = []
    meter = StorageMeter()
    with meter:
        meter.baseline(model, optimizer)
        for step in range(steps):
            rows = global_batch(batch, GLOBAL_BATCH, step)
            value = loss(model(rows["input_ids"]), rows)
            value.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(value.detach()))
    return losses, meter.peak_bytes


def show_need(cluster: autoplan.Cluster, measured: int) -> None:
    """Print what plain training needs on one device, by category, and that it does not fit."""
    model, batch, loss = gpt()
    count = sum(p.numel() for p in model.parameters())
    alone = autoplan.Cluster.parse("1:cpu").with_memory(cluster.total_bytes, reserve_bytes=0)
    need = autoplan.estimate(model, alone, batch, loss_fn=loss, microbatch_size=GLOBAL_BATCH)
    print(f"1. Plain training of {count:,} parameters on one device, {GLOBAL_BATCH} rows")
    parts = need.memory_by_category[0]
    rows = [("category", "predicted")]
    rows += [(name, format_bytes(parts[name])) for name in MEMORY_CATEGORIES]
    rows += [("sum", format_bytes(need.peak_memory_bytes[0]))]
    print(table(rows))
    print(f"  measured peak {format_bytes(measured)}, Device_Memory ", end="")
    print(format_bytes(cluster.total_bytes), flush=True)


def search(cluster: autoplan.Cluster) -> Plan:
    """Return the plan, showing how the search goes."""
    model, batch, loss = gpt()
    console = Console(stderr=True)
    last = [""]

    def progress(state: Progress) -> None:
        best = "no plan yet" if state.objective is None else format_seconds(state.objective * 1e-9)
        line = f"  {state.num_settled} settings settled, {state.num_open} open, best {best}"
        if best != last[0]:
            console.print(line)
            last[0] = best

    print(f"\n2. Search over {cluster}")
    plan = autoplan.optimize(model, cluster, batch, loss_fn=loss, progress=progress)
    print(plan.report(), flush=True)
    return plan


def train_together(plan: Plan, folder: Path, steps: int) -> list[RankResult]:
    """Return what every rank measured of the plan, trained under torchrun."""
    plan.save(folder / "plan.json")
    script = f"{Path(__file__).resolve()}:gpt"
    arguments = ["-m", "autoplan.training", str(folder / "plan.json"), "--model", script]
    arguments += ["--steps", str(steps), "--results", str(folder)]
    launch(arguments, NUM_PROCESSES, timeout_s=900, echo=False)
    files = [folder / f"rank{rank}.json" for rank in range(NUM_PROCESSES)]
    return [codec.loads(RankResult, file.read_text()) for file in files]


def compare(plan: Plan, alone: list[float], results: list[RankResult]) -> list[str]:
    """Print losses and peaks side by side; return what is not as it must be."""
    together = results[0].losses
    print(f"\n3. Training on {NUM_PROCESSES} processes, {len(alone)} steps")
    rows = [("step", "one device", "plan", "relative difference")]
    wrong = []
    for step, (a, b) in enumerate(zip(alone, together, strict=True)):
        difference = abs(a - b) / abs(a)
        rows.append((str(step), f"{a:.7f}", f"{b:.7f}", f"{difference:.1e}"))
        if difference > LOSS_TOLERANCE:
            wrong.append(f"step {step}: losses differ by {difference:.1e}")
    print(table(rows))
    capacity = plan.predicted.capacity_bytes
    peaks = [("rank", "stage", "measured peak", "predicted peak", "error", "Device_Memory")]
    for rank, result in enumerate(results):
        parts = plan.predicted.memory_by_category[result.stage]
        predicted = plan.predicted.peak_memory_bytes[result.stage] - parts["reserve"]
        error = predicted / result.peak_bytes - 1
        sizes = (format_bytes(result.peak_bytes), format_bytes(predicted))
        peaks.append(
            (str(rank), str(result.stage), *sizes, f"{error:+.1%}", format_bytes(capacity))
        )
        if result.peak_bytes > capacity:
            wrong.append(f"rank {rank} needs more than Device_Memory")
        if abs(error) > PEAK_TOLERANCE:
            wrong.append(f"rank {rank}: the predicted peak is {error:+.1%} off")
    print(table(peaks))
    return wrong


def main() -> int:
    """Run the three parts; return the exit code."""
    parser = argparse.ArgumentParser(description="Plan and train a GPT that does not fit.")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    cluster = autoplan.Cluster.parse(f"{NUM_PROCESSES}:cpu").with_memory(
        DEVICE_MEMORY, reserve_bytes=RESERVE_BYTES
    )
    losses, measured = train_alone(steps)
    show_need(cluster, measured)
    plan = search(cluster)
    wrong = []
    if measured <= cluster.total_bytes:
        wrong.append("plain training fits on one device")
    for row in plan.simpler:
        if row.name in ALONE and row.fits:
            wrong.append(f"{row.name} fits by itself")
    with tempfile.TemporaryDirectory() as folder:
        results = train_together(plan, Path(folder), steps)
    wrong += compare(plan, losses, results)
    for line in wrong:
        print(f"WRONG: {line}")
    print("\nall as predicted" if not wrong else "\nnot as predicted")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
