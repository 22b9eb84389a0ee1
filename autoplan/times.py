"""Seconds of ops, conversions, ZeRO collectives, pipeline transfers and the optimizer step.

Every number comes from a profile look-up; a `Tally` counts how each was found.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from autoplan.cluster import Cluster
from autoplan.errors import ProfileError
from autoplan.expert_parallel import EXCHANGE, UNDIVIDED, ExpertParallel
from autoplan.graph import Gemm, OpTrace, ShardOption
from autoplan.local_blocks import LocalOp
from autoplan.op_classes import class_point
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.host import HostSeconds
from autoplan.profiles.lookups import ITEM_BYTES
from autoplan.profiles.op_times import measured_ops
from autoplan.profiles.tables import ATTENTION_DIRECTIONS, Lookup
from autoplan.signatures import local_signature
from autoplan.step_costs import exposed_s, interference

__all__ = ["LINEAR", "OpTime", "Tally", "Timer", "overlaps_communication"]

_WITH_BIAS = 3  # operands of a linear layer
LINEAR = ("aten.linear.default", "aten.addmm.default")
# Bytes per element of an operand that is cast for a narrow product: read in bfloat16 and written;
# its scale comes from the kernel before or the step before (Micikevicius et al. 2022, section 3).
_CAST_BYTES = 2 + 1
_DOUBLE_COST = 2.0  # float64 on units measured in float32: two words for one


@dataclass(slots=True)
class Tally:
    """How often each kind of look-up was used."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, lookup: Lookup) -> float:
        """Count a look-up and return its seconds."""
        self.counts[lookup.how] += 1
        return lookup.time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTime:
    """Seconds of an op: arithmetic and tensor-parallel communication, forward and backward.

    `weights_s`: of the part of the backward that makes gradients of parameters, where it is priced
    by itself.
    """

    forward_s: float
    backward_s: float
    forward_comm_s: float = 0.0
    backward_comm_s: float = 0.0
    weights_s: float = 0.0

    @property
    def deferred_s(self) -> float:
        """Return the part of the backward that is for parameters: half where it is not priced."""
        return self.weights_s or self.backward_s / 2

    @property
    def total_s(self) -> float:
        """Return forward and backward, communication included."""
        return self.forward_s + self.backward_s + self.forward_comm_s + self.backward_comm_s


def overlaps_communication(cluster: Cluster) -> bool:
    """Return whether collectives run beside kernels: on GPUs on their own stream, on CPU not."""
    return not cluster.is_cpu


