"""The transformers families that take images, video or audio, and the configs of models with encoders."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from ..config import ModelConfig
from ..errors import ModelError
from .config import whole_config
from .media_families import Gemma3, Gemma4, GlmAsr, MaskedTiles, Qwen25VL, QwenAudio, QwenOmni, QwenVL, Tiles
from .media_family import MediaFamily

FAMILIES: Mapping[str, type[MediaFamily]] = {
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "glmasr": GlmAsr,
    "idefics3": MaskedTiles,
    "internvl": Tiles,
    "qwen2_5_omni_thinker": QwenOmni,
    "qwen2_5_vl": Qwen25VL,
    "qwen2_audio": QwenAudio,
    "qwen2_vl": QwenVL,
    "qwen3_5": QwenVL,
    "qwen3_5_moe": QwenVL,
    "qwen3_vl": QwenVL,
    "qwen3_vl_moe": QwenVL,
    "smolvlm": MaskedTiles,
}
"""The families that take media, by the model type of their config. The tests compare each with plain transformers."""


def media_config(model: ModelConfig, text: PreTrainedConfig) -> PreTrainedConfig | None:
    """Return the config of the whole model, with its encoders; None if media are not supported for its family.

    Args:
        model: The model settings.
        text: The config of the decoder with the changes from the settings; it becomes a part of the returned config.
    """
    config = whole_config(model)
    if config.model_type not in FAMILIES:
        return None
    # A copy, because transformers writes the attention implementation into a config.
    setattr(config, decoder_key(config), copy.deepcopy(text))
    return config


def decoder_key(config: PreTrainedConfig) -> str:
    """Return the name of the decoder's config within a config."""
    decoder = config.get_text_config()
    return next(key for key in config.sub_configs if getattr(config, key) is decoder)


def check_media_support(lm: PreTrainedModel) -> None:
    """Check that a model accepts the output of its encoders, and that the encoders accept their arguments.

    Raises:
        ModelError: They do not, because the release of transformers is too old.
    """
    base: Any = getattr(lm, lm.base_model_prefix)
    family = FAMILIES[base.config.model_type](base.config)
    needed = {"forward": ["mm_encoder_outputs"]} if family.takes_outputs else {}
    for kind, modality in family.modalities.items():
        if modality.method:
            needed[modality.method] = list(family.arguments(kind, family.blank(kind)))
    for method, arguments in needed.items():
        parameters = inspect.signature(getattr(type(base), method)).parameters
        if lacking := [name for name in arguments if name not in parameters]:
            import transformers

            raise ModelError(
                f"{type(base).__name__}.{method} of transformers {transformers.__version__} does not take {lacking[0]}; install "
                "transformers 5.23 or later"
            )
