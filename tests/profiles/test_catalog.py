"""Shipped profiles: each loads, each number has a source, and wrong names and files are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoplan.errors import ProfileError
from autoplan.profiles import ALIASES, list_profiles, load_profile, save_profile
from autoplan.profiles.catalog import dump_profile

NAMES = list_profiles()


def test_catalog_has_the_promised_devices_and_every_alias_exists() -> None:
    assert {"a100_sxm_80gb", "h100_sxm_80gb", "cpu"} <= set(NAMES)
    assert set(ALIASES.values()) <= set(NAMES)
    assert load_profile("a100") is load_profile("a100_sxm_80gb")
    assert load_profile("H100-SXM-80GB").name == "h100_sxm_80gb"


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profile_is_complete_and_its_numbers_have_origins(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    used = {t.origin for t in profile.gemm} | {t.origin for t in profile.attention}
    used |= {t.origin for t in profile.memory_bound} | {t.origin for t in profile.grouped}
    used |= set(profile.origin_by_field.values())
    assert used == set(profile.origins), "an origin that nothing uses, or the other way round"
    for origin in profile.origins.values():
        assert origin.text
        if origin.kind == "measured":
            assert origin.device
            assert origin.date
            assert origin.torch_version
    assert {t.direction for t in profile.gemm} == {"forward", "dgrad", "wgrad"}
    assert profile.intra is not None
    for link in filter(None, (profile.intra, profile.inter)):
        named = {c.origin for c in link.curves} | set(link.origin_by_field.values())
        assert named == set(link.origins)


@pytest.mark.parametrize("name", NAMES)
def test_shipped_efficiency_never_exceeds_the_peak(name: str) -> None:
    profile = load_profile(name)
    for table in profile.gemm:
        assert max(rate for *_, rate in table.rows) <= profile.peak_flops_per_s[table.dtype]
    for memory in profile.memory_bound:
        assert max(rate for _, rate in memory.rows) <= profile.memory_bandwidth_bytes_per_s


@pytest.mark.parametrize("name", NAMES)
def test_shipped_file_is_small_and_is_what_the_writer_writes(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    text = dump_profile(profile)
    assert len(text) < 150_000
    path = tmp_path / "copy.json"
    save_profile(profile, path)
    assert load_profile(path) == profile


def test_transferred_numbers_say_so() -> None:
    for name in ("a100_sxm_80gb", "h100_sxm_80gb", "l40s"):
        assert "transferred" in load_profile(name).origins["gemm"].text


def test_unknown_name_lists_what_exists_and_the_closest() -> None:
    with pytest.raises(
        ProfileError, match=r"no profile named 'a1000'.*did you mean.*a100_sxm_80gb"
    ):
        load_profile("a1000")


def test_malformed_file_names_file_and_key(tmp_path: Path) -> None:
    document = json.loads(dump_profile(load_profile("cpu")))
    path = tmp_path / "mine.json"

    def message() -> str:
        path.write_text(json.dumps(document), encoding="utf-8")
        with pytest.raises(ProfileError) as caught:
            load_profile(path)
        assert "mine.json" in str(caught.value)
        return str(caught.value)

    document["memory_byte"] = document.pop("memory_bytes")
    assert "memory_byte: unknown key" in message()
    document.pop("memory_byte")
    assert "memory_bytes: missing key" in message()
    document["memory_bytes"] = "much"
    assert "memory_bytes: expected int" in message()
    document["memory_bytes"] = 10**9
    document["gemm"][0]["rows"][0][3] = -1.0
    assert "rows[0]: must be finite and above 0" in message()
    document["gemm"][0]["rows"][0][3] = 1.0
    document["schema_version"] = 99
    assert "schema_version" in message()


def test_missing_and_broken_files_are_profile_errors(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"cannot read the profile.*none\.json"):
        load_profile(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(ProfileError, match=r"broken\.json: not JSON"):
        load_profile(broken)
