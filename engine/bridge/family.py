"""A family of models: how its config is read, and which tensors its modules are made of. Imports no torch."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from ..errors import ModelError
from .decoder import Decoder
from .rules import Rule

FAMILIES = (
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
)
"""Each has a module of its name beside this one."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, kw_only=True)
class Family:
    """How one family's models are named on disk.

    Args:
        decoder: reads a Hugging Face config.
        layer: module inside a Megatron-core layer -> rule, whose names stand under `prefix.N.`; or a tensor, by its full name.
        outer: module outside the layers -> rule.
        prefix: of the layers' names.
    """

    decoder: Callable[[Any], Decoder]
    layer: Mapping[str, Rule]
    outer: Mapping[str, Rule]
    prefix: str = "model.layers"

    def rule(self, parameter: str) -> tuple[Rule, tuple[str, ...]]:
        """The rule of a Megatron-core parameter, and the names on disk behind it.

        Args:
            parameter: its name in an unsharded model: layers counted over all ranks.

        Raises:
            ModelError: the family has no rule for it.
        """
        numbered = _LAYER.match(parameter)
        rules, stem = (self.outer, "") if numbered is None else (self.layer, f"{self.prefix}.{numbered[1]}.")
        inner = parameter if numbered is None else numbered[2]
        module, _, leaf = inner.rpartition(".")
        # A tensor that is called otherwise on disk has a rule of its own, with the leaf.
        rule, end = (rules[inner], "") if inner in rules else (rules.get(module), f".{leaf}")
        if rule is None:
            raise ModelError(f"the bridge of this family has no rule for {parameter}")
        return rule, tuple(f"{stem}{name}{end}" for name in rule.modules)


@cache
def find_family(model_type: str) -> Family:
    """The bridge of a family.

    Raises:
        ModelError: there is none.
    """
    if model_type not in FAMILIES:
        raise ModelError(
            f"model family {model_type!r} has no bridge to Megatron-core; there are {', '.join(FAMILIES)}: use "
            "engine.backend=fsdp, or add it (docs/add-a-model.md)"
        )
    family: Family = import_module(f".{model_type}", __package__).FAMILY
    return family
