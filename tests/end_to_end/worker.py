"""A worker that plans, parallelizes and trains under torchrun, and fails where it is told to.

    worker.py HOW

HOW is `work`, or what rank 1 does in its second forward: `raise`, `kill` (itself) or `stop`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autoplan
from autoplan.processes import run_worker
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn

CONFIG = GPTConfig(vocab_size=64, num_layers=2, width=32, num_heads=4)


def gpt() -> tuple[GPT, Any, Any]:
    """Return the model, its batch and its loss."""
    torch.manual_seed(0)
    return GPT(CONFIG), batch_like(CONFIG, 4, 16), loss_fn


def _fail(how: str) -> None:
    if how == "raise":
        raise ArithmeticError("told to fail")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def main() -> None:
    """Run three steps and print their losses."""
    how, rank = sys.argv[1], int(os.environ["RANK"])
    if "PIDS" in os.environ:
        Path(os.environ["PIDS"], str(rank)).write_text(str(os.getpid()))
    model, batch, loss = gpt()
    plan = autoplan.optimize(
        model, "2:cpu", batch, loss_fn=loss, pp=2, microbatch_size=2, compare=False
    )
    module = plan.parallelize(model, timeout_s=20)
    for step in range(3):
        if step == 1 and rank == 1 and how != "work":
            root = module.__dict__["_root"]
            root.register_forward_pre_hook(lambda *_: _fail(how))
        value = module.train_step(module.shard_batch(batch))
        if dist.get_rank() == 0:
            print(f"step {step} loss {float(value):.9f}", flush=True)


if __name__ == "__main__":
    run_worker(main)
