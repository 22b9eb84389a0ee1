"""A trace of one micro-batch size follows from two others, in every number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from autoplan import codec
from autoplan.graph import Trace
from autoplan.scaling import interpolate
from autoplan.tracer import trace
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.small_traces import ChainSpec, small_trace
from tests.strategies import chains, traces

LAWS = settings(derandomize=True, deadline=None, max_examples=30)


def without_fingerprints(value: Any) -> Any:
    """Return JSON types with every fingerprint emptied."""
    if isinstance(value, dict):
        return {k: "" if k == "fingerprint" else without_fingerprints(v) for k, v in value.items()}
    return [without_fingerprints(v) for v in value] if isinstance(value, list) else value


def gpt_trace(rows: int, **options: Any) -> Trace:
    config = GPTConfig(vocab_size=64, max_tokens=16, num_layers=2, num_heads=4, width=32, **options)
    return trace(
        GPT(config),
        batch_like(config, 8, 16),
        loss_fn,
        microbatch_size=rows,
        backend="cuda",
    )


@pytest.mark.parametrize("options", [{}, {"is_qkv_fused": False, "is_head_tied": False}])
def test_interpolated_traces_of_a_gpt_equal_exact_ones(options: dict[str, bool]) -> None:
    low, high = gpt_trace(2, **options), gpt_trace(4, **options)
    for rows in (5, 8):
        found = interpolate(low, high, rows)
        assert found is not None
        exact = gpt_trace(rows, **options)
        assert without_fingerprints(codec.encode(found)) == without_fingerprints(
            codec.encode(exact)
        )


@LAWS
@given(spec=chains())
def test_interpolated_chains_equal_exact_ones(spec: ChainSpec) -> None:
    found = interpolate(small_trace(spec, 2), small_trace(spec, 4), 16)
    assert found is not None
    exact = small_trace(spec, 16)
    assert without_fingerprints(codec.encode(found)) == without_fingerprints(codec.encode(exact))


@LAWS
@given(spec=chains())
def test_traces_of_different_graphs_do_not_interpolate(spec: ChainSpec) -> None:
    low, high = small_trace(spec, 2), small_trace(spec, 4)
    assert interpolate(low, replace(high, model="Other"), 8) is None
    assert interpolate(low, replace(high, calls=high.calls[:-1]), 8) is None
    assert interpolate(low, replace(high, num_parameters=high.num_parameters + 1), 8) is None


@LAWS
@given(value=traces())
def test_traces_round_trip_through_json(value: Trace) -> None:
    assert Trace.from_json(value.to_json()) == value


def test_a_trace_with_a_wrong_key_is_refused_by_its_name() -> None:
    text = gpt_trace(1).to_json()
    with pytest.raises(ValueError, match=r"trace\.microbatches: unknown key; allowed are .*model"):
        Trace.from_json(text.replace('"microbatch_size"', '"microbatches"', 1))
