"""Small models after faults that users of distributed training reported, with known results.

Each is seeded, so that loss and gradient norms are fixed numbers, worked out on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "MODELS",
    "Adapters",
    "Dropouts",
    "Experts",
    "FusedAttention",
    "GroupedLlama",
    "MaskedLM",
    "Ragged",
    "Repeated",
    "SmallResNet",
    "SmallUNet",
    "TiedLM",
]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _ids(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(1))


class CausalMix(nn.Module):
    """The mean of a row's past through a residual MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        past = x.cumsum(1) / steps[None, :, None]
        out: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.norm(past))))
        return out


class TiedLM(nn.Module):
    """Source: pytorch/torchtitan#1524: the head shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(97, 48)
        self.blocks = nn.ModuleList(CausalMix(48) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 97, bias=False)
        nn.init.normal_(self.tok.weight, std=0.1)
        self.head.weight = self.tok.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out

    @staticmethod
    def batch() -> Any:
        ids = _ids(97, 4, 12)
        return ids, ids

    @staticmethod
    def loss(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class GroupedLlama:
    """Source: huggingface/transformers#48307: two key-value heads, labels in the batch."""

    def __new__(cls) -> Any:
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
        return AutoModelForCausalLM.from_config(config)

    @staticmethod
    def batch() -> Any:
        ids = _ids(128, 4, 16)
        return {"input_ids": ids, "labels": ids.clone()}

    loss = None


class FusedQKV(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (y.reshape(rows, tokens, -1, width // 4).transpose(1, 2) for y in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(y.transpose(1, 2).reshape(rows, tokens, -1))
        return out


class FusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(32), nn.LayerNorm(32), FusedQKV(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.n1(x))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.n2(x))))
        return out


class FusedAttention(nn.Module):
    """Source: pytorch/pytorch#140069: fused qkv cut by `chunk`, and biases that are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FusedLayer(), FusedLayer()])
        for parameter in self.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, std=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @staticmethod
    def batch() -> Any:
        return _random(2, 6, 32)

    @staticmethod
    def loss(output: torch.Tensor) -> torch.Tensor:
        return (output - 1).square().mean()


class DropLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.drop = nn.Linear(64, 64, bias=False), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.drop(torch.relu(self.lin(x)))
        return out


class Dropouts(nn.Module):
    """Source: allenai/OLMo-core#828. The loss is homogeneous in each weight: sum(W * G) == loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DropLayer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @staticmethod
    def batch() -> Any:
        return torch.rand(32, 64, generator=torch.Generator().manual_seed(1))

    @staticmethod
    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.sum()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(width)
        self.c2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.b2 = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b2(self.c2(self.act(self.b1(self.c1(x)))))
        y += x
        out: torch.Tensor = self.act(y)
        return out


class SmallResNet(nn.Module):
    """Source: pytorch/pytorch#96136: batch norm must be updated once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.blocks = nn.ModuleList([Residual(8), Residual(8)])
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.fc(x.mean((2, 3)))
        return out

    @staticmethod
    def batch() -> Any:
        return _random(4, 3, 16, 16) + 0.5, torch.arange(4)

    loss = staticmethod(F.cross_entropy)


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(24, 24), nn.Linear(24, 48), nn.Linear(24, 24)
        self.pos = nn.Embedding(7, 24)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(x).chunk(2, -1)
        q = self.q(x + self.pos(pos))
        score = (q @ k.transpose(-1, -2)) / 24**0.5
        weight = score.masked_fill(~mask[:, None, :], -1e4).softmax(-1)
        out: torch.Tensor = x + self.o(weight @ v)
        return out


class MaskedLM(nn.Module):
    """Source: pytorch/pytorch#183024: keyword-only mask and positions that every block reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(32, 24)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(4))
        self.head = nn.Linear(24, 32)
        with torch.no_grad():
            for block in self.blocks:
                block.get_submodule("kv").get_parameter("weight").mul_(1.5)

    def forward(self, ids: torch.Tensor, *, mask: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x, mask, pos)
        out: torch.Tensor = self.head(x)
        return out

    @staticmethod
    def batch() -> Any:
        mask = torch.arange(7)[None] < torch.tensor([7, 4, 2, 5])[:, None]
        pos = torch.stack([torch.arange(7).roll(i) for i in range(4)])
        return {"pos": pos, "mask": mask, "ids": _ids(32, 4, 7)}

    @staticmethod
    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch["ids"].flatten())


