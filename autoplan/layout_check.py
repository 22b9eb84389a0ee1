"""Check that the layouts and keep marks of a plan are what its emission does with a program."""

from __future__ import annotations

from collections.abc import Mapping

from autoplan.errors import PlanError
from autoplan.graph import Placement, ShardOption
from autoplan.plan import BlockPlan, Layout, Plan
from autoplan.program import BlockGraph, Program
from autoplan.sharding import check_axes, layout_parameters, shard_options

__all__ = ["check_layouts", "fsdp_can_slice"]


def fsdp_can_slice(shape: tuple[int, ...], placement: Placement, dp: int) -> bool:
    """Return whether FSDP over `dp` ranks can slice what is stored in `placement`.

    A slice of several pieces along dimension 0 needs another dimension for FSDP, and FSDP slices
    only dimension 0 unevenly.
    """
    if placement.kind != "shard" or placement.outer == 1 or placement.dim != 0:
        return True
    return len(shape) > 1 and shape[1] % dp == 0


def check_layouts(plan: Plan, program: Program) -> None:
    """Check every layout and keep mark of a plan against the program that it runs.

    Raises:
        PlanError: a layout or op is missing, an axis cannot run at the plan's tp, or a parameter
            would be stored in another placement than the plan says (and counted memory for).
    """
    checker = _Checker(plan, program)
    for stage in plan.stages:
        for block in stage.blocks:
            checker.check(block)


class _Checker:
    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan = plan
        self.program = program
        self.options: dict[int, Mapping[str, tuple[ShardOption, ...]]] = {}
        self.needed: dict[tuple[int, str], Mapping[str, str]] = {}
        self.stored: dict[str, tuple[str, str]] = {}

    def check(self, block: BlockPlan) -> None:
        """Check one call."""
        plan = self.plan
        number = self.program.calls[block.call].graph
        graph = self.program.graphs[number]
        where = block.fqn or block.block
        if block.recompute not in plan.recompute:
            raise PlanError(f"{where}: the plan has no recompute entry {block.recompute}")
        names = {op.name for op in graph.ops}
        for name in plan.recompute[block.recompute].keep:
            if name.split("__")[0] not in names:
                raise PlanError(f"{where} has no op {name}, which the plan keeps: plan again")
        if plan.mesh.tp == 1:
            return
        layout = plan.placements.get(block.placements)
        if layout is None:
            raise PlanError(f"{where}: the plan has no layout {block.placements}: plan again")
        if layout.axes and layout.degree != plan.mesh.tp:
            raise PlanError(
                f"{where}: layout {block.placements} is for tp={layout.degree} and the plan has "
                f"tp={plan.mesh.tp}: plan again"
            )
        self._check_states(block, graph, layout, self._needed(number, block, graph, layout))

    def _needed(
        self, number: int, block: BlockPlan, graph: BlockGraph, layout: Layout
    ) -> Mapping[str, str]:
        key = (number, block.placements)
        if key not in self.needed:
            options = self.options.setdefault(number, shard_options(graph))
            try:
                check_axes(graph, options, layout.axes, self.plan.mesh.tp)
            except ValueError as error:
                raise PlanError(f"{block.fqn or block.block}: {error}") from None
            self.needed[key] = layout_parameters(graph, options, layout.axes)
        return self.needed[key]

    def _check_states(
        self, block: BlockPlan, graph: BlockGraph, layout: Layout, needed: Mapping[str, str]
    ) -> None:
        fqns = self.program.calls[block.call].states
        for state, fqn in zip(graph.states, fqns, strict=True):
            text = layout.parameters.get(state.fqn)
            if text is None:
                continue
            if text not in ("R", needed[state.fqn]):
                raise PlanError(
                    f"{fqn}: the plan stores it as {text}, and layout {block.placements} runs on "
                    f"{needed[state.fqn]}: plan again"
                )
            first = self.program.aliases.get(fqn, fqn)
            other, user = self.stored.setdefault(first, (text, block.fqn or block.block))
            if other != text:
                raise PlanError(
                    f"{fqn}: the plan stores it as {other} for {user} and as {text} for "
                    f"{block.fqn or block.block}, and it is one parameter: plan again"
                )
            self._check_fsdp(fqn, state.meta.shape, Placement.parse(text))

    def _check_fsdp(self, fqn: str, shape: tuple[int, ...], placement: Placement) -> None:
        dp = self.plan.mesh.dp // self.plan.mesh.dp_replicate
        if self.plan.zero_stage == 0 or dp == 1 or fsdp_can_slice(shape, placement, dp):
            return
        raise PlanError(
            f"{fqn}: ZeRO-{self.plan.zero_stage} over dp={dp} cannot slice {tuple(shape)} stored "
            f"as {placement}: use a dp that divides its dimension 1, or zero_stage 0"
        )
