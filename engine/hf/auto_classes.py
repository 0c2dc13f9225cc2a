"""Registration of causal language models with `AutoModelForCausalLM`.

Covers those that transformers registers only as decoders of models with images.
"""

import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

UNREGISTERED: dict[str, str] = {
    model_type: name
    for model_type, name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.items()
    if isinstance(name, str) and name.endswith("ForCausalLM") and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
}
"""Model type -> class. In transformers 5.23 this is Mistral 4, the decoder of a model with images."""
CAUSAL_LMS = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *UNREGISTERED)
"""All model types that a causal language model can be built from."""


def register_causal_lm(config: PreTrainedConfig) -> None:
    """Register the class of a config if transformers has one but does not register it. Uses transformers' extension point."""
    if config.model_type in UNREGISTERED:
        AutoModelForCausalLM.register(type(config), getattr(transformers, UNREGISTERED[config.model_type]), exist_ok=True)
