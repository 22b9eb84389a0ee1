"""A plan as flags or a config of other frameworks, with what they cannot express.

Option names are those of torchtitan's TOML config (to release 0.2.2; later ones have configs in
Python, pytorch/torchtitan#2386), Megatron-LM's command line, DeepSpeed's JSON config and Hugging
Face Accelerate's YAML config, held against their sources and documentation of 2026. None of these
has been run by us.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from autoplan.meshes import AXIS_ORDERS
from autoplan.plan import BlockPlan, Plan

__all__ = ["FORMATS", "FrameworkConfig", "framework_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkConfig:
    """Text in a framework's own form.

    Attributes:
        text: flags or config.
        missing: decisions of the plan that it does not reproduce.
    """

    text: str
    missing: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"# not expressed: {line}" for line in self.missing]
        return "\n".join([*lines, self.text.rstrip()]) + "\n"


def framework_config(plan: Plan, name: str) -> FrameworkConfig:
    """Return a plan in the form of a framework.

    Raises:
        ValueError: an unknown framework; says which there are.
    """
    if name not in FORMATS:
        raise ValueError(f"format {name!r}: allowed are {', '.join(FORMATS)}")
    return FORMATS[name](plan)


def _recompute_mode(plan: Plan) -> str:
    """Return none, full, selective, or mixed, of the blocks that are modules."""
    blocks = [b for stage in plan.stages for b in stage.blocks if b.fqn]
    modes = {_recomputes(plan, b) for b in blocks}
    return modes.pop() if len(modes) == 1 else "mixed" if modes else "none"


def _recomputes(plan: Plan, block: BlockPlan) -> str:
    """Return none, full or selective."""
    mode = plan.recompute[block.recompute].mode
    return "none" if mode == "offload" else mode


def _marks(plan: Plan) -> tuple[str, ...]:
    mode = _recompute_mode(plan)
    if mode == "selective":
        kept = sorted({name for r in plan.recompute.values() for name in r.keep})
        return (f"which results are kept in recomputed blocks: {', '.join(kept)}",)
    if mode == "mixed":
        counts = Counter(_recomputes(plan, b) for s in plan.stages for b in s.blocks if b.fqn)
        text = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        return (f"recompute differs by block ({text}); the config recomputes all of them",)
    return ()


def _layouts(plan: Plan) -> tuple[str, ...]:
    if plan.mesh.tp == 1:
        return ()
    return ("the tensor-parallel placements of this plan: the framework has its own",)


def _saved_on_host(plan: Plan) -> tuple[str, ...]:
    """Return what no framework expresses: blocks whose saved activations wait on the host."""
    used = Counter(plan.recompute[b.recompute].mode for s in plan.stages for b in s.blocks)
    if not used["offload"]:
        return ()
    return (f"saved activations of {used['offload']} blocks in host memory",)


def _order(plan: Plan) -> tuple[str, ...]:
    if plan.mesh.axis_order == AXIS_ORDERS[0]:
        return ()
    return (f"the order of the axes over ranks, {plan.mesh.axis_order}: the framework has its own",)


def _slices_shared(plan: Plan) -> bool:
    """Return whether a parameter with several names is stored in slices."""
    names = {fqn for group in plan.shared for fqn in group}
    return any(
        text.startswith("S") and {key, f"{block.fqn}.{key}"} & names
        for stage in plan.stages
        for block in stage.blocks
        for key, text in plan.placements[block.placements].parameters.items()
    )


def _layers(plan: Plan) -> list[int]:
    """Return the number of blocks that are modules, by rank of the pipeline."""
    counts = [0] * plan.mesh.pp
    for stage in plan.stages:
        counts[stage.index % plan.mesh.pp] += sum(bool(b.fqn) for b in stage.blocks)
    return counts


def _computes_in(plan: Plan) -> str:
    is_reduced = "bfloat16" in (plan.mixed_precision, plan.autocast)
    return "bfloat16" if is_reduced else "float32"


def _shards(plan: Plan) -> int:
    """Return over how many ranks states are sharded."""
    return plan.mesh.dp // plan.mesh.dp_replicate if plan.zero_stage >= 1 else 1


def _torchtitan(plan: Plan) -> FrameworkConfig:
    mesh, mode = plan.mesh, _recompute_mode(plan)
    reshard = "always" if plan.zero_stage == 3 else "never"
    missing = [
        "releases of torchtitan after 0.2.2, which take no TOML: set the same options of the same "
        "names in a config function of its model",
        *_marks(plan),
        *_layouts(plan),
        *_saved_on_host(plan),
        *_order(plan),
    ]
    if plan.zero_stage in (1, 2):
        missing.append(f"ZeRO-{plan.zero_stage} exactly: FSDP2 without resharding after forward")
    lines = [
        "[training]",
        f"local_batch_size = {plan.num_microbatches * plan.microbatch_size}",
        f"global_batch_size = {plan.global_batch_size}",
        f'mixed_precision_param = "{_computes_in(plan)}"',
        'mixed_precision_reduce = "float32"',
        *(["enable_cpu_offload = true"] if plan.offload != "none" else []),
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {mesh.dp // _shards(plan)}",
        f"data_parallel_shard_degree = {_shards(plan)}",
        f'fsdp_reshard_after_forward = "{reshard}"',
        f"tensor_parallel_degree = {mesh.tp}",
        f"pipeline_parallel_degree = {mesh.pp}",
    ]
    if mesh.pp > 1:
        names = {
            "1f1b": "1F1B",
            "gpipe": "GPipe",
            "interleaved": "Interleaved1F1B",
            "zero_bubble": "InterleavedZeroBubble",
        }
        schedule = names[plan.schedule]
        parts = [[b.fqn for b in stage.blocks if b.fqn] for stage in plan.stages]
        lines += [
            f'pipeline_parallel_schedule = "{schedule}"',
            f"pipeline_parallel_microbatch_size = {plan.microbatch_size}",
            f"module_fqns_per_model_part = {json.dumps(parts)}",
        ]
        missing.append("embeddings and head in module_fqns_per_model_part: add them by hand")
    elif plan.num_microbatches > 1:
        size = plan.microbatch_size
        lines[1] = f"local_batch_size = {size}  # accumulated up to global_batch_size"
    checkpointing = {"none": "none", "full": "full", "mixed": "full"}.get(mode, "selective")
    lines += ["", "[activation_checkpoint]", f'mode = "{checkpointing}"']
    return FrameworkConfig(text="\n".join(lines), missing=tuple(missing))


def _megatron(plan: Plan) -> FrameworkConfig:
    mesh, mode = plan.mesh, _recompute_mode(plan)
    flags = [
        f"--tensor-model-parallel-size {mesh.tp}",
        f"--pipeline-model-parallel-size {mesh.pp}",
        f"--micro-batch-size {plan.microbatch_size}",
        f"--global-batch-size {plan.global_batch_size}",
    ]
    missing = [*_marks(plan), *_layouts(plan), *_saved_on_host(plan)]
    if mesh.axis_order == "tp-pp-dp":
        flags.append("--use-tp-pp-dp-mapping")
    if plan.offload != "none":
        missing.append("shards of parameters, gradients and optimizer state in host memory")
    if mesh.dp_replicate > 1:
        missing.append(
            f"{mesh.dp_replicate} replicas of the shards: they are sharded over all of dp"
        )
    if not plan.shared:
        flags.append("--untie-embeddings-and-output-weights")
    elif mesh.tp > 1 and not _slices_shared(plan):
        missing.append("shared parameters whole on every rank: Megatron slices the vocabulary")
    if plan.zero_stage in (1, 2):
        flags.append("--use-distributed-optimizer")
        if plan.zero_stage == 2:
            missing.append("ZeRO-2: the distributed optimizer shards the optimizer's state only")
    elif plan.zero_stage == 3 and mesh.pp == 1:
        flags += [
            "--use-megatron-fsdp",
            "--use-distributed-optimizer",
            "--data-parallel-sharding-strategy optim_grads_params",
            "--no-gradient-accumulation-fusion",
            "--ckpt-format fsdp_dtensor",
            "--init-model-with-meta-device",
        ]
        # Asserted by validate_args in megatron/training/arguments.py.
        missing.append(
            "the environment: Megatron-LM asserts that CUDA_DEVICE_MAX_CONNECTIONS is not 1 beside "
            "its FSDP, so unset it"
        )
        missing.append(
            "checkpoints of other layouts: Megatron-LM asserts --ckpt-format fsdp_dtensor beside "
            "its FSDP, so convert what is loaded"
        )
    elif plan.zero_stage == 3:
        flags.append("--use-distributed-optimizer")
        missing.append("ZeRO-3 beside a pipeline: only the optimizer's state is sharded (ZeRO-1)")
    if mode in ("full", "mixed"):
        flags += [
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--recompute-num-layers 1",
        ]
    elif mode == "selective":
        flags.append("--recompute-granularity selective")
    flags += _megatron_stages(plan)
    if plan.schedule in ("gpipe", "zero_bubble"):
        missing.append(f"schedule {plan.schedule}: Megatron runs 1F1B")
    if _computes_in(plan) == "bfloat16":
        flags.append("--bf16")
    if plan.autocast != "none":
        missing.append("autocast: Megatron keeps bfloat16 parameters beside float32 masters")
    return FrameworkConfig(text=" \\\n".join(flags), missing=tuple(missing))


def _megatron_stages(plan: Plan) -> list[str]:
    """Return the flags for the layers of each stage.

    Unequal stages, of a rank too, are told as a layout: E is the embedding, t a layer, L the loss.
    With the number of the first and last layers instead, the number of stages of a rank must divide
    the layers of every rank.
    """
    layers = [sum(bool(b.fqn) for b in stage.blocks) for stage in plan.stages]
    if len(set(layers)) > 1:
        stages = ["t" * count for count in layers]
        return [f'--pipeline-model-parallel-layout "E{"|".join(stages)}L"']
    if plan.num_chunks > 1:
        return [f"--num-virtual-stages-per-pipeline-rank {plan.num_chunks}"]
    return []


def _deepspeed(plan: Plan) -> FrameworkConfig:
    mesh = plan.mesh
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.microbatch_size,
        "gradient_accumulation_steps": plan.num_microbatches,
        "zero_optimization": {"stage": plan.zero_stage},
        "bf16": {"enabled": plan.mixed_precision == "bfloat16"},
    }
    missing = [*_marks(plan), *_layouts(plan), *_saved_on_host(plan), *_order(plan)]
    if plan.offload != "none":
        on_host = {"device": "cpu", "pin_memory": True}
        config["zero_optimization"] |= {"offload_optimizer": on_host, "offload_param": on_host}
    if mesh.dp_replicate > 1:
        missing.append(
            f"{mesh.dp_replicate} replicas of the shards: they are sharded over all of dp"
        )
    if plan.autocast == "bfloat16":
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    if mesh.tp > 1 and plan.zero_stage == 3:
        missing.append(f"tp={mesh.tp} beside ZeRO-3: AutoTP trains with ZeRO stages 0 to 2")
    elif mesh.tp > 1:
        config["tensor_parallel"] = {"autotp_size": mesh.tp}
    if mesh.pp > 1:
        missing.append(
            f"pp={mesh.pp}: write the model as a PipelineModule(num_stages={mesh.pp}) with "
            f"{_layers(plan)} layers a stage; its schedule is 1F1B"
        )
        if plan.zero_stage > 1:
            missing.append(f"ZeRO-{plan.zero_stage} beside a pipeline: its engine allows ZeRO-1")
    if _recompute_mode(plan) != "none":
        missing.append("recompute: call deepspeed.checkpointing.checkpoint in the model")
    text = json.dumps(config, indent=2)
    return FrameworkConfig(text=text, missing=tuple(missing))


def _accelerate(plan: Plan) -> FrameworkConfig:
    mesh = plan.mesh
    is_sharded = plan.zero_stage >= 1
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_sharded else "MULTI_GPU",
        "num_processes": mesh.world_size,
        "mixed_precision": "bf16" if _computes_in(plan) == "bfloat16" else "no",
    }
    missing = [*_marks(plan), *_layouts(plan), *_saved_on_host(plan), *_order(plan)]
    if is_sharded:
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": plan.zero_stage == 3,
            "fsdp_activation_checkpointing": _recompute_mode(plan) != "none",
        }
        if plan.offload != "none":
            config["fsdp_config"]["fsdp_offload_params"] = True
        if plan.zero_stage in (1, 2):
            missing.append(f"ZeRO-{plan.zero_stage} exactly: FSDP2 that keeps parameters gathered")
    elif _recompute_mode(plan) != "none":
        missing.append("recompute without FSDP: call model.gradient_checkpointing_enable()")
    if mesh.tp > 1 or mesh.dp_replicate > 1:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": mesh.dp // _shards(plan),
            "parallelism_config_dp_shard_size": _shards(plan),
            "parallelism_config_tp_size": mesh.tp,
        }
    if mesh.pp > 1:
        missing.append(f"pp={mesh.pp}: Accelerate trains without a pipeline")
    if plan.num_microbatches > 1:
        missing.append(
            f"{plan.num_microbatches} micro-batches of {plan.microbatch_size}: pass "
            f"Accelerator(gradient_accumulation_steps={plan.num_microbatches})"
        )
    text = yaml.safe_dump(config, sort_keys=False)
    return FrameworkConfig(text=text, missing=tuple(missing))


FORMATS: dict[str, Callable[[Plan], FrameworkConfig]] = {
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
}
