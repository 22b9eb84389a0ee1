"""The running parallel module: one training step, gradients, clipping, and gathering."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoplan.chunks import gathered
from autoplan.errors import EmitError
from autoplan.sharders import local_tensor, normalise_gradient
from autoplan.stage_parts import StepForm, joined
from autoplan.ties import Tie
from autoplan.training_state import load_checkpoint, save_checkpoint

__all__ = ["ParallelModule"]


class Evaluation(Protocol):
    """What evaluates the model on this rank; see `autoplan.evaluation`."""

    def loss(self, batch: Any) -> torch.Tensor | None:
        """Return the loss on the last stage, None on others."""

    def output(self, batch: Any) -> Any:
        """Return the model's output on the last stage, None on others."""


class ParallelModule(nn.Module):
    """This rank's part of a model, run by a plan; made by `parallelize`.

    Parameters keep the user's names. `train_step` leaves gradients in `.grad`, averaged over
    data-parallel ranks and micro-batches; step any optimizer over `parameters()` after it.
    """

    def __init__(
        self,
        *,
        plan: Any,
        form: StepForm,
        mesh: DeviceMesh | None,
        ties: Sequence[Tie],
        aliases: Mapping[str, str],
        sources: Sequence[str],
        computes_loss: bool,
        evaluator: Evaluation | None = None,
        reform: Callable[[Any], StepForm] | None = None,
    ) -> None:
        super().__init__()
        self.training = self._is_trained_in = form.parts[0].root.training
        self.plan = plan
        self.mesh = mesh
        self.__dict__["_root"] = joined(form.parts)
        self._splitter = form.splitter
        self._forms = {form.splitter.form: form}
        self._reform = reform
        self._use(form)
        self._aliases = dict(aliases)
        self._ties = self._own_ties(ties)
        self._sources = tuple(sources)
        self._computes_loss = computes_loss
        self._evaluator = evaluator

    def train_step(self, batch: Any) -> torch.Tensor:
        """Run forward and backward of this rank's batch; return the mean loss of all ranks.

        Args:
            batch: this rank's rows (`shard_batch(global_batch)`): `num_microbatches *
                microbatch_size` in the batch dimension. Ranks that differ in tp or pp only get the
                same. Other sizes, such as a length, may be others than at planning: the model is
                then traced anew, once for each shape.

        Raises:
            ValueError: the batch has another number of rows, dtype or number of dimensions than the
                plan's, or the module is in another mode than it was planned in.
            EmitError: the plan cannot run at this shape.
        """
        if self.training != self._is_trained_in:
            mode = "train" if self._is_trained_in else "eval"
            raise ValueError(f"the plan is for {mode} mode: call {mode}() before train_step")
        count = self.plan.num_microbatches
        leaves = self._splitter.leaves(batch)
        form = self._form_of(batch, leaves)
        self._use(form)
        self._feed(form.splitter.microbatches(leaves))
        for part in self._parts:
            part.sharder.before_step(count)
            part.buffers.begin()
        losses = form.run_step(count)
        for part in self._parts:
            part.sharder.after_step()
            part.buffers.end()
        for parameter in self.parameters():
            normalise_gradient(parameter)
        self._sum_ties()
        return self._mean_loss(losses)

    def run_microbatches(self, count: int) -> list[torch.Tensor]:
        """Run forward and backward of each micro-batch in turn, without a pipeline."""
        (part,) = self._parts
        losses = []
        for index in range(count):
            part.sharder.before_microbatch(index, count)
            (loss,) = part.root()
            loss.backward()
            losses.append(loss.detach())
            del loss
        return losses

    def forward_microbatch(self, batch: Any) -> torch.Tensor:
        """Return the loss of the first micro-batch with its graph; for measuring, not training."""
        leaves = self._splitter.leaves(batch)
        form = self._form_of(batch, leaves)
        self._use(form)
        (part,) = form.parts
        self._feed(form.splitter.microbatches(leaves)[:1])
        loss: torch.Tensor = part.root()[0]
        return loss

    def _form_of(self, batch: Any, leaves: Sequence[torch.Tensor]) -> StepForm:
        """Return what runs for a batch with these leaves, made when its shape first comes.

        No collective is needed for that: data-parallel ranks may have different shapes, and ranks
        that differ in tp or pp only have the same and make theirs together.
        """
        key = self._splitter.form_of(leaves)
        if key not in self._forms:
            if self._reform is None:
                sizes = ", ".join(f"{n} {s}" for n, s in zip(self._splitter.keys, key, strict=True))
                raise ValueError(
                    f"a micro-batch has the shapes {sizes}, this program was made for "
                    f"{self._splitter.form}: pad to those, or plan again with such a batch"
                )
            self._forms[key] = self._reform(batch)
        return self._forms[key]

    def _use(self, form: StepForm) -> None:
        """Make the stages run what a form says."""
        self._parts = form.parts
        for part in form.parts:
            part.root.set_function(part.function)

    def _feed(self, microbatches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Give every stage the leaves that it reads of each micro-batch of the step."""
        for part in self._parts:
            own = [tuple(leaves[i] for i in part.wanted) for leaves in microbatches]
            part.root.feed(own)
            part.means.begin(own)

    def shard_batch(self, global_batch: Any) -> Any:
        """Return the rows of the global batch that this rank's `train_step` takes."""
        return self._splitter.share(global_batch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output in eval mode, without gradients: `module(**batch)`.

        All ranks call it with their rows, of equal shapes; any shape that the model takes is
        allowed, and is traced anew when it first comes. The rows are run at once.

        Returns:
            What the model returns, on the last stage of a pipeline; None on other stages.

        Raises:
            EmitError: the module is in train mode, or gradients are wanted.
        """
        if torch.is_grad_enabled():
            raise EmitError(
                "forward evaluates and has no gradient: call it under torch.no_grad(), and "
                "train_step(batch) to train"
            )
        if args and kwargs:
            raise EmitError("pass all inputs by position or all by keyword")
        return self._evaluation().output(kwargs or args)

    def eval_step(self, batch: Any) -> torch.Tensor:
        """Return the mean loss of all ranks in eval mode; nothing changes.

        All ranks call it with their rows, of equal shapes, in the form of `train_step`'s batch; any
        number of rows and any length is allowed, and is traced anew when it first comes. The rows
        are run at once.

        Raises:
            EmitError: the module is in train mode.
        """
        loss = self._evaluation().loss(batch)
        return self._mean_loss([loss] if loss is not None else [])

    def _evaluation(self) -> Evaluation:
        if self._evaluator is None:
            raise EmitError("this module trains only: make it with plan.parallelize to evaluate")
        if self.training:
            raise EmitError("the module is in train mode: call eval() before evaluating")
        return self._evaluator

    def train(self, mode: bool = True) -> ParallelModule:
        """Switch to train mode, or to eval mode, in which `eval_step` and `forward` run."""
        self.training = mode
        self.__dict__["_root"].train(mode)
        return self

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their 2-norm over the whole model is at most `max_norm`.

        Returns:
            The norm before clipping, the same on every rank; each shared weight counts once.
        """
        # By identity: on this stage a shared weight may come first under another name.
        parameters = dict(self.named_parameters(remove_duplicate=False))
        uncounted = {id(parameters[tie.fqn]) for tie in self._ties if not tie.is_counted}
        named = [(p, p.grad) for p in self.parameters() if p.grad is not None]
        device = self._splitter.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        copies = self.plan.mesh.dp * self.plan.mesh.tp
        for parameter, gradient in named:
            if id(parameter) not in uncounted:
                square = torch.linalg.vector_norm(local_tensor(gradient)).double() ** 2
                total += square / _replication(gradient, copies)
        if dist.is_initialized():
            dist.all_reduce(total)
        norm = total.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for _, gradient in named:
            local = local_tensor(gradient)
            local.mul_(scale.to(local.device, local.dtype))
        return norm

    @torch.no_grad()
    def full_state(self) -> dict[str, torch.Tensor]:
        """Return all parameters and persistent buffers, whole, under the user's names.

        Every rank gets all of them, on the CPU: for tests and export. All ranks must call it.
        """
        named = dict(self.__dict__["_root"].state_dict())
        return self._gather(named, all_names=True)

    @torch.no_grad()
    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of all parameters, whole, under the user's names; see full_state."""
        named = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        return self._gather(named, all_names=False)

    def save_checkpoint(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
    ) -> None:
        """Write parameters, buffers, the optimizer's and the random state to the folder `path`.

        All ranks call it, between steps. It loads under any other plan. A checkpoint that is there
        is replaced only when the new one is whole.

        Args:
            path: on a file system that all ranks share.
            optimizer: over `parameters()`; None saves the model alone.
            extra: anything that pickles, such as the step; returned by `load_checkpoint`.

        Raises:
            EmitError: a rank could not write; on every rank.
        """
        save_checkpoint(
            self.__dict__["_root"],
            self._aliases,
            path,
            optimizer,
            extra,
            mesh=self.plan.mesh,
            device=self._splitter.device,
        )

    def load_checkpoint(
        self, path: str | Path, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Read a checkpoint that any plan of this model saved, and return its `extra`.

        All ranks call it. The optimizer's state and hyper-parameters become those saved, and under
        a plan of the same degrees the generators of every rank; see `autoplan.random_state`.

        Raises:
            EmitError: there is none, or it is of another model.
        """
        return load_checkpoint(
            self.__dict__["_root"],
            self._aliases,
            path,
            optimizer,
            mesh=self.plan.mesh,
            device=self._splitter.device,
        )

    def code(self, stage: int | None = None) -> str:
        """Return the text of what `stage` runs (all of this rank's own, if None)."""
        if stage is None:
            own = self.mesh.get_local_rank("pp") if self.mesh is not None else 0
            return "\n".join(self._sources[own :: self.plan.mesh.pp])
        return self._sources[stage]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under the user's names."""
        root: nn.Module = self.__dict__["_root"]
        yield from root.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's buffers under the user's names."""
        root: nn.Module = self.__dict__["_root"]
        yield from root.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return this rank's parameters and buffers (DTensors where sharded)."""
        state: dict[str, Any] = self.__dict__["_root"].state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict` of the same plan returned."""
        return self.__dict__["_root"].load_state_dict(*args, **kwargs)

    def _own_ties(self, ties: Sequence[Tie]) -> tuple[Tie, ...]:
        """Return ties under names that this rank has.

        The first name of a shared parameter may lie in a block of another stage.
        """
        here: dict[str, str] = {}
        for name, _ in self.named_parameters(remove_duplicate=False):
            here.setdefault(self._aliases.get(name, name), name)
        return tuple(replace(tie, fqn=here[tie.fqn]) for tie in ties)

    def _sum_ties(self) -> None:
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for tie in self._ties:
            gradient = parameters[tie.fqn].grad
            if gradient is None and parameters[tie.fqn].requires_grad:
                gradient = torch.zeros_like(parameters[tie.fqn])
                parameters[tie.fqn].grad = gradient
            if gradient is not None:
                dist.all_reduce(local_tensor(gradient), group=tie.group)

    def _mean_loss(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._splitter.device)
        for loss in losses if self._computes_loss else ():
            total += loss.detach().double().reshape(())
        if dist.is_initialized():
            dist.all_reduce(total)
            total /= self.plan.mesh.dp * self.plan.mesh.tp
        return total

    def _gather(
        self, named: Mapping[str, torch.Tensor], *, all_names: bool
    ) -> dict[str, torch.Tensor]:
        own: dict[str, torch.Tensor] = {}
        scalars = self.__dict__["_root"].scalars
        for name, tensor in named.items():
            first = self._aliases.get(name, name)
            if first not in own:
                whole = gathered(tensor).detach().cpu().clone()
                own[first] = whole.reshape(()) if name in scalars else whole
        if self.plan.mesh.pp > 1:
            assert self.mesh is not None, "a pipeline has a mesh"
            parts: list[Any] = [None] * self.plan.mesh.pp
            dist.all_gather_object(parts, own, group=self.mesh.get_group("pp"))
            own = {name: tensor for part in reversed(parts) for name, tensor in part.items()}
        if all_names:
            own |= {name: own[first] for name, first in self._aliases.items() if first in own}
        return own


def _replication(tensor: torch.Tensor, copies: int) -> int:
    """Return how many of the `copies` ranks of a stage hold each element of a gradient."""
    if not isinstance(tensor, DTensor):
        return copies
    shards = 1
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            shards *= tensor.device_mesh.size(dim)
    return copies // shards
