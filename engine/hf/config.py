"""Reading and checking a model's config."""

import copy
import math
from dataclasses import fields
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ..config import LoraConfig, ModelConfig
from ..errors import ModelError
from ..heads import head_of
from ..ops.linear_head import LogitTransform
from .auto_classes import register_causal_lm
from .model_path import check_model_path, quiet_hub, reason
from .overrides import override
from .tokenizer import load_tokenizer

MOST_SCALE = 1e3
"""The largest plausible scale of the adapters' output."""


def whole_config(model: ModelConfig) -> PreTrainedConfig:
    """Return the config of the whole model, including its encoders if it has any.

    Raises:
        ModelError: The folder or its config.json is missing or unreadable.
    """
    check_model_path(model.path)
    try:
        with quiet_hub():
            config: PreTrainedConfig = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except Exception as e:  # a damaged file, a value of a wrong type or the folder's own code may raise anything
        raise ModelError(f"model.path={model.path}: {reason(e, model.path, 'the config cannot be read')}") from e
    # This object must not be shared: transformers writes the attention implementation into it.
    return copy.deepcopy(config)


def read_config(model: ModelConfig) -> PreTrainedConfig:
    """Return the config of the model's decoder.

    Raises:
        ModelError: The folder or its config.json is missing or unreadable.
    """
    config = whole_config(model).get_text_config()
    register_causal_lm(config)
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        kind = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", stored)
        raise ModelError(
            f"model.path={model.path} has quantized weights (quantization_config: {kind}), which cannot be trained; use the "
            "original model, or convert it to bfloat16 first"
        )
    override(config, model.overrides, model.path)
    if model.added_tokens:
        # Many families have spare rows: the embeddings grow only if the tokens do not fit.
        config.vocab_size = max(config.vocab_size, len(load_tokenizer(model)))
    return config


def check_model(config: PreTrainedConfig, model: ModelConfig) -> None:
    """Check that the engines can run the model on packed documents, and that the settings do not conflict.

    Raises:
        ModelError: The model or a setting is not supported; the message names the setting and the way out.
    """
    for name in ("attention_dropout", "attn_pdrop"):
        if getattr(config, name, 0.0):
            raise ModelError(
                f"{name}={getattr(config, name)} in the config of {model.path}: dropout on attention weights is not supported "
                f"on packed sequences; set model.overrides.{name}=0"
            )
    head, stored = head_of(model), getattr(config, "head_type", None)
    if head is not None and stored is not None and model.init == "weights" and stored != head.description:
        raise ModelError(
            f"the config of {model.path} says head_type={stored}, but model.head={model.head} and model.head_shape="
            f"{list(model.head_shape)}; set them to what it was trained with"
        )
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    # Gemma 4's "vision" concerns only image tokens: a text model has none, and packed attention supports blocks for them.
    if bidirectional not in (None, False, "vision"):
        raise ModelError(
            f"use_bidirectional_attention={bidirectional} in the config of {model.path}: packed attention is causal; set it to false, or "
            "use a causal model"
        )
    # Imports peft and accelerate, which processes that only read a config or a tokenizer do not need.
    from .weights import check_stored_head

    check_stored_head(model)
    if wants_adapters(model.lora):
        for name, value in (("model.added_tokens", model.added_tokens), ("model.freeze", model.freeze)):
            if value and not (name == "model.added_tokens" and model.lora.modules_to_save):
                hint = "; train its embeddings too (model.lora.modules_to_save)" if name == "model.added_tokens" else ""
                raise ModelError(
                    f"{name}={list(value)} with model.lora.rank={model.lora.rank}: with adapters, the model itself, including "
                    f"its embeddings, is frozen{hint}; or unset one of the two"
                )
        if model.lora.rank > config.hidden_size:
            raise ModelError(
                f"model.lora.rank={model.lora.rank} is more than hidden_size={config.hidden_size} of {model.path}, so adapters would have "
                "more parameters than the layers that they adapt; lower it, or train the model itself with model.lora.rank=0"
            )
        return
    unused, defaults = model.lora, LoraConfig()

    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    for f in fields(unused):
        value, default = (plain(getattr(settings, f.name)) for settings in (unused, defaults))
        if value != default:
            raise ModelError(
                f"model.lora.{f.name}={value} with model.lora.rank=0, where the whole model is trained; set the rank, or leave "
                f"model.lora.{f.name} at {default}"
            )


def logit_transform(config: PreTrainedConfig) -> LogitTransform:
    """Return the transform that the family applies to its logits, read from its config."""
    scale = 1.0
    if getattr(config, "logits_scaling", None):
        # Granite divides the logits by its setting; Cohere and Falcon-H1 multiply them.
        scale = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):
        scale = config.logit_scale
    elif getattr(config, "lm_head_multiplier", None):
        scale = config.lm_head_multiplier
    return LogitTransform(scale=scale, softcap=getattr(config, "final_logit_softcapping", None))


def wants_adapters(lora: LoraConfig) -> bool:
    """Return whether adapters are enabled.

    Raises:
        ModelError: A setting is out of range.
    """
    if lora.rank < 0:
        raise ModelError(f"model.lora.rank={lora.rank}; it must be a positive rank, or 0 for no adapters")
    if not (lora.alpha > 0 and math.isfinite(lora.alpha)):
        raise ModelError(f"model.lora.alpha={lora.alpha}; it must be a finite number above 0")
    if lora.rank and lora.scale > MOST_SCALE:
        raise ModelError(
            f"model.lora.alpha={lora.alpha} with model.lora.rank={lora.rank} multiplies the output of the adapters by {lora.scale:g}; it must be "
            f"at most {MOST_SCALE:g}"
        )
    if lora.rank and not lora.targets:
        raise ModelError(f"model.lora.targets=[] with model.lora.rank={lora.rank}; name layers, or all-linear")
    if not 0 <= lora.dropout < 1:
        raise ModelError(f"model.lora.dropout={lora.dropout}; it must be a probability below 1")
    return lora.rank > 0
