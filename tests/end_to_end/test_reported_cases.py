"""Plans of models after reported faults give the known numbers of one device, in float32."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import autoplan
from autoplan.batches import reduce_loss, split_batch
from autoplan.capturer import capture
from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError
from autoplan.plan import Plan
from autoplan.stages import crossing_metas, slice_program
from tests import reported_models as reported
from tests.distributed import run_workers
from tests.numerics import compare

TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, how it is split, and its loss and gradient norm on one device.

    Attributes:
        model: of `tests.reported_models`.
        options: of `autoplan.estimate`.
        loss: None where it is random.
        norm: over all gradients, each shared weight once.
    """

    model: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    loss: float | None
    norm: float | None

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        product = 1
        for name in ("dp", "tp", "pp"):
            product *= int(self.options.get(name, 1))
        return product


def make(kind: Any) -> Any:
    """Return the seeded model."""
    torch.manual_seed(0)
    model = kind()
    if kind is reported.Dropouts:
        torch.manual_seed(5)
    return model


@functools.cache
def plan_of(index: int) -> Plan:
    """Return the plan of a case."""
    case = CASES[index]
    return autoplan.estimate(
        make(case.model),
        f"{case.world_size}:cpu",
        case.model.batch(),
        loss_fn=case.model.loss,
        **case.options,
    ).plan


def case(model: Any, loss: float | None, norm: float | None, **options: Any) -> Case:
    """Return a case by its options."""
    return Case(model=model, options=options, loss=loss, norm=norm)


EXPERTS = (reported.Experts, 2.45110846, 1.32444258)
RAGGED = (reported.Ragged, 3.87943411, 2.75186476)
ADAPTERS = (reported.Adapters, 2.69760394, 0.231863478)
LLAMA = (reported.GroupedLlama, 4.85404444, 2.04770956)
UNET = (reported.SmallUNet, 1.19455028, 4.34313618)
REPEATED = (reported.Repeated, 1.48580873, 11.8103613)
DROPOUTS = (reported.Dropouts, None, None)

CASES = (
    case(reported.TiedLM, 4.93227053, 5.0481491, pp=2, microbatch_size=2),
    case(*LLAMA, tp=2, microbatch_size=4),
    case(*LLAMA, tp=4, microbatch_size=4),
    case(reported.FusedAttention, 3.89840722, 4.11138234, tp=2, microbatch_size=2),
    case(*DROPOUTS, microbatch_size=32, recompute="full"),
    case(*DROPOUTS, microbatch_size=16, recompute="full", dp=2),
    case(*DROPOUTS, microbatch_size=32, recompute="full", tp=2),
    case(*DROPOUTS, microbatch_size=16, recompute="full", dp=2, zero_stage=3),
    case(reported.SmallResNet, 1.78573012, 1.01622077, microbatch_size=4, recompute="full"),
    case(reported.MaskedLM, 3.427742, 1.91460664, pp=2, microbatch_size=2),
    case(*UNET, pp=2, microbatch_size=2),
    case(*UNET, pp=3, microbatch_size=1),
    case(*ADAPTERS, dp=2, zero_stage=3, microbatch_size=16),
    case(*ADAPTERS, tp=2, microbatch_size=32),
    case(*REPEATED, dp=2, zero_stage=3, microbatch_size=4),
    case(*REPEATED, pp=2, microbatch_size=4),
    case(*RAGGED, microbatch_size=1),
    case(*RAGGED, dp=2, microbatch_size=2),
    case(*RAGGED, pp=2, microbatch_size=1),
    case(*EXPERTS, pp=2, microbatch_size=24, schedule="gpipe"),
    case(*EXPERTS, microbatch_size=24, recompute="full"),
)


def _run(rank: int, index: int) -> tuple[float, float, dict[str, torch.Tensor], dict[str, Any]]:
    """Return loss, gradient norm, gradients and the state after a clipped step of SGD.

    The state of the model with dropout is joined by its loss in eval mode, before the step.
    """
    case, plan = CASES[index], plan_of(index)
    model, batch = make(case.model), case.model.batch()
    module = plan.parallelize(model, batch, case.model.loss, device="cpu")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    extra = {}
    if case.model is reported.Dropouts:
        extra["eval loss"] = module.eval().eval_step(module.shard_batch(batch))
        module.train()
    loss = float(module.train_step(module.shard_batch(batch)))
    gradients = module.full_gradients()
    norm = float(module.clip_grad_norm_((case.norm or 2e9) / 2))
    optimizer.step()
    return loss, norm, gradients, module.full_state() | extra


def _run_all(rank: int, indices: list[int]) -> list[Any]:
    return [_run(rank, index) for index in indices]


