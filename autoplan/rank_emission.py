"""This rank's part of a captured model under a plan: its stages, wrapped, sharded and scheduled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan import compat
from autoplan.batch_splitter import BatchSplitter
from autoplan.calls import BoundCall, bind_call, install
from autoplan.device_meshes import axis_of, sharding_mesh
from autoplan.evaluation import Evaluator, RankEvaluator
from autoplan.executor import compile_graph
from autoplan.microbatches import PipelinePart, pipeline_runner
from autoplan.plan import Plan
from autoplan.program import Program
from autoplan.recapture import captured_at_shape, with_true_metas
from autoplan.runtime import ParallelModule
from autoplan.sharders import Sharder, Unsharded, shard
from autoplan.stage_check import check_stages
from autoplan.stage_parts import StagePart, StepForm, root_function
from autoplan.stages import (
    StageRoot,
    StageSlice,
    build_root,
    crossing_metas,
    find_state,
    root_contents,
    side_function,
    slice_program,
    stage_function,
)
from autoplan.step_buffers import StepBuffers, changed_by
from autoplan.step_means import StepMeans, find_denominators
from autoplan.tensor_parallel import lower_calls, whole_calls
from autoplan.ties import Tie, make_ties
from autoplan.written_inputs import with_own_inputs

__all__ = ["RankEmission"]


@dataclass(slots=True)
class RankEmission:
    """What the steps of one `parallelize` share.

    Attributes:
        plan, model, device, mesh, timeout_s, loss_fn: of `parallelize`.
        program: captured at one batch shape.
        skeleton: the model without weights, to trace it at other shapes; None runs this one only.
        compiler: backend of `torch.compile`, or None.
        number: of the batch shape, in order of coming; 0 is that of the plan.
        holder: the module, once it is made.
    """

    plan: Plan
    program: Program
    model: nn.Module
    device: torch.device
    mesh: DeviceMesh | None
    timeout_s: float
    skeleton: nn.Module | None = None
    loss_fn: Callable[..., torch.Tensor] | None = None
    compiler: str | None = None
    number: int = 0
    holder: list[ParallelModule] = field(default_factory=list)

    def build(self) -> ParallelModule:
        """Return the module: stage, tensor parallelism, recompute, ZeRO, pipeline in turn."""
        parameters = {n for n, _ in self.model.named_parameters(remove_duplicate=False)}
        stages = self._stages(parameters)
        own = stages[self._rank("pp") :: self.plan.mesh.pp]
        form, sources = self._form(stages, [None] * len(own))
        module = ParallelModule(
            plan=self.plan,
            form=form,
            mesh=self.mesh,
            ties=self._ties(stages),
            aliases=self.program.aliases,
            sources=self._sources(stages, sources),
            computes_loss=own[-1].index == len(stages) - 1,
            evaluator=self._evaluator(stages, own, form.parts),
            reform=self._reform(form.parts, parameters),
        )
        self.holder.append(module)
        return module

    def _stages(self, parameters: set[str]) -> tuple[StageSlice, ...]:
        """Return the stages of the plan, checked against the names of the model's parameters."""
        cuts = [[block.call for block in stage.blocks] for stage in self.plan.stages]
        stages = slice_program(self.program, cuts)
        check_stages(self.plan, self.program, stages, parameters)
        return stages

    def _form(
        self, stages: Sequence[StageSlice], earlier: Sequence[StagePart | None]
    ) -> tuple[StepForm, dict[int, str]]:
        """Return what this rank runs at the program's batch shape, and its text by stage.

        Args:
            stages: all.
            earlier: those of this rank as they run at another shape; None before they are made.
        """
        own = stages[self._rank("pp") :: self.plan.mesh.pp]
        wanted = sorted({i for stage in own for i in self._leaves(stage)})
        parts, sources = [], {}
        for stage, before in zip(own, earlier, strict=True):
            part, sources[stage.index] = self._part(stage, wanted, before)
            parts.append(part)
        form = StepForm(
            parts=tuple(parts),
            splitter=self._splitter(wanted),
            run_step=self._runner(len(stages), own, parts),
        )
        return form, sources

    def _reform(
        self, parts: Sequence[StagePart], parameters: set[str]
    ) -> Callable[[Any], StepForm] | None:
        """Return what traces the model for a batch of another shape; None without a skeleton."""
        skeleton = self.skeleton
        if skeleton is None:
            return None
        modes = [module.training for module in skeleton.modules()]
        lasting = replace(self, model=nn.Module())  # the weights of other stages are let go
        numbers = itertools.count(1)

        def reform(batch: Any) -> StepForm:
            for module, mode in zip(skeleton.modules(), modes, strict=True):
                module.training = mode
            program = captured_at_shape(
                lasting.plan, lasting.program, skeleton, batch, lasting.loss_fn
            )
            program = with_true_metas(program, lasting.device)
            other = replace(lasting, program=program, number=next(numbers))
            form, _ = other._form(other._stages(parameters), parts)
            return form

        return reform

    def _part(
        self, stage: StageSlice, wanted: Sequence[int], before: StagePart | None
    ) -> tuple[StagePart, str]:
        """Return a stage of this rank, and the text of what it runs."""
        program = self.program
        if before is not None:
            root = before.root
        else:
            root = build_root(self.model, root_contents(self.model, program, stage), self.device)
        group = axis_of(self.mesh, "dp").get_group() if self.mesh is not None else None
        means = self._means(stage, root, group)
        calls = self._bind_calls(stage, root, means, is_stored=before is not None)
        changed = changed_by(program, stage)
        buffers = before.buffers if before is not None else StepBuffers.of(root, changed, group)
        function, source = self._function(stage, root, calls, buffers)
        part = StagePart(
            root=root,
            sharder=before.sharder if before is not None else self._shard(stage, root),
            buffers=buffers,
            means=means,
            wanted=tuple(wanted.index(i) for i in self._leaves(stage)),
            function=function,
        )
        return part, source

    def _leaves(self, stage: StageSlice) -> list[int]:
        """Return the positions of the batch leaves that a stage reads."""
        return [self.program.inputs.index(name) for name in stage.batch_inputs]

    def _evaluator(
        self,
        stages: Sequence[StageSlice],
        own: Sequence[StageSlice],
        parts: Sequence[StagePart],
    ) -> RankEvaluator | None:
        if self.skeleton is None:
            return None
        return RankEvaluator(
            [
                Evaluator(
                    plan=self.plan,
                    program=self.program,
                    stages=stages,
                    index=stage.index,
                    skeleton=self.skeleton,
                    loss_fn=self.loss_fn,
                    root=part.root,
                    mesh=self.mesh,
                    device=self.device,
                    timeout_s=self.timeout_s,
                )
                for stage, part in zip(own, parts, strict=True)
            ]
        )

    def _rank(self, name: str) -> int:
        return axis_of(self.mesh, name).get_local_rank() if self.mesh is not None else 0

    @property
    def _is_mixed(self) -> bool:
        return self.plan.mixed_precision == "bfloat16"

    def _bind_calls(
        self, stage: StageSlice, root: StageRoot, means: StepMeans, *, is_stored: bool
    ) -> dict[int, BoundCall]:
        """Return the stage's calls bound to its modules.

        `is_stored`: the parameters of the root are as the plan stores them.
        """
        plan, program = self.plan, self.program
        if plan.mesh.tp > 1:
            assert self.mesh is not None, "tensor parallelism has a mesh"
            local = lower_calls(plan, program, stage, root, self.mesh, is_stored=is_stored)
        else:
            local = whole_calls(program, stage)
        calls = {}
        for block in plan.stages[stage.index].blocks:
            call = program.calls[block.call]
            recompute = plan.recompute[block.recompute]
            calls[block.call] = bind_call(
                with_own_inputs(plan, means.bind(program, block.call, local[block.call].graph)),
                call.states,
                root,
                mode=recompute.mode,
                keep=recompute.keep,
                localise=local[block.call].localise,
                device=self.device,
                autocast=program.autocast,
                compiler=self.compiler if call.fqn else None,
            )
        return calls

    def _means(
        self, stage: StageSlice, root: StageRoot, group: dist.ProcessGroup | None
    ) -> StepMeans:
        """Return the means over the step that losses of this stage are."""
        program = self.program
        found = find_denominators(program, stage.calls)
        compiled = side_function(program, stage, [one.value for one in found], self.device)
        side = self._side_values(stage, root)

        def read(batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            values: Sequence[torch.Tensor] = compiled.function(side(), *batch)
            return values

        return StepMeans(found, read, group)

    def _side_values(
        self, stage: StageSlice, root: StageRoot
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Return what reads the buffers and constants of a stage's side ops."""
        buffers = [find_state(root, fqn) for fqn in stage.side_states.values()]
        constants = [self.program.constants[name].to(self.device) for name in stage.constants]
        return lambda: (*(holder[key] for holder, key in buffers), *constants)

    def _function(
        self,
        stage: StageSlice,
        root: StageRoot,
        calls: dict[int, BoundCall],
        changed: StepBuffers,
    ) -> tuple[Callable[..., tuple[torch.Tensor, ...]], str]:
        """Return what the root runs, and its text with the text of the graphs it calls.

        Blocks get the calls as their forwards.
        """
        program = self.program
        compiled = stage_function(program, stage, self.device)
        modules = {
            i: install(root.get_submodule(program.calls[i].fqn), ("step", self.number, i), call)
            for i, call in calls.items()
            if program.calls[i].fqn
        }
        run = root_function(
            compiled.function,
            self._side_values(stage, root),
            calls,
            modules,
            changed,
            outputs=crossing_metas(
                program, stage.outputs, self._compute_dtype, slices=self.plan.slices
            ),
            loss_share=self.plan.num_microbatches if program.loss in stage.outputs else None,
            is_split=self.plan.schedule == "zero_bubble",
        )
        texts = dict.fromkeys(calls[i].source for i in stage.calls)
        return run, "\n".join([*texts, compiled.source])

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self._is_mixed else None

    def _shard(self, stage: StageSlice, root: StageRoot) -> Sharder:
        fqns = [self.program.calls[i].fqn for i in stage.calls if self.program.calls[i].fqn]
        if self.mesh is None:
            return Unsharded()
        return shard(
            root,
            [root.get_submodule(fqn) for fqn in fqns],
            states=[fqn for i in stage.calls for fqn in self.program.calls[i].states],
            zero_stage=self.plan.zero_stage,
            mesh=sharding_mesh(self.mesh, self.plan.mesh.dp_replicate),
            is_mixed=self._is_mixed,
            is_pipeline=self.plan.mesh.pp > 1,
            offload=self.plan.offload,
        )

    def _runner(
        self,
        num_stages: int,
        stages: Sequence[StageSlice],
        parts: Sequence[StagePart],
    ) -> Callable[[int], list[torch.Tensor]]:
        """Return what runs all micro-batches of a step: a loop, or a pipeline schedule."""
        if self.plan.mesh.pp == 1:
            holder = self.holder
            return lambda count: holder[0].run_microbatches(count)
        assert self.mesh is not None, "a pipeline has a mesh"
        program, dtype, slices = self.program, self._compute_dtype, self.plan.slices
        is_wrapped = self.plan.mesh.dp > 1 or self._is_mixed or self.plan.offload != "none"
        return pipeline_runner(
            [
                PipelinePart(
                    root=part.root,
                    index=stage.index,
                    inputs=crossing_metas(program, stage.inputs, dtype, slices=slices),
                    outputs=crossing_metas(program, stage.outputs, dtype, slices=slices),
                    before_backward=part.sharder.before_backward,
                )
                for stage, part in zip(stages, parts, strict=True)
            ],
            num_stages=num_stages,
            schedule=self.plan.schedule,
            num_microbatches=self.plan.num_microbatches,
            is_hidden=self.plan.zero_stage >= 2 and is_wrapped,
            device=self.device,
            group=self.mesh.get_group("pp"),
            timeout_s=self.timeout_s,
        )

    def _splitter(self, wanted: Sequence[int]) -> BatchSplitter:
        return BatchSplitter(
            keys=self.program.input_keys,
            metas=self.program.input_metas,
            batch_dims=self.program.batch_dims,
            wanted=tuple(wanted),
            rows=self.plan.microbatch_size,
            num_microbatches=self.plan.num_microbatches,
            dp=self.plan.mesh.dp,
            dp_rank=self._rank("dp"),
            device=self.device,
        )

    def _ties(self, stages: Sequence[StageSlice]) -> tuple[Tie, ...]:
        """Return the parameters of this rank that other ranks of the pipeline have too."""
        pp = self.plan.mesh.pp
        owners: dict[str, set[int]] = {}
        trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
        parameters = {n for n, _ in self.model.named_parameters(remove_duplicate=False)}
        for part in stages:
            for index in part.calls:
                for fqn in set(self.program.calls[index].states) & parameters:
                    owners.setdefault(self.program.aliases[fqn], set()).add(part.index % pp)
        shared = [
            (first, sorted(on))
            for first, on in sorted(owners.items())
            if len(on) > 1 and first in trained
        ]
        ties = make_ties(shared, self.plan.mesh, self._rank("pp"))
        for tie in ties:
            compat.set_timeout(tie.group, self.timeout_s)
        return ties

    def _sources(self, stages: Sequence[StageSlice], own: Mapping[int, str]) -> list[str]:
        """Return the text of every stage; of other stages as captured, not as lowered."""
        texts = []
        for stage in stages:
            if stage.index in own:
                texts.append(own[stage.index])
                continue
            numbers = dict.fromkeys(self.program.calls[i].graph for i in stage.calls)
            parts = [compile_graph(self.program.graphs[n], self.device).source for n in numbers]
            parts.append(stage_function(self.program, stage, self.device).source)
            texts.append("\n".join(parts))
        return texts
