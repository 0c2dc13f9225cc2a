"""The generation settings in a model's folder: the stop tokens, and other settings that a trained model keeps."""

import json
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from ..config import ModelConfig
from ..errors import ModelError
from .config import read_config

FILE = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The settings that occur both in a model's config and in its generation settings."""


def read_generation_settings(model: ModelConfig) -> dict[str, Any] | None:
    """Return the generation settings of a model's folder, with the tokens that `model.overrides` sets; None if it has none.

    Raises:
        ModelError: The file is damaged.
    """
    file = (
        Path(model.path) / FILE
        if Path(model.path).is_dir()
        else cached_file(
            model.path, FILE, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
        )
    )
    if file is None or not Path(file).is_file():
        return None
    try:
        settings = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"model.path={model.path}: {FILE} is damaged ({e}); copy it again") from e
    if not isinstance(settings, dict):
        raise ModelError(f"model.path={model.path}: {FILE} has {settings!r:.50}, which is not a JSON object; copy it again")
    return settings | {name: value for name, value in model.overrides.items() if name in TOKENS}


def end_tokens(model: ModelConfig) -> frozenset[int]:
    """Return the ids of the tokens that end generation with a model.

    Raises:
        ModelError: The model's config or its generation settings cannot be read.
    """
    ends = (read_generation_settings(model) or {}).get("eos_token_id")
    # As in transformers, the generation settings take precedence over the config.
    return token_ids(read_config(model).eos_token_id if ends is None else ends)


def token_ids(value: int | list[int] | None) -> frozenset[int]:
    """Return the ids of a setting that is a token id, a list of them, or None."""
    return frozenset() if value is None else frozenset([value] if isinstance(value, int) else value)
