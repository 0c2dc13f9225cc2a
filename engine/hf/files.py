"""Saving the config, generation config, tokenizer and processor of a trained model, as transformers and peft expect them."""

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from ..config import ModelConfig
from ..model_types import LM
from .generation import FILE, end_tokens, read_generation_settings, token_ids
from .media import FAMILIES
from .model import HFModel
from .model_path import resolve_folder
from .padding import padding_token
from .tokenizer import load_tokenizer

log = logging.getLogger(__name__)

TEMPLATE = "chat_template.json"
PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json", TEMPLATE)
"""The files of the processors of images, videos and audio. Training does not change them."""


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
    source = Path(model.path)
    has_tokenizer = not source.is_dir() or (source / "tokenizer_config.json").is_file()
    tokenizer = load_tokenizer(model) if has_tokenizer else None
    if model.head == "value":
        config = copy.deepcopy(config)
        classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
        if classifier is not None:
            # Its `score` is our value head: one number per sequence, or per token through AutoModelForTokenClassification.
            config.architectures, config.num_labels = [classifier], 1
        _set_padding(config, tokenizer, model)
    elif root.head is not None:
        config = copy.deepcopy(config)
        config.head_type = root.head.description
    config.save_pretrained(folder)
    if lm.can_generate() and model.head == LM:
        settings = read_generation_settings(model)
        if settings is None:
            lm.generation_config.save_pretrained(folder)
        else:
            # Copied unchanged: transformers refuses to save contradictory settings, which some models on the Hub have.
            (folder / FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if adapters is not None:
        adapters.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if config.model_type in FAMILIES:
        stored = resolve_folder(model.path)
        for name in PROCESSOR_FILES:
            # A chat template from the settings belongs to the tokenizer.
            if (stored / name).is_file() and not (name == TEMPLATE and model.chat_template is not None):
                shutil.copyfile(stored / name, folder / name)


def _set_padding(config: Any, tokenizer: Any | None, model: ModelConfig) -> None:
    """Give a classifier and its tokenizer a padding token that never ends a sequence."""
    decoder = config.get_text_config()
    decoder.pad_token_id = padding_token(tokenizer, decoder, end_tokens(model) | token_ids(decoder.eos_token_id))
    if decoder.pad_token_id is None:
        # Without a padding token, transformers refuses batches; with one that ends sequences, it would score the wrong token.
        log.warning(
            "model.path=%s: its vocabulary has no special token that could pad a batch without also ending a sequence. The exported "
            "classifier therefore has no pad_token_id, and transformers can only score one sequence at a time; for batches, add a token "
            "(model.added_tokens=[<pad>])",
            model.path,
        )
    elif tokenizer is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(decoder.pad_token_id)
