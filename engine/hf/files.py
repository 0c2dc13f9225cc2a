"""Config, generation config and tokenizer of a trained model, as transformers or peft look for them."""

import copy
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from ..config import ModelConfig
from .model import HFModel
from .tokenizer import load_tokenizer


def save_model_files(root: HFModel, model: ModelConfig, adapters: Any, folder: Path) -> None:
    """Write what stands beside the weights.

    Args:
        root: the model, on any device.
        model: settings.
        adapters: peft's settings, or None.
        folder: to write into.
    """
    lm: Any = root.lm
    config = lm.config
    if model.head == "value":
        config = copy.deepcopy(config)
        classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
        if classifier is not None:
            # Its `score` is our value head: one number for a sequence, by way of AutoModelForTokenClassification for each token.
            config.architectures, config.num_labels = [classifier], 1
    config.save_pretrained(folder)
    if lm.can_generate() and model.head == "lm":
        lm.generation_config.save_pretrained(folder)
    if adapters is not None:
        adapters.save_pretrained(folder)
    source = Path(model.path)
    if not source.is_dir() or (source / "tokenizer_config.json").is_file():
        load_tokenizer(model).save_pretrained(folder)