@functools.cache
def results() -> dict[int, Any]:
    """Return what rank 0 found for every case; one launch per number of processes."""
    found: dict[int, Any] = {}
    for world_size in sorted({case.world_size for case in CASES}):
        indices = [i for i, case in enumerate(CASES) if case.world_size == world_size]
        for index in indices:
            plan_of(index)
        found |= dict(zip(indices, run_workers(_run_all, world_size, indices)[0], strict=True))
    return found


def name_of(index: int) -> str:
    """Return the name of a case."""
    options = " ".join(f"{k}={v}" for k, v in CASES[index].options.items())
    return f"{CASES[index].model.__name__} {options}"


NUMBERS = [i for i, case in enumerate(CASES) if case.loss is not None]


@pytest.mark.parametrize("index", NUMBERS, ids=name_of)
def test_loss_and_norm_are_those_of_one_device(index: int) -> None:
    loss, norm, _, _ = results()[index]
    assert loss == pytest.approx(CASES[index].loss, rel=TOLERANCE)
    assert norm == pytest.approx(CASES[index].norm, rel=TOLERANCE)


def _gradients(rank: int, indices: list[int]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return gradients, and the state after half of them, of each model on one device."""
    found = []
    for index in indices:
        kind = CASES[index].model
        model, batch = make(kind), kind.batch()
        args, kwargs, target = split_batch(model, batch, kind.loss)
        torch.autograd.backward(reduce_loss(model(*args, **kwargs), kind.loss, target))
        named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.5 * 0.5 * parameter.grad
        found.append((named, {n: t.detach() for n, t in model.state_dict().items()}))
    return found


def test_gradients_and_a_clipped_step_are_those_of_one_device() -> None:
    (expected,) = run_workers(_gradients, 1, NUMBERS)
    problems = []
    for index, (gradients, state) in zip(NUMBERS, expected, strict=True):
        _, _, got, got_state = results()[index]
        found = compare(got, gradients, TOLERANCE)
        found += [
            f"{n} is {float((got_state[n] - t).abs().max()):.1e} off after a step"
            for n, t in state.items()
            if t.is_floating_point() and not torch.allclose(got_state[n], t, atol=1e-5)
        ]
        problems += [f"{name_of(index)}: {x}" for x in found]
    assert problems == []


def test_a_tied_weight_gets_both_shares_of_its_gradient() -> None:
    _, _, gradients, _ = results()[0]
    assert float(gradients["tok.weight"].norm()) == pytest.approx(1.69540274, rel=TOLERANCE)


def test_a_tied_model_has_the_known_loss_after_a_step() -> None:
    model, batch = make(reported.TiedLM), reported.TiedLM.batch()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, gradient in results()[0][2].items():
            named[name] -= 0.5 * gradient
        args, kwargs, target = split_batch(model, batch, reported.TiedLM.loss)
        loss = float(reduce_loss(model(*args, **kwargs), reported.TiedLM.loss, target))
    assert loss == pytest.approx(3.86586452, rel=TOLERANCE)


def test_biases_beside_a_fused_projection_get_their_gradients_once() -> None:
    (index,) = (i for i in NUMBERS if CASES[i].model is reported.FusedAttention)
    gradients = results()[index][2]
    named = {"layers.0.attn.qkv.bias": 0.375612825, "layers.1.down.bias": 0.600400627}
    for name, norm in named.items():
        assert float(gradients[name].norm()) == pytest.approx(norm, rel=TOLERANCE)


def test_dropout_is_off_in_evaluation() -> None:
    for index in (i for i, case in enumerate(CASES) if case.model is reported.Dropouts):
        loss = results()[index][3]["eval loss"] * CASES[index].options.get("dp", 1)
        assert float(loss) == pytest.approx(21.7821407, rel=TOLERANCE), name_of(index)


TRAINED = {
    reported.TiedLM: 79_824,
    reported.GroupedLlama: 86_336,
    reported.FusedAttention: 17_088,
    reported.SmallResNet: 2_653,
    reported.MaskedLM: 11_840,
    reported.SmallUNet: 6_569,
    reported.Adapters: 73_728,
    reported.Repeated: 9_571,
    reported.Ragged: 1_303,
    reported.Experts: 6_357,
}


def test_every_trained_parameter_has_one_gradient() -> None:
    for index in NUMBERS:
        found = sum(gradient.numel() for gradient in results()[index][2].values())
        assert found == TRAINED[CASES[index].model], name_of(index)


def test_the_auxiliary_loss_of_both_layers_is_that_of_the_experts_chosen() -> None:
    model = make(reported.Experts)
    x, _ = reported.Experts.batch()
    with torch.no_grad():
        first = model.layers[0]
        assert float(model(x)[1]) == pytest.approx(4.08174372, rel=TOLERANCE)
        assert float(first(x)[1]) == pytest.approx(2.06820011, rel=TOLERANCE)
        chosen = first.router(x).softmax(-1).topk(2, -1).indices
    assert torch.bincount(chosen.flatten()).tolist() == [11, 7, 14, 16]


@functools.cache
def unet_bytes() -> dict[str, int]:
    """Return the bytes of a row that cross each border between modules of the U-Net."""
    program = capture(
        make(reported.SmallUNet),
        reported.SmallUNet.batch(),
        reported.SmallUNet.loss,
        microbatch_size=1,
    )
    found = {}
    for index, call in enumerate(program.calls[:-1]):
        if call.fqn:
            cuts = [range(index + 1), range(index + 1, len(program.calls))]
            first, _ = slice_program(program, [list(cut) for cut in cuts])
            found[call.fqn] = sum(
                meta.nbytes for meta in crossing_metas(program, first.outputs, None)
            )
    return found


def test_every_tensor_that_crosses_a_border_counts() -> None:
    by_hand = {"up2": 40_960, "up1": 16_384, "down1": 32_768, "down2": 49_152, "mid": 53_248}
    pooled = {"down1": 40_960, "down2": 53_248}  # with the pooling before the border too
    found = unet_bytes()
    assert found.keys() == by_hand.keys()
    assert all(found[name] in (nbytes, pooled.get(name)) for name, nbytes in by_hand.items()), found


@pytest.mark.parametrize(("devices", "mib"), [(1, 32), (2, 14)])
def test_adapters_fit_where_only_they_have_gradients_and_moments(devices: int, mib: int) -> None:
    plan = limited_adapters(devices, mib)
    assert max(plan.predicted.peak_memory_bytes) <= mib * 2**20


def test_a_frozen_base_of_which_every_device_has_all_does_not_fit() -> None:
    with pytest.raises(InfeasibleError, match="the largest part is parameters"):
        limited_adapters(2, 14, dp=2, zero_stage=0)


def limited_adapters(devices: int, mib: int, **pins: Any) -> Plan:
    """Return the fastest plan of the adapters, their batch in one piece a device."""
    return autoplan.optimize(
        make(reported.Adapters),
        Cluster.parse(f"1x{devices}:cpu").with_memory(f"{mib}MiB", reserve_bytes=0),
        reported.Adapters.batch(),
        loss_fn=reported.Adapters.loss,
        num_microbatches=1,
        compare=False,
        **pins,
    )


def test_a_repeated_block_gets_the_gradient_of_all_its_uses() -> None:
    for index in (i for i in NUMBERS if CASES[i].model is reported.Repeated):
        norm = float(results()[index][2]["layer.up.weight"].norm())
        assert norm == pytest.approx(3.25646877, rel=TOLERANCE)


def test_recomputed_dropout_is_that_of_the_loss() -> None:
    """The loss is homogeneous in each weight, so that sum(W * G) is the loss if masks agree."""
    for index in (i for i, case in enumerate(CASES) if case.model is reported.Dropouts):
        loss, _, gradients, _ = results()[index]
        weights = make(reported.Dropouts).state_dict()
        for name, weight in weights.items():
            product = float((weight * gradients[name]).sum())
            assert product == pytest.approx(loss, rel=1e-4), name_of(index)


def test_a_recomputed_batch_norm_is_updated_once() -> None:
    (index,) = (i for i in NUMBERS if CASES[i].model is reported.SmallResNet)
    state = results()[index][3]
    tracked = [int(t) for n, t in state.items() if n.endswith("num_batches_tracked")]
    assert tracked == [1] * 5
    norm = float(state["stem.1.running_mean"].norm())
    assert norm == pytest.approx(0.0594086312, rel=TOLERANCE)


def test_a_plan_that_splits_batch_statistics_says_so() -> None:
    (index,) = (i for i in NUMBERS if CASES[i].model is reported.SmallResNet)
    assert any("batch statistics" in note.lower() for note in plan_of(index).notes)


def test_a_frozen_base_is_neither_trained_nor_changed() -> None:
    before = make(reported.Adapters).state_dict()
    for index in (i for i in NUMBERS if CASES[i].model is reported.Adapters):
        _, _, gradients, state = results()[index]
        assert not [n for n in gradients if "base" in n]
        assert all(torch.equal(state[n], t) for n, t in before.items() if "base" in n)
        trained = sum(t.numel() for n, t in before.items() if "base" not in n)
        assert 4 * sum(t.numel() for t in before.values()) + 12 * trained == 15_335_424
