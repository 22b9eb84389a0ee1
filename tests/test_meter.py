from __future__ import annotations

import pytest
import torch

from autoplan.capturer import capture
from autoplan.emitter import parallelize
from autoplan.meter import StorageMeter
from autoplan.plan import Recompute
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.distributed import run_workers
from tests.plans import hand_plan

CONFIG = GPTConfig(num_layers=3, vocab_size=64, width=32, num_heads=4, max_tokens=32)
ACTIVATION = 2 * 32 * 32 * 4
LOGSUMEXP = 2 * 32 * 4 * 4


def test_a_storage_counts_once_until_its_last_tensor_dies() -> None:
    with StorageMeter() as meter:
        x = torch.ones(100)
        y = x.view(10, 10)
        assert meter.live_bytes == 400
        del x
        assert meter.live_bytes == 400
        del y
    assert (meter.live_bytes, meter.peak_bytes) == (0, 400)


def test_a_resized_storage_counts_what_it_holds() -> None:
    with StorageMeter() as meter:
        x = torch.ones(100)
        x.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        x.untyped_storage().resize_(800)
        assert meter.live_bytes == 800


def test_the_baseline_counts_ties_once() -> None:
    model = GPT(CONFIG)
    assert StorageMeter().baseline(model) == sum(p.nbytes for p in model.parameters())


def _kept_bytes(rank: int, keeps: tuple[tuple[str, ...], ...]) -> list[int]:
    """Return the bytes that live after a forward, per keep list."""
    found = []
    for keep in keeps:
        torch.manual_seed(0)
        model = GPT(CONFIG)
        batch = batch_like(CONFIG, 2, 32)
        program = capture(model, batch, loss_fn, microbatch_size=2)
        mark = Recompute(mode="selective", keep=keep) if keep else Recompute(mode="full")
        plan = hand_plan(program, "GPT", recompute=mark)
        module = parallelize(plan, model, batch, loss_fn, device="cpu")
        meter = StorageMeter()
        base = meter.baseline(module)
        with meter:
            loss = module.forward_microbatch(batch)
            found.append(meter.live_bytes - base)
            del loss
    return found


@pytest.mark.parametrize(
    ("keep", "nbytes"),
    [
        (("v12_scaled_dot_product_attention",), ACTIVATION + LOGSUMEXP),
        (("v1_linear",), 3 * ACTIVATION),
        (("v19_linear", "v20_gelu"), 8 * ACTIVATION),
    ],
)
def test_selective_recompute_keeps_exactly_the_marked_bytes(
    keep: tuple[str, ...], nbytes: int
) -> None:
    ((nothing, marked),) = run_workers(_kept_bytes, 1, ((), keep))
    assert marked - nothing == CONFIG.num_layers * nbytes
