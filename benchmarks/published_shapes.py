"""The model that a row of published measurements trained, and which family of kernels ran it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from benchmarks.published_architectures import experts_of, latent_of
from benchmarks.published_engines import Skipped
from benchmarks.published_models import Adapter, Shape

__all__ = ["amount", "family_of", "need", "number", "padded", "shape_of"]

# Words that a framework's text may hold, and the family of kernels that it runs.
_MEGATRON = ("megatron", "gpt-neox", "libai")
_FOUNDRY = ("llm-foundry",)
_LLAMA = ("llama", "qwen", "mistral", "mixtral", "internlm", "deepseek", "vicuna", "yi-")
# Smaller models of these families share the embedding with the head.
_TIED = r"llama-3\.2|qwen2\.5-(0\.5|1\.5|3)b|qwen3-(0\.6|1\.7|4)b"
# What frameworks adapt unless told otherwise: litgpt `finetune/lora.py`; peft, `LoraConfig` for
# Llama; torchtune, `recipes/configs/llama3_1/8B_lora_single_device.yaml`.
_ADAPTERS = {
    "litgpt": Adapter(rank=8, dropout=True),
    "torchtune": Adapter(rank=8, targets=("query", "value", "out", "up", "gate", "down")),
}


def amount(row: Mapping[str, str], key: str) -> float | None:
    """Return a number of a row, or None where it gives none.

    Raises:
        Skipped: it is no finite number, or below 0.
    """
    text = (row.get(key) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise Skipped(f"{key} is {text[:40]!r}, not a number") from None
    if not math.isfinite(value) or value < 0:
        raise Skipped(f"{key} is {text[:40]!r}, not a finite number from 0 on")
    return value


def number(row: Mapping[str, str], key: str) -> int | None:
    """Return a whole number of a row, or None where it gives none; raises as `amount`."""
    value = amount(row, key)
    if value is not None and value != round(value):
        raise Skipped(f"{key} is {row[key][:40]!r}, not a whole number")
    return None if value is None else round(value)


def need(row: Mapping[str, str], key: str) -> int:
    """Return a whole number of a row, at least 1.

    Raises:
        Skipped: it gives none.
    """
    value = number(row, key)
    if value is None:
        raise Skipped(f"{key} is not given")
    if value < 1:
        raise Skipped(f"{key} is {row[key]}, below 1")
    return value


def family_of(row: Mapping[str, str]) -> str:
    """Return the family of kernels that a row's framework runs."""
    text = row.get("framework", "").lower()
    if any(word in text for word in _MEGATRON):
        return "megatron"
    return "foundry" if any(word in text for word in _FOUNDRY) else "torch"


