"""A fully given configuration as a setting, ends of stages and decisions, or why it is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from autoplan.engines import Engine
from autoplan.expert_parallel import STACKED, UNDIVIDED, ExpertParallel, expert_states
from autoplan.frontiers import Decision
from autoplan.graph import BlockTrace, Trace
from autoplan.inner_recompute import attention_core
from autoplan.meshes import AxisOrder
from autoplan.plan import Recompute
from autoplan.schedules import schedule_actions
from autoplan.settings import Setting, check_pins, shared_states
from autoplan.stage_ends import even_block_ends, even_stage_ends
from autoplan.tensor_layout import TOKEN_BORDERS, WHOLE_BORDERS, megatron_axes

__all__ = [
    "RecomputeRule",
    "check_choices",
    "check_experts",
    "experts_of",
    "placed",
    "recompute_rules",
    "ruled_decisions",
    "setting_of",
    "stage_ends_of",
    "with_recompute",
]

_RECOMPUTE = ("none", "full", "attention")
_SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero_bubble")
RecomputeRule = Callable[[BlockTrace], Recompute]


def placed(setting: Setting, dp_replicate: int, axis_order: AxisOrder) -> Setting:
    """Return a setting with its replicas and its order of axes."""
    check_pins({"dp_replicate": dp_replicate, "axis_order": axis_order})
    is_sharded = setting.zero_stage > 0 and dp_replicate < setting.dp
    if dp_replicate > 1 and (setting.dp % dp_replicate or not is_sharded):
        raise ValueError(
            f"dp_replicate={dp_replicate} must divide dp={setting.dp}, be below it, and have a "
            f"zero_stage above 0 (it is {setting.zero_stage}): replicas are of what ZeRO shards"
        )
    return replace(setting, dp_replicate=dp_replicate, axis_order=axis_order)


def check_choices(
    recompute: str | RecomputeRule | Sequence[str],
    zero_stage: int,
    tensor_layout: str,
    sequence_parallel: bool,
    product_dtype: str | None,
    tp: int,
) -> None:
    words = () if callable(recompute) else _words(recompute)
    if not callable(recompute) and not (words and set(words) <= set(_RECOMPUTE)):
        raise ValueError(
            f"recompute={recompute!r}; estimate takes none, full, attention or a function of a "
            "block that returns a Recompute"
        )
    if product_dtype not in (None, "float8"):
        raise ValueError(f"product_dtype={product_dtype!r}; allowed are None and float8")
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage={zero_stage}; allowed are 0, 1, 2, 3")
    if tensor_layout not in ("fastest", "megatron"):
        raise ValueError(f"tensor_layout={tensor_layout!r}; allowed are fastest and megatron")
    if sequence_parallel and (tensor_layout != "megatron" or tp == 1):
        raise ValueError("sequence_parallel needs tp > 1 and tensor_layout='megatron'")


def experts_of(
    degree: int,
    tensor_parallel: int | None,
    setting: Setting,
    engine: Engine,
    *,
    is_sequence_parallel: bool,
    context: int = 1,
) -> ExpertParallel:
    """Return how experts lie over the ranks of a stage.

    Args:
        degree: ranks that hold different experts.
        tensor_parallel: ranks that share the matrices of one; None: as many as there is tensor
            parallelism.
        setting: degrees; its dp counts the ranks of `context` too.
        engine: the software that trains.
        is_sequence_parallel: activations between products are slices of tokens.
        context: ranks over which every sequence lies.

    Raises:
        ValueError: says which degrees would do.
    """
    if degree == 1:
        return UNDIVIDED
    tp, ranks = setting.tp, setting.dp * setting.tp
    shared = tp if tensor_parallel is None else tensor_parallel
    if degree < 1 or shared not in (1, tp):
        raise ValueError(
            f"expert_parallel={degree}, expert_tensor_parallel={shared}: the first must be at "
            f"least 1, the second 1 or tp={tp}"
        )
    if ranks % (degree * shared):
        raise ValueError(
            f"expert_parallel={degree} times expert_tensor_parallel={shared} does not divide the "
            f"{ranks} ranks of a stage (dp={setting.dp // context} * tp={tp}"
            + (f" * context_parallel={context})" if context > 1 else ")")
        )
    is_priced = engine.has_gradient_buffer and not (engine.is_flat or engine.owns_whole_tensors)
    if not is_priced or setting.zero_stage > 1:
        raise ValueError(
            f"expert_parallel={degree} is priced for the engines of Megatron-LM (megatron, "
            f"megatron-te and others; not {engine.name}) and zero_stage 0 or 1"
        )
    if tp > 1 and not is_sequence_parallel:
        raise ValueError(f"expert_parallel={degree} with tp={tp} needs sequence_parallel=True")
    if setting.axis_order != "tp-dp-pp":
        raise ValueError(f"expert_parallel={degree} needs axis_order='tp-dp-pp'")
    return ExpertParallel(degree=degree, tensor_parallel=shared)


def check_experts(trace: Trace, decisions: Sequence[Decision], experts: ExpertParallel) -> None:
    """Check that tensor parallelism slices the products of experts as `experts` says.

    Raises:
        ValueError: names the product of which every rank would compute all.
    """
    for call, decision in zip(trace.calls, decisions, strict=True):
        block = trace.blocks[call.block]
        for op in block.ops if expert_states(block) else ():
            if op.target in STACKED and op.name not in decision.axes:
                raise ValueError(
                    f"expert_parallel={experts.degree} beside tensor parallelism: {op.target} "
                    f"({op.name} of {block.name}) cannot be sliced over "
                    f"{'features' if experts.tensor_parallel > 1 else 'rows'}; rows of experts "
                    "must be (experts, rows, features) as torch.bmm takes them: use tp=1"
                )


def stage_ends_of(
    trace: Trace, stage_ends: Sequence[int] | Literal["blocks"] | None, pp: int, num_chunks: int
) -> tuple[int, ...]:
    num_calls, num_stages = len(trace.calls), pp * num_chunks
    if num_stages > num_calls:
        what = f"pp={pp}" + (f" * virtual_stages={num_chunks}" if num_chunks > 1 else "")
        raise ValueError(f"{what} stages for a chain of {num_calls} blocks: lower pp")
    if stage_ends == "blocks":
        return even_block_ends(trace, num_stages)
    if stage_ends is None:
        return even_stage_ends(trace, num_stages)
    ends = tuple(map(int, stage_ends))
    is_rising = all(a < b for a, b in zip((0, *ends), ends, strict=False))
    if len(ends) != num_stages or ends[-1] != num_calls or not is_rising:
        raise ValueError(
            f"stage_ends {ends}: needs {num_stages} rising numbers above 0, the last {num_calls} "
            "(blocks)"
        )
    return ends


def ruled_decisions(trace: Trace, setting: Setting, sequence_parallel: bool) -> list[Decision]:
    shared = shared_states(trace)
    by_block = [
        Decision(
            axes=megatron_axes(block, setting.tp, is_sequence_parallel=sequence_parallel),
            borders=TOKEN_BORDERS if sequence_parallel else WHOLE_BORDERS,
            slices=tuple(sorted(shared.get(index, ()))),
        )
        for index, block in enumerate(trace.blocks)
    ]
    return [by_block[call.block] for call in trace.calls]


def _words(recompute: str | Sequence[str]) -> tuple[str, ...]:
    return (recompute,) if isinstance(recompute, str) else tuple(recompute)


def recompute_rules(
    trace: Trace, recompute: str | RecomputeRule | Sequence[str]
) -> list[str | RecomputeRule]:
    """Return the rule of each call; repeated blocks take several in turn."""
    turns = (recompute,) if callable(recompute) else _words(recompute)
    found: list[str | RecomputeRule] = []
    count = 0
    for call in trace.calls:
        is_glue = trace.blocks[call.block].is_glue
        found.append("none" if is_glue else turns[count % len(turns)])
        count += not is_glue
    return found


def with_recompute(
    block: BlockTrace, decision: Decision, recompute: str | RecomputeRule
) -> Decision:
    """Return a decision with what a block runs again; glue keeps everything."""
    if block.is_glue or recompute == "none":
        return decision
    if recompute == "full":
        return replace(decision, recompute=Recompute(mode="full"))
    if isinstance(recompute, str):
        return replace(decision, inner=attention_core(block))
    return replace(decision, recompute=recompute(block))


def setting_of(
    world: int,
    batch: int,
    *,
    dp: int | None,
    tp: int,
    pp: int,
    zero_stage: int,
    microbatch_size: int,
    schedule: str,
    virtual_stages: int,
    is_own: bool,
    offload: Literal["none", "optimizer"],
    context: int = 1,
) -> Setting:
    """Return a given configuration as a setting, whose dp counts the ranks of `context` too.

    Raises:
        ValueError: a number is impossible.
    """
    sizes = {
        "tp": tp,
        "pp": pp,
        "microbatch_size": microbatch_size,
        "virtual_stages": virtual_stages,
        "context_parallel": context,
    }
    for label, value in sizes.items():
        if value < 1:
            raise ValueError(f"{label}={value}: must be at least 1")
    if offload != "none" and zero_stage != 3:
        raise ValueError(f"offload={offload!r} with zero_stage={zero_stage}: it needs zero_stage=3")
    dp = dp if dp is not None else world // (tp * pp * context)
    if dp < 1 or dp * tp * pp * context != world:
        what = f" * context_parallel={context}" if context > 1 else ""
        raise ValueError(
            f"dp={dp} * tp={tp} * pp={pp}{what} is not the {world} devices of the cluster"
        )
    if batch % (dp * microbatch_size):
        raise ValueError(
            f"global batch {batch} does not divide into dp={dp} times micro-batches of "
            f"{microbatch_size}: use a multiple of {dp * microbatch_size}"
        )
    m = batch // (dp * microbatch_size)
    if schedule not in _SCHEDULES:
        raise ValueError(f"schedule={schedule!r}; allowed are {', '.join(_SCHEDULES)}")
    if is_own and pp > 1 and schedule == "1f1b" and virtual_stages == 1 and m < pp:
        raise ValueError(
            f"1F1B with pp={pp} needs at least {pp} micro-batches, the batch gives {m}: lower "
            "microbatch_size or pp, use schedule='gpipe', or name the engine that runs it"
        )
    if virtual_stages > 1 and schedule == "1f1b":
        schedule = "interleaved"
    if virtual_stages > 1 and pp == 1:
        raise ValueError(f"virtual_stages={virtual_stages} needs pp > 1")
    if pp > 1:
        schedule_actions(schedule, pp, m, virtual_stages)
    ranks = dp * context
    return Setting(
        dp=ranks,
        tp=tp,
        pp=pp,
        zero_stage=zero_stage if ranks > 1 or offload != "none" else 0,
        microbatch_size=microbatch_size,
        num_microbatches=m,
        schedule="none" if pp == 1 else schedule,  # type: ignore[arg-type]
        virtual_stages=virtual_stages,
        offload=offload,
    )
