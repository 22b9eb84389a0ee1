"""Presets, configs and functions give a model with a batch, or an error that says what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from autoplan.errors import AutoplanError
from autoplan.models import PRESETS, load_model
from autoplan.tracer import trace


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt3-175b", 174_604_259_328),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_presets_have_the_published_number_of_parameters(name: str, num_parameters: int) -> None:
    pytest.importorskip("transformers", reason="presets need transformers")
    loaded = load_model(name, seq=128, dtype=torch.bfloat16, batch_rows=2)
    parameters = list(loaded.model.parameters())
    assert sum(p.numel() for p in parameters) == num_parameters
    assert all(p.is_meta for p in parameters)
    others = [n for n, p in loaded.model.named_parameters() if p.dtype != torch.bfloat16]
    # The library keeps the routers of DeepSeek-V3 in float32.
    assert all(name.endswith("mlp.gate.weight") for name in others)
    assert {key: tuple(value.shape) for key, value in loaded.batch.items()} == {
        "input_ids": (2, 128),
        "labels": (2, 128),
    }
    assert loaded.name == name
    assert loaded.model.training
    assert torch.get_default_dtype() == torch.float32


def test_all_presets_are_tested() -> None:
    assert len(PRESETS) == 7


def test_mixtral_traces() -> None:
    pytest.importorskip("transformers", reason="presets need transformers")
    loaded = load_model("mixtral-8x7b", seq=64)
    result = trace(loaded.model, loaded.batch, backend="cuda")
    assert len(result.calls) == 34
    assert result.num_parameters == 46_702_792_704


def test_a_longer_sequence_makes_positions_longer() -> None:
    pytest.importorskip("transformers", reason="presets need transformers")
    loaded = load_model("gpt3-175b", seq=4096)
    assert loaded.model.get_parameter("transformer.wpe.weight").shape == (4096, 12288)


def test_a_config_file_is_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="configs need transformers")
    path = tmp_path / "config.json"
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50}
    path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    loaded = load_model(str(path), seq=16, dtype=torch.float32)
    assert type(loaded.model).__name__ == "GPT2LMHeadModel"
    assert loaded.batch["input_ids"].shape == (1, 16)


def test_a_config_file_without_model_type_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="configs need transformers")
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(AutoplanError, match="no model_type"):
        load_model(str(path))


_FILE = """
import torch
from torch import nn

def alone():
    return nn.Linear(4, 4)

def with_batch():
    return nn.Linear(4, 4), torch.randn(2, 4)

def with_loss():
    return nn.Linear(4, 4), torch.randn(2, 4), lambda out: out.mean()

def wrong():
    return 3
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(_FILE)
    return path


def test_a_function_may_return_module_batch_and_loss(model_file: Path) -> None:
    loaded = load_model(f"{model_file}:with_loss")
    assert loaded.name == "Linear"
    assert loaded.loss_fn is not None
    assert len(trace(loaded.model, loaded.batch, loaded.loss_fn).calls) == 1
    assert load_model(f"{model_file}:with_batch").loss_fn is None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("alone", r"without a batch.*return \(module, batch\)"),
        ("wrong", "returned a int"),
        ("missing", "no function missing; it has alone, with_batch"),
    ],
)
def test_a_wrong_function_is_an_error_that_says_what_to_return(
    model_file: Path, function: str, message: str
) -> None:
    with pytest.raises(AutoplanError, match=message):
        load_model(f"{model_file}:{function}")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AutoplanError, match="does not exist"):
        load_model(f"{tmp_path / 'no.py'}:f")
    with pytest.raises(AutoplanError, match="does not exist"):
        load_model(str(tmp_path / "no.json"))


def test_an_unknown_spec_lists_presets_and_forms() -> None:
    with pytest.raises(AutoplanError, match=r"gpt2, .*config\.json.*file\.py:function"):
        load_model("gpt5")


def test_without_transformers_the_error_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(AutoplanError, match=r"pip install 'autoplan-torch\[hf\]'"):
        load_model("gpt2")
