"""Mapping a parameter's name in our root module to its Hugging Face name, with and without adapters."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..model_types import HEAD_PREFIX

PEFT_PREFIX = "base_model.model."


_OF_EXPERTS = re.compile(r"(.*)\.adapters\.(\w+)\.(lora_[AB])")


@dataclass(frozen=True)
class HFName:
    """A parameter's name in Hugging Face files.

    Args:
        name: The name in a plain transformers model or, for an adapter, in peft's own files.
        adapter: Whether the parameter belongs to an adapter.
    """

    name: str
    adapter: bool


def expert_factor(experts: str, matrix: str, factor: str) -> str:
    """Return the name of an adapter's factor of a layer's experts in peft's files.

    peft wraps the module of the experts once for each of its two matrices; the second wrapper is around the first.

    Args:
        experts: The name of the module of the experts.
        matrix: The name of the matrix: gate_up_proj, up_proj or down_proj.
        factor: The factor, lora_A or lora_B.
    """
    inner = "" if matrix == "down_proj" else ".base_layer"
    return f"{PEFT_PREFIX}{experts}{inner}.{factor}.weight"


def peft_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a factor in peft's files, given its shape in a checkpoint.

    For experts, factors are three-dimensional in a checkpoint: A `[experts, rank, in]` and B `[experts, out, rank]`. In peft's files
    they are A `[experts * rank, in]` and B `[out, rank * experts]`.
    """
    if len(shape) != 3 or ".lora_" not in name:
        return tuple(shape)
    experts, first, second = shape
    return (experts * first, second) if ".lora_A." in name else (first, second * experts)


def tied_copies(names: Collection[str], settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the tensors of adapters that must be written under a second name: embeddings, for the head that is tied to them.

    Args:
        names: The tensors of the adapters, under peft's names.
        settings: The content of `adapter_config.json`.

    Returns:
        The name of the head's weight -> that of the embeddings; empty unless both are to be saved.
    """
    saved = settings.get("modules_to_save") or []
    if not settings.get("ensure_weight_tying"):
        return {}
    copies = {}
    # In `modules_to_save`, tied embeddings are followed by their head; see `lora._saved_names`.
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
        if match := _OF_EXPERTS.fullmatch(inner):
            experts, matrix, factor = match.groups()
            return HFName(expert_factor(experts, matrix, factor), adapter=True)
        return HFName(PEFT_PREFIX + inner.replace(".default.", ".").removesuffix(".default"), adapter=True)
    return HFName(inner.replace(".base_layer.", "."), adapter=False)
