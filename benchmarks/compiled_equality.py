"""Whether plans whose blocks `torch.compile` compiles equal the single device, in float64.

    python benchmarks/compiled_equality.py [--backend inductor]

Runs a GPT under ZeRO-3 with recomputation, tensor parallelism and a pipeline on two gloo processes.
Inductor on a CPU needs a C++ compiler, and minutes. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import unittest.mock
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.emitter import parallelize
from autoplan.plan import Plan, Recompute
from autoplan.report import table
from tests.distributed import run_workers
from tests.layouts import megatron
from tests.numerics import build, compare, global_batch, program_of, reference
from tests.plans import hand_plan

__all__ = ["compiled_error", "plans"]

_MODEL = "gpt"
_TIMEOUT_S = 900.0


def plans() -> dict[str, Plan]:
    """Return the plans, each for two processes."""
    program = program_of(_MODEL)
    full = Recompute(mode="full")
    return {
        "ZeRO-3, recompute all": hand_plan(program, "GPT", dp=2, zero_stage=3, recompute=full),
        "tensor parallel": hand_plan(program, "GPT", tp=2, layouts=megatron(program, 2)),
        "pipeline": hand_plan(program, "GPT", pp=2, num_microbatches=2),
    }


def compiled_error(rank: int, plan: Plan, backend: str) -> tuple[float, list[str]]:
    """Return the relative error of the loss on this rank, and the gradients that differ."""
    model, loss_fn = build(_MODEL)
    with unittest.mock.patch("autoplan.recapture.capture", return_value=program_of(_MODEL)):
        module = parallelize(plan, model, global_batch(2), loss_fn, device="cpu", compile=backend)
    batch = global_batch(plan.global_batch_size)
    loss = float(module.train_step(module.shard_batch(batch)))
    expected, gradients = reference(_MODEL, plan.global_batch_size)
    return abs(loss / float(expected) - 1), compare(module.full_gradients(), gradients)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    options = parser.parse_args()
    if options.backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        sys.exit("inductor compiles C++ for a CPU, and there is no g++ or clang++: not run")
    rows = [("plan", "loss error", "gradients")]
    for name, plan in plans().items():
        found = run_workers(compiled_error, 2, plan, options.backend, timeout_s=_TIMEOUT_S)
        wrong = [text for _, texts in found for text in texts]
        error = max(loss for loss, _ in found)
        rows.append((name, f"{error:.0e}", wrong[0] if wrong else "equal to 1e-9"))
        print(table([rows[0], rows[-1]]), flush=True)
        if wrong or error > 1e-9:
            sys.exit(1)


if __name__ == "__main__":
    main()
