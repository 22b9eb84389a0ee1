"""Traces written by hand: an embedding, blocks of a few ops, and a head with its loss.

They are made from a `ChainSpec` without torch and without a model, for any micro-batch size, so
that a planner can be given a trace of every size and the search is tested on shapes that no model
of ours has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from autoplan.cluster import Cluster
from autoplan.graph import (
    BlockTrace,
    CallTrace,
    Gemm,
    OpTrace,
    ParameterTrace,
    SavedTensor,
    ShardOption,
    Trace,
    ValueTrace,
)
from autoplan.model_traces import ModelTraces
from autoplan.optimizers import Optimizer
from autoplan.planner import Planner
from autoplan.settings import Workload

__all__ = ["BodySpec", "ChainSpec", "planner_of", "small_trace", "workload_of"]

_ITEM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BodySpec:
    """A block class: [norm], up, [view], activation, down, [residual sum]; `count` calls of it."""

    count: int
    hidden: int
    has_norm: bool = False
    has_view: bool = False
    has_residual: bool = True
    is_up_trained: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSpec:
    """A chain: embedding glue, bodies, head glue; widths in elements of four bytes."""

    width: int
    vocabulary: int
    bodies: tuple[BodySpec, ...]
    is_tied: bool = False


def small_trace(spec: ChainSpec, rows: int) -> Trace:
    """Return the trace of a chain for micro-batches of `rows`."""
    blocks = [_embedding(spec, rows)]
    blocks += [_body(spec, body, index, rows) for index, body in enumerate(spec.bodies)]
    blocks.append(_head(spec, rows))
    calls = [
        CallTrace(block=0, fqn="", args=("ids",), outs=("h0",), states=("tokens.weight",)),
    ]
    for index, body in enumerate(spec.bodies, start=1):
        for _ in range(body.count):
            fqn = f"layers.{len(calls) - 1}"
            states = tuple(f"{fqn}.{s.fqn}" for s in blocks[index].states)
            calls.append(
                CallTrace(
                    block=index,
                    fqn=fqn,
                    args=(f"h{len(calls) - 1}",),
                    outs=(f"h{len(calls)}",),
                    states=states,
                )
            )
    last = CallTrace(
        block=len(blocks) - 1,
        fqn="",
        args=(f"h{len(calls) - 1}",),
        outs=("loss",),
        states=("head.weight",),
    )
    calls.append(last)
    stream = rows * spec.width * _ITEM
    shared = (("tokens.weight", "head.weight"),) if spec.is_tied else ()
    tables = spec.width * spec.vocabulary * (1 if spec.is_tied else 2)
    states_of = [sum(s.nbytes for s in blocks[c.block].states) // _ITEM for c in calls[1:-1]]
    return Trace(
        model="Chain",
        microbatch_size=rows,
        inputs=(_value("ids", rows, 1, is_activation=False),),
        blocks=tuple(blocks),
        calls=tuple(calls),
        side=(),
        shared=shared,
        crossing_bytes=(stream,) * (len(calls) - 1),
        num_parameters=tables + sum(states_of),
        num_trained=tables + sum(states_of),
        backend="cpu",
        notes=(),
        fingerprint=f"chain-{rows}",
        versions={"torch": "none"},
    )


def workload_of(
    global_batch_size: int,
    optimizer: str = "AdamW",
    mixed_precision: Literal["none", "bfloat16"] = "none",
) -> Workload:
    """Return a workload; under mixed precision stored parameters are twice the traced ones."""
    return Workload(
        global_batch_size=global_batch_size,
        optimizer=Optimizer.named(optimizer, is_foreach=False),
        mixed_precision=mixed_precision,
        parameter_bytes_per_traced_byte=1 if mixed_precision == "none" else 2,
    )


def planner_of(
    spec: ChainSpec, cluster: Cluster, workload: Workload, pins: Mapping[str, Any] | None = None
) -> Planner:
    """Return the planner of a chain: its exact traces are given, so that it captures nothing."""
    sizes = range(1, workload.global_batch_size + 1)
    return Planner(
        traces=ModelTraces(
            model=nn.Identity(),
            batch=None,
            loss_fn=None,
            captured={rows: small_trace(spec, rows) for rows in sizes},
        ),
        cluster=cluster,
        workload=workload,
        pins=dict(pins or {}),
        name="Chain",
    )


def _value(name: str, rows: int, width: int, *, is_activation: bool = True) -> ValueTrace:
    return ValueTrace(
        name=name,
        shape=(rows, width),
        dtype="float32" if is_activation else "int64",
        nbytes=rows * width * (_ITEM if is_activation else 8),
        is_activation=is_activation,
        needs_grad=is_activation,
    )


def _state(
    name: str, fqn: str, shape: tuple[int, ...], *, absolute: bool = False, trained: bool = True
) -> ParameterTrace:
    count = 1
    for size in shape:
        count *= size
    return ParameterTrace(
        name=name,
        fqn=fqn,
        is_absolute=absolute,
        shape=shape,
        dtype="float32",
        nbytes=count * _ITEM,
        is_parameter=True,
        is_trained=trained,
    )


def _whole(inputs: int) -> ShardOption:
    return ShardOption(axis="whole", size=1, inputs=("R",) * inputs, output="R", is_split=False)


def _sliced(axis: str, size: int, inputs: tuple[str, ...], output: str, dim: str) -> ShardOption:
    return ShardOption(
        axis=axis,
        size=size,
        inputs=inputs,
        output=output,
        is_split=True,
        gemm_dim=dim,  # type: ignore[arg-type]
    )


def _gemm(
    name: str, inputs: tuple[str, str], m: int, n: int, k: int, axis_n: str, axis_k: str
) -> OpTrace:
    nbytes = m * n * _ITEM
    moved = (m * n + n * k + m * k) * _ITEM
    return OpTrace(
        name=name,
        target="aten.linear.default",
        fqn="",
        kind="gemm",
        inputs=inputs,
        shape=(m, n),
        dtype="float32",
        nbytes=nbytes,
        storage=name,
        gemm=Gemm(batch=1, m=m, n=n, k=k),
        forward_flops=2 * m * n * k,
        backward_flops=4 * m * n * k,
        forward_bytes=moved,
        backward_bytes=2 * moved,
        saved=(SavedTensor(value=inputs[0], nbytes=m * k * _ITEM),),
        mark_bytes=nbytes,
        may_mark=True,
        options=(
            _whole(2),
            _sliced(axis_k, k, ("S(1)", "S(1)"), "P", "k"),
            _sliced(axis_n, n, ("R*", "S(0)"), "S(1)", "n"),
        ),
    )


def _memory(
    name: str,
    target: str,
    inputs: tuple[str, ...],
    shape: tuple[int, ...],
    *,
    saved: tuple[SavedTensor, ...] = (),
    axis: str = "",
    read_bytes: int,
    temp_bytes: int = 0,
) -> OpTrace:
    nbytes = _ITEM
    for size in shape:
        nbytes *= size
    sliced = (_sliced(axis, shape[1], ("S(1)",) * len(inputs), "S(1)", ""),) if axis else ()
    return OpTrace(
        name=name,
        target=target,
        fqn="",
        kind="memory",
        inputs=inputs,
        shape=shape,
        dtype="float32",
        nbytes=nbytes,
        storage=name,
        forward_bytes=read_bytes + nbytes,
        backward_bytes=2 * (read_bytes + nbytes),
        saved=saved,
        mark_bytes=nbytes,
        may_mark=True,
        backward_temp_bytes=temp_bytes,
        options=(_whole(len(inputs)), *sliced),
    )


def _view(name: str, source: str, shape: tuple[int, int], axis: str) -> OpTrace:
    return OpTrace(
        name=name,
        target="aten.view.default",
        fqn="",
        kind="view",
        inputs=(source,),
        shape=shape,
        dtype="float32",
        nbytes=0,
        storage=source,
        options=(_whole(1), _sliced(axis, shape[1], ("S(1)",), "S(1)", "")),
    )


def _embedding(spec: ChainSpec, rows: int) -> BlockTrace:
    look_up = _memory(
        "look_up",
        "aten.embedding.default",
        ("x0", "s0"),
        (rows, spec.width),
        saved=(SavedTensor(value="x0", nbytes=8 * rows),),
        read_bytes=rows * spec.width * _ITEM,
    )
    return BlockTrace(
        name="glue0",
        is_glue=True,
        fingerprint="glue0",
        inputs=(_value("x0", rows, 1, is_activation=False),),
        states=(_state("s0", "tokens.weight", (spec.vocabulary, spec.width), absolute=True),),
        ops=(look_up,),
        outputs=("look_up",),
    )


def _body(spec: ChainSpec, body: BodySpec, index: int, rows: int) -> BlockTrace:
    width, hidden = spec.width, body.hidden
    stream, inner = rows * width * _ITEM, rows * hidden * _ITEM
    states = [
        _state("s_up", "up.weight", (hidden, width), trained=body.is_up_trained),
        _state("s_down", "down.weight", (width, hidden)),
    ]
    ops: list[OpTrace] = []
    current = "x0"
    if body.has_norm:
        states.append(_state("s_norm", "norm.weight", (width,)))
        kept = (SavedTensor(value="x0", nbytes=stream), SavedTensor(value="", nbytes=8 * rows))
        ops.append(
            _memory(
                "norm",
                "aten.layer_norm.default",
                ("x0", "s_norm"),
                (rows, width),
                saved=kept,
                read_bytes=stream,
            )
        )
        current = "norm"
    ops.append(_gemm("up", (current, "s_up"), rows, hidden, width, "a1", "features"))
    current = "up"
    if body.has_view:
        ops.append(_view("view", "up", (rows, hidden), "a1"))
        current = "view"
    ops.append(
        _memory(
            "gelu",
            "aten.gelu.default",
            (current,),
            (rows, hidden),
            saved=(SavedTensor(value="up", nbytes=inner),),
            axis="a1",
            read_bytes=inner,
            temp_bytes=inner,
        )
    )
    ops.append(_gemm("down", ("gelu", "s_down"), rows, width, hidden, "features", "a1"))
    if body.has_residual:
        ops.append(
            _memory(
                "add",
                "aten.add.Tensor",
                ("x0", "down"),
                (rows, width),
                read_bytes=2 * stream,
            )
        )
    return BlockTrace(
        name=f"block{index}",
        is_glue=False,
        fingerprint=f"block{index}",
        inputs=(_value("x0", rows, width),),
        states=tuple(states),
        ops=tuple(ops),
        outputs=(ops[-1].name,),
    )


def _head(spec: ChainSpec, rows: int) -> BlockTrace:
    logits = rows * spec.vocabulary * _ITEM
    head = _gemm("head", ("x0", "s0"), rows, spec.vocabulary, spec.width, "a1", "features")
    loss = _memory(
        "loss",
        "aten.mean.default",
        ("head",),
        (),
        saved=(SavedTensor(value="head", nbytes=logits),),
        read_bytes=logits,
    )
    return BlockTrace(
        name="glue1",
        is_glue=True,
        fingerprint="glue1",
        inputs=(_value("x0", rows, spec.width),),
        states=(_state("s0", "head.weight", (spec.vocabulary, spec.width), absolute=True),),
        ops=(head, loss),
        outputs=("loss",),
    )
