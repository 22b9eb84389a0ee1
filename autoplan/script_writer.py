"""Write a plan as a training script for torchrun that needs torch and the model, not autoplan.

The script has the decisions on top, then every block as the function that runs, then the stages,
and last the runtime, which is copied from this package (`autoplan.bundler`).
"""

from __future__ import annotations

import dataclasses
import operator
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from autoplan.autocast import InAutocast
from autoplan.bundler import Bundle, bundle
from autoplan.calls import runs_again, written_places
from autoplan.collectives import Redistribute
from autoplan.errors import EmitError
from autoplan.executor import CompiledFunction, compile_graph
from autoplan.gradient_memory import may_share_gradient
from autoplan.graph import Placement
from autoplan.models import LoadedModel
from autoplan.plan import BlockPlan, Plan
from autoplan.processes import ensure_process_group, exit_worker, seed_ranks
from autoplan.program import BlockGraph, Program, TensorMeta
from autoplan.recapture import captured_for, with_true_metas
from autoplan.recompute import KeepPlan, keep_plan
from autoplan.script_text import HEAD, TAIL, model_text
from autoplan.sharders import store_in_float32
from autoplan.stages import (
    RootContents,
    StageSlice,
    crossing_metas,
    root_contents,
    side_function,
    slice_program,
    stage_function,
)
from autoplan.standalone import (
    CallSpec,
    Degrees,
    ScriptPlan,
    StageSpec,
    build_stage,
    make_mesh,
)
from autoplan.step_buffers import changed_by
from autoplan.step_means import Denominator, StepMeans, StepValue, find_denominators
from autoplan.tensor_parallel import lower_stage, slices_read, stored_placements
from autoplan.training import global_batch, make_optimizer
from autoplan.written_inputs import check_writes, with_own_inputs

__all__ = ["write_script"]

_LARGEST_CONSTANT = 4096
_RUNTIME = (
    ScriptPlan,
    Degrees,
    StageSpec,
    CallSpec,
    RootContents,
    TensorMeta,
    KeepPlan,
    Placement,
    Denominator,
    StepValue,
    build_stage,
    make_mesh,
    store_in_float32,
    ensure_process_group,
    seed_ranks,
    exit_worker,
    make_optimizer,
    global_batch,
)
_LEFT_OUT = ("save_checkpoint", "load_checkpoint", "code", "forward_microbatch", "bind")


def write_script(plan: Plan, loaded: LoadedModel, spec: str) -> str:
    """Return the text of a script that trains `plan`.

    Args:
        plan: what to run.
        loaded: the model that was planned; weights may be on the meta device.
        spec: where the script finds the model: `file.py:function`, or what `load_model` takes.

    Raises:
        PlanError: the plan is of another model.
        EmitError: something of the model cannot be written down, such as a module that stays one
            op; says which.
    """
    program = captured_for(plan, loaded.model, loaded.batch, loaded.loss_fn)
    backend = "cuda" if plan.provenance.get("backend_rules") == "cuda" else "cpu"
    program = with_true_metas(program, torch.device(backend))
    return _Script(plan, program, loaded.model).text(spec, loaded)


