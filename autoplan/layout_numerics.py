"""Check without a process group that every block computes the same under its layout.

A block of any size is checked: as it was captured where it is small, else on smaller tensors
(`autoplan.shrinking`), else its sharded ops one by one on smaller tensors. Where a layout is wrong,
the ops that are wrong by themselves are named, so that the search can do without them.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from autoplan.autograd_threads import has_autograd_threads
from autoplan.axes import Analysis
from autoplan.dry_run_result import LayoutNumerics
from autoplan.graph import ShardOption
from autoplan.op_facts import is_random
from autoplan.plan import Plan
from autoplan.program import BlockGraph, Op, Program, Ref, State, TensorMeta
from autoplan.rank_numerics import Comparison, compare_layout, without_chance
from autoplan.sharding import shard_options
from autoplan.shrinking import SmallGraph, axes_of, shrink_graph
from autoplan.tensor_layout import WHOLE_BORDERS, Borders

__all__ = ["check_layout_numerics", "check_plan_layouts"]

_MOST_AS_CAPTURED = 1 << 20  # elements of states and results together: 8 MiB in float64
_MOST_ELEMENTS = 1 << 24  # that are run at all: 128 MiB in float64
_ALIGNMENT = 8  # of small sizes on each rank, where an operator's kernel refuses smaller ones
_TIMEOUT_S = 120.0
_INNER = "inner"  # axis of the product that makes addends
_checked: dict[tuple[str, str, int], LayoutNumerics] = {}


def check_plan_layouts(plan: Plan, program: Program) -> tuple[LayoutNumerics, ...]:
    """Check every layout that a plan uses, once for each class of blocks."""
    wanted: dict[tuple[str, str, int], _Check] = {}
    used: dict[tuple[int, str], tuple[str, str, int]] = {}
    for stage in plan.stages:
        for block in stage.blocks:
            key = (program.calls[block.call].graph, block.placements)
            layout = plan.placements.get(block.placements)
            if layout is None or not layout.axes or key in used:
                continue
            graph = program.graphs[key[0]]
            text = f"{sorted(layout.axes.items())} {layout.both_borders}"
            used[key] = (graph.fingerprint, text, layout.degree)
            if used[key] not in _checked:
                wanted[used[key]] = _Check(graph, layout.axes, layout.degree, layout.both_borders)
    _checked.update(zip(wanted, _run_all(list(wanted.values())), strict=True))
    return tuple(
        replace(_checked[known], block=program.graphs[graph].name, layout=layout)
        for (graph, layout), known in used.items()
    )


def check_layout_numerics(
    graph: BlockGraph,
    axes: Mapping[str, str],
    degree: int,
    *,
    borders: Borders = WHOLE_BORDERS,
) -> LayoutNumerics:
    """Return how a layout of a block compares with the whole block.

    Args:
        graph: as captured.
        axes: op name -> axis.
        degree: ranks.
        borders: how activations enter and leave, where they can be sliced so.
    """
    return _run_all([_Check(graph, axes, degree, borders)])[0]


def _run_all(checks: Sequence[_Check]) -> list[LayoutNumerics]:
    """Return the results of checks.

    They are run in a forked process: a process that has run a backward beside an accelerator cannot
    fork workers any more, and this one may want to. One that cannot runs them in threads. In both
    each has a time to end in.
    """
    if has_autograd_threads():
        return [_in_thread(check) for check in checks]
    found: list[LayoutNumerics] = []
    while len(found) < len(checks):
        found += _in_fork(checks[len(found) :])
    return found


def _in_fork(checks: Sequence[_Check]) -> list[LayoutNumerics]:
    """Return the results of the first checks, up to one at which the process had to end."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, checks), daemon=True)
    process.start()
    theirs.close()
    found: list[LayoutNumerics] = []
    try:
        for check in checks:
            if not ours.poll(_TIMEOUT_S):
                return [*found, check.not_run(f"no result after {_TIMEOUT_S:g} s")]
            found.append(ours.recv())
    except EOFError:
        return [*found, check.not_run("its process died")]
    finally:
        process.kill()
        process.join()
        ours.close()
    return found


