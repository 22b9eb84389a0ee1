"""The examples and the command line, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autoplan
from autoplan.launcher import launch
from tests.end_to_end.worker import gpt

ROOT = Path(__file__).parent.parent.parent
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_the_quickstart_reports_and_trains() -> None:
    script = str(ROOT / "examples" / "ex1_quickstart.py")
    printed = launch([script], 2, timeout_s=100, env=ENV, echo=False).output
    losses = [float(x) for x in re.findall(r"step \d  loss ([\d.]+)", printed)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    assert "predicted" in printed


def test_run_prints_losses_and_peaks(tmp_path: Path) -> None:
    model, batch, loss = gpt()
    plan = autoplan.estimate(model, "2:cpu", batch, loss_fn=loss, zero_stage=3).plan
    plan.save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "autoplan.cli", "run", str(tmp_path / "plan.json")]
    command += ["--model", f"{Path(__file__).parent / 'worker.py'}:gpt", "--steps", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env={**os.environ, **ENV}
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"step +\d  loss \d", done.stdout)) == 2
    found = re.findall(r"^ +\d +\d .*iB .*iB +([+-][\d.]+)%$", done.stdout, re.MULTILINE)
    assert len(found) == 2, done.stdout
    # Both without the reserve, which is larger than this model.
    assert all(abs(float(error)) < 10 for error in found), done.stdout


@pytest.mark.slow
def test_the_elephant_ends_as_predicted() -> None:
    script = str(ROOT / "examples" / "ex2_elephant.py")
    done = subprocess.run(
        [sys.executable, script, "--steps", "4"],
        capture_output=True,
        text=True,
        timeout=580,
        env={**os.environ, **ENV},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "all as predicted" in done.stdout