def shape_of(row: Mapping[str, str]) -> Shape:
    """Return the model that a row trained.

    Raises:
        Skipped: a dimension is missing.
    """
    family = family_of(row)
    args = row.get("args") or ""
    notes = (row.get("notes") or "").lower()
    hidden, heads = need(row, "hidden"), need(row, "heads")
    kv_heads = number(row, "kv_heads") or heads
    if hidden % heads or heads % kv_heads:
        raise Skipped(f"hidden {hidden}, heads {heads} and kv_heads {kv_heads} do not divide")
    is_llama = any(word in row.get("model", "").lower() for word in _LLAMA)
    is_gated = is_llama or row.get("swiglu") == "true" or " swiglu" in args
    is_rotary = is_llama or "position-embedding-type=rope" in args
    attention = (row.get("attention") or "").lower()
    is_unfused = "unfused" in attention or attention == "local"
    if not attention and family == "megatron" and re.search(r"202[01]", row.get("framework", "")):
        is_unfused = True
    is_hf_gpt2 = _is_hf_gpt2(row)
    # FlashAttention needs an Ampere; what transformers ran on a V100 before torch had a kernel of
    # its own were operators.
    if is_hf_gpt2 and not attention and re.match(r"V100|DGX-2", row.get("gpu") or ""):
        is_unfused = True
    is_older = (family == "megatron" and not is_llama) or is_hf_gpt2
    has_dropout = is_older and "dropout 0" not in notes
    has_dropout = has_dropout and "hidden-dropout=0.0" not in args
    default_ffn = hidden * 4 if not is_gated else None
    ffn = number(row, "ffn") or default_ffn
    if ffn is None:
        raise Skipped("ffn is not given")
    is_tied = not is_llama or re.search(_TIED, row.get("model", "").lower()) is not None
    if row.get("untied"):
        is_tied = row["untied"] != "true"
    return Shape(
        layers=need(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=_vocabulary(row),
        seq=_length(row),
        norm="rms" if is_llama or "normalization=RMSNorm" in args else "layer",
        position="rotary" if is_rotary else "learned",
        activation="swiglu" if is_gated else _activation(row, args),
        is_tied=is_tied,
        has_bias=not is_llama and "disable-bias-linear" not in args,
        dropout=has_dropout,
        attention="unfused" if is_unfused else "flash",
        # A100 rows of llm-foundry, which may be fitted to: time grows with the whole matrix.
        skips_masked=family != "foundry",
        kernels=family,  # type: ignore[arg-type]
        adapter=_adapter(row),
        experts=experts_of(row),
        latent=latent_of(row),
    )


def _activation(row: Mapping[str, str], args: str) -> Literal["gelu", "gelu_new", "squared_relu"]:
    """Return the activation of an MLP without a gate."""
    if "squared-relu" in args:
        return "squared_relu"
    return "gelu_new" if _is_hf_gpt2(row) else "gelu"


def _is_hf_gpt2(row: Mapping[str, str]) -> bool:
    """Return whether transformers' GPT-2 was trained: dropout of 0.1 and its own activation."""
    is_hf = (row.get("framework") or "").startswith("HF")
    return is_hf and re.match(r"gpt-?2", (row.get("model") or "").lower()) is not None


def _length(row: Mapping[str, str]) -> int:
    """Return the tokens of a sample, as the row gives them or says which default it ran with."""
    default = re.search(r"\bseq = .*?default (\d+)", row.get("notes") or "")
    if number(row, "seq") is None and default:
        return int(default.group(1))
    return need(row, "seq")


def _adapter(row: Mapping[str, str]) -> Adapter | None:
    """Return the adapters that a row names: their rank as it says, else that of its framework."""
    text = f"{row.get('model')} {row.get('notes')} {row.get('args')}".lower()
    # `q-lora-rank` and `kv-lora-rank` are widths of latent attention.
    if not re.search(r"(?<!q-)(?<!kv-)\blora\b", text):
        return None
    rank = re.search(r"\brank[ =](\d+)", text) or re.search(r"\blora_r[ =](\d+)", text)
    framework = (row.get("framework") or "").lower()
    own = next((kind for word, kind in _ADAPTERS.items() if word in framework), Adapter(rank=8))
    return own if rank is None else replace(own, rank=int(rank.group(1)))


_TOKENIZERS = {
    "nemotron_2_256k": 256000,
    "Llama2Tokenizer": 32000,
    "GPT2BPETokenizer": 50257,
}


def _vocabulary(row: Mapping[str, str]) -> int:
    known = number(row, "vocab")
    if known:
        return known
    for word, size in _TOKENIZERS.items():
        if word in (row.get("args") or ""):
            return size
    raise Skipped("vocab is not given")


def padded(vocab: int, row: Mapping[str, str], tp: int) -> int:
    """Return the vocabulary, with Megatron-LM padded to a multiple of 128 * tp."""
    if family_of(row) != "megatron":
        return vocab
    found = re.search(r"make-vocab-size-divisible-by=(\d+)", row.get("args") or "")
    step = (int(found.group(1)) if found else 128) * tp
    return -(-vocab // step) * step
