"""Written scripts give the losses of the plan without autoplan; configs say what they lack."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import autoplan
from autoplan.capturer import capture
from autoplan.errors import EmitError
from autoplan.framework_configs import FORMATS, framework_config
from autoplan.launcher import launch
from autoplan.models import LoadedModel
from autoplan.plan import Plan
from autoplan.script_writer import write_script
from autoplan.training import train
from tests.distributed import run_workers
from tests.end_to_end.standalone_model import build
from tests.layouts import sliced_ties
from tests.models_for_tests import GatedNet, mean_square
from tests.numerics import program_of
from tests.plans import hand_plan

STEPS = 3
MODEL = str(Path(__file__).parent / "standalone_model.py")
PLANS: list[dict[str, Any]] = [
    {"pp": 2, "tp": 2, "schedule": "1f1b", "microbatch_size": 1, "recompute": "selective"},
    {
        "dp": 2,
        "pp": 2,
        "virtual_stages": 2,
        "zero_stage": 3,
        "microbatch_size": 1,
        "recompute": "full",
    },
]


def loaded() -> LoadedModel:
    """Return the model as `autoplan run` loads it."""
    model, batch, loss = build()
    return LoadedModel(model=model, batch=batch, loss_fn=loss, name="Model")


def plan_of(options: dict[str, Any]) -> Plan:
    """Return a plan for four processes; over tp the tied weight lies in slices."""
    model, batch, loss = build()
    plan = autoplan.optimize(model, "4:cpu", batch, loss_fn=loss, compare=False, **options)
    if plan.mesh.tp == 1:
        return plan
    program = capture(model, batch, loss, microbatch_size=plan.microbatch_size)
    sliced = sliced_ties(program, plan.mesh.tp)
    placements = {
        name: replace(sliced[own.block], borders=own.borders, leaving=own.leaving)
        if own.block in sliced
        else own
        for name, own in plan.placements.items()
    }
    return replace(plan, placements=placements)


def _losses(rank: int, plan: Plan) -> list[float]:
    return list(train(plan, loaded(), STEPS).losses)


@pytest.mark.parametrize("options", PLANS, ids=str)
def test_a_written_script_gives_the_losses_of_the_plan(
    options: dict[str, Any], tmp_path: Path
) -> None:
    plan = plan_of(options)
    script = tmp_path / "train.py"
    script.write_text(write_script(plan, loaded(), f"{MODEL}:build"))
    assert plan.mesh.tp == 1 or "one parameter, in slices S" in script.read_text()
    assert not re.search(r"^\s*(import|from) autoplan", script.read_text(), re.MULTILINE)
    env = {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    arguments = [str(script), "--steps", str(STEPS)]
    printed = launch(arguments, 4, timeout_s=150, env=env, echo=False).output
    found = [float(x) for x in re.findall(r"step +\d+ +loss ([\d.]+)", printed)]
    for losses in run_workers(_losses, 4, plan):
        assert found == pytest.approx(losses, rel=1e-6)


def test_a_script_names_the_decisions_and_what_uses_each_function() -> None:
    text = write_script(plan_of(PLANS[0]), loaded(), f"{MODEL}:build")
    assert "# tensor parallel: " in text
    assert re.search(r"# recompute .*: keeps its inputs and \d+ results", text)
    assert re.search(r"# used by blocks\.2 \(call \d, stage 1\)", text)
    assert "# kept for the backward" in text
    compile(text, "train.py", "exec")


def test_an_opaque_module_is_refused_by_name() -> None:
    import torch

    model, x = GatedNet(), torch.randn(4, 8)
    plan = autoplan.estimate(model, "2:cpu", x, loss_fn=mean_square, microbatch_size=2).plan
    given = LoadedModel(model=model, batch=x, loss_fn=mean_square, name="GatedNet")
    with pytest.raises(EmitError, match="a script cannot name it"):
        write_script(plan, given, f"{MODEL}:build")


def test_configs_tell_replicas_offload_and_unequal_stages() -> None:
    program = program_of("gpt")
    hybrid = hand_plan(program, "GPT", dp=4, dp_replicate=2, zero_stage=3, offload="optimizer")
    texts = {name: framework_config(hybrid, name) for name in FORMATS}
    assert "data_parallel_replicate_degree = 2" in texts["torchtitan"].text
    assert "data_parallel_shard_degree = 2" in texts["torchtitan"].text
    assert "enable_cpu_offload = true" in texts["torchtitan"].text
    zero = json.loads(texts["deepspeed"].text)["zero_optimization"]
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    accelerate = yaml.safe_load(texts["accelerate"].text)
    assert accelerate["fsdp_config"]["fsdp_offload_params"]
    assert accelerate["parallelism_config"]["parallelism_config_dp_shard_size"] == 2
    for name in ("megatron", "deepspeed"):
        assert any("2 replicas of the shards" in line for line in texts[name].missing)
    assert any("in host memory" in line for line in texts["megatron"].missing)
    blocks = [index for index, call in enumerate(program.calls) if call.fqn]
    uneven = hand_plan(program, "GPT", pp=2, num_microbatches=2, first_calls=[blocks[3]])
    assert '--pipeline-model-parallel-layout "Ettt|tL"' in framework_config(uneven, "megatron").text


def test_configs_of_other_frameworks_say_what_they_cannot_express() -> None:
    plan = plan_of(PLANS[0])
    texts = {name: framework_config(plan, name) for name in FORMATS}
    assert all(config.missing for config in texts.values())
    assert "tensor_parallel_degree = 2" in texts["torchtitan"].text
    assert "--pipeline-model-parallel-size 2" in texts["megatron"].text
    deepspeed = json.loads(texts["deepspeed"].text)
    assert deepspeed["gradient_accumulation_steps"] == plan.num_microbatches
    assert yaml.safe_load(texts["accelerate"].text)["num_processes"] == 4
    assert any("pp=2" in line for line in texts["accelerate"].missing)
    assert any("0.2.2" in line for line in texts["torchtitan"].missing)
    sharded = framework_config(hand_plan(program_of("gpt"), "GPT", dp=2, zero_stage=3), "megatron")
    assert {"--use-megatron-fsdp \\", "--ckpt-format fsdp_dtensor \\"} <= set(
        sharded.text.splitlines()
    )
    assert any("CUDA_DEVICE_MAX_CONNECTIONS is not 1" in line for line in sharded.missing)
    with pytest.raises(ValueError, match="allowed are torchtitan, megatron"):
        framework_config(plan, "alpa")
