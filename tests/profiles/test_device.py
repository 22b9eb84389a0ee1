"""Laws and edges of device lookups."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan import codec
from autoplan.errors import ProfileError
from autoplan.profiles import DeviceProfile, GemmTable, Origin, load_profile
from autoplan.profiles.tables import ATTENTION_DIRECTIONS, GEMM_DIRECTIONS
from tests.strategies import device_profiles

LAWS = settings(derandomize=True, deadline=None, max_examples=60)
SIZES = st.integers(1, 2**16)
SPEED_UPS = st.floats(1.0, 100.0)


@LAWS
@given(profile=device_profiles())
def test_device_profile_round_trips_through_json(profile: DeviceProfile) -> None:
    assert codec.loads(DeviceProfile, codec.dumps(profile)) == profile


@LAWS
@given(
    profile=device_profiles(),
    shape=st.tuples(SIZES, SIZES, SIZES),
    batch=st.integers(1, 64),
    direction=st.sampled_from(GEMM_DIRECTIONS),
    flops=SPEED_UPS,
    bandwidth=SPEED_UPS,
)
def test_gemm_is_never_slower_on_a_faster_device(
    profile: DeviceProfile,
    shape: tuple[int, int, int],
    batch: int,
    direction: str,
    flops: float,
    bandwidth: float,
) -> None:
    faster = profile.scaled(flops=flops, bandwidth=bandwidth)
    for dtype in profile.peak_flops_per_s:
        before = profile.gemm_time_s(*shape, dtype=dtype, batch=batch, direction=direction)  # type: ignore[arg-type]
        after = faster.gemm_time_s(*shape, dtype=dtype, batch=batch, direction=direction)  # type: ignore[arg-type]
        assert 0 < after.time_s <= before.time_s * (1 + 1e-9)
        assert before.time_s >= profile.launch_overhead_s


@LAWS
@given(
    profile=device_profiles(),
    seq=SIZES,
    groups=st.integers(1, 256),
    causal=st.booleans(),
    direction=st.sampled_from(ATTENTION_DIRECTIONS),
    speed_up=SPEED_UPS,
)
def test_attention_is_never_slower_on_a_faster_device(
    profile: DeviceProfile, seq: int, groups: int, causal: bool, direction: str, speed_up: float
) -> None:
    faster = profile.scaled(flops=speed_up, bandwidth=speed_up)
    for dtype in profile.peak_flops_per_s:
        times = [
            device.attention_time_s(
                batch=1,
                heads=groups,
                seq_q=seq,
                seq_k=seq,
                head_dim=64,
                causal=causal,
                dtype=dtype,
                direction=direction,  # type: ignore[arg-type]
            ).time_s
            for device in (faster, profile)
        ]
        assert 0 < times[0] <= times[1] * (1 + 1e-9)


@LAWS
@given(
    profile=device_profiles(),
    nbytes=st.integers(1, 2**34),
    more=st.integers(0, 2**34),
    speed_up=SPEED_UPS,
)
def test_memory_bound_time_grows_with_bytes_and_falls_with_bandwidth(
    profile: DeviceProfile, nbytes: int, more: int, speed_up: float
) -> None:
    time_s = profile.memory_time_s(nbytes).time_s
    assert 0 < time_s <= profile.memory_time_s(nbytes + more).time_s * (1 + 1e-9)
    faster = profile.scaled(bandwidth=speed_up)
    assert faster.memory_time_s(nbytes).time_s <= time_s * (1 + 1e-9)
    assert faster.optimizer_time_s(nbytes).time_s <= profile.optimizer_time_s(nbytes).time_s * (
        1 + 1e-9
    )


def test_measured_row_is_returned_as_it_is_and_marked() -> None:
    profile = load_profile("a100")
    m, n, k, rate = profile.gemm[0].rows[5]
    found = profile.gemm_time_s(m, n, k, dtype="bfloat16", direction=profile.gemm[0].direction)
    assert found.how == "measured"
    assert found.time_s == pytest.approx(2 * m * n * k / rate)
    inside = profile.gemm_time_s(m + 8, n + 8, k, dtype="bfloat16")
    assert inside.how == "interpolated"
    assert profile.gemm_time_s(1, 8, 8, dtype="bfloat16").how == "extrapolated"
    assert profile.gemm_time_s(m, n, k, dtype="float32").how == "roofline"


def test_thin_product_far_outside_the_table_is_bound_by_memory() -> None:
    profile = load_profile("a100")
    found = profile.gemm_time_s(1, 65536, 65536, dtype="bfloat16")
    weight_bytes = 2 * 65536**2
    assert found.time_s >= weight_bytes / profile.memory_bandwidth_bytes_per_s


def test_no_work_costs_nothing_and_any_work_costs_a_launch() -> None:
    profile = load_profile("h100")
    assert profile.gemm_time_s(0, 8, 8, dtype="bfloat16").time_s == 0
    assert profile.memory_time_s(0).time_s == 0
    assert profile.memory_time_s(1).time_s >= profile.launch_overhead_s
    assert profile.gemm_time_s(1, 1, 1, dtype="bfloat16").time_s >= profile.launch_overhead_s


def test_unknown_dtype_and_direction_raise_with_what_exists() -> None:
    profile = load_profile("v100")
    with pytest.raises(ProfileError, match=r"no dtype 'bfloat16'.*float16"):
        profile.gemm_time_s(8, 8, 8, dtype="bfloat16")
    with pytest.raises(ProfileError, match=r"'sideways'.*forward, dgrad, wgrad"):
        profile.gemm_time_s(8, 8, 8, dtype="float16", direction="sideways")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="m must be at least 0"):
        profile.gemm_time_s(-1, 8, 8, dtype="float16")


def test_number_without_origin_is_refused_by_name() -> None:
    profile = load_profile("h100")
    document = codec.encode(profile)
    del document["origin_by_field"]["memory_bytes"]
    with pytest.raises(ValueError, match=r"origin_by_field\.memory_bytes: missing key"):
        codec.decode(DeviceProfile, document)
    document = codec.encode(profile)
    document["gemm"][0]["origin"] = "hearsay"
    with pytest.raises(ValueError, match="'hearsay'"):
        codec.decode(DeviceProfile, document)


def test_interpolation_stays_between_its_neighbours() -> None:
    table = GemmTable(
        dtype="float32",
        direction="forward",
        origin="datasheet",
        rows=((64, 64, 64, 1e12), (128, 128, 128, 2e12)),
    )
    base = DeviceProfile.from_datasheet(
        name="two_rows",
        memory_bytes=10**9,
        peak_flops_per_s={"float32": 4e12},
        memory_bandwidth_bytes_per_s=1e15,
        launch_overhead_s=1e-12,
        source="made up",
    )
    profile = codec.decode(DeviceProfile, codec.encode(base) | {"gemm": [codec.encode(table)]})
    found = profile.gemm_time_s(90, 90, 90, dtype="float32")
    assert 1e12 < 2 * 90**3 / found.time_s < 2e12


def test_repeated_lookup_takes_microseconds() -> None:
    profile = load_profile("a100")
    profile.gemm_time_s(2048, 2048, 2048, dtype="bfloat16")
    begin = time.perf_counter()
    for _ in range(2000):
        profile.gemm_time_s(2048, 2048, 2048, dtype="bfloat16")
    assert (time.perf_counter() - begin) / 2000 < 100e-6  # about 1 us on an idle core


def test_origin_without_text_is_refused() -> None:
    with pytest.raises(ValueError, match="must say where"):
        Origin(kind="assumed", text=" ")
