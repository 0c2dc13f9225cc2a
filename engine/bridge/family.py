"""A family of models: the reader of its config, and the tensors that its modules consist of."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from ..errors import ModelError
from ..model_types import HEAD_PREFIX
from .decoder import Decoder
from .rules import Replicated, Rule

FAMILIES = (
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "smollm3",
)
"""Each family has a module with its name in this package."""

PARTS = {
    "qwen2_5_omni_text": "qwen2_vl_text",
    "qwen2_5_vl_text": "qwen2_vl_text",
    "qwen2_vl_text": "qwen2_vl_text",
    "qwen3_vl_moe_text": "qwen3_vl_moe_text",
    "qwen3_vl_text": "qwen3_vl_text",
}
"""The families of decoders that are only a part of models with encoders, each with its module in this package."""

DECODER = "model"
"""The name of the decoder in a causal language model of transformers."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, kw_only=True)
class Family:
    """The reader of one family's configs, and the names of its tensors on disk.

    Args:
        decoder: A function that reads a Hugging Face config.
        layer: The rules inside a layer: Megatron-core module -> rule, whose names are relative to `prefix.N.`; or the full
            name of a tensor -> rule.
        outer: The rules outside the layers: Megatron-core module -> rule.
        prefix: The prefix of the layers' names.
        path: The decoder's name in the model, if it is a part of one; it replaces the first `model` in the names.
        stored: A function that returns the name on disk of a tensor, given its name in the model.
    """

    decoder: Callable[[Any], Decoder]
    layer: Mapping[str, Rule]
    outer: Mapping[str, Rule]
    prefix: str = "model.layers"
    path: str = DECODER
    stored: Callable[[str], str] = str

    def rule(self, parameter: str) -> tuple[Rule, tuple[str, ...]]:
        """Return the rule of a Megatron-core parameter and its names in the model.

        If the model is just a decoder, these are the names on disk.

        Args:
            parameter: The name of the parameter in an unsharded model, with layers counted over all ranks.

        Raises:
            ModelError: The family has no rule for the parameter.
        """
        if parameter.startswith(HEAD_PREFIX):
            # The modules of a head of another type.
            return Replicated(parameter.rpartition(".")[0]), (parameter,)
        numbered = _LAYER.match(parameter)
        rules, stem = (self.outer, "") if numbered is None else (self.layer, f"{self.prefix}.{numbered[1]}.")
        inner = parameter if numbered is None else numbered[2]
        module, _, leaf = inner.rpartition(".")
        # A tensor with a different name on disk has its own rule, under its full name including the leaf.
        rule, end = (rules[inner], "") if inner in rules else (rules.get(module), f".{leaf}")
        if rule is None:
            raise ModelError(f"the bridge of this family has no rule for {parameter}")
        return rule, tuple(self._in_model(f"{stem}{name}{end}") for name in rule.modules)

    def _in_model(self, name: str) -> str:
        first, _, suffix = name.partition(".")
        # Names outside of the decoder, such as `lm_head`, do not depend on where it is in the model.
        return f"{self.path}.{suffix}" if first == DECODER else name


@cache
def find_family(model_type: str) -> Family:
    """Return the bridge of a family.

    Raises:
        ModelError: The family has no bridge.
    """
    if model_type not in FAMILIES and model_type not in PARTS:
        raise ModelError(
            f"model family {model_type!r} has no bridge to Megatron-core; the supported families are "
            f"{', '.join(FAMILIES)}: use engine.backend=fsdp, or add a bridge (docs/add-a-model.md)"
        )
    # Imported on demand: a model needs only its own family.
    family: Family = import_module(f".{PARTS.get(model_type, model_type)}", __package__).FAMILY
    return family
