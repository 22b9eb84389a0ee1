"""Layouts are run in one process and held against the whole block."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from autoplan import layout_numerics, rank_numerics, sharded_ops
from autoplan.autograd_threads import has_autograd_threads
from autoplan.cluster import Cluster
from autoplan.dry_run_result import LayoutNumerics
from autoplan.graph import ShardOption
from autoplan.layout_numerics import check_layout_numerics
from autoplan.optimizing import find_plan
from autoplan.plan import Plan
from autoplan.planner import Planner, make_planner
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.link import LinkProfile
from autoplan.program import BlockGraph, Op
from autoplan.sharding import shard_options
from autoplan.tensor_layout import WHOLE_BORDERS
from autoplan.training_job import TrainingJob
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.distributed import run_workers
from tests.layouts import megatron_axes, prefer_axes, random_axes
from tests.models import blocks_of
from tests.numerics import program_of


def every_rank_adds(self: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """Run `RowLinear` wrongly: the bias is added once per rank."""
    return torch.nn.functional.linear(x, weight, bias)


def block_of(name: str) -> BlockGraph:
    return blocks_of(name)["block0"]


def row_axis(options: Sequence[ShardOption]) -> str:
    return next(o.axis for o in options if o.output == "P" and o.is_split)


def is_row_linear(op: Op, options: Sequence[ShardOption]) -> bool:
    is_biased = op.target_name == "aten.linear.default" and len(op.args) > 2
    return is_biased and any(o.output == "P" and o.is_split for o in options)


def outputs_of(plan: Plan, planner: Planner, name: str) -> set[str]:
    """Return the placements in which an op's result leaves it, over all layouts of its block."""
    block = next(b for b in planner.trace(1).blocks if not b.is_glue)
    op = next(op for op in block.ops if op.name == name)
    layouts = [one for one in plan.placements.values() if one.block == block.name]
    axes = [layout.axes.get(name, "whole") for layout in layouts]
    return {option.output for option in op.options if option.axis in axes}


def arithmetic(num_devices: int) -> Cluster:
    """Return devices on which little but arithmetic takes time."""
    link = LinkProfile.from_numbers(
        name="fast", level="intra", latency_s=1e-9, bytes_per_s=1e12, source="made for this test"
    )
    device = DeviceProfile.from_datasheet(
        name="arithmetic",
        memory_bytes=2**34,
        peak_flops_per_s={"float32": 1e12},
        memory_bandwidth_bytes_per_s=1e16,
        source="made for this test",
        launch_overhead_s=1e-12,
        intra=link,
    )
    return Cluster.from_device(device, gpus_per_node=num_devices)


@pytest.mark.parametrize("name", ["llama_one_kv_head", "gpt2", "gpt_plain_attention"])
def test_random_layouts_compute_what_the_block_does(name: str) -> None:
    for graph in blocks_of(name).values():
        options = shard_options(graph)
        for seed in range(3):
            found = check_layout_numerics(graph, random_axes(graph, options, 2, seed), 2)
            assert not found.is_wrong, (graph.name, seed, found.reason)
            assert found.error is not None
            assert found.error < 1e-12, found.reason


def test_dropout_is_off_while_a_layout_is_checked() -> None:
    graph = next(g for g in program_of("gpt_dropout").graphs if not g.is_glue)
    found = check_layout_numerics(graph, megatron_axes(graph, shard_options(graph)), 2)
    assert found.error is not None
    assert found.error < 1e-12, found.reason


def test_a_wrong_local_form_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = next(g for g in program_of("gpt").graphs if not g.is_glue)
    options = shard_options(graph)
    axes = megatron_axes(graph, options)
    monkeypatch.setattr(sharded_ops.RowLinear, "__call__", every_rank_adds)
    found = check_layout_numerics(graph, axes, 2)
    assert found.is_wrong
    assert found.error is not None
    assert found.error > 1e-3
    assert "differs" in found.reason
    rows = {op.name for op in graph.ops if is_row_linear(op, options[op.name])}
    assert {op for op, _ in found.blamed} <= rows


@contextlib.contextmanager
def autograd_thread() -> Iterator[None]:
    """Run a thread that has the name of those that autograd starts beside an accelerator."""
    is_named, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_autograd_0")
        is_named.set()
        may_end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert is_named.wait(10)
        yield
    finally:
        may_end.set()
        thread.join()


def no_fork(*_: Any) -> Any:
    raise AssertionError("a process that has threads of autograd was forked")


def found_in_a_thread(rank: int, graph: BlockGraph, axes: dict[str, str]) -> tuple[bool, str]:
    """Return whether a right layout is right, and what is said of a wrong one."""
    multiprocessing.get_context = no_fork  # type: ignore[assignment]
    with autograd_thread():
        right = check_layout_numerics(graph, axes, 2)
        sharded_ops.RowLinear.__call__ = every_rank_adds  # type: ignore[method-assign]
        wrong = check_layout_numerics(graph, axes, 2)
    return right.error is not None and not right.is_wrong, wrong.reason * wrong.is_wrong


