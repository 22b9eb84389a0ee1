"""The benchmark of emission overhead: both programs train alike, and its ratios are medians."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import emission_overhead
from benchmarks.emission_overhead import CASES, Sample, compare, row_of
from examples.gpt import GPTConfig


def test_programs_of_a_layout_have_equal_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = GPTConfig(
        vocab_size=64,
        max_tokens=16,
        num_layers=2,
        num_heads=2,
        width=16,
        is_qkv_fused=False,
        is_head_tied=False,
    )
    monkeypatch.setattr(emission_overhead, "CONFIG", tiny)
    # `measure` raises where losses differ.
    rows = compare([case for case in CASES if case.world_size == 2], pairs=2)
    assert [row.name for row in rows] == ["DDP", "FSDP2", "1F1B"]
    assert all(row.wall_ratio > 0 for row in rows)


def test_a_row_is_of_the_slowest_rank_and_of_the_processor_time_of_all() -> None:
    def sample(**seconds: float) -> Sample:
        whole: dict[str, Any] = {"hand_wall_s": 1.0, "hand_processor_s": 1.0} | seconds
        return Sample(**whole)

    fast = sample(emitted_wall_s=1.0, emitted_processor_s=1.0)
    slow = sample(emitted_wall_s=2.0, emitted_processor_s=2.0)
    row = row_of(CASES[0], [[fast], [slow]])
    assert row.wall_ratio == 2.0
    assert row.processor_ratio == 1.5
