"""The shortest use: plan a small GPT for two processes, read why, and train it.

    torchrun --nproc-per-node 2 examples/ex1_quickstart.py

Every process runs this script. The first one searches and hands its plan to the others.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import autoplan
from autoplan.processes import run_worker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn


def main() -> None:
    """Plan, report, and train for five steps."""
    torch.manual_seed(0)  # every process must build the same weights
    config = GPTConfig(num_layers=2, width=64, max_tokens=32)
    model = GPT(config)  # written for one device; nothing in it knows of parallelism
    batch = batch_like(config, rows=8, tokens=32)  # all rows of one step, over all processes

    # Two CPU processes of 3 MiB each, which is too little for either to train the model alone.
    cluster = autoplan.Cluster.parse("2:cpu").with_memory("3MiB", reserve_bytes=0)
    plan = autoplan.optimize(model, cluster, batch, loss_fn=loss_fn)
    if dist.get_rank() == 0:
        print(plan.report())  # what was decided, what it needs, and what simpler ways would need

    module = plan.parallelize(model)  # this process's part; parameters keep their names
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for step in range(5):
        loss = module.train_step(module.shard_batch(batch))  # forward, backward, all communication
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    run_worker(main)  # runs main and leaves the process group in good order
