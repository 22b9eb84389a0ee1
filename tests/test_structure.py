"""Imports point one way, packages are complete, and running a plan needs no solver."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import autoplan

ROOT = Path(autoplan.__file__).parent
REPOSITORY = Path(__file__).parent.parent

# The layers in the order in which the data flows; a module imports only its own and lower ones,
# where it is imported (not only named for types, and not inside a function).
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "units", "patching", "collecting"),
    ("split_backward",),
    ("compat", "mask_causality", "autograd_threads"),
    ("codec",),
    ("profiles", "search"),
    ("schedules", "stage_costs", "timeline", "nodes", "meshes"),
    ("simulator",),
    (
        "cluster",
        "cluster_files",
        "graph",
        "assigned_states",
        "batch_forms",
        "batches",
        "shortening",
        "dry_run_result",
        "launcher",
        "meter",
        "plan",
        "tensor_layout",
    ),
    ("redistribution", "program", "hf", "interpreter", "processes"),
    ("collectives", "thread_ranks"),
    (
        "autocast",
        "blocks",
        "custom_ops",
        "answers",
        "opaque",
        "op_facts",
        "shared_writes",
        "value_checks",
        "missing_fakes",
        "flattener",
        "exporter",
        "matching",
        "segments",
        "capturer",
        "models",
        "backends",
        "kernels",
        "opcost",
        "axes",
        "axis_labels",
        "axis_rules",
        "view_rules",
        "sharding",
        "axis_sizes",
        "shrinking",
        "dimension_rules",
        "dimension_evidence",
        "dimensions",
        "step_means",
        "batch_sums",
        "batch_linearity",
        "gradient_memory",
        "runner",
        "signatures",
        "cuda_autocast",
        "layout_check",
        "tracer",
        "program_pickles",
    ),
    ("limits", "engines", "optimizers", "expert_parallel"),
    ("op_classes",),
    (
        "settings",
        "context_batches",
        "setting_rules",
        "offload",
        "local_blocks",
        "local",
        "deferral",
        "split_steps",
        "times",
        "liveness",
        "inner_recompute",
        "losses",
        "frames",
        "flat_partitions",
        "fusion",
        "caching_allocator",
        "block_heap",
        "resident",
        "stage_walk",
        "repeated_walk",
        "memory",
        "replay_groups",
        "replay",
        "step_costs",
        "scaling",
        "stage_ends",
        "transfers",
    ),
    ("block_options", "block_choice"),
    ("detours",),
    ("frontiers", "conventions"),
    ("decomposed", "context_parallel"),
    ("block_work", "call_prices"),
    ("decision_tables", "block_layouts"),
    ("parameter_groups",),
    ("costs",),
    ("stage_borders",),
    ("stage_bytes", "border_seconds"),
    ("search_options", "plan_prices", "reserved", "interleaving"),
    ("setting_problem", "split_cuts", "held"),
    ("stage_pricing", "plan_timeline"),
    ("plan_writer", "simple"),
    (
        "bounds",
        "walked_plans",
        "calibration",
        "answer_prices",
        "dealing",
        "setting_solver",
        "verifier",
        "report",
        "dimension_text",
    ),
    ("leanest", "remedies", "reasons", "alone"),
    ("model_traces", "training_job"),
    ("planner",),
    ("configurations", "tracing_ahead"),
    ("estimating", "optimizing"),
    (
        "lowering",
        "host_activations",
        "recompute",
        "sharded_ops",
        "sharders",
        "stages",
        "step_buffers",
        "entries",
        "standalone",
        "chunks",
        "checkpoints",
        "random_state",
        "training_state",
        "microbatches",
        "stage_check",
        "stage_parts",
        "tensor_parallel",
        "executor",
        "batch_splitter",
        "ties",
        "runtime",
        "calls",
        "written_inputs",
        "recapture",
        "device_meshes",
        "alike_programs",
        "evaluation",
        "layout_numerics",
        "rank_numerics",
        "rank_emission",
        "emitter",
    ),
    ("training", "op_runner", "op_profiler"),
    ("bundler", "script_text", "script_writer", "framework_configs", "dry_runner", "twin_steps"),
    ("twins",),
    ("comparison",),
    ("planning_commands", "checking_commands", "running_commands"),
    ("cli",),
    ("__main__",),
)
LAYER_OF = {name: index for index, layer in enumerate(LAYERS) for name in layer}
FILES = sorted(p for p in ROOT.glob("*.py") if p.stem != "__init__")
FOLDERS = {name: sorted((ROOT / name).resolve().glob("*.py")) for name in ("profiles", "search")}
MODULES = [
    "autoplan",
    *(f"autoplan.{p.stem}" for p in FILES),
    *(f"autoplan.{n}" for n in FOLDERS),
    *(f"autoplan.{n}.{p.stem}" for n, ps in FOLDERS.items() for p in ps if p.stem != "__init__"),
]


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported_at_start(path: Path) -> set[str]:
    """Return the modules that importing a file imports."""
    names: set[str] = set()
    pending: list[ast.AST] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if is_for_types(node) or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide what is imported"
            module = node.module or ""
            names.add(module)
            names |= {f"autoplan.{a.name}" for a in node.names if module == "autoplan"}
        pending += ast.iter_child_nodes(node)
    return names


def own_parts(path: Path) -> set[str]:
    """Return the modules or folders of autoplan that importing a file imports."""
    names = imported_at_start(path)
    return {n.split(".")[1] for n in names if n.startswith("autoplan.")} & set(LAYER_OF)


def test_every_module_has_a_layer() -> None:
    assert {p.stem for p in FILES} | set(FOLDERS) == set(LAYER_OF)


def test_the_table_for_contributors_names_every_module_once() -> None:
    table = (REPOSITORY / "CONTRIBUTING.md").read_text().split("## House rules")[0]
    named = re.findall(r"`(?:autoplan/)?(\w+)\.py`", table)
    assert sorted(named) == sorted(path.stem for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_imports_point_from_higher_to_lower_layers(path: Path) -> None:
    own = LAYER_OF[path.stem]
    higher = {name for name in own_parts(path) if LAYER_OF[name] > own}
    assert not higher, f"{path.stem} imports {higher} of higher layers"


@pytest.mark.parametrize("folder", FOLDERS)
def test_profiles_and_search_import_values_only(folder: str) -> None:
    for path in FOLDERS[folder]:
        own = LAYER_OF[folder]
        assert all(LAYER_OF[n] < own or n == folder for n in own_parts(path)), path


def test_running_a_plan_never_imports_the_solver() -> None:
    program = (
        "import sys, autoplan, autoplan.emitter, autoplan.training, autoplan.launcher\n"
        "import autoplan.profiles.measure\n"
        "autoplan.Plan.load, autoplan.Cluster.parse('1:cpu')\n"
        "assert 'ortools' not in sys.modules, sorted(m for m in sys.modules if 'autoplan' in m)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_packages_of_the_distribution_are_those_on_disk() -> None:
    document = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    listed = document["tool"]["setuptools"]["packages"]
    found = {"autoplan"} | {f"autoplan.{p.parent.name}" for p in ROOT.glob("*/__init__.py")}
    assert set(listed) == found
    folders = document["tool"]["setuptools"]["package-dir"]
    assert all((REPOSITORY / folders[name] / "__init__.py").exists() for name in listed)
    for name in listed:
        nested = [
            p
            for p in (REPOSITORY / folders[name]).resolve().glob("*/*.py")
            if f"{name}.{p.parent.name}" not in listed
        ]
        assert nested == []


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_exists_and_none_is_called_like_its_module(name: str) -> None:
    module = importlib.import_module(name)
    public = getattr(module, "__all__", ())
    missing = [item for item in public if not hasattr(module, item)]
    assert missing == []
    assert name.rpartition(".")[2] not in public
    assert len(set(public)) == len(public)


def test_no_public_name_of_the_package_hides_a_module() -> None:
    assert not set(autoplan.__all__) & {p.stem for p in FILES}
