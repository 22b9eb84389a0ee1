"""Blocks and cuts are found in models of any form, and every cut says what crosses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capturer import capture
from autoplan.graph import Trace
from autoplan.program import Program
from autoplan.tracer import trace, trace_program
from tests.models_for_tests import ConvNet, LinearChain, TinyGPT, mean_square
from tests.numerics import compare
from tests.programs import gradients_of, run_program


def fqns(program: Program) -> list[str]:
    return [call.fqn for call in program.calls]


def classes(program: Program) -> list[str]:
    return [program.graphs[call.graph].name for call in program.calls]


def assert_equals_eager(program: Program, model: nn.Module, x: torch.Tensor) -> None:
    loss = mean_square(model(x))
    got, found = run_program(program, model, [x])
    torch.testing.assert_close(got, loss.detach())
    assert compare(found, gradients_of(loss, model)) == []


def layers(width_in: int, width: int) -> nn.Sequential:
    conv = nn.Conv2d(width_in, width, 3, padding=1)
    return nn.Sequential(conv, nn.GroupNorm(2, width), nn.SiLU())


class SkipNet(nn.Module):
    """A U-Net of two levels; each way down is kept for the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.mid = layers(1, 8), layers(8, 16), layers(16, 16)
        self.up2, self.up1, self.out = layers(32, 8), layers(16, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(F.avg_pool2d(first, 2))
        y = self.mid(F.avg_pool2d(second, 2))
        y = self.up2(torch.cat([F.interpolate(y, scale_factor=2), second], 1))
        y = self.up1(torch.cat([F.interpolate(y, scale_factor=2), first], 1))
        out: torch.Tensor = self.out(y)
        return out


def crossing(result: Trace, *, before: str = "", after: str = "") -> int:
    """Return the bytes at the cut before or after the block of a module."""
    names = [call.fqn for call in result.calls]
    return result.crossing_bytes[names.index(before) - 1 if before else names.index(after)]


def test_every_tensor_that_jumps_over_a_cut_is_counted() -> None:
    """Bytes of one sample by hand: levels of 8 x 32 x 32, 16 x 16 x 16 and 16 x 8 x 8 floats."""
    first, second, middle = 8 * 32 * 32 * 4, 16 * 16 * 16 * 4, 16 * 8 * 8 * 4
    result = trace(SkipNet(), torch.randn(4, 1, 32, 32), mean_square, microbatch_size=1)
    assert crossing(result, before="down2") == first + first // 4 == 40960
    assert crossing(result, before="mid") == first + second + second // 4 == 53248
    assert crossing(result, after="mid") == first + second + middle == 53248
    assert crossing(result, after="up2") == first + 8 * 16 * 16 * 4 == 40960
    assert crossing(result, after="up1") == 4 * 32 * 32 * 4 == 16384


def test_pooling_behind_a_cut_is_a_narrower_cut() -> None:
    result = trace(SkipNet(), torch.randn(4, 1, 32, 32), mean_square, microbatch_size=1)
    assert crossing(result, after="down1") == 32768
    assert crossing(result, after="down2") == 49152


def test_a_small_sequence_of_layers_is_one_block() -> None:
    program = capture(SkipNet(), torch.randn(2, 1, 32, 32), mean_square)
    assert [f for f in fqns(program) if f] == ["down1", "down2", "mid", "up2", "up1"]
    assert_equals_eager(program, SkipNet(), torch.randn(2, 1, 32, 32))
    program = capture(ConvNet(), torch.randn(2, 3, 16, 16), mean_square)
    assert fqns(program)[0] == "stem"


def test_a_long_or_large_sequence_of_layers_is_cut_into_its_layers() -> None:
    class Tall(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.body = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
            self.head = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.body(x))
            return out

    for depth in (3, 12):
        program = capture(Tall(depth), torch.randn(2, 8), mean_square)
        assert fqns(program)[:depth] == [f"body.{i}" for i in range(depth)]


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(self.up(x).relu())
        return out


def test_a_list_of_lists_gives_the_inner_blocks() -> None:
    stages = (nn.Sequential(*(Bottleneck(8) for _ in range(depth))) for depth in (2, 5))
    program = capture(nn.Sequential(*stages), torch.randn(2, 8), mean_square)
    inner = [f"{s}.{i}" for s, depth in enumerate((2, 5)) for i in range(depth)]
    assert [f for f in fqns(program) if f] == inner
    assert len(set(classes(program)[1:7])) == 1


def test_a_stage_that_is_mostly_a_list_of_blocks_gives_the_blocks() -> None:
    class Stage(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.enter = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(Bottleneck(8) for _ in range(depth))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return x

    program = capture(nn.Sequential(Stage(2), Stage(6)), torch.randn(2, 8), mean_square)
    found = [f for f in fqns(program) if f]
    assert found == [*(f"0.blocks.{i}" for i in range(2)), *(f"1.blocks.{i}" for i in range(6))]


class Repeated(nn.Module):
    """One block applied several times between a stem and a head."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(8, 8), Bottleneck(8), nn.Linear(8, 3)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(self.times):
            x = self.layer(x)
        out: torch.Tensor = self.head(x)
        return out


def test_a_module_that_is_applied_several_times_is_one_class_with_several_calls() -> None:
    model, x = Repeated(4), torch.randn(2, 8)
    program = capture(model, x, mean_square)
    assert fqns(program)[:-1] == ["stem", *["layer"] * 4, "head"]
    assert len(set(classes(program)[1:5])) == 1
    result = trace_program(program, model_name="Repeated")
    assert result.num_parameters == sum(p.numel() for p in model.parameters())
    assert result.crossing_bytes[:5] == (2 * 8 * 4,) * 5
    assert_equals_eager(program, model, x)


def test_a_module_that_two_blocks_share_is_read_by_both() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), shared) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).relu()
            return x

    model, x = Sharing(), torch.randn(2, 8)
    program = capture(model, x, mean_square)
    result = trace_program(program, model_name="Sharing")
    assert result.num_parameters == sum(p.numel() for p in model.parameters()) == 4 * 72
    assert result.shared[0] == ("blocks.0.1.weight", "blocks.1.1.weight", "blocks.2.1.weight")
    assert_equals_eager(program, model, x)


def test_named_modules_are_blocks_where_none_is_numbered() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.work, self.leave = nn.Linear(8, 8), Bottleneck(8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.leave(self.work(self.enter(x).tanh()).tanh())
            return out

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.model(x)
            return out

    program = capture(Wrapped(), torch.randn(2, 8), mean_square)
    assert fqns(program) == ["model.enter", "model.work", "model.leave", ""]
    assert_equals_eager(program, Wrapped(), torch.randn(2, 8))


def test_a_model_without_modules_is_cut_where_it_is_narrow() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.ParameterList(nn.Parameter(torch.randn(64, 8) / 8) for _ in range(12))
            self.thin = nn.ParameterList(nn.Parameter(torch.randn(8, 64) / 8) for _ in range(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for wide, thin in zip(self.wide, self.thin, strict=True):
                x = x + F.linear(F.linear(x, wide).relu(), thin).tanh()
            return x

    model, x = Flat(), torch.randn(2, 8)
    program = capture(model, x, mean_square)
    result = trace_program(program, model_name="Flat")
    assert len(program.calls) >= 10
    assert max(result.crossing_bytes) <= 2 * 2 * 8 * 4
    assert_equals_eager(program, model, x)


@pytest.mark.parametrize("model", [TinyGPT(depth=4), LinearChain(depth=5)], ids=["gpt", "chain"])
def test_chains_of_numbered_blocks_stay_what_they_were(model: Any) -> None:
    if isinstance(model, TinyGPT):
        ids = torch.randint(0, 50, (2, 16))
        program = capture(model, ids, mean_square)
        assert fqns(program) == ["", *(f"layers.{i}" for i in range(4)), ""]
    else:
        program = capture(model, torch.randn(2, 16), mean_square)
        assert fqns(program) == [*(f"blocks.{i}" for i in range(5)), ""]


def test_an_encoder_decoder_is_a_chain_whose_cuts_carry_the_memory() -> None:
    class Decode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.cross = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x + self.own(x).tanh() * self.cross(memory).mean(1, keepdim=True)
            return out

    class Translate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleList(Bottleneck(8) for _ in range(4))
            self.decoder = nn.ModuleList(Decode() for _ in range(4))

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            for block in self.encoder:
                source = block(source)
            for block in self.decoder:
                target = block(target, source)
            return target

    batch = {"source": torch.randn(2, 10, 8), "target": torch.randn(2, 6, 8)}
    result = trace(Translate(), batch, mean_square)
    assert [call.fqn for call in result.calls if call.fqn] == [
        f"{part}.{i}" for part in ("encoder", "decoder") for i in range(4)
    ]
    memory, own = 2 * 10 * 8 * 4, 2 * 6 * 8 * 4
    assert result.crossing_bytes[3:7] == (memory, memory + own, memory + own, memory + own)
