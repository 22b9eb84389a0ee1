"""Measuring this machine, with tiny budgets."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autoplan.cluster import Cluster
from autoplan.errors import ProfileError
from autoplan.profiles import load_profile
from autoplan.profiles.budgets import Deadline
from autoplan.profiles.measure import measure_device, profile_command
from autoplan.profiles.measure_links import measure_group
from autoplan.profiles.measure_numbers import measure_extras
from autoplan.profiles.measure_op_classes import measure_classes
from autoplan.profiles.origin import Origin
from autoplan.profiles.stopping import stoppable
from autoplan.profiles.tables import ATTENTION_DIRECTIONS, OP_CLASSES, OpClassTable
from autoplan.times import Tally, Timer
from autoplan.tracer import trace

HAS_CUDA = torch.cuda.is_available()


def a_minute() -> Deadline:
    return Deadline(ends_s=time.monotonic() + 60.0)


@pytest.mark.skipif(HAS_CUDA, reason="this machine has a CUDA device")
@pytest.mark.parametrize("name", ["a100", "h100_sxm_80gb", "cuda"])
def test_measuring_an_absent_gpu_says_what_is_there(name: str, tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"no CUDA device: this machine has cpu \(\d+ cores\)"):
        profile_command(name, tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_tiny_budget_gives_a_valid_profile_and_leaves_torch_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    random_before, threads_before = torch.get_rng_state(), torch.get_num_threads()
    told: list[float] = []
    path = profile_command(
        "cpu",
        tmp_path / "cpu.json",
        budget_s=1.0,
        with_links=False,
        progress=lambda message, fraction: told.append(fraction),
    )
    assert torch.equal(random_before, torch.get_rng_state())
    assert torch.get_num_threads() == threads_before
    assert told[-1] == 1.0
    assert all(0 <= fraction <= 1 for fraction in told)
    profile = load_profile(path)
    assert {t.direction for t in profile.gemm} == {"forward", "dgrad", "wgrad"}
    assert {t.dtype for t in profile.gemm} == {"float32", "bfloat16"}
    assert profile.optimizer_bytes_per_s is not None
    assert 0 < profile.gemm_time_s(256, 256, 256, dtype="float64").time_s < 1
    assert all(o.kind == "measured" and "1 thread" in o.device for o in profile.origins.values())


def test_shapes_of_a_model_are_measured_first() -> None:
    profile = measure_device("cpu", budget_s=0.5, with_links=False, gemm_shapes=((48, 96, 80),))
    assert profile.gemm_time_s(48, 96, 80, dtype="float32", direction="wgrad").how == "measured"


def test_collectives_between_two_processes_are_measured() -> None:
    found = measure_group(2, budget_s=1.0)  # over before the processes are there: the least
    by_name = {curve.collective: curve for curve in found.curves}
    assert [nbytes for nbytes, _ in by_name["all_reduce"].rows] == [2**12, 2**22]
    assert found.least_s > 0
    assert found.interference is not None
    assert found.interference >= 1.0
    names = ("sharded_block", "gather", "reduce", "pipeline_action")
    assert set(found.host) == {f"host.{name}.seconds" for name in names}
    assert all(0 < value < 1 for value in found.host.values())
    for curve in found.curves:
        assert curve.degree == 2
        assert all(time_s > 0 for _, time_s in curve.rows)


def test_failing_workers_are_a_profile_error() -> None:
    with pytest.raises(ProfileError, match="measuring collectives failed"):
        measure_group(2, budget_s=0.1, backend="smoke_signals")


def test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "new" / "cpu.json"
    told: list[str] = []

    def interrupt(message: str, fraction: float) -> None:
        told.append(message)
        if len(told) == 1:
            signal.raise_signal(signal.SIGINT)

    with stoppable() as stop:
        profile_command("cpu", file, budget_s=20.0, progress=interrupt)
    assert stop.is_asked
    few = load_profile(file)
    assert told[0] == "collectives of 2 processes"
    assert few.intra is None
    before = signal.getsignal(signal.SIGINT)
    with stoppable() as stop:
        profile_command("cpu", file, budget_s=0.5, with_links=False)
    assert not stop.is_asked
    assert signal.getsignal(signal.SIGINT) is before
    rows = {(t.dtype, t.direction): set(t.rows) for t in load_profile(file).gemm}
    for table in few.gemm:
        assert set(table.rows) <= rows[table.dtype, table.direction]


def test_a_second_ctrl_c_is_one_as_always() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        with stoppable() as stop:
            signal.raise_signal(signal.SIGINT)
            assert stop.is_asked
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_unknown_device_is_told_from_an_absent_one(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"'foo' is no device: write cpu, cuda .*a100_sxm_80gb"):
        profile_command("foo", tmp_path / "x.json")


def test_budget_must_be_positive() -> None:
    with pytest.raises(ValueError, match="budget_s and num_threads must be above 0"):
        measure_device("cpu", budget_s=0.0)


@pytest.mark.parametrize("module", ["autoplan.cluster", "autoplan.profiles"])
def test_planning_on_numbers_imports_neither_torch_nor_ortools(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'ortools', 'yaml'}} & set(sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "set()"


def test_measuring_code_never_imports_ortools() -> None:
    code = (
        "import sys, autoplan.profiles.measure, autoplan.profiles.measure_links\n"
        "print({'torch', 'ortools'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == "set()"


def test_a_second_run_goes_on_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    sizes = []
    for _ in range(2):
        profile_command("cpu", path, budget_s=0.4, with_links=False)
        profile = load_profile(path)
        sizes.append(
            sum(len(table.rows) for table in profile.gemm)
            + sum(len(table.rows) for table in profile.op_classes)
        )
        first = profile.gemm[0].rows
    assert sizes[0] < sizes[1]
    assert set(first) <= set(load_profile(path).gemm[0].rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_class_of_ops_can_be_measured_both_ways(dtype: str) -> None:
    tables = measure_classes(
        torch.device("cpu"), dtype, deadline=a_minute(), slice_s=1e-6,
        origin="measured", sizes=((8,), (16,)),
    )  # fmt: skip
    found = {(table.op_class, table.direction) for table in tables}
    assert found == {(name, way) for name in OP_CLASSES for way in ("forward", "backward")}
    assert all(table.rows[0][:2] == (8, 16) for table in tables)


def test_single_numbers_name_their_unit_and_origin() -> None:
    found = measure_extras(torch.device("cpu"), deadline=a_minute(), slice_s=1e-6)
    assert {"optimizer.adamw.fused.parameters_per_s", "context_bytes"} <= set(found)
    assert "host_copy.pageable.to_host.bytes_per_s" in found
    assert all(value > 0 and name.endswith(("_bytes", "_per_s")) for name, value in found.items())
    profile = measure_device("cpu", budget_s=0.3, with_links=False)
    assert profile.host.op_forward > 0
    assert profile.origin_by_field["measurements.host.region.seconds"] == "host"
    assert profile.measurements["context_bytes"] > 2**20
    assert profile.origin_by_field["measurements.context_bytes"] == "extras"


def test_tables_of_classes_price_the_ops_of_a_model() -> None:
    cluster = Cluster.parse("1:cpu")
    rows = tuple((count, width, 1e3) for count in (4, 4096) for width in (8, 4096))
    tables = tuple(
        OpClassTable(op_class="softmax", dtype="float32", direction=way, origin="x", rows=rows)
        for way in ATTENTION_DIRECTIONS
    )
    device = replace(
        cluster.device, op_classes=tables,
        origins={**cluster.device.origins, "x": Origin(kind="measured", text="made up")},
    )  # fmt: skip
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Softmax(-1))
    traced = trace(model, torch.randn(8, 16), lambda out: out.square().mean())
    (op,) = (op for b in traced.blocks for op in b.ops if op.target.startswith("aten.softmax"))
    tally = Tally()
    found = Timer(replace(cluster, device=device), 1, tally).traced_time(op, op.options[0])
    # The table's time has the launch in it; of the host's dispatch the rest comes on top.
    host, launched_s = device.host, device.launch_overhead_s
    table_s = 8 * 16 / 1e3
    assert 0 < launched_s < host.op_forward < host.op_backward
    assert found.forward_s == pytest.approx(table_s + host.op_forward - launched_s, rel=1e-9)
    assert found.backward_s == pytest.approx(table_s + host.op_backward - launched_s, rel=1e-9)
    assert tally.counts["interpolated"] == 2
