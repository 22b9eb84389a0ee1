"""Seconds of the host: read from a profile, priced where it runs the kernels and beside devices."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from autoplan import sharders
from autoplan.cluster import Cluster
from autoplan.estimating import estimate
from autoplan.graph import Trace
from autoplan.profiles import load_profile
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.host import HostSeconds
from autoplan.profiles.origin import Origin
from autoplan.resident import REDUCED_TOGETHER_BYTES
from autoplan.settings import Setting
from autoplan.stage_costs import GroupBytes
from autoplan.step_costs import (
    INTERFERENCE,
    data_parallel_times,
    interference,
)
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.small_traces import workload_of

CONFIG = GPTConfig(vocab_size=64, max_tokens=8, num_layers=2, num_heads=2, width=16)
TRACES: dict[str, dict[int, Trace]] = {}
SOURCE = Origin(kind="assumed", text="of a test")


def with_host(name: str, **seconds: float) -> DeviceProfile:
    numbers = {f"host.{key}.seconds": value for key, value in seconds.items()}
    return load_profile(name).with_measurements(numbers, "host", SOURCE)


def priced(device: DeviceProfile, **options: Any) -> Any:
    """Return the price; all devices of a kind share the traces of the model."""
    cluster = Cluster.from_device(device, gpus_per_node=4).with_memory("1GiB", reserve_bytes=0)
    traces = TRACES.setdefault(device.name, {}) if options.pop("has_plan", None) is None else None
    return estimate(
        GPT(CONFIG), cluster, batch_like(CONFIG, 8, 8), loss_fn=loss_fn, traces=traces, **options
    )


def test_a_profile_gives_what_was_measured_of_the_host() -> None:
    shipped = load_profile("cpu")
    device = with_host("cpu", op_forward=1e-5, gather=2e-4)
    assert device.host == replace(shipped.host, op_forward=1e-5, gather=2e-4)
    assert device.origins[device.origin_by_field["measurements.host.gather.seconds"]] == SOURCE
    assert load_profile("h100").host == HostSeconds()
    assert with_host("h100", gather=2e-4).host == HostSeconds(gather=2e-4)


def test_the_shipped_cpu_profile_has_all_of_the_host_as_measured() -> None:
    device = load_profile("cpu")
    for field in fields(HostSeconds):
        assert 1e-6 < getattr(device.host, field.name) < 1e-2, field.name
        origin = device.origins[device.origin_by_field[f"measurements.host.{field.name}.seconds"]]
        assert (origin.kind, origin.torch_version[:4], origin.device) == (
            "measured", "2.13", device.description,
        )  # fmt: skip


def without_host() -> DeviceProfile:
    """Return the cpu profile with nothing of the host."""
    device = load_profile("cpu")
    return replace(
        device,
        measurements={k: v for k, v in device.measurements.items() if not k.startswith("host.")},
        origin_by_field={k: v for k, v in device.origin_by_field.items() if ".host." not in k},
    )


@pytest.mark.parametrize(
    ("number", "options"),
    [
        ("op_forward", {}),
        ("op_backward", {}),
        ("region", {"recompute": "full"}),
        ("optimizer_tensor", {}),
        ("sharded_block", {"zero_stage": 2}),
        ("gather", {"zero_stage": 3}),
        ("reduce", {"zero_stage": 1}),
        ("pipeline_action", {"pp": 2, "zero_stage": 1}),
    ],
)
def test_every_number_makes_the_steps_longer_that_have_it(
    number: str, options: dict[str, Any]
) -> None:
    without = priced(without_host(), **options)
    numbers = {f"host.{number}.seconds": 1e-3}
    found = priced(without_host().with_measurements(numbers, "host", SOURCE), **options)
    assert found.step_time_s > without.step_time_s


@pytest.mark.parametrize("options", [{"zero_stage": 3, "recompute": "full"}, {"pp": 4}])
def test_a_simulated_step_has_the_host_too(options: dict[str, Any]) -> None:
    names = ("op_forward", "op_backward", "region", "sharded_block", "gather", "reduce")
    host = dict.fromkeys((*names, "optimizer_tensor", "pipeline_action"), 1e-3)
    plan = priced(with_host("cpu", **host), has_plan=True, **options).plan
    simulated_s = plan.timeline().step_time_s
    if "pp" not in options:
        assert simulated_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    without = priced(load_profile("cpu"), **options).step_time_s
    assert simulated_s > 2 * without


def test_more_microbatches_cost_the_host_as_many_times() -> None:
    host = {"op_forward": 1e-2, "op_backward": 1e-2}
    few, many = (priced(with_host("cpu", **host), dp=4, microbatch_size=size) for size in (2, 1))
    assert many.step_time_s / few.step_time_s == pytest.approx(2.0, rel=0.1)


def test_beside_a_device_a_block_takes_the_longer_of_host_and_device() -> None:
    device = load_profile("a100_sxm_80gb")
    alone = priced(device).step_time_s
    quick = priced(with_host("a100_sxm_80gb", op_forward=1e-9, op_backward=1e-9))
    assert quick.step_time_s == alone
    seconds = [
        priced(with_host("a100_sxm_80gb", op_forward=s, op_backward=s)).step_time_s
        for s in (1e-3, 2e-3)
    ]
    assert seconds[1] / seconds[0] == pytest.approx(2.0, rel=0.02)


def test_a_measured_interference_takes_the_place_of_the_published_one() -> None:
    link = load_profile("a100_sxm_80gb").intra
    assert link is not None
    assert interference(link) == INTERFERENCE
    sources = {**link.origin_by_field, "interference": "latency"}
    assert interference(replace(link, interference=1.5, origin_by_field=sources)) == 1.5
    with pytest.raises(ValueError, match="interference: must be at least 1"):
        replace(link, interference=0.9, origin_by_field=sources)


def test_small_gradients_are_priced_as_they_are_reduced_together() -> None:
    assert REDUCED_TOGETHER_BYTES == sharders._TOGETHER_BYTES
    cluster = Cluster.parse("1x4:v100")
    setting = Setting(
        dp=4,
        tp=1,
        pp=1,
        zero_stage=0,
        microbatch_size=1,
        num_microbatches=1,
        schedule="none",
    )

    def seconds(nbytes: int, tensors: int) -> float:
        group = GroupBytes(
            stored=nbytes,
            trained=nbytes,
            gathered=nbytes,
            gathered_grads=nbytes,
            largest=nbytes // tensors,
            trained_tensors=tensors,
        )
        return data_parallel_times(group, setting, workload_of(4), cluster).once_reduce_s

    link = cluster.link_for(4, 1)
    joint_s = link.collective_time_s("all_reduce", REDUCED_TOGETHER_BYTES, 4)
    assert seconds(REDUCED_TOGETHER_BYTES, 512) == pytest.approx(joint_s)
    assert seconds(REDUCED_TOGETHER_BYTES // 2, 8) == pytest.approx(joint_s / 2)
    large = 8 * REDUCED_TOGETHER_BYTES
    alone_s = 2 * link.collective_time_s("all_reduce", large // 2, 4)
    assert seconds(large, 2) == pytest.approx(alone_s)
