"""Mapping a parameter's name in our root module to its Hugging Face name, with and without adapters."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..model_types import HEAD_PREFIX

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class HFName:
    """A parameter's name in Hugging Face files.

    Args:
        name: The name in a plain transformers model or, for an adapter, in peft's own files.
        adapter: Whether the parameter belongs to an adapter.
    """

    name: str
    adapter: bool


def tied_copies(names: Collection[str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return which tensor of adapters has to be written under a second name: embeddings, for the head that is tied to them.

    Args:
        names: The tensors of the adapters, under peft's names.
        settings: The content of `adapter_config.json`.

    Returns:
        The name of the head's weight -> that of the embeddings; empty if they are not both to be saved.
    """
    saved = settings.get("modules_to_save") or []
    if not settings.get("ensure_weight_tying"):
        return {}
    copies = {}
    for module, following in pairwise(saved):
        weight, head = next((n for n in names if n.endswith(f".{module}.weight")), None), f"{PEFT_PREFIX}{following}.weight"
        if weight is not None and head not in names:
            copies[head] = weight
    return copies


def hf_name(name: str) -> HFName:
    """Return the Hugging Face name of a parameter or buffer of `PackedModel`."""
    if name.startswith(HEAD_PREFIX):
        return HFName(name, adapter=False)
    inner = name.removeprefix("lm.")
    if ".lora_" in inner:
        return HFName(PEFT_PREFIX + inner.replace(".default.", "."), adapter=True)
    return HFName(inner.replace(".base_layer.", "."), adapter=False)
