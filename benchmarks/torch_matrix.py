"""Whether what autoplan emits computes the same on every supported torch.

    python benchmarks/torch_matrix.py [--versions 2.11.0 2.12.0 2.13.0] [--folder DIR] [--tests ...]

For each version a virtual environment is made in the folder (kept, and used again), this repository
is installed into it beside that torch, and the tests of numerics are run: each emitted module
equals the single device, in float64, on gloo processes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.report import table

__all__ = ["outcome_of", "run_version"]

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.11.0", "2.12.0", "2.13.0")
TESTS = (
    "tests/test_equality.py",
    "tests/test_emitter.py",
    "tests/test_checkpoints.py",
    "tests/test_evaluation.py",
    "tests/test_layout_numerics.py",
)
_SUMMARY = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def run_version(version: str, folder: Path, tests: Sequence[str]) -> tuple[str, ...]:
    """Return version, passed, failed and the first failure, of the tests under a torch."""
    home = folder / f"torch-{version}"
    python = home / "bin" / "python"
    if not python.exists():
        made = _run([sys.executable, "-m", "venv", str(home)])
        if made.returncode:
            return version, "-", "-", _last_line(made)
    installed = _run(
        [str(python), "-m", "pip", "install", "-q", f"torch=={version}", "-e", f"{ROOT}[hf,dev]"]
    )
    if installed.returncode:
        return version, "-", "-", _last_line(installed)
    done = _run([str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests])
    return version, *outcome_of(done.stdout)


def outcome_of(printed: str) -> tuple[str, str, str]:
    """Return how many tests passed and failed, and the first failure, from pytest's output."""
    counts = {kind.rstrip("s"): number for number, kind in _SUMMARY.findall(printed)}
    failed = int(counts.get("failed", 0)) + int(counts.get("error", 0))
    found = re.search(r"^(?:FAILED|ERROR) (.*)$", printed, re.MULTILINE)
    return counts.get("passed", "0"), str(failed), found.group(1)[:100] if found else ""


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1][:100] if lines else f"exit code {done.returncode}"


def main() -> None:
    """Print the table; exit code 1 where a test failed or a version could not be had."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS))
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = [run_version(version, options.folder, options.tests) for version in options.versions]
    print(table([("torch", "passed", "failed", "first failure"), *rows]))
    if any(row[2] != "0" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
