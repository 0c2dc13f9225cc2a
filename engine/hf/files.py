"""Saving the config, generation config and tokenizer of a trained model, as transformers and peft expect them."""

import copy
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from ..config import ModelConfig
from .model import HFModel
from .tokenizer import load_tokenizer


def save_model_files(root: HFModel, model: ModelConfig, adapters: Any, folder: Path) -> None:
    """Write the files that belong next to the weights.

    Args:
        root: The model, on any device.
        model: The model settings.
        adapters: The peft config, or None.
        folder: The folder to write into.
    """
    lm: Any = root.lm
    config = lm.config
    if model.head == "value":
        config = copy.deepcopy(config)
        classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
        if classifier is not None:
            # Its `score` is our value head: one number per sequence, or per token through AutoModelForTokenClassification.
            config.architectures, config.num_labels = [classifier], 1
    config.save_pretrained(folder)
    if lm.can_generate() and model.head == "lm":
        lm.generation_config.save_pretrained(folder)
    if adapters is not None:
        adapters.save_pretrained(folder)
    source = Path(model.path)
    if not source.is_dir() or (source / "tokenizer_config.json").is_file():
        load_tokenizer(model).save_pretrained(folder)
