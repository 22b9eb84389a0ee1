"""Seconds of a micro-batch at the borders of a pipeline stage: transfers and the host."""

from __future__ import annotations

from autoplan.costs import Pricer
from autoplan.settings import Setting
from autoplan.step_costs import transfer_s

__all__ = ["action_s", "actions_s", "boundary_s", "sent_s"]


def boundary_s(
    pricer: Pricer, setting: Setting, cut: int, *, stage: int | None = None, is_sliced: bool = False
) -> float:
    """Return the seconds of sending one micro-batch's activations over a cut, one way.

    Args:
        pricer: of the micro-batch size.
        setting: degrees and their order.
        cut: index of the first call after it.
        stage: before it; None: whichever is farthest from the next.
        is_sliced: as in `transfer_s`.
    """
    nbytes = pricer.trace.crossing_bytes[cut - 1]
    return transfer_s(
        nbytes, setting, pricer.workload, pricer.cluster, stage=stage, is_sliced=is_sliced
    )


def sent_s(pricer: Pricer, setting: Setting, cut: int, stage: int, is_sliced: bool) -> float:
    """Return the seconds of sending what a stage hands on; the last rank sends to the first."""
    rank = stage % setting.pp
    sender = rank if rank < setting.pp - 1 else None
    return boundary_s(pricer, setting, cut, stage=sender, is_sliced=is_sliced)


def action_s(pricer: Pricer, setting: Setting) -> float:
    """Return seconds of the host in a forward or a backward of a pipeline stage, ops apart."""
    return pricer.layouts.timer(setting.tp).host.pipeline_action if setting.pp > 1 else 0.0


def actions_s(pricer: Pricer, setting: Setting) -> float:
    """Return seconds of the host in all actions of a stage for one micro-batch, ops apart."""
    return (3 if setting.schedule == "zero_bubble" else 2) * action_s(pricer, setting)
