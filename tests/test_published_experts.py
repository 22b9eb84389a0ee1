"""Rows of published measurements whose models have experts."""

from __future__ import annotations

import pytest

from benchmarks.published_rows import Skipped, configurations
from benchmarks.published_runs import TraceStore, price_row
from tests.test_published_runs import ALLTOALL, ROW

EXPERTS = {
    **ROW,
    "model": "mixtral",
    "ffn": "256",
    "num_experts": "8",
    "moe_topk": "2",
    "untied": "true",
    "ep": "2",
    "args": f"{ALLTOALL} moe-ffn-hidden-size=96",
}


def test_experts_of_a_row_are_built_and_divided_as_it_says() -> None:
    (found,) = configurations(EXPERTS)
    experts = found.shape.experts
    assert experts is not None
    assert (experts.count, experts.chosen, experts.ffn, experts.dense_layers) == (8, 2, 96, 0)
    assert found.shape.latent is None
    options = {key: found.options[key] for key in found.options if key.startswith("expert")}
    assert options == {"expert_parallel": 2, "expert_tensor_parallel": 2}
    (own,) = configurations({**EXPERTS, "args": f"{EXPERTS['args']} expert-tensor-parallel-size=1"})
    assert own.options["expert_tensor_parallel"] == 1
    assert price_row(EXPERTS, "made_up.csv", 7, TraceStore()).skipped == ""


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("mtp-num-layers=1", "multi-token prediction is not priced"),
        ("pipeline-model-parallel-layout=Et|tL", "stages of a layout of their own"),
        ("overlap-moe-expert-parallel-comm", "exchanges beside kernels are not priced"),
        ("moe-layer-freq=([1]*2+[0]*2)", "moe-layer-freq .* is not priced"),
        ("moe-token-dispatcher-type=flex", "a token dispatcher flex is not priced"),
    ],
)
def test_experts_that_run_as_nothing_here_does_are_skipped(argument: str, reason: str) -> None:
    row = {**EXPERTS, "args": f"{EXPERTS['args']} {argument}"}
    with pytest.raises(Skipped, match=reason):
        configurations(row)


def test_a_cut_deepseek_has_the_dimensions_of_its_paper_and_what_its_script_passes() -> None:
    row = {
        **{key: ROW[key] for key in ROW if key not in ("hidden", "heads", "vocab")},
        "model": "deepseekv2 cut to 4 layers (MoE)",
        "layers": "4",
        "tp": "1",
        "dp": "4",
        "ep": "4",
        "source": "simu_tools/megatron_scripts",
    }
    (found,) = configurations(row)
    shape = found.shape
    assert (shape.hidden, shape.heads, shape.ffn, shape.vocab) == (5120, 128, 12288, 102400)
    assert shape.experts is not None
    assert shape.latent is not None
    assert shape.experts.is_padded
    assert (shape.experts.groups, shape.experts.dense_layers) == (4, 1)
    assert (shape.latent.query_rank, shape.latent.key_rank) == (1536, 512)
    assert shape.adapter is None  # a `q-lora-rank` is no adapter
    with pytest.raises(Skipped, match="a token dispatcher allgather"):
        configurations({**row, "source": "elsewhere"})


def test_an_open_number_of_devices_is_priced_from_the_fewest_that_hold_all_experts_on() -> None:
    row = {
        **EXPERTS,
        "gpus": "",
        "dp": "",
        "ep": "4",
        "gpus_per_node": "8",
        "global_batch": "16",
        "args": f"{EXPERTS['args']} expert-tensor-parallel-size=2",
    }
    found = configurations(row)
    assert [c.cluster.world_size for c in found] == [8, 16, 32]  # 32: 16 replicas of one row
    assert [c.assumed["gpus"] for c in found] == [8, 16, 32]
    outcome = price_row(row, "made_up.csv", 7, TraceStore())
    assert outcome.time_s is None
    assert "number of GPUs is open" in outcome.left_out
    assert outcome.predicted_bytes is not None
    assert outcome.predicted_bytes[0] < outcome.predicted_bytes[1]
    (alone,) = configurations({**EXPERTS, "gpus": "8", "dp": "4", "global_batch": "16"})
    assert alone.assumed == {}
