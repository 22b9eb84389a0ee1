"""The model families of the equality benchmark: small, in float64, without dropout.

Every family gives a model with unequal, nonzero weights and a batch of any number of rows. Losses
are computed from logits in float64: those of transformers are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from examples.gpt import GPT, GPTConfig

__all__ = ["FAMILIES", "Family", "build"]

TOKENS, VOCABULARY, CLASSES = 8, 32, 5

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Attributes:
        make: returns the model; its weights are changed afterwards.
        batch: returns a batch of so many rows.
        loss_fn: `loss_fn(output, batch)`.
        computes_in_float32: the model casts to float32 inside, so that sums in another order
            differ by its rounding.
        sums_in_float32: the gradient of a parameter is summed over the batch in float32, so that
            splitting the batch differs by its rounding.
        has_batch_statistics: rows of a micro-batch change each other's results.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Batch]
    loss_fn: Callable[..., torch.Tensor]
    computes_in_float32: bool = False
    sums_in_float32: bool = False
    has_batch_statistics: bool = False


def _hf(config: str, model: str, **arguments: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**arguments))
        return made

    return make


def _tokens(rows: int, generator: torch.Generator) -> Batch:
    ids = torch.randint(3, VOCABULARY, (rows, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def _padded(rows: int, generator: torch.Generator) -> Batch:
    """Rows of unequal lengths: the loss is a mean over other numbers of tokens in each."""
    batch = _tokens(rows, generator)
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (rows,), generator=generator)
    mask = torch.arange(TOKENS)[None] < lengths[:, None]
    labels = batch["labels"].masked_fill(~mask, -100)
    return {**batch, "labels": labels, "attention_mask": mask.long()}


def _images(rows: int, generator: torch.Generator) -> Batch:
    pixels = torch.randn(rows, 3, 8, 8, generator=generator, dtype=torch.float64)
    return {
        "pixel_values": pixels,
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


def _token_loss(output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _class_loss(output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits, batch["labels"])


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x))
        y += x
        out: torch.Tensor = self.act(y)
        return out


class _ConvNet(nn.Module):
    """Convolutions, batch norm with running statistics, activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(_Residual(8) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class _Adapted(nn.Module):
    """A frozen linear layer with a trained product of two thin ones beside it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(width, rank) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + (x @ self.down.T) @ self.up.T
        return x + torch.tanh(out)


class _AdaptedMLP(nn.Module):
    """Adapters on frozen layers over a flattened image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3 * 8 * 8, 16)
        self.layers = nn.ModuleList(_Adapted(16, 4) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixel_values.flatten(1))
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class _Repeated(nn.Module):
    """One block applied four times, and a long skip around all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(3 * 8 * 8, 16), _Expansion(16)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        first = x = self.stem(pixel_values.flatten(1))
        for _ in range(4):
            x = self.block(x)
        out: torch.Tensor = self.head(torch.cat([x, first], 1))
        return out


class _Normed(nn.Module):
    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(width, width), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.norm(self.mix(x))
        return out


class _SharedNorm(nn.Module):
    """Two blocks change the running statistics of one norm; a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(12, affine=False)
        self.stem = nn.Linear(16, 16)
        self.normed = nn.ModuleList(_Normed(16, norm) for _ in range(2))
        self.blocks = nn.ModuleList(_Expansion(16) for _ in range(3))
        self.scale, self.head = nn.Parameter(torch.tensor(0.5)), nn.Linear(16, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixel_values.reshape(-1, 12, 16))
        for block in (*self.normed, *self.blocks):
            x = block(x)
        out: torch.Tensor = self.head(x.mean(1)) * self.scale.exp()
        return out


