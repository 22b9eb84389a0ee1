"""autoplan: plan and run the training of a PyTorch model that does not fit on one device.

    nn.Module, batch --trace--> Trace --+
    profiles/data/*.json --> Profile ---+--cost--> Problem --search--> Plan --emit--> module
    Cluster ----------------------------+

`optimize` and `estimate` plan (they need ortools); `Plan.load` and `Plan.parallelize` run a plan
and need torch only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoplan.cluster import Cluster
from autoplan.collecting import without_collections
from autoplan.errors import (
    AutoplanError,
    EmitError,
    InfeasibleError,
    PlanError,
    ProfileError,
    SearchLimitError,
    TraceError,
)
from autoplan.plan import Plan

if TYPE_CHECKING:
    from autoplan.custom_ops import register_op
    from autoplan.estimating import Estimate, estimate
    from autoplan.optimizing import optimize
    from autoplan.plan_timeline import simulate
    from autoplan.tracer import trace
    from autoplan.verifier import verify_plan

__version__ = "0.1.0"

__all__ = [
    "AutoplanError",
    "Cluster",
    "EmitError",
    "Estimate",
    "InfeasibleError",
    "Plan",
    "PlanError",
    "ProfileError",
    "SearchLimitError",
    "TraceError",
    "estimate",
    "optimize",
    "register_op",
    "simulate",
    "trace",
    "verify_plan",
]

_LAZY = {
    "Estimate": "autoplan.estimating",
    "estimate": "autoplan.estimating",
    "optimize": "autoplan.optimizing",
    "register_op": "autoplan.custom_ops",
    "simulate": "autoplan.plan_timeline",
    "trace": "autoplan.tracer",
    "verify_plan": "autoplan.verifier",
}


def __getattr__(name: str) -> Any:
    """Import what plans only when it is asked for, so that running a plan needs no solver."""
    if name not in _LAZY:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
    import importlib

    with without_collections():
        return getattr(importlib.import_module(_LAZY[name]), name)
