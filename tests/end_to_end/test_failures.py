"""A rank that fails ends the launch soon and whole, with its error.

Plans for other models, other numbers of processes and other batches: see `tests/test_emitter.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from autoplan.errors import EmitError
from autoplan.launcher import is_running, launch
from tests.end_to_end.worker import gpt

ROOT = Path(__file__).parent.parent.parent
WORKER = str(Path(__file__).parent / "worker.py")


def run(folder: Path, *arguments: str, nproc: int = 2) -> str:
    """Run the worker and return what rank 0 printed; its processes note their numbers."""
    env = {"PIDS": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return launch([WORKER, *arguments], nproc, timeout_s=180, env=env, echo=False).output


def alive(folder: Path) -> list[int]:
    """Return the workers that still run."""
    pids = [int(path.read_text()) for path in folder.iterdir() if path.name.isdigit()]
    assert pids
    return [pid for pid in pids if is_running(pid)]


def test_a_plan_searched_on_rank_0_is_run_by_every_rank(tmp_path: Path) -> None:
    printed = run(tmp_path, "work")
    model, batch, loss = gpt()
    expected = float(loss(model(batch["input_ids"]), batch).detach())
    (line,) = [line for line in printed.splitlines() if line.startswith("step 0")]
    assert float(line.split()[-1]) == pytest.approx(expected, rel=1e-5)
    assert "step 2" in printed


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 failed first:(.|\n)*ArithmeticError: told to fail"),
        ("kill", r"rank 1 was ended by SIGKILL"),
        ("stop", r"rank 0 failed first:(.|\n)*in train_step(.|\n)*Timed out"),
    ],
)
def test_a_rank_that_ends_or_hangs_ends_the_launch(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(EmitError, match=message):  # not that the launch took too long
        run(tmp_path, how)
    assert alive(tmp_path) == []
