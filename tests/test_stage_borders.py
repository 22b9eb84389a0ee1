"""What crosses a stage's borders counts once, whoever holds it: executed peaks are predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from autoplan.entries import Entry
from autoplan.estimating import estimate
from autoplan.graph import Trace
from autoplan.memory import held_gradient_bytes, held_send_after, receive_buffer_bytes
from autoplan.meter import StorageMeter
from autoplan.models import LoadedModel
from autoplan.plan import Plan
from autoplan.planner import make_planner
from autoplan.setting_problem import _transfer_copies, _unkept_bytes, pipeline_problem
from autoplan.settings import Setting
from autoplan.stage_borders import borders_of, crossing_places
from autoplan.stage_bytes import part_bytes, stage_blocks
from autoplan.stage_walk import PartBytes
from autoplan.tracer import trace
from autoplan.training import global_batch, make_optimizer
from autoplan.training_job import TrainingJob
from benchmarks.executed_plans import load
from tests.distributed import run_workers
from tests.models_for_tests import mean_square

STEPS = 5
TOLERANCE = 0.005


def layers(width_in: int, width: int) -> nn.Sequential:
    conv = nn.Conv2d(width_in, width, 3, padding=1)
    return nn.Sequential(conv, nn.GroupNorm(2, width), nn.SiLU())


class UNet(nn.Module):
    """Two levels; the first skip enters in the middle of the way up, kept by no first block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = layers(3, width), layers(width, 2 * width)
        self.mid = layers(2 * width, 2 * width)
        self.up2, self.up1 = layers(4 * width, width), layers(2 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(functional.avg_pool2d(first, 2))
        y = self.mid(functional.avg_pool2d(second, 2))
        y = self.up2(torch.cat([functional.interpolate(y, scale_factor=2), second], 1))
        y = self.up1(torch.cat([functional.interpolate(y, scale_factor=2), first], 1))
        out: torch.Tensor = self.out(y)
        return out


def loaded(name: str) -> LoadedModel:
    if name != "unet":
        return load(name)
    torch.manual_seed(0)
    batch = torch.randn(8, 3, 32, 32)
    return LoadedModel(model=UNet(), batch=batch, loss_fn=mean_square, name="UNet")


def planned(name: str, pp: int, num_microbatches: int, **options: Any) -> Plan:
    own = loaded(name)
    return estimate(
        own.model,
        f"1x{pp}:cpu",
        own.batch,
        loss_fn=own.loss_fn,
        pp=pp,
        microbatch_size=8 // num_microbatches,
        **options,
    ).plan


def executed_peak(rank: int, name: str, plan: Plan) -> int:
    """Return the least peak of some steps after the first, which makes the optimizer's states."""
    own = loaded(name)
    module = plan.parallelize(own.model, own.batch, own.loss_fn, device="cpu")
    optimizer = make_optimizer(plan.optimizer, module.parameters())
    share = module.shard_batch(global_batch(own.batch, plan.global_batch_size, 0))
    peaks = []
    with StorageMeter() as meter:
        meter.baseline(module, optimizer, pytree.tree_leaves(share))
        for _ in range(STEPS):
            dist.barrier()
            meter.reset_peak()
            module.train_step(share)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            peaks.append(meter.peak_bytes)
    return min(peaks[1:])


CASES = [
    *((name, 2, m, {}) for name in ("gpt", "cnn", "unet") for m in (4, 8)),
    ("unet", 2, 4, {"recompute": "full"}),
    ("cnn", 2, 4, {"recompute": "full"}),
    ("unet", 2, 4, {"schedule": "gpipe"}),
]


@pytest.mark.parametrize(("name", "pp", "num_microbatches", "options"), CASES)
def test_executed_peaks_of_stages_are_the_predicted_ones(
    name: str, pp: int, num_microbatches: int, options: dict[str, Any]
) -> None:
    plan = planned(name, pp, num_microbatches, **options)
    executed = run_workers(executed_peak, pp, name, plan)
    predicted = [plan.predicted.tensor_peak_bytes(stage) for stage in range(pp)]
    assert predicted == pytest.approx(executed, rel=TOLERANCE)


def test_a_stage_that_only_hands_a_skip_on_is_not_predicted_too_low() -> None:
    plan = planned("unet", 3, 8)
    executed = run_workers(executed_peak, 3, "unet", plan)
    for stage, peak in enumerate(executed):
        assert -TOLERANCE <= plan.predicted.tensor_peak_bytes(stage) / peak - 1 < 0.02


@pytest.fixture(scope="module")
def skips() -> Trace:
    return trace(UNet(), torch.randn(1, 3, 32, 32), mean_square, microbatch_size=1)


def place(skips: Trace, fqn: str) -> int:
    return [call.fqn for call in skips.calls].index(fqn)


def test_a_skip_that_a_stage_only_hands_on_lies_in_its_receive_buffer(skips: Trace) -> None:
    """Bytes by hand: 16 x 32 x 32, 32 x 16 x 16 and 32 x 8 x 8 floats, pooled before the cut."""
    first, second, middle = 16 * 32 * 32 * 4, 32 * 16 * 16 * 4, 32 * 8 * 8 * 4
    mid = place(skips, "mid")
    borders = borders_of(skips, range(mid, mid + 1))
    assert sorted(borders.entering.values()) == sorted([first, second, middle])
    assert sorted(borders.leaving.values()) == sorted([first, second, middle])
    assert borders.handed_bytes == first + second
    assert borders.returning == first + second + middle


def test_what_a_stage_keeps_of_its_borders_is_told_by_name(skips: Trace) -> None:
    mid = place(skips, "mid")
    borders = borders_of(skips, range(mid))
    (largest,) = (n for n, b in borders.leaving.items() if b == max(borders.leaving.values()))
    assert borders.kept_bytes({largest: 10, "another": 20}) == 10
    assert borders.kept_bytes({largest: 1 << 30}) == borders.leaving[largest]
    assert not borders.entering
    assert borders.returning == 0


def test_the_borders_of_every_stage_are_what_crosses_its_cuts(skips: Trace) -> None:
    count = len(skips.calls)
    for start in range(count):
        for end in range(start + 1, count + 1):
            borders = borders_of(skips, range(start, end))
            before = skips.crossing_bytes[start - 1] if start > 0 else 0
            after = skips.crossing_bytes[end - 1] if end < count else 0
            assert sum(borders.entering.values()) == before
            assert sum(borders.leaving.values()) == after


def test_stages_are_alike_where_the_same_places_make_and_read_what_crosses(skips: Trace) -> None:
    gpt = loaded("gpt")
    chain = trace(gpt.model, gpt.batch, gpt.loss_fn, microbatch_size=1)
    assert crossing_places(chain, range(2, 3)) == crossing_places(chain, range(3, 4))
    count = len(skips.calls)
    for start in range(1, count - 1):
        borders = borders_of(skips, range(start, start + 1))
        entering, leaving = crossing_places(skips, range(start, start + 1))
        assert sum(nbytes for nbytes, _ in entering) == sum(borders.entering.values())
        assert sum(nbytes for nbytes, _ in leaving) == sum(borders.leaving.values())
        handed = [nbytes for nbytes, reads in entering if not reads]
        assert sum(handed) <= sum(nbytes for nbytes, place in leaving if place < 0)
    assert any(
        not reads
        for start in range(1, count - 1)
        for _, reads in crossing_places(skips, range(start, start + 1))[0]
    )


@pytest.mark.parametrize("name", ["gpt", "cnn", "unet"])
@pytest.mark.parametrize(("pp", "schedule"), [(2, "1f1b"), (3, "1f1b"), (2, "gpipe")])
def test_the_search_counts_no_less_at_borders_than_the_walk(
    name: str, pp: int, schedule: str
) -> None:
    """Beside what blocks keep, which both count; for every stage that can be cut."""
    own = loaded(name)
    pins = {"dp": 1, "tp": 1, "pp": pp, "microbatch_size": 1, "schedule": schedule}
    job = TrainingJob(own.model, f"1x{pp}:cpu", own.batch, loss_fn=own.loss_fn)
    planner = make_planner(job, pins=pins)
    (setting,) = planner.settings()
    pricer = planner.pricer(1)
    per_call = pipeline_problem(planner, setting).per_call
    unkept = _unkept_bytes(pricer, setting, per_call, False)
    count, crossing = len(per_call), max(pricer.trace.crossing_bytes)
    for which, (stage, start) in product((0, -1), product(range(pp), range(count))):
        live = setting.live()[stage]
        for end in range(start + 1, count + 1):
            calls = range(start, end)
            if (stage == 0) != (start == 0) or (stage == pp - 1) != (end == count):
                continue
            decisions = [per_call[call][which] for call in calls]
            blocks = stage_blocks(pricer, calls, decisions, setting)
            part = part_bytes(pricer, setting, stage, [calls] * pp, decisions)
            sent = part.leaving - part.handed
            counted = receive_buffer_bytes([part], setting, stage) + 2 * part.returning
            counted += sent if held_send_after(setting, stage) else 0
            counted += live * (sent - sum(block.border_bytes for block in blocks))
            bound = crossing * _transfer_copies(setting, stage, live)
            assert counted <= bound + (unkept * live if stage > 0 else 0)


def test_the_gradient_of_a_part_of_a_larger_tensor_is_sent_without_it() -> None:
    value = torch.ones(1, 4, 8, requires_grad=True)
    whole = torch.ones(1, 8, 8)
    part = whole.narrow(1, 0, 4)
    assert part.is_contiguous()
    Entry.apply(value).backward(part)  # type: ignore[no-untyped-call]
    assert value.grad is not None
    assert value.grad.untyped_storage().nbytes() == value.nbytes
    torch.testing.assert_close(value.grad, part)


def test_the_gradient_of_a_whole_tensor_is_sent_without_a_copy() -> None:
    gradient = torch.ones(1, 4, 8)
    sent = Entry.backward(None, gradient)
    assert sent.data_ptr() == gradient.data_ptr()


def test_the_gradient_sent_before_lies_beside_a_backward_under_1f1b() -> None:
    setting = Setting(
        dp=1,
        tp=1,
        pp=2,
        zero_stage=0,
        microbatch_size=1,
        num_microbatches=4,
        schedule="1f1b",
        virtual_stages=1,
    )
    parts = (PartBytes(num_blocks=1, entering=3, returning=2),)
    assert held_gradient_bytes(parts, setting) == 2
    assert held_gradient_bytes(parts, replace(setting, schedule="gpipe")) == 2
    assert held_gradient_bytes(parts, replace(setting, schedule="interleaved")) == 0


def test_a_saved_plan_from_before_borders_had_names_still_loads() -> None:
    document = json.loads(planned("cnn", 2, 4).to_json())
    for stage in document["costs"]["stages"]:
        del stage["handed_bytes"], stage["returning_bytes"]
    for block in document["costs"]["blocks"].values():
        del block["bytes"]["border_bytes"], block["bytes"]["carried_bytes"]
    old = Plan.from_json(json.dumps(document))
    assert max(old.timeline().peak_bytes()) > 0
