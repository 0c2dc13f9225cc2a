"""One of several adapters in peft's terms: the names of its tensors and its settings."""

import json
from collections.abc import Iterator
from typing import Any

from peft import LoraConfig as PeftLoraConfig
from torch import Tensor

from ..adapters.slot import AdaptedLayer, AdapterSlot
from .names import PEFT_PREFIX, expert_factor

_FACTORS = {"down": "lora_A", "up": "lora_B"}


def stored_tensors(slot: AdapterSlot) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the name, the kind (`value`, `exp_avg`, `exp_avg_sq`) and a view of each tensor of an adapter, as checkpoints store them."""
    names = {(layer.name, factor): _stored_name(layer, factor) for layer, factor, _ in slot.views(slot.values)}
    for layer, factor, kind, tensor in slot.tensors():
        yield names[layer, factor], kind, tensor


def named_factors(slot: AdapterSlot, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each factor's name in peft's files, and a view of its part of a flat tensor with the layout of the adapter's values."""
    for layer, factor, view in slot.views(flat):
        yield _stored_name(layer, factor), view


def _stored_name(layer: AdaptedLayer, factor: str) -> str:
    if layer.experts is None:
        return f"{PEFT_PREFIX}{layer.name}.{_FACTORS[factor]}.weight"
    experts, _, matrix = layer.name.rpartition(".")
    return expert_factor(experts, matrix, _FACTORS[factor])


def peft_settings(slot: AdapterSlot, base: str, *, transposed: bool) -> bytes:
    """Return the content of `adapter_config.json`.

    Args:
        slot: The adapter.
        base: The path or name of the model.
        transposed: Whether the model stores the weights of its linear layers transposed.
    """
    settings: dict[str, Any] = PeftLoraConfig(
        r=slot.config.rank,
        lora_alpha=slot.config.alpha,  # type: ignore[arg-type]  # peft annotates int and computes with floats
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        fan_in_fan_out=transposed,
        base_model_name_or_path=base,
    ).to_dict()
    settings["target_modules"] = sorted(layer.name for layer in slot.layers if layer.experts is None) or None
    settings["target_parameters"] = sorted(layer.name for layer in slot.layers if layer.experts is not None) or None
    # As peft's own `save_pretrained` writes it.
    settings["inference_mode"] = True
    return (json.dumps(settings, indent=2, sort_keys=True, default=str) + "\n").encode()