class _Expansion(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class _Halves(nn.Module):
    """Returns two slices of one tensor, and its input as another view."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gain = nn.Linear(width, 2 * width), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.up(x * self.gain)
        width = x.shape[-1]
        return y[:, :width], y[:, width:], x.view(-1, 2, width // 2)


class _Turned(nn.Module):
    """Writes to its input, and returns one view of its result."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.gain = nn.Linear(width, width), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x *= self.gain
        out: torch.Tensor = self.mix(torch.sin(x)).view(-1, 2, x.shape[-1] // 2)
        return out


class _Views(nn.Module):
    """Blocks write to their inputs and return views, which are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3 * 8 * 8, 16)
        self.halves = nn.ModuleList(_Halves(16) for _ in range(2))
        self.turned = nn.ModuleList(_Turned(16) for _ in range(2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixel_values.flatten(1)).tanh() * 2
        for halves, turned in zip(self.halves, self.turned, strict=True):
            left, right, whole = halves(x)
            left += torch.tanh(right)
            right.mul_(0.5)
            x = left.sin() + right + whole.flip(1).flatten(1)
            y = turned(x)
            y += 1
            x = x + y.flatten(1)
        out: torch.Tensor = self.head(x)
        return out


def _tied_gpt() -> nn.Module:
    return GPT(
        GPTConfig(vocab_size=VOCABULARY, max_tokens=TOKENS, num_layers=3, num_heads=4, width=16)
    )


_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": TOKENS,
    "pad_token_id": 0,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _causal(model: str, arguments: Mapping[str, Any], *, is_float32: bool = True) -> Family:
    return Family(
        make=_hf(f"{model}Config", f"{model}ForCausalLM", **arguments),
        batch=_padded,
        loss_fn=_token_loss,
        computes_in_float32=is_float32,
    )


FAMILIES: Mapping[str, Family] = {
    "llama": _causal("Llama", _GROUPED),
    "qwen2": _causal("Qwen2", {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": _causal("Mistral", {**_GROUPED, "sliding_window": 4}),
    # Its norms multiply by float32 casts of their weights.
    "gemma": replace(
        _causal("Gemma", {**_GROUPED, "num_key_value_heads": 1, "head_dim": 8}),
        sums_in_float32=True,
    ),
    "gpt_neox": _causal("GPTNeoX", {**_SMALL, "hidden_dropout": 0.0}, is_float32=False),
    # The grouped product that transformers takes by default has no float64.
    "mixtral": _causal(
        "Mixtral",
        {**_GROUPED, "num_local_experts": 4, "experts_implementation": "batched_mm"},
    ),
    "gpt2": Family(
        make=_hf(
            "GPT2Config",
            "GPT2LMHeadModel",
            vocab_size=VOCABULARY,
            n_positions=TOKENS,
            n_embd=16,
            n_layer=3,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        ),
        batch=_tokens,
        loss_fn=_token_loss,
    ),
    "bert": Family(
        make=_hf("BertConfig", "BertForMaskedLM", **_SMALL, **_NO_DROPOUT),
        batch=_padded,
        loss_fn=_token_loss,
    ),
    "t5": Family(
        make=_hf(
            "T5Config",
            "T5ForConditionalGeneration",
            vocab_size=VOCABULARY,
            d_model=16,
            d_ff=32,
            d_kv=4,
            num_heads=4,
            num_layers=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        batch=_padded,
        loss_fn=_token_loss,
        computes_in_float32=True,
    ),
    "vit": Family(
        make=_hf(
            "ViTConfig",
            "ViTForImageClassification",
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=8,
            patch_size=4,
            num_labels=CLASSES,
            **_NO_DROPOUT,
        ),
        batch=_images,
        loss_fn=_class_loss,
    ),
    "convnet": Family(make=_ConvNet, batch=_images, loss_fn=_class_loss, has_batch_statistics=True),
    "adapted_mlp": Family(make=_AdaptedMLP, batch=_images, loss_fn=_class_loss),
    "repeated": Family(make=_Repeated, batch=_images, loss_fn=_class_loss),
    "shared_norm": Family(
        make=_SharedNorm, batch=_images, loss_fn=_class_loss, has_batch_statistics=True
    ),
    "views": Family(make=_Views, batch=_images, loss_fn=_class_loss),
    "tied_gpt": Family(make=_tied_gpt, batch=_tokens, loss_fn=_token_loss),
}


def build(name: str) -> nn.Module:
    """Return a family's model in training mode; the same weights at every call."""
    torch.manual_seed(0)
    model = FAMILIES[name].make().double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model
