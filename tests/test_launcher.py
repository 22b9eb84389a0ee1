from __future__ import annotations

import time
from pathlib import Path

import pytest

from autoplan.errors import EmitError
from autoplan.launcher import is_running, launch

WORKER = """
import os, sys, time
rank = int(os.environ["RANK"])
open(os.environ["PIDS"] + f"/{rank}", "w").write(str(os.getpid()))
if sys.argv[1] == "hang":
    time.sleep(600)
import torch, torch.distributed as dist
from autoplan.processes import run_worker

def main():
    dist.init_process_group("gloo")
    if sys.argv[1] == "fail" and rank == 1:
        raise ValueError("told to fail")
    value = torch.ones(1)
    dist.all_reduce(value)
    print(f"sum {value.item():g}", flush=True)

run_worker(main)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


def _run(script: Path, what: str, timeout_s: float) -> str:
    folder = script.parent / "pids"
    folder.mkdir()
    root = str(Path(__file__).parent.parent)
    env = {"PIDS": str(folder), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return launch([str(script), what], 2, timeout_s=timeout_s, env=env, echo=False).output


def _alive(script: Path) -> list[int]:
    pids = [int(path.read_text()) for path in (script.parent / "pids").iterdir()]
    return [pid for pid in pids if is_running(pid)]


def test_a_launch_returns_what_rank_0_printed(script: Path) -> None:
    assert _run(script, "work", 60).count("sum 2") == 1
    assert _alive(script) == []


def test_the_first_failing_rank_is_named_with_its_traceback(script: Path) -> None:
    with pytest.raises(EmitError, match=r"rank 1 failed first:(.|\n)*told to fail"):
        _run(script, "fail", 60)
    assert _alive(script) == []


def test_a_hanging_launch_is_killed_and_leaves_no_process(script: Path) -> None:
    started = time.monotonic()
    with pytest.raises(EmitError, match="did not end in 10 s"):
        _run(script, "hang", 10)
    assert time.monotonic() - started < 30
    assert len(list((script.parent / "pids").iterdir())) == 2
    assert _alive(script) == []
