"""The plan: every decision, as one readable JSON document, with what it predicts and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoplan import codec
from autoplan.errors import PlanError
from autoplan.meshes import AXIS_ORDERS, AxisOrder
from autoplan.stage_costs import PlanCosts
from autoplan.tensor_layout import Border, Borders
from autoplan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from autoplan.reasons import WhyNot
    from autoplan.runtime import ParallelModule
    from autoplan.timeline import Timeline

__all__ = [
    "BlockPlan",
    "Layout",
    "Mesh",
    "Plan",
    "Predicted",
    "Recompute",
    "SearchRecord",
    "Simpler",
    "StagePlan",
]

Schedule = Literal["none", "gpipe", "1f1b", "interleaved", "zero_bubble"]

MEMORY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "working",
    "reserve",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees of data, tensor and pipeline parallelism; their product is the world size.

    Attributes:
        dp, tp, pp: degrees.
        dp_replicate: into how many replicas dp falls, each of which shards what ZeRO shards over
            its dp / dp_replicate neighbouring ranks (hybrid sharding); 1: all of dp shards.
        axis_order: how ranks are numbered, innermost axis first: with `tp-dp-pp` it is
            rank = (p * dp + d) * tp + t, with `tp-pp-dp` it is (d * pp + p) * tp + t.
    """

    dp: int
    tp: int
    pp: int
    dp_replicate: int = 1
    axis_order: AxisOrder = "tp-dp-pp"

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "dp_replicate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.dp % self.dp_replicate:
            raise ValueError(
                f"dp_replicate is {self.dp_replicate}; it must divide dp, which is {self.dp}"
            )

    @property
    def world_size(self) -> int:
        """Return dp * tp * pp."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        text = f"dp={self.dp} tp={self.tp} pp={self.pp}"
        if self.dp_replicate > 1:
            text += f" dp_replicate={self.dp_replicate}"
        return text if self.axis_order == AXIS_ORDERS[0] else f"{text} order {self.axis_order}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What a block keeps for its backward.

    Attributes:
        mode: `none`: all that autograd saves. `full`: only the block's inputs; it runs again.
            `selective`: inputs and the results of the ops in `keep`. `offload`: inputs; all else
            that autograd saves waits in host memory, and nothing runs again.
        keep: op names of the block's graph whose results are kept; empty unless selective.
    """

    mode: Literal["none", "full", "selective", "offload"]
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.mode == "selective") != bool(self.keep):
            raise ValueError(f"mode {self.mode} with {len(self.keep)} kept ops: only selective has")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Tensor-parallel placements of one block class.

    Attributes:
        block: name of the block class in the trace.
        degree: tp.
        axes: per op that is not `whole`, the axis of its shard option.
        parameters: per state FQN (as in the trace) its placement: R, S(dim) or S(dim,outer).
        borders: how activations of shape (batch, tokens, features) enter the block: `whole` on
            every rank, or as slices of `tokens` or `features`.
        leaving: how they leave it; None: as they enter.
    """

    block: str
    degree: int
    axes: dict[str, str] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    borders: Border = "whole"
    leaving: Border | None = None

    @property
    def both_borders(self) -> Borders:
        """Return how activations enter and leave the block."""
        return self.borders, self.leaving or self.borders


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """One call of the chain: its index and FQN, and the names of its layout and recompute entry."""

    call: int
    fqn: str
    block: str
    placements: str
    recompute: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A pipeline stage: consecutive calls of the chain."""

    index: int
    blocks: tuple[BlockPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the plan is predicted to take; all of it follows from the profile in `provenance`.

    Attributes:
        step_time_s: one optimizer step of the whole global batch.
        peak_memory_bytes: per rank of the pipeline, of its fullest device, reserve included.
        memory_by_category: likewise, bytes by category at the instant of the peak.
        stage_time_s: likewise, forward plus backward of one micro-batch in all its stages.
        time_by_category: of the step, seconds by category.
        capacity_bytes: Device_Memory that every peak was held against.
        lookups: how many kernels of one micro-batch have a time that was measured, interpolated,
            extrapolated or from the roofline; every call counts, forward and backward.
        host_bytes: likewise, bytes of the rank's shards in host memory; empty without offload.
    """

    step_time_s: float
    peak_memory_bytes: tuple[int, ...]
    memory_by_category: tuple[dict[str, int], ...]
    stage_time_s: tuple[float, ...]
    time_by_category: dict[str, float]
    capacity_bytes: int
    lookups: dict[str, int]
    host_bytes: tuple[int, ...] = ()

    def tensor_peak_bytes(self, stage: int) -> int:
        """Return what a meter of tensors would see of a stage: no reserve, but the host's bytes."""
        reserve = self.memory_by_category[stage].get("reserve", 0)
        on_host = self.host_bytes[stage] if self.host_bytes else 0
        return self.peak_memory_bytes[stage] - reserve + on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """How the search ended.

    Attributes:
        status: optimal, feasible (ended by a limit or an interrupt), or priced (not searched).
        objective_s: predicted step time of the plan by the search's cost model.
        bound_s: proven: no plan of the space is faster.
        gap: (objective - bound) / objective.
        wall_time_s: of the search, trace excluded.
        settings: number of settings by outcome (solved, cut, infeasible, unexplored).
        outcomes: per setting, why it lost.
        constraints: what the user pinned, bounded or forbade, in words.
    """

    status: Literal["optimal", "feasible", "priced"]
    objective_s: float
    bound_s: float
    gap: float
    wall_time_s: float
    settings: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Simpler:
    """A simpler strategy beside the plan: what it would need and take.

    Attributes:
        name: such as `DDP`, `ZeRO-3`, `recompute every block on one device`.
        fits: within Device_Memory.
        peak_memory_bytes: largest over ranks.
        step_time_s: predicted, whether or not it fits.
        note: why it cannot be, if it cannot.
    """

    name: str
    fits: bool
    peak_memory_bytes: int
    step_time_s: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that is needed to run a model in parallel, and what was predicted of it.

    Attributes:
        model: class name, for people.
        fingerprint: of the program that was planned; another model is refused.
        mesh: degrees.
        zero_stage: 0 to 3.
        microbatch_size: rows of one micro-batch on one rank.
        num_microbatches: micro-batches per step and rank.
        batch_dims: per tensor of the batch its batch dimension, None for one without a batch;
            empty: dimension 0.
        global_batch_size: dp * num_microbatches * microbatch_size.
        schedule: `none` without a pipeline.
        mixed_precision: `bfloat16` computes in it over parameters of the model's own dtype.
        offload: `optimizer`: shards of parameters, gradients and optimizer state lie in host memory
            and the optimizer steps there.
        autocast: dtype of the `torch.autocast` that forward and recomputation run under.
        optimizer: name of the optimizer that the memory was counted for.
        stages: blocks of each stage, in the order of the chain; stage s is on rank s % pp of the
            pipeline. Under `interleaved` and `zero_bubble` a rank may have several.
        recompute: named recompute entries.
        placements: named layouts.
        shared: groups of FQNs of one parameter that live in one or more stages.
        predicted: time and memory.
        search: status, bound, gap.
        simpler: simpler strategies, for comparison.
        provenance: profile, origins, versions, seed, cluster.
        notes: what a reader must know.
        costs: seconds and bytes of every block, from which `timeline` simulates the step; None in
            plans that were not priced.
        attached: the example batch and loss function of the planning process; not in the JSON.
        question: the planning problem that it answers, for `why_not`; not in the JSON.
    """

    schema_version: int = 1
    model: str
    fingerprint: str
    mesh: Mesh
    zero_stage: int
    microbatch_size: int
    num_microbatches: int
    batch_dims: tuple[int | None, ...] = ()
    global_batch_size: int
    schedule: Schedule
    mixed_precision: Literal["none", "bfloat16"] = "none"
    autocast: Literal["none", "bfloat16"] = "none"
    offload: Literal["none", "optimizer"] = "none"
    optimizer: str
    stages: tuple[StagePlan, ...]
    recompute: dict[str, Recompute]
    placements: dict[str, Layout]
    shared: tuple[tuple[str, ...], ...] = ()
    predicted: Predicted
    search: SearchRecord
    simpler: tuple[Simpler, ...] = ()
    provenance: dict[str, str]
    notes: tuple[str, ...] = ()
    costs: PlanCosts | None = None
    attached: Any = field(default=None, compare=False, repr=False, metadata={"json": False})
    question: Any = field(default=None, compare=False, repr=False, metadata={"json": False})

    @property
    def num_chunks(self) -> int:
        """Return the stages of each rank of the pipeline."""
        return max(1, len(self.stages) // self.mesh.pp)

    @property
    def recomputes(self) -> bool:
        """Return whether some block runs again in its backward."""
        blocks = (block for stage in self.stages for block in stage.blocks)
        return any(self.recompute[b.recompute].mode != "none" for b in blocks)

    @property
    def slices(self) -> int:
        """Return into how many slices of tokens activations are cut where they cross stages."""
        first = [stage.blocks[0].placements for stage in self.stages[1:] if stage.blocks]
        entering = [self.placements[name].borders for name in first if name in self.placements]
        return self.mesh.tp if "tokens" in entering else 1

    def to_json(self) -> str:
        """Return readable JSON text."""
        return codec.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: names the key that is missing, unknown or wrong.
        """
        try:
            return codec.loads(cls, text, "plan")
        except ValueError as error:
            raise PlanError(str(error)) from None

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON to `path`, whole or not at all."""
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(self.to_json() + "\n")
        partial.replace(target)

    def __repr__(self) -> str:
        """Return one line; `report` and `to_json` tell the rest."""
        peak = max(self.predicted.peak_memory_bytes, default=0)
        return (
            f"<Plan of {self.model} for {self.provenance.get('cluster', 'a cluster')}: "
            f"{self.mesh} ZeRO-{self.zero_stage}, {self.num_microbatches} micro-batches of "
            f"{self.microbatch_size}, predicted {format_seconds(self.predicted.step_time_s)} and "
            f"{format_bytes(peak)}, {self.search.status}>"
        )

    def __str__(self) -> str:
        return self.report()

    def report(self) -> str:
        """Return the plan as text: what, why, memory by category, simpler strategies, bound."""
        from autoplan.report import plan_report

        return plan_report(self)

    def why_not(self, **settings: Any) -> WhyNot:
        """Return why the plan has not these settings: a rule, memory, or time, and how much.

        In the process that planned, and while the model lives, the question is solved; of a loaded
        plan the recorded outcomes of the search answer.

        Args:
            **settings: such as `tp=8, pp=1`, with the names that `optimize` takes.

        Raises:
            ValueError: a setting has a wrong name or value.
        """
        from autoplan.reasons import why_not

        return why_not(self, settings)

    def timeline(self, *, schedule: str | None = None) -> Timeline:
        """Return the predicted timeline of one step, with each rank's bytes over it.

        Args:
            schedule: another schedule over the same stages, as a what-if; None: the plan's own.

        Raises:
            PlanError: the plan carries no costs; it was not made by `optimize` or `estimate`.
        """
        from autoplan.plan_timeline import simulate

        return simulate(self, schedule=schedule)

    def parallelize(
        self,
        model: nn.Module,
        batch: Any = None,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float = 120.0,
        compile: str | None = None,
    ) -> ParallelModule:
        """Return this rank's part of `model`; called on every rank of the plan, under torchrun.

        Args:
            model: the model that was planned, with the same weights on every rank.
            batch, loss_fn: as given to `optimize`; may be left out where this process planned.
            device, timeout_s, compile: see `autoplan.emitter.parallelize`.

        Raises:
            PlanError: another model, another world size, or no batch is known.
            EmitError: the plan cannot be run with this model or this torch.
        """
        from autoplan.emitter import parallelize

        if batch is None:
            if self.attached is None:
                raise PlanError(
                    "the plan does not know its batch: pass batch= (an example of the planned "
                    "form) and loss_fn= to parallelize"
                )
            batch, loss_fn = self.attached
        return parallelize(
            self, model, batch, loss_fn, device=device, timeout_s=timeout_s, compile=compile
        )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Return the plan in the file at `path`; a PlanError names the file and what is wrong."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise PlanError(f"cannot read plan {path}: {error.strerror}") from None
        return cls.from_json(text)