class _Script:
    def __init__(self, plan: Plan, program: Program, model: nn.Module) -> None:
        self.plan = plan
        self.program = program
        self.model = model
        self.device = torch.device("cpu")
        cuts = [[block.call for block in stage.blocks] for stage in plan.stages]
        self.stages = slice_program(program, cuts)
        check_writes(plan, program)
        self.stored: dict[str, str] = {}
        self.functions: dict[str, str] = {}
        self.objects: dict[str, str] = {}
        self.classes: dict[type, None] = {}
        self.values: dict[str, tuple[int, str]] = {}
        self.uses: dict[str, list[str]] = {}

    def text(self, spec: str, loaded: LoadedModel) -> str:
        """Return the whole script."""
        specs = [self._stage(stage) for stage in self.stages]
        runtime = bundle([*_RUNTIME, *self.classes], without=_LEFT_OUT)
        parts = [
            HEAD.format(report=_indented_report(self.plan), world=self.plan.mesh.world_size),
            _imports(runtime),
            "# The blocks, as they run on one rank.\n",
            *self._function_texts(),
            "# The runtime: copied from autoplan, and independent of this plan.\n\n"
            + "\n\n\n".join(runtime.definitions),
            model_text(spec, loaded),
            TAIL.format(
                plan=self._plan_text(),
                objects="\n".join(f"{name} = {text}" for name, text in self.objects.items()),
                stages="\n".join(specs),
                names=", ".join(f"STAGE_{i}" for i in range(len(specs))),
                optimizer=self.plan.optimizer,
                rows=self.plan.global_batch_size,
                is_mixed=self.plan.mixed_precision != "none",
            ),
        ]
        return "\n\n".join(part.strip("\n") + "\n" for part in parts)

    def _function_texts(self) -> Iterable[str]:
        for name, source in self.functions.items():
            users = self.uses.get(name, [])
            yield "".join(f"# {line}\n" for line in users) + source

    def _stage(self, stage: StageSlice) -> str:
        """Return the text of a stage's specification; notes functions and objects on the way."""
        program, plan = self.program, self.plan
        lowered = lower_stage(plan, program, stage, rank=0, group=None) if plan.mesh.tp > 1 else {}
        placed = stored_placements(plan, program, stage, lowered) if lowered else {}
        self.stored |= {n: str(p) for n, p in placed.items() if p.kind == "shard"}
        found = find_denominators(program, stage.calls)
        means = StepMeans(found, lambda _: (), None)
        calls = []
        for block in plan.stages[stage.index].blocks:
            call = program.calls[block.call]
            graph = lowered[block.call].graph if lowered else program.graphs[call.graph]
            slices = (
                slices_read(program, block.call, lowered[block.call], placed) if lowered else ()
            )
            graph = with_own_inputs(plan, means.bind(program, block.call, graph))
            entry = plan.recompute[block.recompute]
            kept = None
            if entry.mode == "selective":
                is_autocast = program.autocast is not None
                kept = keep_plan(graph.ops, entry.keep, is_autocast=is_autocast)
            compiled = compile_graph(graph, self.device, is_marked=kept is not None)
            cloned, changed = written_places(graph) if runs_again(entry.mode) else ((), ())
            risky = may_share_gradient(graph)
            shared = tuple(i for i, state in enumerate(graph.states) if state.name in risky)
            run = self._function(graph.name, compiled, means, entry.keep)
            self._note_use(run, block, graph)
            arguments = {
                "fqn": repr(call.fqn),
                "run": run,
                "states": repr(call.states),
                "slices": repr(tuple(str(p) if p else "" for p in slices)) if any(slices) else "",
                "mode": repr(entry.mode) if entry.mode != "none" else "",
                "keep": _keep_text(kept),
                "cloned": repr(cloned) if cloned else "",
                "changed": repr(changed) if changed else "",
                "shared": repr(shared) if shared else "",
            }
            calls.append(f"        {block.call}: CallSpec({_keywords(arguments)}),")
        return self._stage_text(stage, calls, found, means)

    def _stage_text(
        self,
        stage: StageSlice,
        calls: Sequence[str],
        found: Sequence[Denominator],
        means: StepMeans,
    ) -> str:
        program = self.program
        run = self._function("stage", stage_function(program, stage, self.device), means, ())
        read = ""
        if found:
            compiled = side_function(program, stage, [d.value for d in found], self.device)
            read = self._function("denominators", compiled, means, ())
        contents = root_contents(self.model, program, stage)
        dtype = torch.bfloat16 if self.plan.mixed_precision == "bfloat16" else None
        slices = self.plan.slices
        arguments = {
            "run": run,
            "calls": "{\n" + "\n".join(calls) + "\n    }",
            "contents": repr(contents),
            "side": repr(tuple(stage.side_states.values())) if stage.side_states else "",
            "constants": self._constants(stage),
            "batch": repr(tuple(program.inputs.index(n) for n in stage.batch_inputs)),
            "inputs": repr(crossing_metas(program, stage.inputs, dtype, slices=slices)),
            "outputs": repr(crossing_metas(program, stage.outputs, dtype, slices=slices)),
            "computes_loss": repr(program.loss in stage.outputs),
            "changed": repr(changed_by(program, stage)),
            "denominators": repr(tuple(found)) if found else "",
            "read": read,
            "values": "{" + ", ".join(f"{key}: {n}" for n, key in self.values.items()) + "}"
            if found
            else "",
        }
        lines = [f"    {key}={value}," for key, value in arguments.items() if value]
        return f"STAGE_{stage.index} = StageSpec(\n" + "\n".join(lines) + "\n)"

    def _constants(self, stage: StageSlice) -> str:
        texts = []
        for name in stage.constants:
            tensor = self.program.constants[name]
            if tensor.numel() > _LARGEST_CONSTANT:
                raise EmitError(
                    f"the model has a constant of {tensor.numel()} elements, too large for a "
                    "script: register it as a buffer"
                )
            texts.append(f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype}), ")
        return f"({''.join(texts)})" if texts else ""

    def _function(
        self, base: str, compiled: CompiledFunction, means: StepMeans, keep: Sequence[str]
    ) -> str:
        """Note a function and the objects that it names; returns its name in the script."""
        source = compiled.source
        for name, value in compiled.objects.items():
            if name in ("torch", "device", "aten"):
                continue
            text = self._object(value, means)
            unique = self._unique(name, text)
            if unique != name:
                source = re.sub(rf"\b{name}\b(?=\()", unique, source)
        for op in keep:
            source = re.sub(
                rf"(?m)^(    {op} = .*)$", r"\1  # kept for the backward", source, count=1
            )
        body = source.split("(", 1)[1]
        for name, known in self.functions.items():
            if known.split("(", 1)[1] == body:
                return name
        number = sum(name.rstrip("0123456789_") == base.rstrip("0123456789_")
                     for name in self.functions)  # fmt: skip
        name = base if base not in self.functions and base != "stage" else f"{base}_{number}"
        self.functions[name] = f"def {name}({body}"
        return name

    def _unique(self, name: str, text: str) -> str:
        number = 1
        free = name
        while self.objects.setdefault(free, text) != text:
            number += 1
            free = f"{name}_{number}"
        return free

    def _object(self, value: Any, means: StepMeans) -> str:
        """Return the text that makes an object which a function names."""
        if isinstance(value, torch._ops.OpOverload):
            namespace, _, rest = value._schema.name.partition("::")
            return f"torch.ops.{namespace}.{rest}.{value._overloadname}"
        if value is operator.getitem:
            self.classes.setdefault(Redistribute, None)
            return "operator.getitem"
        if isinstance(value, Placement):
            return f"Placement.parse({str(value)!r})"
        if isinstance(value, StepValue):
            (key,) = (key for key, own in means.values.items() if own is value)
            name = f"VALUE_{len(self.values)}"
            for known, other in self.values.items():
                if other == key:
                    return known
            self.values[name] = key
            self.objects = {name: "StepValue()", **self.objects}
            return name
        if isinstance(value, InAutocast):
            self.classes.setdefault(InAutocast, None)
            inner = self._object(value.inner, means)
            return f"InAutocast({inner}, {', '.join(value.arguments())})"
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith("autoplan."):
            return self._dataclass(value, means)
        raise EmitError(
            f"{getattr(value, '__name__', value)} is no operator of torch: a script cannot name "
            "it. It stays one op or is a custom autograd function; run the plan by "
            "plan.parallelize(model)"
        )

    def _dataclass(self, value: Any, means: StepMeans) -> str:
        self.classes.setdefault(type(value), None)
        arguments = {}
        for one in dataclasses.fields(value):
            held = getattr(value, one.name)
            if one.name == "rank":
                arguments[one.name] = "TP_RANK"
            elif one.name == "group":
                arguments[one.name] = "TP_GROUP"
            elif held is None or isinstance(held, (int, float, str, bool, torch.dtype)):
                arguments[one.name] = repr(held)
            else:
                arguments[one.name] = self._object(held, means)
        return f"{type(value).__name__}({_keywords(arguments)})"

    def _note_use(self, function: str, block: BlockPlan, graph: BlockGraph) -> None:
        """Say in a comment what uses a function, and under which decisions."""
        lines = self.uses.setdefault(function, [])
        layout = self.plan.placements.get(block.placements)
        entry = self.plan.recompute[block.recompute]
        if not lines:
            lines += _wrapped("reads " + ", ".join(f"{x.name} {x.fqn}" for x in graph.states))
            sliced = {k: v for k, v in (layout.parameters if layout else {}).items() if v != "R"}
            if self.plan.mesh.tp > 1:
                texts = [f"{k} {v}" for k, v in sliced.items()]
                lines += _wrapped(f"tensor parallel: {', '.join(texts) or 'whole on every rank'}")
            words = {
                "none": "keeps what autograd saves",
                "offload": "keeps its inputs; what else autograd saves waits on the host",
                "full": "keeps its inputs, and runs again in the backward",
                "selective": f"keeps its inputs and {len(entry.keep)} results, and runs again",
            }
            lines.append(f"recompute {block.recompute}: {words[entry.mode]}")
        stage = next(s.index for s in self.plan.stages if block in s.blocks)
        lines.append(f"used by {block.fqn or 'the model'} (call {block.call}, stage {stage})")

    def _plan_text(self) -> str:
        plan, program, pp = self.plan, self.program, self.plan.mesh.pp
        owners: dict[str, set[int]] = {}
        trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
        for stage in self.stages:
            for index in stage.calls:
                for fqn in program.calls[index].states:
                    if fqn in program.aliases:
                        owners.setdefault(program.aliases[fqn], set()).add(stage.index % pp)
        shared = tuple(
            (n, tuple(sorted(on)))
            for n, on in sorted(owners.items())
            if len(on) > 1 and n in trained
        )
        ties = {n: f for n, f in program.aliases.items() if n != f}
        arguments = {
            "mesh": repr(plan.mesh).replace("Mesh(", "Degrees(", 1),
            "zero_stage": repr(plan.zero_stage),
            "schedule": repr(plan.schedule),
            "num_microbatches": repr(plan.num_microbatches),
            "microbatch_size": repr(plan.microbatch_size),
            "mixed_precision": repr(plan.mixed_precision),
            "autocast": repr(program.autocast),
            "offload": repr(plan.offload),
            "input_keys": repr(program.input_keys),
            "input_metas": repr(program.input_metas),
            "batch_dims": repr(tuple(program.batch_dims)),
            "aliases": repr(ties),
            "stored": repr(self.stored),
            "shared": repr(shared),
        }
        lines = [f"    {key}={value}," for key, value in arguments.items()]
        return "PLAN = ScriptPlan(\n" + "\n".join(lines) + "\n)"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, width=96, subsequent_indent="    ")