def _stage(width_in: int, width: int) -> nn.Module:
    conv = nn.Conv2d(width_in, width, 3, padding=1)
    return nn.Sequential(conv, nn.GroupNorm(2, width), nn.SiLU())


class SmallUNet(nn.Module):
    """Source: pytorch/pytorch#127964: skips that jump over stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.mid = _stage(1, 8), _stage(8, 16), _stage(16, 16)
        self.up2, self.up1, self.out = _stage(32, 8), _stage(16, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s1 = self.down1(x)
        s2 = self.down2(F.avg_pool2d(s1, 2))
        y = self.mid(F.avg_pool2d(s2, 2))
        y = self.up2(torch.cat([F.interpolate(y, scale_factor=2), s2], 1))
        y = self.up1(torch.cat([F.interpolate(y, scale_factor=2), s1], 1))
        out: torch.Tensor = self.out(y)
        return out

    @staticmethod
    def batch() -> Any:
        x = _random(4, 1, 32, 32)
        return x, x

    @staticmethod
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(768, 768, bias=False).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(8, 768) / 768**0.5)
        self.lora_b = nn.Parameter(torch.randn(768, 8) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + (x @ self.lora_a.T) @ self.lora_b.T
        return out


class Adapters(nn.Module):
    """Source: pytorch/pytorch#104690: only adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapter() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    @staticmethod
    def batch() -> Any:
        return _random(32, 768)

    @staticmethod
    def loss(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Repeated(nn.Module):
    """Source: pytorch/torchtitan#2817: one block is applied four times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(32, 32), Shared(), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(4):
            x = self.layer(x)
        out: torch.Tensor = self.head(x)
        return out

    @staticmethod
    def batch() -> Any:
        return _random(8, 32)

    @staticmethod
    def loss(output: torch.Tensor) -> torch.Tensor:
        return (output - 1).square().mean()


class Ragged(nn.Module):
    """Source: pytorch/torchtitan#2206: rows with 9, 1, 5 and 2 labels, a mean over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.fc1 = nn.Embedding(23, 16), nn.Linear(16, 16)
        self.fc2, self.head = nn.Linear(16, 16), nn.Linear(16, 23)
        with torch.no_grad():
            self.head.weight.mul_(6)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.fc2(torch.tanh(self.fc1(self.tok(ids)))))
        logits = self.head(x).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), ignore_index=-100)

    @staticmethod
    def batch() -> Any:
        ids = _ids(23, 4, 10)
        keep = torch.arange(10)[None] < torch.tensor([9, 1, 5, 2])[:, None]
        return ids, torch.where(keep, ids.roll(-1, 1), -100)

    loss = None


class DenseExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.w1 = nn.Parameter(torch.randn(4, 16, 24) / 16**0.5)
        self.w2 = nn.Parameter(torch.randn(4, 24, 16) / 24**0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prob = self.router(x).softmax(-1)
        top, chosen = prob.topk(2, -1)
        gate = torch.zeros_like(prob).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        hidden = torch.relu(torch.einsum("td,edh->teh", x, self.w1))
        y = torch.einsum("te,ted->td", gate, torch.einsum("teh,ehd->ted", hidden, self.w2))
        used = torch.zeros_like(prob).scatter(-1, chosen, 1.0)
        return x + y, 4 * (used.mean(0) * prob.mean(0)).sum()


class Experts(nn.Module):
    """Source: NVIDIA-NeMo/Automodel#2635: an auxiliary loss that is summed over the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DenseExperts(), DenseExperts()])
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros((), dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x, auxiliary = layer(x)
            total = total + auxiliary
        return self.head(x), total

    @staticmethod
    def batch() -> Any:
        return _random(24, 16), torch.arange(24) % 5

    @staticmethod
    def loss(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        logits, auxiliary = output
        return F.cross_entropy(logits, target) + 0.1 * auxiliary


MODELS: tuple[Callable[[], Any], ...] = (
    TiedLM,
    GroupedLlama,
    FusedAttention,
    Dropouts,
    SmallResNet,
    MaskedLM,
    SmallUNet,
    Adapters,
    Repeated,
    Ragged,
    Experts,
)
