"""Building profiles from a folder of published measurements, here a made-up one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autoplan.errors import ProfileError
from autoplan.profiles.build import build_profile
from autoplan.profiles.measurements import Measurements
from autoplan.profiles.sources import SOURCES


def write_devices(folder: Path, rows: list[str]) -> None:
    header = "device,group,quantity,value,unit,kind,notes,source"
    (folder / "devices.csv").write_text("\n".join([header, *rows]), encoding="utf-8")


def test_missing_folder_and_missing_number_are_named(tmp_path: Path) -> None:
    source = SOURCES[0]
    with pytest.raises(ProfileError, match=r"cannot read the measurements.*devices\.csv"):
        build_profile(source, Measurements(tmp_path))
    write_devices(tmp_path, ["A100-SXM,peak_dense,peak_bf16,312,TFLOP/s,spec,,sheet"])
    with pytest.raises(ProfileError, match=r"devices\.csv has no 'memory' for any of"):
        build_profile(source, Measurements(tmp_path))


def test_first_device_of_a_family_wins_and_the_fact_knows_its_kind(tmp_path: Path) -> None:
    write_devices(
        tmp_path,
        [
            "A100-SXM,memory,hbm_bandwidth,2000,GB/s,spec,,sheet one",
            "A100-SXM-80,memory,hbm_bandwidth,2039,GB/s,spec,,sheet two",
            "A100-SXM,achievable,mamf,271.2,TFLOP/s,measured,,bench",
        ],
    )
    measurements = Measurements(tmp_path)
    fact = measurements.need(("A100-SXM-80", "A100-SXM"), "hbm_bandwidth")
    assert fact.value == 2039
    assert fact.origin().kind == "datasheet"
    assert measurements.need(("A100-SXM",), "mamf").origin("note").kind == "published"
    assert "note" in measurements.need(("A100-SXM",), "mamf").origin("note").text
    assert measurements.find(("V100",), "mamf") is None


def test_sources_have_distinct_names_and_known_attention_kinds() -> None:
    assert len({source.name for source in SOURCES}) == len(SOURCES)
    for source in SOURCES:
        assert source.attention in {"flash", "standard", "full_matrix"}
        needed = {f.name for f in dataclasses.fields(source)} - {"watts", "memory_gib"}
        assert all(getattr(source, name) is not None for name in needed)
