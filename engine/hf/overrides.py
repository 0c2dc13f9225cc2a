"""`model.overrides`: changes to the settings in a model's config.json."""

import difflib
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..errors import ModelError

SIZES = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
)
"""Config settings that must be positive numbers."""


def override(config: PreTrainedConfig, overrides: Mapping[str, Any], path: str) -> None:
    """Change settings of a config, and check that it remains valid.

    Args:
        config: The config, which is changed in place.
        overrides: `model.overrides`.
        path: The model's folder, for messages.

    Raises:
        ModelError: The config has no such setting, its shapes would no longer match the weights, or it rejects a value.
    """
    defaults = config.to_dict()
    for name, value in overrides.items():
        if name not in defaults:
            close_matches = difflib.get_close_matches(name, defaults, n=1)
            hint = f"; did you mean {close_matches[0]}?" if close_matches else ""
            raise ModelError(f"model.overrides.{name}={value}: the config of {path} has no such setting{hint}")
        if name in ("model_type", "architectures", "auto_map"):
            raise ModelError(
                f"model.overrides.{name}={value}: another family has other weights; give the folder of a model of that family"
            )
        old = getattr(config, name)
        if isinstance(old, int | float) and not isinstance(old, bool) and not isinstance(value, int | float | None):
            raise ModelError(f"model.overrides.{name}={value!r}: the config of {path} has {old} there; give a number")
        if name in SIZES and isinstance(value, int | float) and value < 1:
            raise ModelError(f"model.overrides.{name}={value}; it must be at least 1")
        try:
            setattr(config, name, {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value)
        except Exception as e:  # a config may validate its values, and raise anything
            raise ModelError(f"model.overrides.{name}={value}: the config of {path} rejects it: {_cause(e)}") from e
    if overrides:
        _check_layers(config, defaults, overrides, path)
        try:
            # Values that are valid by themselves may contradict each other.
            config.validate()
        except Exception as e:
            raise ModelError(f"{named(overrides)}: the config of {path} rejects that: {_cause(e)}") from e


def _check_layers(config: PreTrainedConfig, before: Mapping[str, Any], overrides: Mapping[str, Any], path: str) -> None:
    """Check that lists with one entry per layer still have as many entries as there are layers.

    Args:
        config: The changed config.
        before: The config before the changes.
        overrides: The changes.
        path: The model's folder, for the message.

    Raises:
        ModelError: A list has another length. Such a model could be built and trained, but not saved.
    """
    layers = getattr(config, "num_hidden_layers", None)
    for name, old in before.items():
        entries = getattr(config, name, None)
        if not (isinstance(old, list) and isinstance(entries, list) and "layer" in name):
            continue
        # Only lists of layer kinds are checked; a list of numbers may hold positions.
        if not old or not all(isinstance(kind, str) for kind in old) or len(old) != before.get("num_hidden_layers"):
            continue
        if len(entries) == layers:
            continue
        if "num_hidden_layers" not in overrides:
            raise ModelError(
                f"model.overrides.{name}={entries} has {len(entries)} entries, but the config of {path} has {layers} layers "
                "(num_hidden_layers); give one entry per layer"
            )
        kinds = ", ".join(dict.fromkeys(map(str, entries)))
        raise ModelError(
            f"model.overrides.num_hidden_layers={layers}, but {name} of the config of {path} has {len(entries)} entries, one per layer; give "
            f"model.overrides.{name} too, a list of {layers} ({kinds})"
        )


def named(overrides: Mapping[str, Any]) -> str:
    """Format `model.overrides` as they are written in settings, for messages."""
    return " ".join(f"model.overrides.{name}={value}" for name, value in overrides.items())


def _cause(error: Exception) -> str:
    """Describe the problem with a config in one line. A validator's error wraps the error with the cause."""
    lines = str(error.__cause__ or error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
