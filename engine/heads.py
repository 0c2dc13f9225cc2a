"""What stands behind a decoder in place of its language-model head, and the outputs that it computes for each token.

Axes: S selected tokens, H hidden size.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .errors import ConfigError
from .model_types import LM, head_class


class HeadType(ABC):
    """A type of models by its head.

    Engines build the head once for each rank that has the end of the decoder. It is computed alike on all ranks that share a token's hidden
    state, and its parameters are those of `module`, sharded or copied like others.

    Args:
        shape: `model.head_shape`.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    @property
    @abstractmethod
    def outputs(self) -> Mapping[str, tuple[int, ...]]:
        """Output name -> the shape of what one token has; `()` is one number."""

    @abstractmethod
    def module(self, hidden: int, dtype: torch.dtype) -> nn.Module:
        """Return the head.

        Args:
            hidden: The size of a hidden state.
            dtype: The dtype of the parameters.
        """

    @abstractmethod
    def compute(self, head: nn.Module, hidden_sh: Tensor) -> dict[str, Tensor]:
        """Compute the outputs of tokens: `[S, H]` -> output name -> `[S, *shape]`.

        Args:
            head: What `module` returned.
            hidden_sh: The hidden states behind the decoder's last norm.
        """

    def describe(self, config: Any) -> None:
        """Change the config that is exported beside the weights, so that who loads them knows what the head is."""
        config.head_type = {"name": type(self).__name__, "shape": list(self.shape)}


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

    def describe(self, config: Any) -> None:
        """Leave it to what exports sequence classifiers, which transformers has a class for."""


class ActionHead(HeadType):
    """A chunk of continuous actions per token: policies for robots and other controllers (Zhao et al. 2023, arXiv:2304.13705).

    `model.head_shape=[4,7]` is a chunk of 4 actions, one for each of the next steps, with 7 numbers each.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2:
            raise ConfigError(
                f"model.head_shape={list(shape)} with model.head=actions; give two numbers, the actions of a chunk and the numbers of an "
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


def head_of(model: ModelConfig) -> HeadType | None:
    """Return the type of a model; None if it has its own language-model head.

    Raises:
        ConfigError: The settings do not fit the type.
    """
    if model.head != LM:
        head: HeadType = head_class(model.head)(model.head_shape)
        return head
    if model.head_shape:
        raise ConfigError(
            f"model.head_shape={list(model.head_shape)} with model.head=lm, whose outputs have no shape; unset it"
        )
    return None
