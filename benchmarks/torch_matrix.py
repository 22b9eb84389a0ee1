"""Whether what autoplan emits computes the same on every supported torch.

    python benchmarks/torch_matrix.py [--versions 2.11.0 2.12.0 2.13.0] [--folder DIR] [--tests ...]
        [--use VERSION=PATH ...]

For each version a virtual environment is made in the folder (kept, and used again), this repository
is installed into it beside that torch, and the tests of numerics are run: each emitted module
equals the single device, in float64, on gloo processes. Nothing is installed for a version that is
there already: `--use` names a python that has it, or a folder of packages (`pip install --target`)
that is put before those of the python that runs this.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.report import table

__all__ = ["found_at", "outcome_of", "run_version"]

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.11.0", "2.12.0", "2.13.0")
TESTS = (
    "tests/test_equality.py",
    "tests/test_emitter.py",
    "tests/test_checkpoints.py",
    "tests/test_evaluation.py",
    "tests/test_layout_numerics.py",
    "tests/test_lowering.py",
    "tests/test_compiled.py",
    "tests/test_split_backward.py",
    "tests/test_batch_shapes.py",
    "tests/test_gradient_memory.py",
)
_SUMMARY = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def run_version(
    version: str, folder: Path, tests: Sequence[str], found: Path | None = None
) -> tuple[str, ...]:
    """Return version, passed, failed and the first failure, of the tests under a torch.

    Args:
        version: of torch.
        folder: where environments are made.
        tests: files or names of tests.
        found: a python or a folder of packages that has it; None makes an environment.
    """
    python, environment = (sys.executable, {}) if found is None else found_at(found)
    if found is None:
        home = folder / f"torch-{version}"
        python = str(home / "bin" / "python")
        folder.mkdir(parents=True, exist_ok=True)
        if not Path(python).exists():
            made = _run([sys.executable, "-m", "venv", str(home)])
            if made.returncode:
                return version, "-", "-", _last_line(made)
        wanted = ["-q", f"torch=={version}", "-e", f"{ROOT}[hf,dev]"]
        installed = _run([python, "-m", "pip", "install", *wanted])
        if installed.returncode:
            return version, "-", "-", _last_line(installed)
    told = _run([python, "-c", "import torch; print(torch.__version__)"], environment)
    if told.returncode or told.stdout.strip().partition("+")[0] != version:
        return version, "-", "-", f"{found or python} has {_last_line(told)}"
    # Each file in a process of its own: in a build for CUDA tracing starts threads of autograd, and
    # a test after it in the same process could fork no workers.
    printed = []
    for one in tests:
        command = [python, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", one]
        printed.append(_told_of(one, _run(command, environment)))
        print(version, one, *outcome_of(printed[-1]), file=sys.stderr, flush=True)
    return version, *outcome_of("\n".join(printed))


def found_at(path: Path) -> tuple[str, Mapping[str, str]]:
    """Return the python to run, and variables to set, for a python or a folder of packages."""
    if not path.exists():
        raise SystemExit(f"{path} is not there: name a python, or a folder that holds torch")
    if not path.is_dir():
        return str(path), {"PYTHONPATH": str(ROOT)}
    return sys.executable, {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}


def outcome_of(printed: str) -> tuple[str, str, str]:
    """Return how many tests passed and failed, and the first failure, from pytest's outputs."""
    counts: Counter[str] = Counter()
    for number, kind in _SUMMARY.findall(printed):
        counts[kind.rstrip("s")] += int(number)
    failed = counts["failed"] + counts["error"]
    found = re.search(r"^(?:FAILED|ERROR) (.*)$", printed, re.MULTILINE)
    return str(counts["passed"]), str(failed), found.group(1)[:100] if found else ""


def _told_of(file: str, done: subprocess.CompletedProcess[str]) -> str:
    """Return what pytest printed about a file, with an error where it ended without a summary."""
    if done.returncode in (0, 1) and _SUMMARY.search(done.stdout):
        return done.stdout
    last = (done.stderr or done.stdout).strip().splitlines()
    ended = f"ERROR {file} - exit code {done.returncode}: {last[-1] if last else 'nothing printed'}"
    return f"{done.stdout}\n{ended}\n1 error"


def _run(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = ((done.stderr if done.returncode else "") or done.stdout).strip().splitlines()
    return lines[-1][:100] if lines else f"exit code {done.returncode}"


def main() -> None:
    """Print the table; exit code 1 where a test failed or a version could not be had."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--versions", nargs="+", default=list(VERSIONS))
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    parser.add_argument("--use", nargs="+", default=[], metavar="VERSION=PATH")
    options = parser.parse_args()
    found = {one.partition("=")[0]: Path(one.partition("=")[2]) for one in options.use}
    if unknown := set(found) - set(options.versions):
        parser.error(f"--use names {', '.join(sorted(unknown))}, which --versions does not")
    rows = [
        run_version(version, options.folder, options.tests, found.get(version))
        for version in options.versions
    ]
    print(table([("torch", "passed", "failed", "first failure"), *rows]))
    if any(row[2] != "0" for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
