"""Find the model that a command line means: a preset, a transformers config, or a function.

Presets are built from their published configurations on the meta device, so even the largest one
takes no memory and nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoplan.batches import LossFn
from autoplan.collecting import without_collections
from autoplan.errors import AutoplanError

__all__ = ["PRESETS", "LoadedModel", "example_batch", "load_model"]

_DEFAULT_TOKENS = 2048
INSTALL_LINE = "pip install 'autoplan-torch[hf]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with an example batch.

    Attributes:
        model: for presets and configs on the meta device.
        batch: example input in a form that `capture` takes.
        loss_fn: None where the model returns its loss.
        name: the spec, shortened to what a person would call it.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    """Config class, its arguments, and the sequence length of the publication."""

    config: str
    seq: int
    arguments: Mapping[str, Any]


def _llama(hidden: int, ffn: int, layers: int, heads: int) -> _Preset:
    """Source: The Llama 3 Herd of Models (2024), Table 3; sequence length of pre-training."""
    arguments = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    return _Preset(config="LlamaConfig", seq=8192, arguments=arguments)


PRESETS: Mapping[str, _Preset] = {
    "gpt2": _Preset(config="GPT2Config", seq=1024, arguments={}),
    # Source: Brown et al. 2020, Table 2.1.
    "gpt3-175b": _Preset(
        config="GPT2Config",
        seq=2048,
        arguments={
            "n_embd": 12288,
            "n_layer": 96,
            "n_head": 96,
            "vocab_size": 50257,
            "n_positions": 2048,
        },
    ),
    "llama3-8b": _llama(4096, 14336, 32, 32),
    "llama3-70b": _llama(8192, 28672, 80, 64),
    "llama3-405b": _llama(16384, 53248, 126, 128),
    # Source: Jiang et al. 2024, Table 1. The defaults of MixtralConfig are this model.
    "mixtral-8x7b": _Preset(config="MixtralConfig", seq=4096, arguments={}),
    # Source: DeepSeek-V3 (2024), section 4.2. The defaults of DeepseekV3Config are this model.
    "deepseek-v3": _Preset(config="DeepseekV3Config", seq=4096, arguments={}),
}


@without_collections()
def load_model(
    spec: str,
    *,
    seq: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    batch_rows: int = 1,
    device: str = "meta",
) -> LoadedModel:
    """Return the model that `spec` means, with an example batch.

    Args:
        spec: a preset name, the path of a transformers `config.json`, or `file.py:function`. The
            function takes no arguments and returns a module, `(module, batch)` or
            `(module, batch, loss_fn)`.
        seq: tokens per row of presets and configs; None takes the preset's own.
        dtype: of the parameters of presets and configs.
        batch_rows: rows of the batch of presets and configs.
        device: where presets and configs are built; `meta` allocates nothing, `cpu` makes weights.

    Raises:
        AutoplanError: unknown spec, missing file or function, or transformers is missing; says
            what is allowed.
    """
    if spec in PRESETS:
        preset = PRESETS[spec]
        return _from_preset(spec, preset, seq or preset.seq, dtype, batch_rows, device)
    path, _, function = spec.rpartition(":")
    if path.endswith(".py"):
        return _from_file(Path(path), function)
    if spec.endswith(".json"):
        return _from_config_file(Path(spec), seq, dtype, batch_rows, device)
    raise AutoplanError(
        f"{spec!r} is no model: write a preset ({', '.join(PRESETS)}), the path of a transformers "
        "config.json, or file.py:function with a function that returns (module, batch)"
    )


def _transformers(spec: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise AutoplanError(
            f"{spec} needs the transformers package, which is not installed: {INSTALL_LINE}"
        ) from None
    return transformers


def _from_preset(
    name: str, preset: _Preset, seq: int, dtype: torch.dtype, rows: int, device: str
) -> LoadedModel:
    transformers = _transformers(name)
    arguments = dict(preset.arguments)
    for key in ("n_positions", "max_position_embeddings"):
        if key in arguments:
            arguments[key] = max(arguments[key], seq)
    if name == "gpt2":
        arguments["n_positions"] = max(1024, seq)
    config = getattr(transformers, preset.config)(**arguments)
    return _from_config(transformers, config, name, seq, dtype, rows, device)


def _from_config_file(
    path: Path, seq: int | None, dtype: torch.dtype, rows: int, device: str
) -> LoadedModel:
    if not path.is_file():
        raise AutoplanError(f"{path} does not exist: give the path of a transformers config.json")
    transformers = _transformers(str(path))
    try:
        values = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise AutoplanError(f"{path} is no JSON: {error}") from None
    kind = values.pop("model_type", None) if isinstance(values, dict) else None
    if kind is None:
        raise AutoplanError(f"{path} has no model_type: it is no transformers config.json")
    try:
        config = transformers.AutoConfig.for_model(kind, **values)
    except ValueError as error:
        raise AutoplanError(f"{path}: {error}") from None
    length = seq or min(int(getattr(config, "max_position_embeddings", 2048)), 4096)
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return _from_config(transformers, config, name, length, dtype, rows, device)


def _from_config(
    transformers: Any,
    config: Any,
    name: str,
    seq: int,
    dtype: torch.dtype,
    rows: int,
    device: str,
) -> LoadedModel:
    config.use_cache = False
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise AutoplanError(f"{name} is no causal language model: {error}") from None
    finally:
        torch.set_default_dtype(before)
    model.train()
    return LoadedModel(
        model=model, batch=_token_batch(rows, seq, device, config), loss_fn=None, name=name
    )


def _token_batch(rows: int, seq: int, device: str, config: Any) -> dict[str, torch.Tensor]:
    """Return a batch of tokens; off the meta device random ones, each the label of the last."""
    if device == "meta":
        return {
            key: torch.empty((rows, seq), dtype=torch.int64, device="meta")
            for key in ("input_ids", "labels")
        }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (rows, seq), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def example_batch(model: nn.Module) -> Any:
    """Return a batch for a model that can say what its inputs are: a transformers language model.

    Raises:
        AutoplanError: the model says nothing; asks for `batch=`.
    """
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None or not hasattr(model, "dummy_inputs"):
        raise AutoplanError(
            f"{type(model).__name__} does not say what its inputs are: pass batch=, an example "
            "input (a mapping of keyword arguments, a tuple, or a tensor)"
        )
    longest = getattr(config, "max_position_embeddings", _DEFAULT_TOKENS)
    return _token_batch(1, min(int(longest), _DEFAULT_TOKENS), "meta", config)


_RETURNS = "return (module, batch) or (module, batch, loss_fn)"


def _from_file(path: Path, name: str) -> LoadedModel:
    result = _function(path, name)()
    spec = f"{path.name}:{name}"
    if isinstance(result, nn.Module):
        return LoadedModel(
            model=result, batch=_own_batch(result, spec), loss_fn=None, name=type(result).__name__
        )
    if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module):
        model, batch, loss_fn = (*result, None)[:3]
        return LoadedModel(model=model, batch=batch, loss_fn=loss_fn, name=type(model).__name__)
    raise AutoplanError(f"{spec} returned a {type(result).__name__}: it must {_RETURNS}")


def _function(path: Path, name: str) -> Callable[[], Any]:
    if not path.is_file():
        raise AutoplanError(f"{path} does not exist")
    module_name = f"autoplan_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise AutoplanError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    function = getattr(module, name, None)
    if not callable(function):
        found = [k for k, v in vars(module).items() if callable(v) and not k.startswith("_")]
        raise AutoplanError(f"{path} has no function {name}; it has {', '.join(found) or 'none'}")
    return function  # type: ignore[no-any-return]


def _own_batch(model: nn.Module, spec: str) -> Any:
    """Return the batch that a transformers model can name itself."""
    dummy = getattr(model, "dummy_inputs", None)
    if not isinstance(dummy, Mapping) or "input_ids" not in dummy:
        raise AutoplanError(
            f"{spec} returned a {type(model).__name__} without a batch, and the model does not say "
            f"what its inputs are: {_RETURNS}"
        )
    batch = dict(dummy)
    batch["labels"] = batch["input_ids"]
    return batch
