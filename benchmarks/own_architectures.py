"""Architectures written for the benchmarks: ResNet, U-Net, LSTM, MLP-Mixer, diffusion transformer.

Each takes its sizes as arguments and is written as a user would write it, without regard to how it
is traced.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["DiT", "LSTMLanguageModel", "MLPMixer", "ResNet", "UNet"]


class _Residual(nn.Module):
    """A bottleneck of three convolutions; source: He et al. 2015, figure 5."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        wide = 4 * width
        self.conv1 = nn.Conv2d(width_in, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(width, wide, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3 = nn.BatchNorm2d(wide)
        self.act = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != wide:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, wide, 1, stride=stride, bias=False), nn.BatchNorm2d(wide)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(self.act(self.norm2(self.conv2(y)))))
        out: torch.Tensor = self.act(y + self.shortcut(x))
        return out


class ResNet(nn.Module):
    """ResNet-50 by default."""

    def __init__(
        self, width: int = 64, depths: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages: list[nn.Module] = []
        width_in = width
        for number, depth in enumerate(depths):
            own = width * 2**number
            blocks = []
            for index in range(depth):
                blocks.append(_Residual(width_in, own, 2 if number and not index else 1))
                width_in = 4 * own
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width_in, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stages(self.stem(x))
        out: torch.Tensor = self.head(F.adaptive_avg_pool2d(y, 1).flatten(1))
        return out


def _double(width_in: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for source in (width_in, width):
        layers += [nn.Conv2d(source, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Encoder and decoder with skips between equal sizes; source: Ronneberger et al. 2015."""

    def __init__(self, width: int = 64, levels: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.enter = _double(3, width)
        self.down = nn.ModuleList(_double(a, b) for a, b in itertools.pairwise(widths))
        pairs = list(itertools.pairwise(widths))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs)
        self.merge = nn.ModuleList(_double(2 * a, a) for a, _ in pairs)
        self.leave = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = [self.enter(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        y = skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            y = merge(torch.cat([skips.pop(), up(y)], 1))
        out: torch.Tensor = self.leave(y)
        return out


class LSTMLanguageModel(nn.Module):
    def __init__(self, width: int = 1024, depth: int = 2, vocabulary: int = 33000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(self.tokens(ids))[0])
        return out


class _Mix(nn.Module):
    """Mixes patches, then channels; source: Tolstikhin et al. 2021, figure 1."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_patches = nn.Sequential(
            nn.Linear(patches, width // 2), nn.GELU(), nn.Linear(width // 2, patches)
        )
        self.over_channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = x + self.over_channels(self.norm2(x))
        return out


class MLPMixer(nn.Module):
    def __init__(
        self,
        width: int = 768,
        depth: int = 12,
        image: int = 224,
        patch: int = 16,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(_Mix((image // patch) ** 2, width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        out: torch.Tensor = self.head(self.norm(y).mean(1))
        return out


class _DiTBlock(nn.Module):
    """Norms are scaled and shifted by the condition; source: Peebles and Xie 2022, figure 3."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        parts = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        y = self.norm1(x) * (1 + scale1) + shift1
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(y).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(query, key, value)
        x = x + gate1 * self.out(y.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return out


class DiT(nn.Module):
    """DiT-B/2 on latents of 32 x 32 by default."""

    def __init__(
        self, width: int = 768, depth: int = 12, heads: int = 12, image: int = 32, patch: int = 2
    ) -> None:
        super().__init__()
        self.patch = patch
        self.enter = nn.Conv2d(4, width, patch, stride=patch)
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2, width))
        self.times = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.classes = nn.Embedding(1001, width)
        self.blocks = nn.ModuleList(_DiTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, patch * patch * 4)

    def forward(self, x: torch.Tensor, times: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(torch.arange(128, device=x.device) * (-9.21 / 128))
        angles = times[:, None] * frequencies[None]
        condition = self.times(torch.cat([angles.cos(), angles.sin()], -1)) + self.classes(label)
        y = self.enter(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            y = block(y, condition)
        out: torch.Tensor = self.leave(self.norm(y))
        return out
