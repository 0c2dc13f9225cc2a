"""What `model.path` may be. Imports no torch."""

import re
from pathlib import Path

from .errors import ModelError

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_model_path(path: str) -> None:
    """Refuse a path that is neither a model folder nor a Hugging Face name.

    Raises:
        ModelError: says which of the two is missing what.
    """
    if not path:
        raise ModelError("model.path is not set; give a folder with config.json, tokenizer and safetensors")
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ModelError(f"model.path={path} has no config.json; give a folder in Hugging Face format")
    elif not _HUB_NAME.fullmatch(path) or path.startswith("."):
        raise ModelError(f"model.path={path} is no folder; give a folder with config.json, or a Hugging Face name (org/name)")
