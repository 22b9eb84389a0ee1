"""Print what tracing makes of every architecture: `python -m benchmarks.trace_coverage`.

Each architecture is traced in a process of its own. The default size, on the meta device, gives
the seconds, the memory, the blocks and the FLOPs. The small size, with weights on the CPU, is also
run for real: the FLOPs of its kernels and the bytes that autograd keeps are compared with the
trace.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autoplan.batches import reduce_loss, split_batch
from autoplan.graph import Trace
from autoplan.tracer import trace
from benchmarks.architectures import ARCHITECTURES, Example, build

__all__ = ["Row", "measure", "table"]

_TIMEOUT_S = 600
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one architecture gave.

    Attributes:
        traced: whether the default size gave a trace.
        reason: why not, or how it had to degrade; empty if neither.
        blocks: blocks of repeated containers in the chain, glue left out.
        classes: distinct block graphs among them.
        opaque: module classes that stayed one op.
        parameters: elements, shared ones once.
        parameters_equal: whether that is what the model itself says.
        forward_flops, backward_flops: of the default size.
        forward_flops_error, backward_flops_error: of the small size, trace over kernels less one.
        kept_bytes_error: of the small size, trace over autograd less one.
        small_error: why the small size could not be compared, or empty.
        seconds: CPU time of the trace of the default size.
        peak_rss_bytes: of the whole process until then.
    """

    name: str
    traced: bool
    reason: str = ""
    blocks: int = 0
    classes: int = 0
    opaque: tuple[str, ...] = ()
    parameters: int = 0
    parameters_equal: bool = False
    forward_flops: int = 0
    backward_flops: int = 0
    forward_flops_error: float | None = None
    backward_flops_error: float | None = None
    kept_bytes_error: float | None = None
    small_error: str = ""
    seconds: float = 0.0
    peak_rss_bytes: int = 0


def flops_of(result: Trace) -> tuple[int, int]:
    """Return (forward, backward) floating-point operations of a whole trace."""
    ops = [op for call in result.calls for op in result.blocks[call.block].ops]
    return sum(op.forward_flops for op in ops), sum(op.backward_flops for op in ops)


def kept_of(result: Trace) -> int:
    """Return the bytes of all storages that a trace says autograd keeps, each once."""
    kept: dict[object, int] = {}
    owner: dict[str, object] = {}
    for number, call in enumerate(result.calls):
        block = result.blocks[call.block]
        names = [value.name for value in block.inputs]
        bound = {n: owner.get(arg, arg) for n, arg in zip(names, call.args, strict=True)}
        storages = {op.name: op.storage for op in block.ops}
        for op in block.ops:
            for index, saved in enumerate(op.saved):
                inside = (number, saved.value) if saved.value else (number, op.name, index)
                kept[bound.get(saved.value, inside)] = saved.nbytes
        for name, out in zip(block.outputs, call.outs, strict=True):
            owner[out] = bound.get(storages[name], (number, storages[name]))
    return sum(kept.values())


def loss_of(example: Example) -> torch.Tensor:
    """Run a model and its loss as a training loop does."""
    args, kwargs, target = split_batch(example.model, example.batch, example.loss_fn)
    return reduce_loss(example.model(*args, **kwargs), example.loss_fn, target)


def _convolution_backward(
    gradient: Any, image: Any, weight: Any, *rest: Any, out_shape: Any = None, **_: Any
) -> int:
    """Two operations for each weight at each place, for each gradient that is wanted.

    Torch's law counts every pair of channels, even of different groups.
    """
    is_transposed, wanted = rest[4], rest[7]
    places = image if is_transposed else gradient
    each = 2 * places[0] * math.prod(places[2:]) * math.prod(weight)
    return int(each) * sum(map(bool, wanted[:2]))


_LAWS = {torch.ops.aten.convolution_backward: _convolution_backward}


def real_flops(example: Example) -> tuple[int, int]:
    """Return (forward, backward) operations counted by torch on the kernels of a real run.

    Attention, recurrences and experts run by the products that they are made of, because the
    counter does not know their fused kernels.
    """
    for module in example.model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
        forward = FlopCounterMode(display=False, custom_mapping=_LAWS)
        with forward:
            loss = loss_of(example)
        backward = FlopCounterMode(display=False, custom_mapping=_LAWS)
        with backward:
            torch.autograd.backward(loss)
    return forward.get_total_flops(), backward.get_total_flops()