def _serve(pipe: Connection, checks: Sequence[_Check]) -> None:
    torch.set_num_threads(1)
    for check in checks:
        pipe.send(check.run())
    os._exit(0)


def _in_thread(check: _Check) -> LayoutNumerics:
    """Run a check in a thread; one that does not end is left behind: nothing can end a thread."""
    answers: queue.SimpleQueue[LayoutNumerics | BaseException] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put(check.run())
        except BaseException as error:  # raised again by who waits
            answers.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        answer = answers.get(timeout=_TIMEOUT_S)
    except queue.Empty:
        return check.not_run(f"no result after {_TIMEOUT_S:g} s")
    if isinstance(answer, BaseException):
        raise answer
    return answer


@dataclass(frozen=True, slots=True)
class _Check:
    """A layout of a block that is to be checked; attributes as in `check_layout_numerics`."""

    graph: BlockGraph
    axes: Mapping[str, str]
    degree: int
    borders: Borders

    def run(self) -> LayoutNumerics:
        """Return how the layout compares, in the first form in which it can be run."""
        quiet, options = without_chance(self.graph), shard_options(self.graph)
        whole = SmallGraph(graph=quiet, options=options)
        if _elements(quiet) <= _MOST_AS_CAPTURED:
            found, form = self._compare(whole), "as captured"
            axes_found = None
        else:
            axes_found = axes_of(quiet)
            found = self._smaller(quiet, options, axes_found)
            form = "smaller"
            if found.is_wrong and _elements(quiet) <= _MOST_ELEMENTS:
                found, form = self._compare(whole), "as captured"
        if found.error is not None and not found.is_wrong:
            return self._result(found, form)
        by_op = self._by_op(quiet, options, axes_found or axes_of(quiet))
        wrong = tuple(name for name, one in by_op.items() if one.is_wrong)
        # On smaller tensors a layout may fail to run that runs on the tensors that it is for.
        is_certain = found.is_wrong and (found.error is not None or form == "as captured")
        if wrong or is_certain:
            blamed = wrong or tuple(name for name, axis in self.axes.items() if axis != "whole")
            reason = f"{wrong[0]}: {by_op[wrong[0]].reason}" if wrong else found.reason
            error = by_op[wrong[0]].error if wrong and not is_certain else found.error
            told = Comparison(error=error, reason=reason, is_wrong=True)
            return self._result(told, form if is_certain else "op by op", blamed)
        errors = [one.error for one in by_op.values() if one.error is not None]
        left_out = {name: one.reason for name, one in by_op.items() if one.error is None}
        if not errors:
            return self._result(found, "not run")
        reason = ", ".join(f"{name} {text}" for name, text in left_out.items())
        told = Comparison(error=max(errors), reason=reason, is_wrong=False)
        return self._result(told, "op by op")

    def not_run(self, reason: str) -> LayoutNumerics:
        """Return the result of a check that gave none."""
        return self._result(Comparison.not_run(reason), "not run")

    def _result(self, found: Comparison, form: str, blamed: tuple[str, ...] = ()) -> LayoutNumerics:
        return LayoutNumerics(
            block=self.graph.name,
            layout="",
            degree=self.degree,
            form=form,
            error=found.error,
            reason=found.reason,
            is_wrong=found.is_wrong,
            blamed=tuple((name, self.axes[name]) for name in blamed),
        )

    def _smaller(
        self,
        graph: BlockGraph,
        options: Mapping[str, tuple[ShardOption, ...]],
        found: Analysis,
        *,
        takes_addends: bool = False,
    ) -> Comparison:
        """Return how a graph compares on smaller tensors."""
        for alignment in (1, _ALIGNMENT):
            small = shrink_graph(graph, options, self.degree, found, alignment)
            one = self._compare(_of_addends(small, self.degree) if takes_addends else small)
            if one.error is not None:
                break
        return one

    def _compare(self, small: SmallGraph) -> Comparison:
        count = _elements(small.graph)
        if count > _MOST_ELEMENTS:
            return Comparison.not_run(f"{count:,} elements, more than {_MOST_ELEMENTS:,}")
        names = {op.name for op in self.graph.ops}
        axes = {
            op.name: self.axes.get(op.name, "whole") if op.name in names else _INNER
            for op in small.graph.ops
        }
        borders = self.borders if len(axes) == len(names) else WHOLE_BORDERS
        return compare_layout(small.graph, small.options, axes, self.degree, borders=borders)

    def _by_op(
        self, quiet: BlockGraph, options: Mapping[str, tuple[ShardOption, ...]], found: Analysis
    ) -> dict[str, Comparison]:
        """Return how each sharded op compares by itself; equal ops are run once."""
        known: dict[object, Comparison] = {}
        compared = {}
        for op, unit in _units(quiet):
            axis = self.axes.get(op.name, "whole")
            if axis == "whole" or is_random(op) or (axis == "partial" and not unit.inputs):
                continue
            option = next((o for o in options[op.name] if o.axis == axis), None)
            shapes = tuple((meta.shape, meta.dtype) if meta else None for meta in unit.input_metas)
            states = tuple((s.meta.shape, s.meta.dtype) for s in unit.states)
            key = (op.target_name, shapes, states, repr(option), _constants(op))
            if key not in known:
                own = {o.name: options[o.name] for o in unit.ops}
                known[key] = self._smaller(unit, own, found, takes_addends=axis == "partial")
            compared[op.name] = known[key]
        return compared


