"""Train a plan on this rank for some steps: the loop of `autoplan run`, and what it measures.

Run under torchrun as `python -m autoplan.training PLAN --model MODEL --steps N`; needs no solver.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from autoplan import codec
from autoplan.batches import BatchDims
from autoplan.checkpoints import is_saved
from autoplan.errors import EmitError
from autoplan.meshes import stage_of_rank
from autoplan.meter import StorageMeter
from autoplan.models import LoadedModel, load_model
from autoplan.plan import Plan
from autoplan.processes import run_worker
from autoplan.runtime import ParallelModule

__all__ = ["RankResult", "main", "make_optimizer", "train"]

_LEARNING_RATE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank measured.

    Attributes:
        losses: global mean loss of every step.
        peak_bytes: most bytes of tensors alive on this rank during the steps.
        stage: pipeline stage of this rank.
    """

    losses: tuple[float, ...]
    peak_bytes: int
    stage: int


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer that a plan's memory was counted for.

    Raises:
        ValueError: the plan names one that this loop cannot make.
    """
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=_LEARNING_RATE),
        "adam": lambda p: torch.optim.Adam(p, lr=_LEARNING_RATE),
        "sgd": lambda p: torch.optim.SGD(p, lr=_LEARNING_RATE),
        "sgd momentum": lambda p: torch.optim.SGD(p, lr=_LEARNING_RATE, momentum=0.9),
    }
    if name.lower() not in makers:
        raise ValueError(f"optimizer {name!r}: this loop can make {', '.join(makers)}")
    return makers[name.lower()](parameters)


def global_batch(batch: Any, rows: int, step: int, dims: BatchDims | None = None) -> Any:
    """Return a batch of `rows` rows of the form of `batch`; step 0 repeats its rows as they are.

    Later steps roll the rows and the tokens, so that steps differ and every rank makes the same.
    `dims` tells the batch dimensions; None: dimension 0 of every tensor.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    told = iter(dims if dims else [0 if x.dim() else None for x in tensors])

    def grow(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or (dim := next(told)) is None:
            return leaf
        along = max((d for d in range(leaf.dim()) if d != dim), default=dim)
        times = -(-rows // leaf.shape[dim])
        whole = torch.cat([leaf.roll(i, dims=along) for i in range(times)], dim)
        return whole.narrow(dim, 0, rows).roll(step, dims=along)

    return pytree.tree_map(grow, batch)


def train(
    plan: Plan,
    loaded: LoadedModel,
    steps: int,
    *,
    on_step: Callable[[int, float], None] | None = None,
    checkpoint: Path | None = None,
    save_every: int | None = None,
    compile: str | None = None,
) -> RankResult:
    """Run optimizer steps of a plan on this rank and return its losses and peak.

    Args:
        plan: what to run.
        loaded: the model with weights, and a batch whose form is repeated.
        steps: at least 1; with a checkpoint, those that it has done already count.
        on_step: called with the step and its loss, on every rank.
        checkpoint: folder to resume from, if it holds a checkpoint, and to save to.
        save_every: steps between saves; None: only after the last.
        compile: see `autoplan.emitter.parallelize`.
    """
    model: nn.Module = loaded.model
    module = plan.parallelize(model, loaded.batch, loaded.loss_fn, compile=compile)
    batch, name = loaded.batch, plan.optimizer
    dims = BatchDims(plan.batch_dims) if plan.batch_dims else None
    del model, loaded
    optimizer = make_optimizer(name, module.parameters())
    losses = []
    first = _resume(module, optimizer, checkpoint)
    meter = StorageMeter()
    with meter:
        meter.baseline(module, optimizer)
        for step in range(first, steps):
            whole = global_batch(batch, plan.global_batch_size, step, dims)
            share = module.shard_batch(whole)
            loss = float(module.train_step(share))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss)
            if on_step is not None:
                on_step(step, loss)
            done = step + 1
            is_due = done == steps or (save_every is not None and done % save_every == 0)
            if checkpoint is not None and is_due:
                module.save_checkpoint(checkpoint, optimizer, extra={"steps": done})
    rank = dist.get_rank() if dist.is_initialized() else 0
    return RankResult(
        losses=tuple(losses),
        peak_bytes=meter.peak_bytes,
        stage=stage_of_rank(rank, plan.mesh),
    )


def _resume(
    module: ParallelModule, optimizer: torch.optim.Optimizer, checkpoint: Path | None
) -> int:
    """Load a checkpoint if there is one; returns how many steps it has done."""
    if checkpoint is None or not is_saved(checkpoint):
        return 0
    extra = module.load_checkpoint(checkpoint, optimizer)
    if not isinstance(extra, dict) or "steps" not in extra:
        raise EmitError(f"{checkpoint} was not saved by this loop: it does not say its step")
    return int(extra["steps"])


def main(arguments: list[str] | None = None) -> None:
    """Train a saved plan under torchrun; rank 0 prints losses, every rank may write its result."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seq", type=int, default=None)
    parser.add_argument("--results", type=Path, default=None, help="folder for one JSON per rank")
    parser.add_argument("--checkpoint", type=Path, default=None)
    parser.add_argument("--save-every", type=int, default=None)
    parser.add_argument("--compile", default=None)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    loaded = load_model(
        options.model, seq=options.seq, dtype=torch.float32, device="cpu", batch_rows=2
    )
    plan = Plan.load(options.plan)
    rank = _rank()

    def show(step: int, loss: float) -> None:
        if rank == 0:
            print(f"step {step:4d}  loss {loss:.6f}", flush=True)

    result = train(
        plan,
        loaded,
        options.steps,
        on_step=show,
        checkpoint=options.checkpoint,
        save_every=options.save_every,
        compile=options.compile,
    )
    if options.results is not None:
        (options.results / f"rank{rank}.json").write_text(codec.dumps(result))


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


if __name__ == "__main__":
    run_worker(main)
