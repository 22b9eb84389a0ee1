"""Evaluate a parallel module: its model in eval mode, for batches of any shape, without gradients.

The graphs of a plan are those of one batch shape in train mode. For evaluation the model is traced
anew, once for each shape, from a copy without weights, and run on the parameters as the plan stores
them:

- a call runs on the first stage, not before that of the call before it, that holds its states;
- an op takes the slices that the equal op of training takes, if they can run at the new sizes, else
  its block runs whole on every tensor-parallel rank, with gathered parameters;
- activations go from stage to stage for the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autoplan import compat
from autoplan.alike_programs import alike_axes, assign_calls
from autoplan.batches import BatchDims, LossFn
from autoplan.calls import BoundCall, bind_call, install
from autoplan.capturer import capture, capture_outputs
from autoplan.chunks import gathered
from autoplan.collectives import local_slice
from autoplan.device_meshes import axis_of
from autoplan.graph import Placement, ShardOption
from autoplan.lowering import lower
from autoplan.plan import Plan
from autoplan.processes import agree
from autoplan.program import BlockGraph, Program
from autoplan.sharding import check_axes, shard_options
from autoplan.stages import (
    StageRoot,
    StageSlice,
    crossing_metas,
    find_state,
    side_function,
    slice_program,
    stage_function,
)
from autoplan.step_means import StepMeans, find_denominators
from autoplan.tensor_parallel import lower_stage, stored_placements

__all__ = ["Evaluator", "RankEvaluator"]

_WHOLE = Placement(kind="replicate")


@dataclass(frozen=True, slots=True)
class _Form:
    """What runs for batches of one shape.

    Attributes:
        run: from the batch inputs of this stage and what enters it to what leaves it.
        means: of the loss.
        wanted: positions of the batch leaves that this stage reads.
        inputs, outputs: metas of what crosses the borders of this stage.
        output_of: makes the model's output of its tensors; None for a loss.
    """

    run: Callable[..., tuple[Any, ...]]
    means: StepMeans
    wanted: tuple[int, ...]
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.dtype, ...]
    output_of: Callable[[Sequence[torch.Tensor]], Any] | None


@dataclass(slots=True)
class Evaluator:
    """Evaluates the model of a stage root.

    Attributes:
        plan: that the root runs.
        program: captured for training.
        stages: all stages of training.
        index: of the stage.
        skeleton: the user's model without weights, taken before the root was made.
        loss_fn: as given to the planner.
        root: of the stage.
        mesh: (pp, dp, tp), or None for one process.
        device: where the stage computes.
        timeout_s: how long a message may wait before it raises.
    """

    plan: Plan
    program: Program
    stages: Sequence[StageSlice]
    index: int
    skeleton: nn.Module
    loss_fn: LossFn | None
    root: StageRoot
    mesh: DeviceMesh | None
    device: torch.device
    timeout_s: float
    _forms: dict[Any, _Form] = field(default_factory=dict)
    _stored: dict[str, Placement] | None = None

    def prepare(self, batch: Any, *, is_loss: bool) -> None:
        """Trace the model for a batch if it has to be; all ranks call it."""
        self._form(batch, is_loss=is_loss)

    def loss(self, batch: Any) -> torch.Tensor | None:
        """Return the loss of a batch on the last stage, None on others; all ranks call it."""
        outputs = self._evaluate(batch, is_loss=True)
        return outputs[0] if outputs is not None else None

    def output(self, batch: Any) -> Any:
        """Return the model's output on the last stage, None on others; all ranks call it."""
        form = self._form(batch, is_loss=False)
        outputs = self._evaluate(batch, is_loss=False)
        if outputs is None:
            return None
        assert form.output_of is not None, "an output has a form"
        (value,) = outputs
        return form.output_of(value if isinstance(value, tuple) else (value,))

    def _evaluate(self, batch: Any, *, is_loss: bool) -> tuple[Any, ...] | None:
        form = self._form(batch, is_loss=is_loss)
        leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
        mine = tuple(leaves[i].to(self.device) for i in form.wanted)
        with torch.no_grad():
            form.means.begin([mine])
            entered = self._receive(form)
            outputs = self._run(form, entered, mine)
            if self._stage + 1 == len(self.stages):
                return outputs
            self._send(form, outputs)
        return None

    def _run(
        self, form: _Form, entered: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:
        """Run the root's forward, inside whatever hooks it has, with the function of a form."""
        trained = self.root.swap_function(form.run)
        try:
            self.root.feed([tuple(batch)])
            outputs: tuple[Any, ...] = self.root(*entered)
        finally:
            assert trained is not None, "the root has no function"
            self.root.swap_function(trained)
            # Gathered parameters would outlive a step of the optimizer.
            for module in self.root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return outputs

    @property
    def _stage(self) -> int:
        return self.index

    def _peer(self, stage: int) -> int:
        assert self.mesh is not None, "a pipeline has a mesh"
        return dist.get_global_rank(self.mesh.get_group("pp"), stage % self.plan.mesh.pp)

    def _receive(self, form: _Form) -> list[torch.Tensor]:
        received = [torch.empty_like(x, device=self.device) for x in form.inputs]
        for tensor in received:
            assert self.mesh is not None, "a pipeline has a mesh"
            group = self.mesh.get_group("pp")
            self._wait(dist.irecv(tensor, src=self._peer(self._stage - 1), group=group))
        return received

    def _wait(self, work: Any) -> None:
        compat.wait(work, self.timeout_s if self.device.type == "cpu" else None)

    def _send(self, form: _Form, outputs: Sequence[torch.Tensor]) -> None:
        assert self.mesh is not None, "a pipeline has a mesh"
        for tensor, dtype in zip(outputs, form.outputs, strict=True):
            group = self.mesh.get_group("pp")
            left = tensor.to(dtype).contiguous()
            self._wait(dist.isend(left, dst=self._peer(self._stage + 1), group=group))

    def _form(self, batch: Any, *, is_loss: bool) -> _Form:
        leaves, spec = pytree.tree_flatten(batch)
        shapes = [
            (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x) for x in leaves
        ]
        key = (is_loss, str(spec), tuple(shapes))
        if key not in self._forms:
            form, problem = None, None
            try:
                form = self._made(batch, len(self._forms), is_loss=is_loss)
            except Exception as error:  # handed to `agree`, which raises it on every rank
                problem = error
            if dist.is_initialized():
                agree(problem)
            elif problem is not None:
                raise problem
            assert form is not None, "no form without a problem"
            self._forms[key] = form
        return self._forms[key]

    def _made(self, batch: Any, number: int, *, is_loss: bool) -> _Form:
        """Trace the model for a batch and bind its calls to this stage."""
        output_of = None
        self.skeleton.eval()
        dims = self._dims(batch)
        if is_loss:
            program = capture(
                self.skeleton, batch, self.loss_fn, batch_dim=dims, autocast=self.program.autocast
            )
        else:
            program, output_of = capture_outputs(
                self.skeleton, batch, batch_dim=dims, autocast=self.program.autocast
            )
        cuts = assign_calls(program, self.program, self.stages)
        stage = slice_program(program, cuts)[self._stage]
        group = axis_of(self.mesh, "dp").get_group() if self.mesh is not None else None
        found = find_denominators(program, stage.calls) if is_loss else ()
        side = self._side(program, stage)
        reader = side_function(program, stage, [one.value for one in found], self.device)
        means = StepMeans(found, lambda values: reader.function(side(), *values), group)
        calls = {i: self._bound(program, i, means) for i in stage.calls}
        for index, call in calls.items():
            if program.calls[index].fqn:
                module = self.root.get_submodule(program.calls[index].fqn)
                install(module, (number, index), call)
        is_mixed = self.plan.mixed_precision == "bfloat16"
        dtype = torch.bfloat16 if is_mixed else None
        return _Form(
            run=self._function(program, stage, number, calls, side),
            means=means,
            wanted=tuple(program.inputs.index(name) for name in stage.batch_inputs),
            inputs=tuple(
                torch.empty(m.shape, dtype=m.dtype, device="meta")
                for m in crossing_metas(program, stage.inputs, dtype)
            ),
            outputs=tuple(
                m.dtype
                for m in crossing_metas(program, stage.outputs, dtype)
                if self._stage + 1 < len(self.stages)
            ),
            output_of=output_of,
        )

    def _dims(self, batch: Any) -> Any:
        """Return the batch dimensions of training where the batch has its form."""
        told = self.plan.batch_dims
        count = sum(isinstance(x, torch.Tensor) for x in pytree.tree_leaves(batch))
        return BatchDims(told) if told and len(told) == count else 0

    def _side(self, program: Program, stage: StageSlice) -> Callable[[], tuple[torch.Tensor, ...]]:
        buffers = [find_state(self.root, fqn) for fqn in stage.side_states.values()]
        constants = [program.constants[name].to(self.device) for name in stage.constants]
        return lambda: (*(holder[key] for holder, key in buffers), *constants)

    def _function(
        self,
        program: Program,
        stage: StageSlice,
        number: int,
        calls: Mapping[int, BoundCall],
        side: Callable[[], tuple[torch.Tensor, ...]],
    ) -> Callable[..., tuple[Any, ...]]:
        compiled = stage_function(program, stage, self.device)
        modules = {i: self.root.get_submodule(c.fqn) for i in calls if (c := program.calls[i]).fqn}

        def call(index: int, *inputs: Any) -> Any:
            module = modules.get(index)
            return calls[index](*inputs) if module is None else module((number, index), *inputs)

        def run(
            activations: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]
        ) -> tuple[Any, ...]:
            outputs: tuple[Any, ...] = compiled.function(call, side(), *activations, *batch)
            return outputs

        return run

    def _bound(self, program: Program, index: int, means: StepMeans) -> BoundCall:
        """Return a call of the new program, lowered and bound to the root."""
        call = program.calls[index]
        graph = program.graphs[call.graph]
        localise: list[Callable[[torch.Tensor], torch.Tensor] | None] = [None] * len(graph.states)
        if self.plan.mesh.tp > 1:
            assert self.mesh is not None, "tensor parallelism has a mesh"
            tp = self.mesh["tp"]
            options = shard_options(graph)
            axes = self._axes(call.states, graph, options)
            lowered = lower(
                graph,
                options,
                axes,
                degree=tp.size(),
                rank=tp.get_local_rank(),
                group=tp.get_group(),
            )
            localise = [
                self._reader(program.aliases.get(fqn, fqn), lowered.parameters[state.fqn], tp)
                if state.is_parameter
                else None
                for state, fqn in zip(graph.states, call.states, strict=True)
            ]
            graph = lowered.graph
        return bind_call(
            means.bind(program, index, graph),
            call.states,
            self.root,
            mode="none",
            keep=(),
            localise=localise,
            device=self.device,
            autocast=program.autocast,
        )

    def _axes(
        self,
        states: Sequence[str],
        graph: BlockGraph,
        options: Mapping[str, tuple[ShardOption, ...]],
    ) -> dict[str, str]:
        """Return the axes of the training call with the most of these states."""
        wanted = {self.program.aliases.get(fqn, fqn) for fqn in states}
        best, most = None, 0
        for block in self.plan.stages[self._stage].blocks:
            names = self.program.calls[block.call].states
            common = len(wanted & {self.program.aliases.get(fqn, fqn) for fqn in names})
            if common > most:
                best, most = block, common
        layout = self.plan.placements.get(best.placements) if best is not None else None
        if best is None or layout is None:
            return {}
        trained = self.program.graphs[self.program.calls[best.call].graph]
        axes = alike_axes(trained, layout.axes, graph, options)
        try:
            check_axes(graph, options, axes, self.plan.mesh.tp)
        except ValueError:
            return {}  # whole on every rank, with gathered parameters
        return axes

    def _reader(
        self, first: str, required: str, tp: DeviceMesh
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return how a parameter is read that is not stored as a graph requires it."""
        wanted = Placement.parse(required)
        if self._held().get(first, _WHOLE) == wanted:
            return None

        def read(parameter: torch.Tensor) -> torch.Tensor:
            assert isinstance(parameter, DTensor), "tensor parallel parameters are DTensors"
            return local_slice(gathered(parameter), wanted, tp.get_local_rank(), tp.size())

        return read

    def _held(self) -> dict[str, Placement]:
        """Return the placement over tp in which each parameter of this stage is stored."""
        if self._stored is None:
            assert self.mesh is not None, "tensor parallelism has a mesh"
            stage, tp = self.stages[self._stage], self.mesh["tp"]
            lowered = lower_stage(
                self.plan, self.program, stage, rank=tp.get_local_rank(), group=tp.get_group()
            )
            self._stored = stored_placements(self.plan, self.program, stage, lowered)
        return self._stored


@dataclass(frozen=True, slots=True)
class RankEvaluator:
    """Evaluates with the stages of a rank, one after the other; see `Evaluator`."""

    evaluators: Sequence[Evaluator]

    def loss(self, batch: Any) -> torch.Tensor | None:
        """Return the loss of a batch on the last stage, None on others; all ranks call it."""
        loss: torch.Tensor | None = self._each(batch, Evaluator.loss, is_loss=True)
        return loss

    def output(self, batch: Any) -> Any:
        """Return the model's output on the last stage, None on others; all ranks call it."""
        return self._each(batch, Evaluator.output, is_loss=False)

    def _each(self, batch: Any, run: Callable[[Evaluator, Any], Any], *, is_loss: bool) -> Any:
        # Ranks agree on every trace before the first one waits for a message of another.
        for evaluator in self.evaluators:
            evaluator.prepare(batch, is_loss=is_loss)
        result = None
        for evaluator in self.evaluators:
            result = run(evaluator, batch)
        return result
