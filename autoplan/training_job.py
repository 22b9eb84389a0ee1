"""What is to be trained, and where: the arguments that planning and pricing have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn

from autoplan.autocast import check_autocast, choose_precision
from autoplan.batches import batch_rows
from autoplan.capturer import LossFn
from autoplan.cluster import Cluster
from autoplan.offload import check_offload
from autoplan.optimizers import Optimizer
from autoplan.settings import Workload

__all__ = ["TrainingJob"]


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A model, its batch and how it is trained, on a cluster; arguments of `autoplan.optimize`.

    `optimize` and `estimate` list them with these defaults, and hand them on as one.
    """

    model: nn.Module
    cluster: Cluster | str
    batch: Any = None
    _: KW_ONLY
    batch_dim: Any = 0
    global_batch_size: int | None = None
    optimizer: str | type[torch.optim.Optimizer] = "AdamW"
    loss_fn: LossFn | None = None
    mixed_precision: str = "auto"
    autocast: torch.dtype | None = None
    name: str | None = None
    offload: Sequence[str] | str = ()

    def devices(self) -> Cluster:
        """Return the cluster.

        Raises:
            ValueError: its text names none.
        """
        return Cluster.parse(self.cluster) if isinstance(self.cluster, str) else self.cluster

    def example(self) -> Any:
        """Return the batch, or one that the model says its inputs are like.

        Raises:
            TraceError: there is none and none can be made.
        """
        if self.batch is not None:
            return self.batch
        from autoplan.models import example_batch

        return example_batch(self.model)

    def workload(self, cluster: Cluster, batch: Any) -> Workload:
        """Return the batch size, the optimizer and the precision, for `devices` and `example`.

        Raises:
            ValueError: a number or a name is wrong; says what would do.
        """
        rows = self.global_batch_size
        if rows is None:
            rows = batch_rows(batch, self.batch_dim)
        if rows < 1:
            raise ValueError(f"global_batch_size is {rows}; it must be at least 1")
        named = self.optimizer if isinstance(self.optimizer, str) else self.optimizer.__name__
        is_gpu = not cluster.is_cpu
        wanted = "none" if self.autocast else self.mixed_precision
        precision = choose_precision(self.model, wanted, is_gpu)
        width = 1 if precision == "none" else 2  # master parameters are float32
        trained = (p.element_size() for p in self.model.parameters() if p.requires_grad)
        item_bytes = width * max(trained, default=4)
        return Workload(
            global_batch_size=rows,
            optimizer=Optimizer.named(named, is_foreach=is_gpu, item_bytes=item_bytes),
            mixed_precision=precision,
            autocast=check_autocast(self.model, self.autocast, self.mixed_precision),
            parameter_bytes_per_traced_byte=width,
            offload=check_offload(self.offload, cluster),
        )
