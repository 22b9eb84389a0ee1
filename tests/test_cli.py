"""The command line: plans, explains and verifies; an error is one line and exit code 2."""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from autoplan import codec
from autoplan.checking_commands import VerifyResult
from autoplan.cli import app, main
from autoplan.plan import Plan
from autoplan.planning_commands import parse_pins

MODEL = """
import torch
from torch import nn

def chain():
    layers = [nn.Linear(32, 32) for _ in range(3)]
    model = nn.Sequential(*layers)
    return model, torch.randn(4, 32), lambda output: output.square().mean()
"""
SMALL = ("--cluster", "1x2:cpu", "--global-batch", "4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def autoplan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs the command line in this process as the console script does."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["autoplan", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        code = caught.value.code
        return Outcome(code=code if isinstance(code, int) else 0, out=printed.out, err=printed.err)

    return run


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "chain_model.py"
    path.write_text(MODEL)
    return f"{path}:chain"


@pytest.fixture(scope="module")
def gpt2_plan(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a plan of the preset gpt2 and what planning it printed."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    arguments = ["plan", "gpt2", "--seq", "128", "--cluster", "1x2:a100", "--global-batch", "4"]
    arguments += ["--pin", "tp=1,pp=1", "--pin", "microbatch_size=1", "--out", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return path, result.output


def one_line(outcome: Outcome) -> str:
    """Return the message of an error that is one line of ours and nothing else."""
    assert outcome.code == 2
    assert outcome.out == ""
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("autoplan: ")
    return lines[0]


def test_plan_of_a_preset_is_reported_and_written(gpt2_plan: tuple[Path, str]) -> None:
    path, printed = gpt2_plan
    plan = Plan.load(path)
    assert printed.startswith("Plan of gpt2 for 1x2:a100_sxm_80gb")
    assert (plan.mesh.dp, plan.mesh.tp, plan.mesh.pp) == (2, 1, 1)
    assert (plan.global_batch_size, plan.microbatch_size) == (4, 1)
    assert plan.mixed_precision == "bfloat16"
    assert f"written to {path}" in printed


def test_written_plan_is_explained_as_it_was_reported(
    gpt2_plan: tuple[Path, str], autoplan: Any
) -> None:
    path, printed = gpt2_plan
    explained = autoplan("explain", path, "--settings")
    assert explained.code == 0
    assert printed.split("\n\nwritten to")[0].strip() in explained.out
    assert "dp=2 tp=1 pp=1 zero=0 mbs=1 m=2: " in explained.out


def test_written_plan_is_verified_and_a_changed_one_is_not(
    gpt2_plan: tuple[Path, str], autoplan: Any, tmp_path: Path
) -> None:
    path, _ = gpt2_plan
    result = tmp_path / "result.json"
    good = autoplan(
        "verify", path, "--model", "gpt2", "--seq", 128, "--no-numerics", "--json", result
    )
    assert good.code == 0
    assert good.out.startswith("every rule holds\n")
    found = codec.loads(VerifyResult, result.read_text())
    assert found.is_sound
    assert [run.rank for run in found.dry_runs] == [0]
    assert abs(found.dry_runs[0].error) < 0.1
    document = json.loads(path.read_text())
    document["global_batch_size"] += 1
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(document))
    bad = autoplan("verify", changed, "--model", "gpt2", "--seq", 128, "--cluster", "1x4:a100")
    assert bad.code == 1
    assert "V1: dp=2 tp=1 pp=1 is 2 devices" in bad.out
    assert "V2: " in bad.out


def test_plan_of_a_function_obeys_memory_and_pins(
    model_file: str, autoplan: Any, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    done = autoplan(
        "plan", model_file, *SMALL, "--device-memory", "3GiB", "--pin", "tp=2", "--out", path
    )
    assert done.code == 0
    plan = Plan.load(path)
    assert plan.mesh.tp == 2
    assert plan.predicted.capacity_bytes == 3 * 2**30
    assert "Plan of Sequential for 1x2:cpu" in done.out


def test_pins_are_read_as_names_and_whole_numbers() -> None:
    assert parse_pins(["tp=4,pp=2", "recompute=none"]) == {"tp": 4, "pp": 2, "recompute": "none"}
    assert parse_pins([]) == {}


PLAN = ("plan", "{model}")
FEW = ("--global-batch", "4")
WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown GPU": (
        (*PLAN, *FEW, "--cluster", "1x2:z100"),
        "no profile named 'z100': did you mean",
    ),
    "no cluster": (
        (*PLAN, *FEW, "--cluster", "two"),
        "'two' is not a cluster: write '4x8:a100_sxm_80gb'",
    ),
    "malformed profile": (
        (*PLAN, *FEW, "--cluster", "2:{folder}/profile.json"),
        "memory: unknown key; allowed are",
    ),
    "malformed cluster": (
        (*PLAN, *FEW, "--cluster", "{folder}/cluster.yaml"),
        "memory: unknown key; allowed are num_nodes",
    ),
    "missing cluster file": (
        (*PLAN, *FEW, "--cluster", "{folder}/no.yaml"),
        "cannot read the cluster file",
    ),
    "unknown pin": ((*PLAN, *SMALL, "--pin", "tpp=2"), "cannot pin 'tpp' (did you mean tp?)"),
    "pin without value": ((*PLAN, *SMALL, "--pin", "tp"), "write name=value"),
    "pin of a wrong value": ((*PLAN, *SMALL, "--pin", "tp=two"), "tp needs a whole number"),
    "pins without setting": (
        (*PLAN, "--cluster", "1x2:cpu", "--global-batch", "3", "--pin", "dp=2"),
        "no setting is possible for 2 devices, global batch 3 and dp=2",
    ),
    "no size": ((*PLAN, *SMALL, "--device-memory", "much"), "'much' is not a size"),
    "unknown dtype": (
        (*PLAN, *SMALL, "--dtype", "float3"),
        "--dtype 'float3'; allowed are auto, float32",
    ),
    "unknown optimizer": (
        (*PLAN, *SMALL, "--optimizer", "Adamm"),
        "optimizer 'Adamm' is not known; known are adamw",
    ),
    "unknown model": (("plan", "gpt5", *SMALL), "'gpt5' is no model: write a preset (gpt2"),
    "missing model file": (("plan", "{folder}/no.py:model", *SMALL), "no.py does not exist"),
    "missing function": (("plan", "{model}s", *SMALL), "has no function chains; it has chain"),
    "missing config": (("plan", "{folder}/no.json", *SMALL), "no.json does not exist"),
    "missing plan": (("explain", "{folder}/no.json"), "No such file"),
    "plan with a wrong key": (
        ("explain", "{folder}/plan.json"),
        "plan.modell: unknown key; allowed are schema_version, model",
    ),
    "plan that is no JSON": (("explain", "{folder}/cluster.yaml"), "plan: not JSON"),
    "plan to run is missing": (("run", "{folder}/no.json", "--model", "gpt2"), "No such file"),
    "no steps": (
        ("run", "{folder}/plan.json", "--model", "gpt2", "--steps", "0"),
        "--steps 0: must be at least 1",
    ),
}


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "plan.json").write_text('{"schema_version": 1, "modell": "x"}')
    (folder / "profile.json").write_text('{"schema_version": 1, "name": "x", "memory": 3}')
    (folder / "cluster.yaml").write_text("gpus_per_node: 2\ndevice: cpu\nmemory: 3GiB\n")
    return folder


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_one_line_and_exit_code_2(
    name: str, model_file: str, wrong_files: Path, autoplan: Any
) -> None:
    arguments, message = WRONG[name]
    given = [text.format(model=model_file, folder=wrong_files) for text in arguments]
    assert message in one_line(autoplan(*given))


def test_a_model_that_does_not_fit_is_answered_with_remedies(
    model_file: str, autoplan: Any, tmp_path: Path
) -> None:
    cluster = tmp_path / "tiny.yaml"
    cluster.write_text("gpus_per_node: 2\ndevice: cpu\ndevice_memory: 10KiB\nreserve: 0\n")
    outcome = autoplan("plan", model_file, "--cluster", cluster, "--global-batch", 4)
    assert (outcome.code, outcome.out) == (2, "")
    first, conflict, *others = outcome.err.strip().splitlines()
    assert first.startswith("autoplan: no plan fits: ")
    assert conflict.startswith("conflict: 10.00 KiB a device alone, ")
    assert others
    assert all(line.startswith("remedy: ") for line in others)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here, it would be measured")
def test_profile_of_a_gpu_that_is_not_here_says_what_is(autoplan: Any) -> None:
    message = one_line(autoplan("profile", "--gpu", "a100"))
    assert "a100" in message
    assert "cpu" in message


def test_preset_without_transformers_names_the_install_line(
    autoplan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def hidden(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", hidden)
    message = one_line(autoplan("plan", "gpt2", *SMALL))
    assert "gpt2 needs the transformers package" in message
    assert "pip install" in message


def test_command_line_works_as_a_process(model_file: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autoplan", "plan", model_file, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Plan of Sequential for 1x2:cpu")
    wrong = subprocess.run(
        [*command, "--pin", "tp=3"], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
    assert wrong.stderr.startswith("autoplan: no setting is possible")


def test_plans_are_compared_side_by_side(autoplan: Any, model_file: str, tmp_path: Path) -> None:
    paths = [tmp_path / "wide.json", tmp_path / "deep.json"]
    for path, pin in zip(paths, ("pp=1", "pp=2"), strict=True):
        done = autoplan("plan", model_file, *SMALL, "--pin", pin, "--out", path)
        assert done.code == 0, done.err
    plans = [Plan.load(path) for path in paths]
    printed = autoplan("compare", *paths).out
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()[1:]]
    facts = {title: cells for title, *cells in rows}
    assert facts["mesh"] == [str(plan.mesh) for plan in plans]
    times = [plan.predicted.step_time_s for plan in plans]
    assert facts["of the first's step time"] == ["1.000", f"{times[1] / times[0]:.3f}"]
    assert "time: compute" in facts
    missing = autoplan("compare", paths[0], tmp_path / "none.json")
    assert missing.code == 2
    assert "none.json" in missing.err


def test_ctrl_c_before_the_first_plan_says_so(
    autoplan: Any, model_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoplan.planner.search_settings", interrupted)
    outcome = autoplan("plan", model_file, *SMALL)
    assert outcome.code == 130
    assert outcome.err.strip() == "autoplan: stopped before any plan that fits was found"
