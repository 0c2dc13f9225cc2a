"""Heads that replace a language-model head, and the outputs that they compute for each token.

Axes: S selected tokens, H hidden size.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .errors import ConfigError, ModelError
from .loss import OUTPUTS
from .model_types import LM, head_class


class HeadType(ABC):
    """A type of model, defined by its head.

    Engines build the head on each rank that has the end of the decoder. All ranks that share a token's hidden state compute the same
    outputs. The parameters of `module` are sharded or replicated like all others.

    Args:
        shape: `model.head_shape`.
    """

    name = ""
    """The value of `model.head`."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    @property
    @abstractmethod
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        """Output name -> the shape of the output of one token; `()` is a single number."""

    @abstractmethod
    def module(self, hidden: int, dtype: torch.dtype) -> nn.Module:
        """Return the head with its initial values. The model family's initialization then replaces that of linear layers and embeddings.

        Args:
            hidden: The size of a hidden state.
            dtype: The dtype of the parameters, which have one axis or two.
        """

    @abstractmethod
    def compute(self, head: nn.Module, hidden_sh: Tensor) -> dict[str, Tensor]:
        """Compute the outputs of tokens: `[S, H]` -> output name -> `[S, *shape]`, of a floating-point type.

        Args:
            head: What `module` returned.
            hidden_sh: The hidden states after the decoder's last norm.
        """

    @property
    def description(self) -> dict[str, Any]:
        """The description of the head in an export's config (`head_type`). Loading the export requires the same head."""
        return {"name": self.name, "shape": list(self.shape)}


class ValueHead(HeadType):
    """One number per token: critics and reward models."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        if shape:
            raise ConfigError(
                f"model.head_shape={list(shape)} with model.head=value, which gives one number per token; unset it"
            )
        super().__init__(shape)

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        """`values`."""
        return {"values": ()}

    def module(self, hidden: int, dtype: torch.dtype) -> nn.Linear:
        """Return a row without a bias."""
        return nn.Linear(hidden, 1, bias=False, dtype=dtype)

    def compute(self, head: nn.Module, hidden_sh: Tensor) -> dict[str, Tensor]:
        """Return the numbers `[S]`."""
        return {"values": head(hidden_sh)[:, 0]}


class ActionHead(HeadType):
    """A chunk of continuous actions per token: policies for robots and other controllers (Zhao et al. 2023, arXiv:2304.13705).

    `model.head_shape=[4,7]` is a chunk of 4 actions, one for each of the next steps, with 7 numbers each.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2:
            raise ConfigError(
                f"model.head_shape={list(shape)} with model.head=actions; give two numbers, the actions per chunk and the size of an "
                "action, as in model.head_shape=[4,7]"
            )
        super().__init__(shape)

    @property
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        """`actions`."""
        return {"actions": self.shape}

    def module(self, hidden: int, dtype: torch.dtype) -> nn.Linear:
        """Return a linear layer with a bias."""
        return nn.Linear(hidden, math.prod(self.shape), dtype=dtype)

    def compute(self, head: nn.Module, hidden_sh: Tensor) -> dict[str, Tensor]:
        """Return the chunks `[S, chunk, size]`."""
        return {"actions": head(hidden_sh).unflatten(-1, self.shape)}


RESERVED = frozenset({*OUTPUTS, "router_aux"})
"""Output names that are reserved for the built-in heads."""


def head_of(model: ModelConfig) -> HeadType | None:
    """Return the type of a model; None if it has its own language-model head.

    Raises:
        ConfigError: The settings do not fit the type, or the type cannot be used.
    """
    if model.head == LM:
        if model.head_shape:
            raise ConfigError(
                f"model.head_shape={list(model.head_shape)} with model.head=lm, whose outputs have no shape; unset it"
            )
        return None
    kind = head_class(model.head)
    if not (isinstance(kind, type) and issubclass(kind, HeadType)):
        raise ConfigError(
            f"model.head={model.head} is registered as {kind!r}; it must be a subclass of drivetrain.engine.heads.HeadType"
        )
    try:
        head = kind(model.head_shape)
    except TypeError as e:  # of an abstract class
        raise ConfigError(f"model.head={model.head}: {kind.__name__} cannot be created: {e}") from e
    head.name = model.head
    if taken := sorted(RESERVED & set(head.outputs)) if kind is not ValueHead else []:
        raise ConfigError(
            f"model.head={model.head}: {kind.__name__} has an output {taken[0]!r}, a name that the engine reserves; rename it"
        )
    return head


def check_module(head: HeadType, module: nn.Module) -> None:
    """Check that engines can store and shard the parameters of a head.

    Raises:
        ModelError: One is a single number, or has more than two axes.
    """
    for name, parameter in module.named_parameters():
        if not 1 <= parameter.dim() <= 2:
            raise ModelError(
                f"model.head={head.name}: the parameter {name} of {type(head).__name__} is {list(parameter.shape)}; give it one axis or "
                "two, and reshape it in compute"
            )


def compute_outputs(head: HeadType, module: nn.Module, hidden_sh: Tensor, names: Collection[str]) -> dict[str, Tensor]:
    """Compute outputs of a head, and check them.

    Args:
        head: The type of the head.
        module: The head.
        hidden_sh: `[S, H]`, the hidden states of the selected tokens.
        names: The outputs to return.

    Returns:
        Output name -> `[S, *shape]`, in float32 at least.

    Raises:
        ModelError: The head did not return the outputs that `HeadType.outputs` declares.
    """
    computed = head.compute(module, hidden_sh)
    what = f"{type(head).__name__}.compute (model.head={head.name})"
    if not isinstance(computed, Mapping) or set(computed) != set(head.outputs):
        returned = sorted(computed) if isinstance(computed, Mapping) else type(computed).__name__
        raise ModelError(f"{what} returned {returned}; it must return a dict with {', '.join(sorted(head.outputs))}")
    for name, shape in head.outputs.items():
        value, expected = computed[name], [len(hidden_sh), *shape]
        if list(value.shape) != expected or not value.is_floating_point():
            raise ModelError(
                f"{what} returned {name} {list(value.shape)} of {value.dtype}; it must be {expected} of floating point"
            )
    # Copies, because FSDP would warn about views that its hooks may modify.
    return {name: computed[name].clone().to(torch.promote_types(computed[name].dtype, torch.float32)) for name in names}