class Timer:
    """Prices local ops on a cluster for one tensor-parallel degree."""

    def __init__(
        self,
        cluster: Cluster,
        degree: int,
        tally: Tally | None = None,
        product_dtype: str | None = None,
        attention_kernel: str = "",
        *,
        experts: ExpertParallel = UNDIVIDED,
    ) -> None:
        self.cluster = cluster
        self.experts = experts
        self.product_dtype = product_dtype
        self.attention_kernel = attention_kernel
        self.device = cluster.device
        self.degree = degree
        self.link = cluster.link_for(degree, 1)
        # Where kernels run on the host, what it takes beside them comes on top of each. Elsewhere
        # it runs ahead of the device, and a block takes the longer of the two (`Pricer`).
        self.host = cluster.device.host if cluster.is_cpu else HostSeconds()
        self.tally = tally or Tally()
        self._times: dict[tuple[int, str, bool], tuple[OpTrace, OpTime]] = {}
        # What-if devices have the name of the one that they were made from.
        is_real = "(scaled:" not in self.device.description
        version = str(torch.__version__)
        self._measured = measured_ops(self.device.name, version) if is_real else {}

    def op_time(self, op: LocalOp) -> OpTime:
        """Return the seconds of one local op."""
        if op.op is None:
            return self._conversion_time(op)
        time = self.traced_time(op.op, op.option)
        if not op.regathered_bytes:
            return time
        # The input's gradient does not need what is gathered: the two run at once.
        gather_s = self.collective_s("all_gather", op.regathered_bytes)
        slowed = interference(self.link)
        comm_s = time.backward_comm_s + exposed_s(gather_s, time.backward_s / 2, slowed)
        return replace(time, backward_comm_s=comm_s)

    def _conversion_time(self, op: LocalOp) -> OpTime:
        assert op.transition is not None, "a conversion carries its transition"
        return OpTime(
            forward_s=0.0,
            backward_s=0.0,
            forward_comm_s=self.collective_s(op.transition[0], op.moved_bytes),
            backward_comm_s=(
                self.collective_s(op.transition[1], op.moved_bytes) if op.grads else 0.0
            ),
        )

    def collective_s(self, name: str, nbytes: int) -> float:
        """Return the seconds of a conversion's collective over a whole value of `nbytes`."""
        if name == "":
            return 0.0
        if name == "slice":
            return self.tally.add(self.device.memory_time_s(2 * nbytes / self.degree))
        link_s = self.link.collective_time_s(name, nbytes, self.degree)  # type: ignore[arg-type]
        return self.host.op_forward + link_s

    def traced_time(self, op: OpTrace, option: ShardOption) -> OpTime:
        """Return the seconds of one rank's share of a traced op: measured ones if there are any."""
        signature = local_signature(op, option, self.degree) if self._measured else ""
        measured = self._measured.get(signature)
        key = (id(op), signature if measured else option.gemm_dim, option.is_split)
        if key not in self._times:
            if measured is not None:
                self.tally.counts["measured"] += 1 + op.needs_grad
                found = OpTime(forward_s=measured.forward_s, backward_s=measured.backward_s)
            else:
                found = self._with_host(self._new_time(op, option.gemm_dim, option.is_split), op)
            # The op is kept, so that no later one can have its id.
            self._times[key] = (op, found)
        return self._times[key][1]

    def _with_host(self, time: OpTime, op: OpTrace) -> OpTime:
        """Add what the host takes beside the kernels, whose own launch is in their times."""
        launched_s = 0.0 if op.kind == "view" else self.device.launch_overhead_s
        forward_s = max(0.0, self.host.op_forward - launched_s)
        backward_s = max(0.0, self.host.op_backward - launched_s) if op.needs_grad else 0.0
        return replace(
            time, forward_s=time.forward_s + forward_s, backward_s=time.backward_s + backward_s
        )

    def _new_time(self, op: OpTrace, gemm_dim: str, is_split: bool) -> OpTime:
        split = self.degree if is_split else 1
        if op.kind == "view":
            return OpTime(forward_s=0.0, backward_s=0.0)
        if op.target == EXCHANGE:
            return self._exchange_time(op.nbytes / split)
        if op.kind == "gemm" and op.gemm is not None and op.forward_flops > 0:
            products = self._gemm_time(op, _divided(op.gemm, gemm_dim, self.degree))
            return self._with_casts(products, op, split)
        if op.kind == "attention" and op.attention is not None:
            return self._with_casts(self._attention_time(op, split), op, split)
        classed = self._class_time(op, split)
        if classed is not None:
            return classed
        kernel = op.target.split(".")[1] if op.target.startswith("aten.") else ""
        forward = self.memory_s(op.forward_bytes / split, kernel)
        backward = 0.0
        if op.needs_grad:
            own = (op.backward_bytes - op.accumulated_bytes) / split
            backward = self.memory_s(own, f"{kernel}_backward")
            backward += self.memory_s(op.accumulated_bytes / split)
        return OpTime(forward_s=forward, backward_s=backward)

    def _exchange_time(self, nbytes: float) -> OpTime:
        """Return the seconds of an all-to-all of the rows that a rank holds, and of gradients."""
        degree = self.experts.degree
        link = self.cluster.link_for(degree, self.experts.tensor_parallel)
        seconds = self.host.op_forward + link.collective_time_s("all_to_all", nbytes, degree)
        return OpTime(
            forward_s=0.0, backward_s=0.0, forward_comm_s=seconds, backward_comm_s=seconds
        )

    def _class_time(self, op: OpTrace, split: int) -> OpTime | None:
        """Return the seconds of an op whose class the profile has a table of, if it has."""
        point = class_point(op) if self.device.op_classes else None
        if point is None:
            return None
        seconds = []
        for direction in ATTENTION_DIRECTIONS:
            found = self.device.op_class_time_s(
                point.op_class,
                -(-point.rows // split),
                point.width,
                dtype=point.dtype,
                direction=direction,
            )
            if found is None:
                return None
            seconds.append(found)
        forward, backward = seconds
        return OpTime(
            forward_s=self.tally.add(forward),
            backward_s=self.tally.add(backward) if op.needs_grad else 0.0,
        )

    def _with_casts(self, time: OpTime, op: OpTrace, split: int) -> OpTime:
        """Add the copies that autocast makes of operands and gradients."""
        return replace(
            time,
            forward_s=time.forward_s + self.memory_s(op.cast_bytes / split),
            backward_s=time.backward_s + self.memory_s(op.backward_cast_bytes / split),
        )

    def memory_s(self, nbytes: float, kernel: str = "") -> float:
        """Return the seconds of one memory-bound kernel."""
        return self.tally.add(self.device.memory_time_s(nbytes, kernel)) if nbytes > 0 else 0.0

    def _gemm_time(self, op: OpTrace, gemm: Gemm) -> OpTime:
        m, n, k, batch = gemm.m, gemm.n, gemm.k, gemm.batch
        add, device = self.tally.add, self.device
        dtype, cost = _priced_dtype(device, op.dtype)
        casts = 0.0
        if self.product_dtype is not None and op.target in LINEAR:
            dtype = self.product_dtype
            casts = _CAST_BYTES * (m * k + k * n)
        product_s = partial(device.gemm_time_s, batch=batch)
        if batch > 1 and _has_experts(op):
            product_s = partial(device.grouped_time_s, groups=batch)
        forward = add(product_s(m, n, k, dtype=dtype))
        forward += self.memory_s(casts)
        backward = self.memory_s(_CAST_BYTES * m * n) if casts else 0.0
        products = round(op.backward_flops / op.forward_flops)
        weights = 0.0
        if products >= 2:
            backward += add(product_s(m, k, n, dtype=dtype, direction="dgrad"))
        if products >= 1:
            weights = add(product_s(n, k, m, dtype=dtype, direction="wgrad"))
            if op.target in LINEAR and len(op.inputs) == _WITH_BIAS:
                # The bias's gradient is a sum over rows, a kernel of its own.
                weights += self.memory_s(m * n * ITEM_BYTES.get(op.dtype, 4))
        backward += weights + self.memory_s(op.accumulated_bytes)
        return OpTime(
            forward_s=cost * forward, backward_s=cost * backward, weights_s=cost * weights
        )

    def _attention_time(self, op: OpTrace, split: int) -> OpTime:
        assert op.attention is not None, "an attention op carries its sizes"
        batch, heads, seq_q, seq_k, head_dim, causal = op.attention
        dtype, cost = _priced_dtype(self.device, op.dtype)

        def seconds(direction: str) -> float:
            lookup = self.device.attention_time_s(
                batch=batch,
                heads=-(-heads // split),
                seq_q=seq_q,
                seq_k=seq_k,
                head_dim=head_dim,
                causal=bool(causal),
                dtype=dtype,
                direction=direction,  # type: ignore[arg-type]
                kernel=self.attention_kernel,
            )
            return cost * self.tally.add(lookup)

        backward = seconds("backward") if op.needs_grad else 0.0
        return OpTime(forward_s=seconds("forward"), backward_s=backward)


def _has_experts(op: OpTrace) -> bool:
    """Return whether a product of a stack is one of rows with a matrix for each expert."""
    return any(labels[:1] == ("experts",) for labels in op.dimensions.inputs)


def _divided(gemm: Gemm, gemm_dim: str, degree: int) -> Gemm:
    sizes = {"batch": gemm.batch, "m": gemm.m, "n": gemm.n, "k": gemm.k}
    if gemm_dim:
        sizes[gemm_dim] = -(-sizes[gemm_dim] // degree)
    return Gemm(**sizes)


def _priced_dtype(device: DeviceProfile, dtype: str) -> tuple[str, float]:
    """Return the dtype to look up and the factor on its time.

    Raises:
        ProfileError: the profile knows neither the dtype nor a stand-in for it.
    """
    if dtype in device.peak_flops_per_s:
        return dtype, 1.0
    if dtype == "float64" and "float32" in device.peak_flops_per_s:
        return "float32", _DOUBLE_COST
    known = ", ".join(device.peak_flops_per_s)
    raise ProfileError(
        f"profile {device.name} has no speed for {dtype}, it has {known}: build the model in one "
        "of these, or measure a profile with it"
    )
