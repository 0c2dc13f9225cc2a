"""Mapping a parameter's name in our root module to its Hugging Face name, with and without adapters."""

from dataclasses import dataclass

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


def hf_name(name: str) -> HFName:
    """Return the Hugging Face name of a parameter or buffer of `PackedModel`."""
    if name.startswith("score."):
        return HFName(name, adapter=False)
    inner = name.removeprefix("lm.")
    if ".lora_" in inner:
        return HFName(PEFT_PREFIX + inner.replace(".default.", "."), adapter=True)
    return HFName(inner.replace(".base_layer.", "."), adapter=False)
