"""The benchmark over published runs: what it reads from a row, what it skips, what it writes."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from autoplan.engines import engine_named
from autoplan.estimating import Estimate
from benchmarks import published_runs
from benchmarks.published_clusters import gpus_of, stated_network
from benchmarks.published_models import Adapter
from benchmarks.published_rows import (
    Skipped,
    configurations,
    measured_bytes,
    measured_time_s,
)
from benchmarks.published_runs import TraceStore, main, price_row, stages_of_first_node

ROW = {
    "source_id": "made_up/one",
    "model": "GPT",
    "layers": "2",
    "hidden": "128",
    "heads": "4",
    "vocab": "500",
    "seq": "64",
    "gpus": "4",
    "gpu": "A100-SXM4-80",
    "gpus_per_node": "4",
    "tp": "2",
    "pp": "1",
    "dp": "2",
    "zero_stage": "1",
    "micro_batch": "1",
    "global_batch": "4",
    "recompute": "none",
    "sequence_parallel": "true",
    "dtype": "bf16",
    "optimizer": "Adam",
    "framework": "Megatron-LM",
    "iter_time_s": "0.01",
    "peak_mem_gib": "0.1",
    "mem_kind": "torch max allocated, max over ranks",
    "outcome": "fit",
}


def _no_price(*_: object) -> Estimate:
    raise Skipped("priced")


def test_a_row_is_priced_as_it_says() -> None:
    (found,) = configurations(ROW)
    assert (found.shape.hidden, found.shape.ffn, found.shape.vocab) == (128, 512, 512)
    assert found.cluster.world_size == 4
    wanted = {"tp": 2, "dp": 2, "zero_stage": 1, "sequence_parallel": True, "engine": "megatron"}
    assert {key: found.options[key] for key in wanted} == wanted
    assert found.assumed == {}


def test_what_a_row_leaves_open_is_priced_under_each_plausible_value() -> None:
    row = {**ROW, "recompute": "", "zero_stage": "", "sequence_parallel": ""}
    found = configurations(row)
    assert len(found) == 2 * 2 * 2
    assert {f.options["recompute"] for f in found} == {"none", "full"}
    assert all(set(f.assumed) == {"recompute", "zero_stage", "sequence_parallel"} for f in found)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cp": "2"}, "dp 2 \\* tp 2 \\* pp 1 \\* cp 2 is not 4 GPUs"),
        ({"vocab": ""}, "vocab is not given"),
        ({"gpu": "TPU"}, "no profile for GPU TPU"),
        ({"seq": "64.5"}, "seq is '64.5', not a whole number"),
        ({"heads": "3"}, "hidden 128, heads 3 and kv_heads 3 do not divide"),
        ({"dp": "8"}, "dp 8 \\* tp 2 \\* pp 1 is not 4 GPUs"),
        ({"recompute": "sometimes"}, "recompute 'sometimes' is not priced"),
        ({"model": "GPT QLoRA"}, "quantized weights are not priced"),
        ({"notes": "optimizer offload Y, param offload N"}, "offload of a part"),
        ({"notes": "full cpu offload"}, "offload without ZeRO-3"),
        ({"optimizer": "Muon"}, "optimizer muon is not priced"),
    ],
)
def test_a_row_that_cannot_be_priced_says_why(change: dict[str, str], reason: str) -> None:
    with pytest.raises(Skipped, match=reason):
        configurations({**ROW, **change})


CONTEXT = {**ROW, "gpus": "8", "gpus_per_node": "8", "cp": "2"}


@pytest.mark.parametrize(
    ("change", "exchange"),
    [
        ({}, "ring"),
        ({"args": "cp-comm-type=a2a"}, "all_to_all"),
        ({"source_id": "simumax_b200/one"}, "all_to_all"),
        ({"framework": "torchtitan", "ffn": "256"}, "all_gather"),
    ],
)
def test_context_parallelism_exchanges_keys_as_what_ran(
    change: dict[str, str], exchange: str
) -> None:
    (found,) = configurations({**CONTEXT, **change})
    assert engine_named(found.options["engine"]).context_exchange == exchange
    assert (found.options["dp"], found.options["context_parallel"]) == (2, 2)
    priced = price_row({**CONTEXT, **change}, "made_up.csv", 2, TraceStore())
    assert priced.predicted_time_s is not None
    assert priced.predicted_time_s[0] > 0


def test_two_exchanges_of_keys_are_skipped() -> None:
    with pytest.raises(Skipped, match=r"cp-comm-type a2a\+p2p is not priced"):
        configurations({**CONTEXT, "args": "cp-comm-type=a2a+p2p"})


def test_a_stated_fusion_writes_gradients_over_the_logits() -> None:
    (found,) = configurations({**ROW, "framework": "Megatron-LM + TE 2, CE fusion"})
    assert engine_named(found.options["engine"]).loss == "fused"


def test_a_pipeline_of_torchtitan_leaves_its_micro_batches_open() -> None:
    change = {"framework": "torchtitan (Interleaved1F1B)", "pp": "2", "tp": "1", "micro_batch": ""}
    row = {**ROW, **change, "zero_stage": "3", "global_batch": "16", "sequence_parallel": ""}
    found = configurations(row)
    assert [f.options["microbatch_size"] for f in found] == [1, 2, 4]
    assert {f.options["virtual_stages"] for f in found} == {2}
    assert {f.options["zero_stage"] for f in found} == {1}  # gathered and whole for the step
    (flat,) = configurations({**row, "framework": "torchtitan", "micro_batch": "2"})
    assert (flat.options["virtual_stages"], flat.options["microbatch_size"]) == (1, 2)


ALLTOALL = "moe-token-dispatcher-type=alltoall moe-grouped-gemm swiglu"
MALFORMED: list[tuple[dict[str, str | None], str]] = [
    ({"gpus": "four"}, "gpus is 'four', not a number"),
    ({"micro_batch": "0"}, "micro_batch is 0, below 1"),
    ({"hidden": "-128"}, "hidden is '-128', not a finite number from 0 on"),
    ({"iter_time_s": "nan"}, "iter_time_s is 'nan', not a finite number"),
    ({"iter_time_s": "0"}, "iter_time_s is 0"),
    ({"peak_mem_gib": "2 GiB"}, "peak_mem_gib is '2 GiB', not a number"),
    ({"peak_mem_gib": "20000"}, "peak_mem_gib 20000 is more than the device has"),
    ({"gpu": None}, "no profile for GPU that is not given"),
    ({"heads": "7"}, "hidden 128, heads 7 and kv_heads 7 do not divide"),
    ({"global_batch": "3"}, "estimate refuses: global batch 3 does not divide"),
    ({"model": "MoE 8x7B"}, "num_experts is not given"),
    ({"ep": "2"}, "num_experts is not given"),
    ({"num_experts": "8", "args": ALLTOALL}, "moe_topk is not given"),
    ({"num_experts": "8", "moe_topk": "2"}, "a token dispatcher allgather is not priced"),
    ({"duplicate_of": "x"}, "copy of another row"),
]


@pytest.mark.parametrize(("change", "reason"), MALFORMED)
def test_a_malformed_row_is_skipped_and_says_why(
    change: dict[str, str | None], reason: str
) -> None:
    outcome = price_row({**ROW, **change}, "made_up.csv", 7, TraceStore())
    assert re.search(reason, outcome.skipped), outcome.skipped
    assert (outcome.file, outcome.line) == ("made_up.csv", 7)


@pytest.mark.parametrize("column", sorted(ROW))
def test_a_file_without_a_column_prices_its_rows_or_says_what_they_lack(
    column: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_runs, "_price", _no_price)
    row = {key: value for key, value in ROW.items() if key != column}
    needed = ("layers", "hidden", "heads", "vocab", "seq", "gpus", "micro_batch")
    reason = {key: f"{key} is not given" for key in needed} | {
        "tp": "tp or pp is not given",
        "pp": "tp or pp is not given",
        "gpu": "no profile for GPU that is not given",
    }
    skipped = price_row(row, "made_up.csv", 2, TraceStore()).skipped
    assert skipped == reason.get(column, "priced")


def test_more_cells_than_columns_are_no_row() -> None:
    row: dict[Any, Any] = {**ROW, None: ["x"]}
    assert "more cells" in price_row(row, "made_up.csv", 2, TraceStore()).skipped


def test_files_without_rows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "binary.csv").write_bytes(bytes([0xFF, 0xFE, 0, 1]))
    main([str(tmp_path / name) for name in ("empty.csv", "binary.csv", "missing.csv")])
    printed = capsys.readouterr().out
    assert "empty.csv: has no rows" in printed
    assert "binary.csv: has no column layers" in printed
    assert "missing.csv: cannot be read as CSV after 0 rows" in printed


def test_what_is_not_compared_is_named() -> None:
    row = {**ROW, "mem_kind": "torch peak", "notes": "time is per micro-batch iteration"}
    outcome = price_row(row, "made_up.csv", 2, TraceStore())
    assert "memory: kind 'torch peak' is not known" in outcome.left_out
    assert "time: not one of the batch" in outcome.left_out
    assert price_row(ROW, "made_up.csv", 2, TraceStore()).left_out == ""


def test_litgpt_on_several_devices_checkpoints_and_keeps_whole_gradients() -> None:
    row = {**ROW, "framework": "litgpt (FSDP)", "tp": "1", "dp": "4", "zero_stage": ""}
    found = configurations({**row, "recompute": ""})
    assert [(f.options["engine"], f.options["recompute"]) for f in found] == [("litgpt", "full")]
    assert set(found[0].assumed) == {"recompute", "zero_stage"}


def test_adapters_offload_and_narrow_states_are_read() -> None:
    row = {**ROW, "framework": "litgpt", "tp": "1", "dp": "4", "optimizer": "paged_adamw_8bit"}
    (found,) = configurations({**row, "model": "Llama LoRA", "ffn": "256", "notes": "rank 16"})
    assert found.shape.adapter == Adapter(rank=16, dropout=True)
    assert (found.options["optimizer"], found.options["mixed_precision"]) == (
        "PagedAdamW8bit",
        "none",
    )
    row = {**ROW, "framework": "HF+DeepSpeed", "tp": "1", "dp": "4", "zero_stage": "3"}
    (found,) = configurations({**row, "sharding": "ZeRO-3 cpuoffload_all"})
    assert (found.options["engine"], found.options["offload"]) == ("deepspeed", "optimizer")


def test_a_gpu_of_no_stated_memory_is_each_that_holds_what_was_measured() -> None:
    assert gpus_of({"gpu": "A100", "peak_mem_gib": "20"}) == ("A100-40", "A100-80")
    assert gpus_of({"gpu": "A100 (size not stated)", "peak_mem_gib": "60"}) == ("A100-80",)
    with pytest.raises(Skipped, match="no profile for GPU A100"):
        gpus_of({"gpu": "A100", "peak_mem_gib": "90"})


@pytest.mark.parametrize(
    ("gpu", "name"),
    [("A10-24 (A10G)", "A10G"), ("A40-48", "A40"), ("RTX 3090-24", "RTX 3090"), ("L4-24", "L4")],
)
def test_of_a_gpu_without_a_profile_bytes_alone_are_compared(gpu: str, name: str) -> None:
    assert gpus_of({"gpu": gpu}) == (name,)
    priced = price_row({**ROW, "gpu": gpu}, "made_up.csv", 2, TraceStore())
    assert priced.predicted_time_s is None
    assert "no profile" in priced.left_out
    assert priced.predicted_bytes is not None
    assert priced.predicted_oom == (False, False)
    timed = {**ROW, "gpu": gpu, "peak_mem_gib": "", "outcome": ""}
    assert "no profile" in price_row(timed, "made_up.csv", 2, TraceStore()).skipped


def test_the_time_of_another_batch_or_length_is_not_compared() -> None:
    assert measured_time_s({**ROW, "notes": "time is per micro-batch iteration"}) is None


def test_times_and_bytes_are_read_in_their_units() -> None:
    rate = {**ROW, "iter_time_s": "", "tokens_per_s_per_gpu": "100"}
    assert measured_time_s(rate) == 4 * 64 / (100 * 4)
    for kind, nbytes, counted in (
        ("torch max allocated", 2**30, "allocated"),
        ("reserved GB as reported", 1e9, "reserved"),
        ("nvidia-smi GB (rounded)", 1000 * 2**20, "device"),
    ):
        row = {**ROW, "peak_mem_gib": "1", "mem_kind": kind}
        assert measured_bytes(row) == (nbytes, counted)


@pytest.mark.parametrize(
    ("change", "engine"),
    [
        ({"framework": "Megatron-Core (transformer_engine)"}, "megatron-te"),
        ({"framework": "Megatron-LM + TE 2", "args": "overlap-grad-reduce"}, "megatron-te-overlap"),
        ({"args": "overlap-grad-reduce"}, "megatron-overlap"),
        (
            {
                "framework": "Megatron-Core (transformer_engine)",
                "args": "overlap-grad-reduce no-gradient-accumulation-fusion",
            },
            "megatron-unfused-overlap",
        ),
        ({"framework": "Megatron-DeepSpeed", "dtype": "fp16"}, "megatron-deepspeed"),
        ({"framework": "InternEvo"}, "internevo"),
        ({"framework": "torchtitan (compile)", "source": "bench_202412.md"}, "torchtitan"),
        (
            {"framework": "torchtitan (compile)", "source": "bench_2025-06.md", "tp": "1"},
            "torchtitan-compiled-loss",
        ),
    ],
)
def test_an_engine_is_told_from_the_framework(change: dict[str, str], engine: str) -> None:
    dp = "4" if change.get("tp") == "1" else "2"
    found = configurations({**ROW, **change, "dp": dp})
    assert {configuration.options["engine"] for configuration in found} == {engine}


@pytest.mark.parametrize(
    ("notes", "gbit_of_node"),
    [
        ("iter_time DERIVED; inter-node 4x100Gb RoCE", 400),
        ("A100 nodes 400 Gb/s, H100 nodes 800 Gb/s", 400),
        ("H100 nodes 800 Gb/s, A100 nodes 400 Gb/s", 400),
        ("; 100 Gb/s EDR InfiniBand shared per node; NVLink", 100),
        ("section: A100 40GB with 1600 Gbps node-node interconnect (RoCE)", 1600),
        ("local batch size 2; 400 Gb/s CX-7 per GPU; sampled", 3200),
        ("22.488 GB usable; tokens 4x100", None),
        ("400 Gb/s InfiniBand", None),
    ],
)
def test_a_stated_network_takes_the_place_of_the_profiles(
    notes: str, gbit_of_node: int | None
) -> None:
    expected = None if gbit_of_node is None else gbit_of_node * 1e9 / 8 / 8
    assert stated_network(notes, "A100-SXM4-80", 8) == expected
    row = {**ROW, "gpus": "16", "gpus_per_node": "8", "dp": "8", "global_batch": "16"}
    (plain,) = configurations(row)
    (found,) = configurations({**row, "notes": notes})
    usual = plain.cluster.inter.bytes_per_s
    wanted = usual if expected is None else pytest.approx(0.9 * expected)
    assert found.cluster.inter.bytes_per_s == wanted


def test_pairs_behind_a_switch_have_all_links() -> None:
    row = {**ROW, "gpus": "8", "gpus_per_node": "8", "dp": "4"}
    plain, switched = (
        configurations({**row, "gpu": gpu})[0].cluster.intra.collective_time_s("all_reduce", 2e8, 2)
        for gpu in ("V100-SXM2-32", "V100-SXM3-32")
    )
    assert switched < plain / 2


@pytest.mark.parametrize(
    ("sharding", "replicas"),
    [
        ("optimizer sharded over 4 gpus", 2),
        ("optimizer sharded over all dp", 1),
        ("optimizer sharded over 16 gpus", 1),
        ("HSDP", 4),
        ("", 1),
    ],
)
def test_a_stated_group_of_shards_gives_the_replicas(sharding: str, replicas: int) -> None:
    row = {**ROW, "gpus": "16", "gpus_per_node": "2", "dp": "8", "global_batch": "16"}
    (found,) = configurations({**row, "sharding": sharding})
    assert found.options["dp_replicate"] == replicas


def test_asynchronous_tensor_parallelism_cuts_collectives_into_pieces() -> None:
    for text, decomposes in (
        ("torchtitan (compile)", False),
        ("torchtitan (compile+async_tp)", True),
    ):
        (found,) = configurations({**ROW, "framework": text})
        assert engine_named(found.options["engine"]).decomposes == decomposes


@pytest.mark.parametrize(
    ("change", "attention", "activation"),
    [
        (
            {"framework": "HF+DeepSpeed", "model": "GPT2-xl", "gpu": "V100-32"},
            "unfused",
            "gelu_new",
        ),
        ({"framework": "HF+DeepSpeed", "model": "GPT2-xl"}, "flash", "gelu_new"),
        ({"framework": "OneFlow", "gpu": "V100-32"}, "flash", "gelu"),
        ({"framework": "HF Trainer", "model": "Llama-2-7B", "ffn": "256"}, "flash", "swiglu"),
    ],
)
def test_transformers_ran_gpt2_operator_by_operator(
    change: dict[str, str], attention: str, activation: str
) -> None:
    shape = configurations({**ROW, "tp": "1", "dp": "4", **change})[0].shape
    assert (shape.attention, shape.activation) == (attention, activation)
    assert shape.dropout == (activation == "gelu_new")


def test_recompute_of_every_second_layer_alternates() -> None:
    (found,) = configurations({**ROW, "recompute": "selective_layer(every 2nd layer)"})
    assert found.options["recompute"] == ("full", "none")


def test_a_file_of_another_form_is_read_or_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_runs, "configurations", _no_price)
    file, out = tmp_path / "runs.csv", tmp_path / "new" / "out.json"
    head, cells = [*ROW, "notes"], [*(f'"{v}"' for v in ROW.values()), "x" * 200_000 + "\u00e8"]
    lines = "\r\n".join((",".join(reversed(head)), ",".join(reversed(cells)), ""))
    file.write_bytes(b"\xef\xbb\xbf" + lines.encode("latin-1"))
    main([str(file), "--json", str(out)])
    assert "made_up: 1 skipped: priced" in capsys.readouterr().out
    assert json.loads(out.read_text())["sources"]["made_up"]["rows_skipped"] == 1
    file.write_text(lines.replace(",", ";"))
    main([str(file), "--json", str(out)])
    printed = capsys.readouterr().out
    assert "has no column layers, hidden, heads, gpus, gpu; columns are divided by" in printed
    assert len(json.loads(out.read_text())["rows"]) == 1


def test_what_was_priced_before_somebody_stops_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = iter([Skipped("priced"), KeyboardInterrupt()])

    def stopped(*_: object) -> Estimate:
        raise next(prices)

    monkeypatch.setattr(published_runs, "configurations", stopped)
    file, out = tmp_path / "runs.csv", tmp_path / "out.json"
    file.write_text("\n".join((",".join(ROW), *[",".join(f'"{v}"' for v in ROW.values())] * 3)))
    with pytest.raises(SystemExit):
        main([str(file), "--json", str(out)])
    assert "Stopped before the last row" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["rows"]) == 1


def test_nvidia_smi_shows_the_stages_of_one_node() -> None:
    row = {**ROW, "gpus": "8", "gpus_per_node": "2", "tp": "1", "pp": "4", "dp": "2"}
    (found,) = configurations({**row, "sequence_parallel": "false", "global_batch": "8"})
    assert stages_of_first_node(found) == 1


def test_the_command_writes_a_summary_per_source_and_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "runs.csv", tmp_path / "out.json"
    rows = [ROW, {**ROW, "recompute": ""}, {**ROW, "layers": ""}]
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    main([str(file), "--json", str(out)])
    printed = capsys.readouterr().out
    assert "made_up: 1 skipped: layers is not given" in printed
    document = json.loads(out.read_text())
    summary = document["sources"]["made_up"]
    assert (summary["rows_used"], summary["rows_skipped"]) == (2, 1)
    assert summary["rows_with_open_fields"] == 1
    assert summary["time_mape"] > 0
    assert summary["oom_right"] + summary["oom_wrong"] == 2
    needed = {"time_rank_correlation", "memory_mape", "memory_worst_under", "oom_wrong"}
    assert needed <= set(summary)
    assert len(document["rows"]) == 3
    exact, opened, _ = document["rows"]
    assert exact["predicted_time_s"][0] == exact["predicted_time_s"][1]
    assert opened["predicted_time_s"][0] < opened["predicted_time_s"][1]
