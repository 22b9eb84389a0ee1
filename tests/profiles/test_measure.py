"""Measuring this machine, with tiny budgets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoplan.errors import ProfileError
from autoplan.profiles import load_profile
from autoplan.profiles.measure import measure_device, profile_command
from autoplan.profiles.measure_links import measure_collectives

HAS_CUDA = torch.cuda.is_available()


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
    curves = measure_collectives(2, budget_s=1.0)
    by_name = {curve.collective: curve for curve in curves}
    assert {"all_reduce", "all_gather", "reduce_scatter", "send"} <= set(by_name)
    for curve in curves:
        assert curve.degree == 2
        assert all(time_s > 0 for _, time_s in curve.rows)


def test_failing_workers_are_a_profile_error() -> None:
    with pytest.raises(ProfileError, match="measuring collectives failed"):
        measure_collectives(2, budget_s=0.1, backend="smoke_signals")


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