def test_layouts_are_checked_without_a_fork_beside_threads_of_autograd() -> None:
    graph = block_of("gpt")
    axes = megatron_axes(graph, shard_options(graph))
    ((is_right, reason),) = run_workers(found_in_a_thread, 1, graph, axes)
    assert is_right
    assert "differs" in reason


def test_without_names_of_threads_an_accelerator_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for is_there in (False, True):
        monkeypatch.setattr("torch.accelerator.is_available", lambda found=is_there: found)
        assert has_autograd_threads(tmp_path / "none") is is_there


@pytest.mark.parametrize("is_forked", [False, True])
def test_a_check_that_does_not_end_is_not_run(
    monkeypatch: pytest.MonkeyPatch, is_forked: bool
) -> None:
    graph = block_of("gpt")
    may_end = threading.Event()
    monkeypatch.setattr(layout_numerics, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(layout_numerics, "compare_layout", lambda *_, **__: may_end.wait())
    with contextlib.nullcontext() if is_forked else autograd_thread():
        found = check_layout_numerics(graph, megatron_axes(graph, shard_options(graph)), 2)
    may_end.set()
    assert found.form == "not run"
    assert "no result after 0.2 s" in found.reason


def test_a_check_that_ends_its_process_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = block_of("gpt")
    axes = megatron_axes(graph, shard_options(graph))
    compare = rank_numerics.compare_layout

    def dies(graph: BlockGraph, options: Any, axes: Any, degree: int, **more: Any) -> Any:
        return os._exit(1) if degree == 4 else compare(graph, options, axes, degree, **more)

    monkeypatch.setattr(layout_numerics, "compare_layout", dies)
    checks = [layout_numerics._Check(graph, axes, n, WHOLE_BORDERS) for n in (2, 4, 2, 4, 2)]
    found = layout_numerics._run_all(checks)
    assert [one.form for one in found] == ["as captured", "not run"] * 2 + ["as captured"]
    assert "its process died" in found[3].reason
    assert all(one.error is not None and not one.is_wrong for one in found[::2])


def test_a_layout_that_cannot_run_is_wrong() -> None:
    graph = next(g for g in program_of("gpt").graphs if not g.is_glue)
    found = check_layout_numerics(graph, megatron_axes(graph, shard_options(graph)), 3)
    assert found.is_wrong
    assert "allowed degrees are" in found.reason
    assert found.blamed


@pytest.mark.parametrize("limits", [(0, 2**24), (0, 900)])
def test_a_large_block_is_run_smaller_or_op_by_op(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]
) -> None:
    monkeypatch.setattr(layout_numerics, "_MOST_AS_CAPTURED", limits[0])
    monkeypatch.setattr(layout_numerics, "_MOST_ELEMENTS", limits[1])
    for graph in (block_of("gpt"), block_of("gpt_repeated_keys")):
        options = shard_options(graph)
        axes = random_axes(graph, options, 2, seed=1)
        found = check_layout_numerics(graph, axes, 2)
        assert found.form == ("smaller" if limits[1] > 2**20 else "op by op")
        assert not found.is_wrong, found.reason
        assert found.error is not None
        assert found.error < 1e-12
        with monkeypatch.context() as planted:
            planted.setattr(sharded_ops.RowLinear, "__call__", every_rank_adds)
            rows = [op.name for op in graph.ops if is_row_linear(op, options[op.name])]
            axes = {**prefer_axes(graph, options, 2), rows[0]: row_axis(options[rows[0]])}
            found = check_layout_numerics(graph, axes, 2)
        assert found.is_wrong
        blamed = {op for op, _ in found.blamed}
        assert blamed
        assert blamed <= set(rows)


@pytest.mark.parametrize(
    ("width", "tokens", "form"), [(192, 32, "as captured"), (2048, 256, "smaller")]
)
def test_the_search_does_without_an_option_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, width: int, tokens: int, form: str
) -> None:
    """Of the ways to run the second product of the MLP, the fastest is made wrong."""
    config = GPTConfig(vocab_size=64, num_layers=2, width=width, num_heads=4, max_tokens=tokens)
    with torch.device("meta"):
        model = GPT(config)
    pins: dict[str, Any] = {"tp": 2, "pp": 1, "microbatch_size": 1, "recompute": "none"}
    forms: list[str] = []

    run_all = layout_numerics._run_all

    def remember(checks: Sequence[Any]) -> list[LayoutNumerics]:
        found = run_all(checks)
        pairs = zip(checks, found, strict=True)
        forms.extend(one.form for check, one in pairs if not check.graph.is_glue)
        return found

    monkeypatch.setattr(layout_numerics, "_run_all", remember)
    monkeypatch.setattr(layout_numerics, "_checked", {})
    planner = make_planner(
        TrainingJob(model, arithmetic(2), batch_like(config, 1, tokens), loss_fn=loss_fn), pins=pins
    )
    row = "v21_linear"
    monkeypatch.setattr(sharded_ops.RowLinear, "__call__", every_rank_adds)
    plan = find_plan(planner, compare=False)
    assert outputs_of(plan, planner, row).isdisjoint({"P"})
    assert any(note.startswith("block0 is not sliced in ") and row in note for note in plan.notes)
    assert plan.mesh.tp == 2
    assert any(layout.axes for layout in plan.placements.values())
    assert set(forms) == {form}
