"""How much slower an emitted program is than one written by hand on torch for the same layout.

    python benchmarks/emission_overhead.py [--json FILE] [--pairs N] [--only TEXT]

A small GPT is trained on gloo processes of this machine, by the module that autoplan emits and by
the program of `benchmarks/hand_written.py`, one step of each in turn: both have the same weights,
batches, optimizer and losses, which is checked. A step is everything from the batch to zeroed
gradients. `wall` is the median over pairs of emitted / written by hand of the slowest rank, and
`processor` that of the seconds of processor time of all ranks, which does not count waiting and is
the steadier of the two where processes share cores. The claim is a ratio of at most 1.03.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.capturer import capture
from autoplan.emitter import parallelize
from autoplan.report import table
from benchmarks.hand_written import PROGRAMS, Batch, Step, make_optimizer
from benchmarks.worker_pool import WorkerPool
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.layouts import megatron
from tests.plans import hand_plan

__all__ = ["CASES", "Case", "Row", "compare"]

TARGET = 1.03
WARM_STEPS = 3
LOSS_TOLERANCE = 2e-5
CONFIG = GPTConfig(
    vocab_size=1024, num_layers=4, num_heads=4, width=256, is_qkv_fused=False, is_head_tied=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout: the plan of it, and the program of it by name in `PROGRAMS`."""

    name: str
    world_size: int
    rows: int
    options: Mapping[str, Any] = field(default_factory=dict)
    first_call: int | None = None


CASES = (
    Case(name="DDP", world_size=2, rows=4, options={"dp": 2}),
    Case(name="FSDP2", world_size=2, rows=4, options={"dp": 2, "zero_stage": 3}),
    Case(name="FSDP2 x TP", world_size=4, rows=4, options={"dp": 2, "tp": 2, "zero_stage": 3}),
    Case(name="1F1B", world_size=2, rows=2, options={"pp": 2, "num_microbatches": 4}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One step of each program on one rank, in seconds."""

    hand_wall_s: float
    hand_processor_s: float
    emitted_wall_s: float
    emitted_processor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of a layout: medians over pairs of steps."""

    name: str
    world_size: int
    hand_s: float
    emitted_s: float
    wall_ratio: float
    processor_ratio: float


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def _emitted(case: Case) -> Step:
    """Return a step of the module that autoplan emits."""
    example = batch_like(CONFIG, case.rows, CONFIG.max_tokens)
    model = _model()
    program = capture(model, example, loss_fn, microbatch_size=case.rows)
    options = dict(case.options)
    if "tp" in options:
        options["layouts"] = megatron(program, options["tp"])
    if "pp" in options:
        middle = f"blocks.{CONFIG.num_layers // 2}"
        options["first_calls"] = [next(i for i, c in enumerate(program.calls) if c.fqn == middle)]
    plan = hand_plan(program, "GPT", **options)
    module = parallelize(plan, model, example, loss_fn, device="cpu")
    optimizer = make_optimizer(module.parameters())

    def step(batch: Batch) -> torch.Tensor:
        mean = module.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return step


def _timed(step: Step, batch: Batch) -> tuple[float, float, float]:
    """Return loss, seconds and seconds of processor time of a step that all ranks begin at once."""
    dist.barrier()
    begin, begin_processor = time.perf_counter(), time.process_time()
    loss = step(batch)
    ends = time.perf_counter() - begin, time.process_time() - begin_processor
    return float(loss), *ends


def measure(rank: int, task: tuple[Case, int]) -> list[Sample]:
    """Run pairs of steps on this rank, each program first in every other pair.

    Raises:
        AssertionError: the losses differ, so the two programs do not compute the same.
    """
    case, pairs = task
    hand, emitted = PROGRAMS[case.name](_model()), _emitted(case)
    dp = int(case.options.get("dp", 1))
    per_rank = case.rows * int(case.options.get("num_microbatches", 1))
    first = rank // int(case.options.get("tp", 1)) % dp * per_rank
    samples = []
    for index in range(WARM_STEPS + pairs):
        whole = batch_like(CONFIG, per_rank * dp, CONFIG.max_tokens, seed=index)
        batch = {"input_ids": whole["input_ids"][first : first + per_rank]}
        order = [hand, emitted] if index % 2 == 0 else [emitted, hand]
        by_step = {id(step): _timed(step, batch) for step in order}
        a, b = by_step[id(hand)], by_step[id(emitted)]
        assert abs(a[0] - b[0]) <= LOSS_TOLERANCE * abs(a[0]), (case.name, index, a[0], b[0])
        if index >= WARM_STEPS:
            samples.append(
                Sample(
                    hand_wall_s=a[1],
                    hand_processor_s=a[2],
                    emitted_wall_s=b[1],
                    emitted_processor_s=b[2],
                )
            )
    return samples


def row_of(case: Case, by_rank: Sequence[Sequence[Sample]]) -> Row:
    """Return the medians over pairs of what all ranks measured."""
    pairs = list(zip(*by_rank, strict=True))
    hand = [max(s.hand_wall_s for s in pair) for pair in pairs]
    emitted = [max(s.emitted_wall_s for s in pair) for pair in pairs]
    processor = [
        sum(s.emitted_processor_s for s in pair) / sum(s.hand_processor_s for s in pair)
        for pair in pairs
    ]
    return Row(
        name=case.name,
        world_size=case.world_size,
        hand_s=statistics.median(hand),
        emitted_s=statistics.median(emitted),
        wall_ratio=statistics.median(e / h for e, h in zip(emitted, hand, strict=True)),
        processor_ratio=statistics.median(processor),
    )


def compare(cases: Sequence[Case], pairs: int) -> list[Row]:
    """Measure every case on processes of its own."""
    rows = []
    for case in cases:
        with WorkerPool(measure, case.world_size, timeout_s=600.0) as pool:
            rows.append(row_of(case, pool.run((case, pairs))))
    return rows


def _text(rows: Sequence[Row]) -> str:
    lines = [("layout", "processes", "by hand", "emitted", "wall", "processor")]
    for row in rows:
        seconds = (f"{row.hand_s * 1e3:.0f} ms", f"{row.emitted_s * 1e3:.0f} ms")
        ratios = (f"{row.wall_ratio:.3f}", f"{row.processor_ratio:.3f}")
        lines.append((row.name, str(row.world_size), *seconds, *ratios))
    return table(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps of each layout")
    parser.add_argument("--only", default="", help="only layouts whose name has this text")
    options = parser.parse_args()
    chosen = [case for case in CASES if options.only.lower() in case.name.lower()]
    if not chosen or options.pairs < 1:
        parser.error(f"--only is of {', '.join(c.name for c in CASES)}, --pairs at least 1")
    rows = compare(chosen, options.pairs)
    print(_text(rows))
    print(f"torch {torch.__version__}, target {TARGET:.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
