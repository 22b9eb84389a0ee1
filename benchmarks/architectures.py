"""The architectures whose tracing is measured, built offline from configurations.

Each is built in two sizes: `default`, the configuration that its library or publication gives, on
the meta device; and `small`, on the CPU with weights, to compare with what autograd really does.
Those of timm are there where timm is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.own_architectures import DiT, LSTMLanguageModel, MLPMixer, ResNet, UNet
from benchmarks.timm_architectures import TIMM, timm_model

__all__ = ["ARCHITECTURES", "Example", "build"]

Size = Literal["default", "small"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A model with a batch and, where it does not return its loss, a loss."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[..., torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hf:
    """A transformers model: config class, model class or head, and the small configuration."""

    config: str
    model: str
    small: Mapping[str, Any]
    batch: Callable[[Any, Size], dict[str, Any]]
    default: Mapping[str, Any] = field(default_factory=dict)


def _ids(rows: int, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (rows, length))


def _language(length: int) -> Callable[[Any, Size], dict[str, Any]]:
    def batch(config: Any, size: Size) -> dict[str, Any]:
        text = config.get_text_config()
        rows, seq = (1, length) if size == "default" else (2, 16)
        ids = _ids(rows, seq, text.vocab_size)
        return {"input_ids": ids, "labels": ids.clone()}

    return batch


def _image(config: Any, size: Size) -> dict[str, Any]:
    side = getattr(config, "image_size", 224)
    side = side if size == "default" else min(side, 64)
    return {"pixel_values": torch.randn(2, 3, side, side), "labels": torch.tensor([0, 1])}


def _pixels(config: Any, size: Size) -> dict[str, Any]:
    side = 512 if size == "default" else 64
    labels = torch.randint(0, config.num_labels, (2, side, side))
    return {"pixel_values": torch.randn(2, 3, side, side), "labels": labels}


def _audio(config: Any, size: Size) -> dict[str, Any]:
    frames = 2 * config.max_source_positions
    features = torch.randn(2, config.num_mel_bins, frames)
    return {"input_features": features, "labels": _ids(2, 16, config.vocab_size)}


def _pairs(config: Any, size: Size) -> dict[str, Any]:
    side = config.vision_config.image_size
    ids = _ids(4, 16, config.text_config.vocab_size)
    return {"input_ids": ids, "pixel_values": torch.randn(4, 3, side, side), "return_loss": True}


_TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {
    **_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
_GROUPED = {**_SMALL, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    **_SMALL,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _causal(config: str, model: str, small: Mapping[str, Any], length: int = 512) -> _Hf:
    return _Hf(config=config, model=model, small=small, batch=_language(length))


_HF: Mapping[str, _Hf] = {
    "gpt2": _causal(
        "GPT2Config",
        "GPT2LMHeadModel",
        {**_TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    ),
    "llama": _causal("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "qwen2": _causal("Qwen2Config", "Qwen2ForCausalLM", _GROUPED),
    "qwen3": _causal("Qwen3Config", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "mistral": _causal("MistralConfig", "MistralForCausalLM", _GROUPED),
    "gemma": _causal("GemmaConfig", "GemmaForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma2": _causal("Gemma2Config", "Gemma2ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma3": _causal("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GROUPED, "head_dim": 8}),
    "phi": _causal("PhiConfig", "PhiForCausalLM", _SMALL),
    "phi3": _causal("Phi3Config", "Phi3ForCausalLM", _GROUPED),
    "gpt_neox": _causal("GPTNeoXConfig", "GPTNeoXForCausalLM", _SMALL),
    "opt": _causal(
        "OPTConfig",
        "OPTForCausalLM",
        {**_SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "bloom": _causal("BloomConfig", "BloomForCausalLM", {**_TOKENS, "hidden_size": 32,
                                                         "n_layer": 3, "n_head": 4}),
    "falcon": _causal("FalconConfig", "FalconForCausalLM", _SMALL),
    "olmo": _causal("OlmoConfig", "OlmoForCausalLM", _GROUPED),
    "olmo2": _causal("Olmo2Config", "Olmo2ForCausalLM", _GROUPED),
    "cohere": _causal("CohereConfig", "CohereForCausalLM", _GROUPED),
    "granite": _causal("GraniteConfig", "GraniteForCausalLM", _GROUPED),
    "stablelm": _causal("StableLmConfig", "StableLmForCausalLM", _GROUPED),
    "starcoder2": _causal("Starcoder2Config", "Starcoder2ForCausalLM", _GROUPED),
    "smollm3": _causal("SmolLM3Config", "SmolLM3ForCausalLM", _GROUPED),
    "deepseek_v2": _Hf(
        config="DeepseekV2Config",
        model="DeepseekV2ForCausalLM",
        small=_LATENT,
        batch=_language(512),
        # The library's default leaves it out; source: DeepSeek-V2 (2024), section 3.1.2.
        default={"num_experts_per_tok": 6},
    ),
    "deepseek_v3": _causal("DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT),
    "mixtral": _causal(
        "MixtralConfig", "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}
    ),
    "qwen2_moe": _causal(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_moe": _causal("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_EXPERTS, "head_dim": 8}),
    "gpt_oss": _causal(
        "GptOssConfig", "GptOssForCausalLM", {**_GROUPED, "num_local_experts": 4, "head_dim": 8}
    ),
    "mamba": _causal(
        "MambaConfig",
        "MambaForCausalLM",
        {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4},
        length=32,
    ),
    "mamba2": _causal(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8, "num_heads": 8,
         "head_dim": 8, "n_groups": 2, "chunk_size": 8},
    ),
    "rwkv": _causal(
        "RwkvConfig",
        "RwkvForCausalLM",
        {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 4, "attention_hidden_size": 32},
        length=32,
    ),
    "bert": _causal("BertConfig", "BertForMaskedLM", _SMALL),
    "roberta": _causal("RobertaConfig", "RobertaForMaskedLM", _SMALL, length=500),
    "deberta_v2": _causal(
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        {**_SMALL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "electra": _causal("ElectraConfig", "ElectraForMaskedLM", {**_SMALL, "embedding_size": 16}),
    "albert": _causal("AlbertConfig", "AlbertForMaskedLM", {**_SMALL, "embedding_size": 16}),
    "distilbert": _causal(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {**_TOKENS, "dim": 32, "hidden_dim": 64, "n_layers": 3, "n_heads": 4},
    ),
    "modernbert": _causal(
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**_SMALL, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
    ),
    "t5": _Hf(
        config="T5Config",
        model="T5ForConditionalGeneration",
        small={"vocab_size": 64, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4,
               "num_layers": 3, "decoder_start_token_id": 0},
        batch=_language(512),
        # Every published T5 sets it, and its loss needs it.
        default={"decoder_start_token_id": 0},
    ),
    "bart": _causal(
        "BartConfig",
        "BartForConditionalGeneration",
        {**_TOKENS, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3,
         "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "max_position_embeddings": 64,
         "decoder_start_token_id": 2},
    ),
    "whisper": _Hf(
        config="WhisperConfig",
        model="WhisperForConditionalGeneration",
        small={**_TOKENS, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3,
               "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_attention_heads": 4,
               "decoder_attention_heads": 4, "max_source_positions": 24,
               "max_target_positions": 32, "num_mel_bins": 8, "decoder_start_token_id": 1},
        batch=_audio,
    ),
    "vit": _Hf(
        config="ViTConfig",
        model="ViTForImageClassification",
        small={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
               "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
        batch=_image,
    ),
    "dinov2": _Hf(
        config="Dinov2Config",
        model="Dinov2ForImageClassification",
        small={"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
               "image_size": 32, "patch_size": 8},
        batch=_image,
    ),
    "swin": _Hf(
        config="SwinConfig",
        model="SwinForImageClassification",
        small={"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
               "image_size": 64, "patch_size": 4},
        batch=_image,
    ),
    "convnext": _Hf(
        config="ConvNextConfig",
        model="ConvNextForImageClassification",
        small={"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2},
        batch=_image,
    ),
    "clip": _Hf(
        config="CLIPConfig",
        model="CLIPModel",
        small={
            "text_config": {**_SMALL, "max_position_embeddings": 32},
            "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
                              "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
        batch=_pairs,
    ),
    "segformer": _Hf(
        config="SegformerConfig",
        model="SegformerForSemanticSegmentation",
        small={"hidden_sizes": [8, 16], "depths": [2, 2], "num_encoder_blocks": 2,
               "sr_ratios": [2, 1], "num_attention_heads": [1, 2], "patch_sizes": [7, 3],
               "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16},
        batch=_pixels,
    ),
}  # fmt: skip


def _hf(spec: _Hf, size: Size) -> Example:
    import transformers

    values = spec.default if size == "default" else spec.small
    config = getattr(transformers, spec.config)(**values)
    with torch.device("meta" if size == "default" else "cpu"):
        model = getattr(transformers, spec.model)(config)
    return Example(model=model.train(), batch=spec.batch(config, size))


def _tokens_and_targets(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _resnet(size: Size) -> Example:
    model = ResNet() if size == "default" else ResNet(8, (2, 3), 10)
    images = torch.randn(2, 3, *((224, 224) if size == "default" else (32, 32)))
    return Example(model=model, batch=(images, torch.tensor([1, 2])), loss_fn=F.cross_entropy)


def _unet(size: Size) -> Example:
    model = UNet() if size == "default" else UNet(8, 2)
    side = 256 if size == "default" else 32
    return Example(model=model, batch=torch.randn(2, 3, side, side), loss_fn=_square)


def _lstm(size: Size) -> Example:
    model = LSTMLanguageModel() if size == "default" else LSTMLanguageModel(16, 2, 64)
    vocabulary, length = (33000, 256) if size == "default" else (64, 16)
    ids = _ids(2, length, vocabulary)
    return Example(model=model, batch=(ids, ids.clone()), loss_fn=_tokens_and_targets)


def _mixer(size: Size) -> Example:
    model = MLPMixer() if size == "default" else MLPMixer(16, 3, 32, 8, 10)
    side = 224 if size == "default" else 32
    images = torch.randn(2, 3, side, side)
    return Example(model=model, batch=(images, torch.tensor([1, 2])), loss_fn=F.cross_entropy)


def _dit(size: Size) -> Example:
    model = DiT() if size == "default" else DiT(32, 3, 4, 8, 2)
    side = 32 if size == "default" else 8
    batch = (torch.randn(2, 4, side, side), torch.rand(2), torch.tensor([3, 4]))
    return Example(model=model, batch=batch, loss_fn=_square)


_OWN: Mapping[str, Callable[[Size], Example]] = {
    "resnet": _resnet,
    "unet": _unet,
    "lstm": _lstm,
    "mlp_mixer": _mixer,
    "dit": _dit,
}


def _timm(name: str, size: Size) -> Example:
    is_small = size == "small"
    side = 64 if is_small else 224
    with torch.device("cpu" if is_small else "meta"):
        model = timm_model(name, is_small=is_small)
    batch = (torch.randn(2, 3, side, side), torch.tensor([1, 2]))
    return Example(model=model.train(), batch=batch, loss_fn=F.cross_entropy)


_TIMM_PREFIX = "timm/"
_HAS_TIMM = importlib.util.find_spec("timm") is not None
ARCHITECTURES = (*_HF, *_OWN, *(_TIMM_PREFIX + name for name in TIMM if _HAS_TIMM))


def build(name: str, size: Size) -> Example:
    """Return an architecture in one of its two sizes; random weights, always the same."""
    torch.manual_seed(0)
    if name in _HF:
        return _hf(_HF[name], size)
    if name.startswith(_TIMM_PREFIX):
        return _timm(name.removeprefix(_TIMM_PREFIX), size)
    if size == "small":
        return _OWN[name](size)
    with torch.device("meta"):
        return _OWN[name](size)
