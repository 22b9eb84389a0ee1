"""Plans under autocast: the emitted module equals one device under autocast, in its memory too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.graph import Trace
from autoplan.plan import Plan, Recompute
from autoplan.tracer import trace
from autoplan.training import RankResult, train
from benchmarks.predicted_peaks import gpt as peak_gpt
from benchmarks.predicted_peaks import stage_peaks
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.distributed import run_workers
from tests.models_for_tests import mean_square

ROWS = 8
CONFIG = GPTConfig(vocab_size=64, num_layers=4, width=32, num_heads=4)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def estimated(world: int, **options: Any) -> Plan:
    batch = batch_like(CONFIG, ROWS, 16)
    estimate = autoplan.estimate(
        gpt(), f"{world}:cpu", batch, loss_fn=loss_fn, autocast=torch.bfloat16,
        microbatch_size=2, **options,
    )  # fmt: skip
    return estimate.plan


def selective(plan: Plan) -> Plan:
    """Return the plan with every block keeping one product and its attention."""
    result: Trace = trace(
        gpt(), batch_like(CONFIG, ROWS, 16), loss_fn, microbatch_size=2, autocast=torch.bfloat16
    )
    (block,) = (block for block in result.blocks if not block.is_glue)
    marked = [op.name for op in block.ops if op.may_mark and op.kind in ("gemm", "attention")]
    entry = Recompute(mode="selective", keep=tuple(marked[:2]))
    stages = tuple(
        replace(
            stage,
            blocks=tuple(
                replace(b, recompute="marked" if b.block == block.name else b.recompute)
                for b in stage.blocks
            ),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=stages, recompute={**plan.recompute, "marked": entry})


def _reference(rank: int) -> dict[str, torch.Tensor]:
    """Return the gradients of one device: four micro-batches, each under autocast.

    In a process of its own, whose one thread adds in the order of the ranks'.
    """
    model, batch = gpt(), batch_like(CONFIG, ROWS, 16)
    for first in range(0, ROWS, 2):
        part = {name: leaf[first : first + 2] for name, leaf in batch.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(model(part["input_ids"]), part)
        torch.autograd.backward(loss / 4)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _gradients(rank: int, plans: list[Plan]) -> list[dict[str, torch.Tensor]]:
    found = []
    for plan in plans:
        batch = batch_like(CONFIG, ROWS, 16)
        module = Plan.from_json(plan.to_json()).parallelize(gpt(), batch, loss_fn, device="cpu")
        for _ in range(2):
            for parameter in module.parameters():
                parameter.grad = None
            module.train_step(module.shard_batch(batch))
        found.append(module.full_gradients())
    return found


def test_emitted_modules_equal_one_device_under_autocast() -> None:
    sharded = estimated(2, dp=2, zero_stage=2, recompute="full")
    piped = estimated(2, pp=2)
    plans = {
        "ZeRO-2, recompute": sharded,
        "ZeRO-3, selective": selective(estimated(2, dp=2, zero_stage=3)),
        "pipeline": piped,
        "tensor parallel": estimated(2, tp=2),
    }
    found = run_workers(_gradients, 2, list(plans.values()))[0]
    (expected,) = run_workers(_reference, 1)
    tolerance = dict.fromkeys(plans, 1e-6) | {"tensor parallel": 0.05}  # adds in bfloat16
    problems = []
    for name, gradients in zip(plans, found, strict=True):
        for fqn, wanted in expected.items():
            scale = max(float(wanted.abs().max()), 1e-6)
            error = float((gradients[fqn] - wanted).abs().max()) / scale
            if not error <= tolerance[name]:
                problems.append(f"{name}: {fqn} is off by {error:.1e}")
    assert problems == []
    piped_gradients = found[list(plans).index("pipeline")]
    unequal = [n for n, g in expected.items() if not torch.equal(g, piped_gradients[n])]
    assert unequal == ["tokens.weight"]  # tied over the two stages: added in another order


def _train(rank: int, plan: Plan) -> RankResult:
    return train(plan, peak_gpt(plan.global_batch_size), 2)


def test_peaks_under_autocast_hold_the_copies_of_weights() -> None:
    loaded = peak_gpt(8)
    cluster = autoplan.Cluster.parse("2:cpu").with_memory("4GiB", reserve_bytes=0)
    plan = autoplan.estimate(
        loaded.model, cluster, loaded.batch, loss_fn=loss_fn, autocast=torch.bfloat16,
        microbatch_size=2, zero_stage=3, recompute="full",
    ).plan  # fmt: skip
    (measured,) = stage_peaks(run_workers(_train, 2, plan))
    (predicted,) = plan.predicted.peak_memory_bytes
    assert predicted == pytest.approx(measured, rel=0.05)


class Twice(nn.Module):
    """Reads its weight in two products."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(self.inner(x).tanh())
        return out


def test_copies_of_weights_are_kept_once_a_block_and_are_no_part_of_marks() -> None:
    result = trace(nn.Sequential(Twice()), torch.randn(4, 8), mean_square, autocast=torch.bfloat16)
    ops = [op for block in result.blocks for op in block.ops if op.kind == "gemm"]
    copies = {tensor.value for op in ops for tensor in op.saved if "__autocast" in tensor.value}
    assert len(ops) == 2
    assert sorted(cast.nbytes for op in ops for cast in op.casts) == [2 * 8, 2 * 8 * 8]
    assert ops[1].casts == ()
    assert len(copies) == 1
    assert [op.mark_bytes for op in ops] == [2 * 4 * 8] * 2
    assert all(op.cast_bytes > 0 for op in ops)


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({"autocast": torch.float16}, gpt, "GradScaler"),
        ({"autocast": torch.float32}, gpt, "takes None or torch.bfloat16"),
        ({"autocast": torch.bfloat16, "mixed_precision": "bfloat16"}, gpt, "leave out one"),
        ({"autocast": torch.bfloat16}, lambda: gpt().bfloat16(), "over float32 parameters"),
    ],
)
def test_combinations_that_cannot_be_right_are_refused(
    options: Any, model: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        autoplan.optimize(
            model(), "1:cpu", batch_like(CONFIG, ROWS, 16), loss_fn=loss_fn, **options
        )


def test_a_plan_says_that_it_runs_under_autocast() -> None:
    plan = estimated(1)
    assert plan.autocast == "bfloat16"
    assert "autocast to bfloat16" in plan.report()
    assert '"autocast": "bfloat16"' in plan.to_json()
