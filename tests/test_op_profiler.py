"""The ops of a model are measured each once, kept, gone on with, and used by later searches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.cluster import Cluster
from autoplan.errors import ProfileError
from autoplan.op_profiler import Candidate, candidates_of, measure_candidates
from autoplan.op_runner import OpCall, TensorSpec, measure_call
from autoplan.profiles.op_times import CACHE_VARIABLE, MeasuredOp, OpTimesFile, measured_ops
from autoplan.times import Timer
from autoplan.tracer import trace
from autoplan.units import parse_seconds
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.models_for_tests import mean_square

CONFIG = GPTConfig(vocab_size=64, num_layers=2, width=32, num_heads=4)


@torch.library.custom_op("profiled::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _scale_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient * 2.0, None


scale.register_autograd(_scale_backward)


class Own(nn.Module):
    """Has an operator of its own, a write in place, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(6)
        self.up = nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids))
        out: torch.Tensor = torch.ops.profiled.scale(self.up(x).relu_(), 2.0)
        return out


def gpt_candidates(cluster: str = "2:cpu") -> list[Candidate]:
    batch = batch_like(CONFIG, 4, 16)
    return candidates_of(GPT(CONFIG), batch, loss_fn, Cluster.parse(cluster), global_batch_size=4)


def file_in(folder: Path, **changes: str) -> OpTimesFile:
    values = {"profile": "cpu", "device": "here", "driver": "", "torch": str(torch.__version__)}
    return OpTimesFile(path=folder / "op_times.sqlite", **{**values, **changes})


def test_candidates_are_the_ops_of_every_microbatch_and_sharding_each_once() -> None:
    candidates = gpt_candidates()
    signatures = [candidate.signature for candidate in candidates]
    assert len(set(signatures)) == len(signatures)
    for rows in (1, 2, 4):
        traced = trace(GPT(CONFIG), batch_like(CONFIG, 4, 16), loss_fn, microbatch_size=rows)
        whole = {op.signature for block in traced.blocks for op in block.ops if op.kind != "view"}
        assert whole <= set(signatures)
    sharded = [s for s in signatures if " tp 2: " in s and s.startswith("aten.linear")]
    assert any("-> P" in s for s in sharded)
    assert any("-> S(2)" in s for s in sharded)
    estimates = [candidate.estimate_s for candidate in candidates]
    assert estimates == sorted(estimates, reverse=True)


def test_local_sizes_of_a_sharded_product_are_those_of_one_rank() -> None:
    products = [c for c in gpt_candidates() if c.signature.endswith("tp 2: R* S(0) S(0) -> S(2)")]
    for candidate in products:
        whole = [int(n) for n in candidate.signature.split("float32[")[2].split("]")[0].split(",")]
        assert candidate.call.args[1].shape == (whole[0] // 2, whole[1])


def test_operators_of_the_user_are_measured(tmp_path: Path) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    ids = torch.randint(0, 50, (4, 6))
    candidates = candidates_of(Own(), ids, mean_square, Cluster.parse("1:cpu"))
    names = {candidate.signature.partition("(")[0] for candidate in candidates}
    assert {"profiled.scale.default", "aten.relu_.default", "aten.embedding.default"} <= names
    torch.set_rng_state(before)
    outcome = measure_candidates(candidates, torch.device("cpu"), file_in(tmp_path), budget_s=5.0)
    assert torch.equal(before, torch.get_rng_state())
    assert outcome.failed == {}
    assert (outcome.measured, outcome.known) == (len(candidates), 0)
    kept = file_in(tmp_path).read()
    own = next(times for text, times in kept.items() if text.startswith("profiled.scale"))
    assert own.forward_s > 0
    assert own.backward_s > 0


def test_a_run_that_ends_early_is_gone_on_with(tmp_path: Path) -> None:
    candidates, device = gpt_candidates("1:cpu")[:6], torch.device("cpu")
    told: list[tuple[int, int]] = []
    first = measure_candidates(candidates, device, file_in(tmp_path), budget_s=1e-6)
    assert (first.measured, first.known, first.left) == (1, 0, 5)
    second = measure_candidates(
        candidates, device, file_in(tmp_path), budget_s=5.0,
        progress=lambda _, done, total: told.append((done, total)),
    )  # fmt: skip
    assert (second.measured, second.known, second.left) == (5, 1, 0)
    assert told == [(n, 6) for n in range(1, 7)]
    assert set(file_in(tmp_path).read()) == {c.signature for c in candidates}
    assert file_in(tmp_path, driver="newer").read() == {}


def test_an_op_that_cannot_run_alone_says_why() -> None:
    spec = TensorSpec((2, 3), None, torch.float32, False)
    call = OpCall(target=torch.ops.aten.mm.default, args=(spec, spec), kwargs={})
    result = measure_call(call, torch.device("cpu"), 1e-3)
    assert isinstance(result, str)
    assert "RuntimeError" in result


def test_searches_use_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_like(CONFIG, 4, 16)
    cluster = Cluster.parse("1:cpu")

    def estimated() -> autoplan.Estimate:
        return autoplan.estimate(GPT(CONFIG), cluster, batch, loss_fn=loss_fn, microbatch_size=4)

    plain = estimated()
    traced = trace(GPT(CONFIG), batch, loss_fn, microbatch_size=4)
    file = file_in(tmp_path)
    ops = {op.signature for block in traced.blocks for op in block.ops if op.signature}
    for signature in ops:
        file.write(signature, MeasuredOp(forward_s=1.0, backward_s=2.0))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    every = [op for c in traced.calls for op in traced.blocks[c.block].ops]
    calls = [op for op in every if op.signature]
    found = estimated()
    # Views are not measured: of them there is what the host takes to dispatch them.
    host = cluster.device.host
    views_s = (len(every) - len(calls)) * (host.op_forward + host.op_backward)
    assert found.time_by_category["compute"] == pytest.approx(3.0 * len(calls) + views_s)
    assert plain.time_by_category["compute"] < 1.0
    lookups = found.plan.predicted.lookups
    # Every call of every op counts, forward and backward.
    assert lookups["measured"] == 2 * len(calls)
    assert f"{lookups['measured']} measured" in found.plan.report()
    what_if = replace(cluster, device=cluster.device.scaled(flops=2.0))
    op = calls[0]
    assert Timer(cluster, 1).traced_time(op, op.options[0]).total_s == 3.0
    assert Timer(what_if, 1).traced_time(op, op.options[0]).total_s < 1.0


def test_the_newest_measurement_of_a_profile_counts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    for driver, seconds in (("old", 1.0), ("new", 2.0)):
        file_in(tmp_path, driver=driver).write("x", MeasuredOp(forward_s=seconds, backward_s=0.0))
    found = measured_ops("cpu", str(torch.__version__))
    assert found["x"].forward_s == 2.0
    assert measured_ops("cpu", "1.0") == {}
    assert measured_ops("h100_sxm_80gb", str(torch.__version__)) == {}


def test_a_file_that_is_no_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "op_times.sqlite").write_text("hello" * 400)
    with pytest.raises(ProfileError, match=r"op_times.sqlite: .*remove the file"):
        file_in(tmp_path).read()


@pytest.mark.parametrize(
    ("text", "seconds"), [("120s", 120.0), ("2min", 120.0), ("1.5h", 5400.0), ("30", 30.0)]
)
def test_durations_are_read_with_their_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "-1s", "5 days", "s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_seconds(text)
