"""Small models that tests capture, trace and run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "ConvNet",
    "Gate",
    "GatedNet",
    "KorthikantiBlock",
    "LinearChain",
    "TinyGPT",
    "mean_square",
]


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


class LinearChain(nn.Module):
    """Linear layers of one size with ReLU between, and a head four times as wide."""

    def __init__(self, width: int = 16, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.head = nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        out: torch.Tensor = self.head(x)
        return out


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            parts[0], parts[1], parts[2], is_causal=True, dropout_p=dropout
        )
        out: torch.Tensor = self.out(y.transpose(1, 2).reshape(rows, length, width))
        return out


class TinyBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        out: torch.Tensor = x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class TinyGPT(nn.Module):
    """An own GPT whose head is tied to the embedding."""

    def __init__(self, dropout: float = 0.0, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, width)
        self.positions = nn.Embedding(16, width)
        self.layers = nn.ModuleList(TinyBlock(width, 4, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class ConvNet(nn.Module):
    """Convolutions with batch norm, in-place ReLU, pooling and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(8)
        self.act = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.act(x + self.norm(self.conv(x)))
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class Gate(nn.Module):
    """Takes one of two layers by the mean of its input."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.limit = 1.0
        self.calm, self.wild = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().mean() > self.limit:
            wild: torch.Tensor = self.wild(x)
            return wild
        calm: torch.Tensor = self.calm(x)
        return calm


class GatedNet(nn.Module):
    """The gate of block 1 branches on the values of its input; with a depth, of every block."""

    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(), nn.Linear(8, 8)])
        if depth:
            self.blocks = nn.ModuleList(nn.Sequential() for _ in range(depth))
        for block in self.blocks:
            if isinstance(block, nn.Sequential):
                block.add_module("gate", Gate())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class KorthikantiBlock(nn.Module):
    """The transformer block of Korthikanti et al. 2022, section 4.1, with unfused attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.view(rows, length, self.heads, -1).transpose(1, 2)

        y = self.norm1(x)
        query, key, value = split(self.query(y)), split(self.key(y)), split(self.value(y))
        scores = (query @ key.transpose(2, 3)) * (width // self.heads) ** -0.5
        weights = F.dropout(scores.softmax(-1), 0.1, self.training)
        y = (weights @ value).transpose(1, 2).reshape(rows, length, width)
        x = x + F.dropout(self.out(y), 0.1, self.training)
        y = self.down(F.gelu(self.up(self.norm2(x))))
        return x + F.dropout(y, 0.1, self.training)