def real_kept_bytes(example: Example) -> int:
    """Return the bytes of all storages that autograd keeps in a real run, states left out."""
    states = [*example.model.parameters(), *example.model.buffers()]
    excluded = {tensor.untyped_storage()._cdata for tensor in states}
    kept: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(example)
    del loss
    return sum(kept.values())


def measure(name: str) -> Row:
    """Trace one architecture in this process and return its row."""
    example = build(name, "default")
    started = time.process_time()
    try:
        result = trace(example.model, example.batch, example.loss_fn)
    except Exception as error:
        return Row(name=name, traced=False, reason=f"{type(error).__name__}: {error}")
    seconds = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    blocks = [call.block for call in result.calls if not result.blocks[call.block].is_glue]
    opaque = [note for note in result.notes if "stays one op" in note]
    forward, backward = flops_of(result)
    own = {id(p): p.numel() for p in example.model.parameters()}
    errors = _errors(name)
    return Row(
        name=name,
        traced=True,
        reason="; ".join(opaque),
        blocks=len(blocks),
        classes=len(set(blocks)),
        opaque=tuple(opaque),
        parameters=result.num_parameters,
        parameters_equal=result.num_parameters == sum(own.values()),
        forward_flops=forward,
        backward_flops=backward,
        seconds=round(seconds, 2),
        peak_rss_bytes=peak,
        **errors,
    )


def _errors(name: str) -> dict[str, Any]:
    """Return the relative errors of the small size, or why there are none."""
    try:
        example = build(name, "small")
        result = trace(example.model, example.batch, example.loss_fn)
        forward, backward = flops_of(result)
        for module in example.model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False
        kept = real_kept_bytes(example)
        real_forward, real_backward = real_flops(example)
    except Exception as error:
        return {"small_error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {
        "forward_flops_error": forward / real_forward - 1,
        "backward_flops_error": backward / real_backward - 1,
        "kept_bytes_error": kept_of(result) / kept - 1,
    }


def _measure_apart(name: str) -> Row:
    """Return the row of an architecture that is measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.trace_coverage", "--one", name]
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=environment,
            cwd=_ROOT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Row(name=name, traced=False, reason=f"no answer within {_TIMEOUT_S} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return Row(name=name, traced=False, reason=lines[-1] if lines else "the process died")
    values = json.loads(done.stdout.strip().splitlines()[-1])
    return Row(**{**values, "opaque": tuple(values["opaque"])})


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.3f} %"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| model | traced | blocks | classes | parameters | forward FLOPs | error | "
        "backward FLOPs | error | kept bytes error | s | RSS MiB | remark |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        remark = row.reason or row.small_error
        if row.traced and not row.parameters_equal:
            remark = "; ".join(filter(None, ["not all parameters are read", remark]))
        cells = (
            row.name,
            "yes" if row.traced else "no",
            row.blocks,
            row.classes,
            row.parameters,
            f"{row.forward_flops:.4g}",
            _percent(row.forward_flops_error),
            f"{row.backward_flops:.4g}",
            _percent(row.backward_flops_error),
            _percent(row.kept_bytes_error),
            f"{row.seconds:.1f}",
            row.peak_rss_bytes // 2**20,
            remark.replace("|", "/"),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    traced = sum(row.traced for row in rows)
    lines.append(f"\n{traced} of {len(rows)} traced")
    return "\n".join(lines)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Measure the architectures that are asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all if none is named")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    parser.add_argument("--one", choices=ARCHITECTURES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        with _quiet():
            print(json.dumps(asdict(measure(arguments.one))))
        return
    unknown = set(arguments.names) - set(ARCHITECTURES)
    if unknown:
        parser.error(f"unknown: {sorted(unknown)}; there are {', '.join(ARCHITECTURES)}")
    rows = []
    for name in arguments.names or ARCHITECTURES:
        rows.append(_measure_apart(name))
        print(f"{name}: {rows[-1].seconds} s {rows[-1].reason}", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
