"""Causal language models that transformers registers only among those with images, made known to `AutoModelForCausalLM` as well."""

import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

UNREGISTERED: dict[str, str] = {
    model_type: name
    for model_type, name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()
    if isinstance(name, str) and name.endswith("ForCausalLM") and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
}
"""The class of each, by its type: in transformers 5.23, Mistral 4, which is the decoder of a model with images."""
CAUSAL_LMS = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *UNREGISTERED)
"""All types of which a causal language model can be built."""


def register_causal_lm(config: PreTrainedConfig) -> None:
    """Register the class of a config, where transformers has one and does not register it, by its own extension point for that."""
    if config.model_type in UNREGISTERED:
        AutoModelForCausalLM.register(type(config), getattr(transformers, UNREGISTERED[config.model_type]), exist_ok=True)
