"""Print what tracing makes of every architecture: `python benchmarks/trace_coverage.py`.

Each architecture is traced in a process of its own. The default size, on the meta device, gives
the seconds, the memory, the blocks and the FLOPs. The small size, with weights on the CPU, is also
run for real: the FLOPs of its kernels and the bytes that autograd keeps are compared with the
trace. Kept bytes are compared with the captured program, which a planned module runs, and beside it
with the model's own forward, which may compute in every layer what a plan computes once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.batches import reduce_loss, split_batch
from autoplan.capturer import capture
from autoplan.graph import Trace
from autoplan.tracer import trace, trace_program
from benchmarks.apart import run_apart
from benchmarks.architectures import ARCHITECTURES, Example, build
from benchmarks.kept_bytes import kept_by_trace, kept_tensors, run_captured, surplus

__all__ = ["Row", "measure", "table"]

_TIMEOUT_S = 600


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
        kept_bytes_error: of the small size, trace over autograd less one, both of what a planned
            module runs: the captured program.
        eager_kept_bytes_error: the same trace over autograd of the model's own forward.
        eager_keeps: what that forward keeps and the captured program does not.
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
    eager_kept_bytes_error: float | None = None
    eager_keeps: tuple[str, ...] = ()
    small_error: str = ""
    seconds: float = 0.0
    peak_rss_bytes: int = 0


def flops_of(result: Trace) -> tuple[int, int]:
    """Return (forward, backward) floating-point operations of a whole trace."""
    ops = [op for call in result.calls for op in result.blocks[call.block].ops]
    return sum(op.forward_flops for op in ops), sum(op.backward_flops for op in ops)


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
        program = capture(example.model, example.batch, example.loss_fn)
        result = trace_program(program, model_name=name)
        forward, backward = flops_of(result)
        for module in example.model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False):
                config.use_cache = False
        model = example.model
        planned = kept_tensors(model, lambda: run_captured(program, model, example.batch))
        eager = kept_tensors(model, lambda: loss_of(example))
        real_forward, real_backward = real_flops(example)
    except Exception as error:
        return {"small_error": f"{type(error).__name__}: {error}".splitlines()[0]}
    kept = sum(kept_by_trace(result))
    return {
        "forward_flops_error": forward / real_forward - 1,
        "backward_flops_error": backward / real_backward - 1,
        "kept_bytes_error": kept / _bytes_of(planned) - 1,
        "eager_kept_bytes_error": kept / _bytes_of(eager) - 1,
        "eager_keeps": surplus(eager, planned),
    }


def _bytes_of(kept: Sequence[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in kept)


def _measure_apart(name: str) -> Row:
    """Return the row of an architecture that is measured in a process of its own."""
    try:
        done = run_apart(__file__, "--one", name, timeout_s=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Row(name=name, traced=False, reason=f"no answer within {_TIMEOUT_S} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return Row(name=name, traced=False, reason=lines[-1] if lines else "the process died")
    values: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return Row(**{**values, **lists})


def _eager_remark(row: Row) -> str:
    return f"eager keeps {', '.join(row.eager_keeps)} more" if row.eager_keeps else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.3f} %"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| model | traced | blocks | classes | parameters | forward FLOPs | error | "
        "backward FLOPs | error | kept bytes error | of eager | s | RSS MiB | remark |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        remark = row.reason or row.small_error or _eager_remark(row)
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
            _percent(row.eager_kept_bytes_error),
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