def _of_addends(small: SmallGraph, degree: int) -> SmallGraph:
    """Return a graph of one input with a product before it, so that addends can enter."""
    graph = small.graph
    (name,), (meta,) = graph.inputs, graph.input_metas
    assert meta is not None, "addends are a tensor"
    factor = replace(meta, shape=(*meta.shape[:-1], 2 * degree))
    weight = State(
        name=f"{name}__weight",
        fqn="weight",
        is_absolute=False,
        is_parameter=True,
        meta=replace(meta, shape=(meta.shape[-1], 2 * degree), requires_grad=True),
    )
    product = Op(
        name=f"{name}__product",
        target=torch.ops.aten.linear.default,
        args=(Ref(f"{name}__factor"), Ref(weight.name)),
        kwargs={},
        fqn="",
        line="",
        meta=meta,
    )
    sliced = ShardOption(
        axis=_INNER,
        size=2 * degree,
        inputs=(f"S({len(meta.shape) - 1})", "S(1)"),
        output="P",
        is_split=True,
    )

    def read(value: str) -> str:
        return product.name if value == name else value

    return SmallGraph(
        graph=replace(
            graph,
            inputs=(f"{name}__factor",),
            input_metas=(factor,),
            states=(weight,),
            ops=(product, *(op.reading(read) for op in graph.ops)),
        ),
        options={**small.options, product.name: (sliced,)},
    )


def _constants(op: Op) -> str:
    return repr([value for value in (*op.args, *op.kwargs.values()) if isinstance(value, int)])


def _units(graph: BlockGraph) -> Iterator[tuple[Op, BlockGraph]]:
    """Yield each op as a graph of its own; one that makes a tuple with all that read it."""
    made = {op.name: op for op in graph.ops}
    metas: dict[str, TensorMeta | None] = {name: op.meta for name, op in made.items()}
    metas |= dict(zip(graph.inputs, graph.input_metas, strict=True))
    states = {state.name: state for state in graph.states}
    for op in graph.ops:
        readers = [other for other in graph.ops if op.meta is None and op.name in other.inputs()]
        ops = (op, *readers)
        own = {one.name for one in ops}
        read = dict.fromkeys(name for one in ops for name in one.inputs() if name not in own)
        if any(name in made and made[name].meta is None for name in read):
            continue  # a component of a tuple: run with what makes the tuple
        inputs = tuple(name for name in read if name not in states)
        yield (
            op,
            replace(
                graph,
                inputs=inputs,
                input_metas=tuple(metas[name] for name in inputs),
                states=tuple(states[name] for name in read if name in states),
                ops=ops,
                outputs=tuple(one.name for one in ops if one.meta is not None),
                fingerprint=f"{graph.fingerprint} {op.name}",
            ),
        )


def _elements(graph: BlockGraph) -> int:
    metas = [s.meta for s in graph.states] + [op.meta for op in graph.ops if op.meta is not None]
    return sum(torch.Size(m.shape).numel() for m in metas)