def _keywords(arguments: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in arguments.items() if value)


def _keep_text(kept: KeepPlan | None) -> str:
    if kept is None:
        return ""
    return (
        f"KeepPlan(stored=frozenset({sorted(kept.stored)}), "
        f"skipped=frozenset({sorted(kept.skipped)}), recast=frozenset({sorted(kept.recast)}), "
        f"names={kept.names!r})"
    )


def _indented_report(plan: Plan) -> str:
    return plan.report().replace("\\", "\\\\").replace('"""', "'''")


def _imports(runtime: Bundle) -> str:
    lines = {"import argparse", "import operator", "import torch", *runtime.imports}
    lines |= {"from typing import TYPE_CHECKING", "from typing import Any"}
    plain = sorted(line for line in lines if line.startswith("import "))
    by_module: dict[str, list[str]] = {}
    for line in sorted(line for line in lines if line.startswith("from ")):
        module, _, name = line.removeprefix("from ").partition(" import ")
        by_module.setdefault(module, []).append(name)
    named = [f"from {module} import {', '.join(names)}" for module, names in by_module.items()]
    typed = [f"    {name} = Any" for name in runtime.typed]
    text = "\n".join([*plain, "", *named, ""])
    if typed:
        text += "\nif TYPE_CHECKING:  # named in annotations only\n" + "\n".join(typed) + "\n"
    return text + "\naten = torch.ops.aten\ndevice = torch.device('cpu')  # set below\n"
