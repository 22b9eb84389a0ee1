"""Every benchmark starts as a file, from any folder, and says what it measures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = sorted(
    path for path in BENCHMARKS.rglob("*.py") if 'if __name__ == "__main__"' in path.read_text()
)

ASK_FOR_HELP = """
import contextlib, io, runpy, sys

for script in sys.argv[1:]:
    for name in [n for n in sys.modules if n.split(".")[0] in ("benchmarks", "tests", "examples")]:
        del sys.modules[name]
    paths, sys.argv = list(sys.path), [script, "--help"]
    sys.path.insert(0, script.rpartition("/")[0])
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
    finally:
        sys.path[:] = paths
    assert "usage:" in printed.getvalue(), f"{script} does not answer --help"
"""


def test_there_are_benchmarks() -> None:
    assert {"trace_coverage", "search_speed", "equality_draws"} <= {p.stem for p in SCRIPTS}


@pytest.mark.timeout(300)
def test_every_benchmark_answers_help_from_any_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK_FOR_HELP, *map(str, SCRIPTS)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
