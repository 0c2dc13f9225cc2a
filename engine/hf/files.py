"""Config, generation config and tokenizer of a trained model, as transformers or peft look for them."""

from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..tokenizer import load_tokenizer
from .model import HFModel


def save_model_files(root: HFModel, model: ModelConfig, adapters: Any, folder: Path) -> None:
    """Write what stands beside the weights.

    Args:
        root: the model, on any device.
        model: settings.
        adapters: peft's settings, or None.
        folder: to write into.
    """
    lm: Any = root.lm
    lm.config.save_pretrained(folder)
    if lm.can_generate() and model.head == "lm":
        lm.generation_config.save_pretrained(folder)
    if adapters is not None:
        adapters.save_pretrained(folder)
    source = Path(model.path)
    if not source.is_dir() or (source / "tokenizer_config.json").is_file():
        load_tokenizer(model).save_pretrained(folder)
