"""The interface of inference engines, with its sampling options and results. Imports no inference engine."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...engine.config import ModelConfig
from ...engine.errors import ConfigError

MIN_TEMPERATURE = 1e-4
"""The smallest temperature above 0. Dividing logits by less exceeds the range of float32."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How responses are sampled.

    Args:
        max_tokens: The maximum number of tokens in a response.
        temperature: The value that logits are divided by; 0 selects the most likely token.
        top_p: The probability mass to sample from: the smallest set of most likely tokens that reaches it.
        top_k: The number of most likely tokens to sample from; 0 means all.
        samples: The number of responses per prompt.
        stop_tokens: Token ids that end a response, in addition to those of the model's generation config.
        seed: The random seed; None uses a new one for every call.
        evaluation: Whether the responses are only for evaluation and never trained on. In a group with an actor, their
            temperature may then differ from the actor's.

    Raises:
        ConfigError: A setting is out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    samples: int = 1
    stop_tokens: tuple[int, ...] = ()
    seed: int | None = None
    evaluation: bool = False

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("top_k", 0), ("samples", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r}; it must be an integer of at least {least}")
        for name in ("temperature", "top_p"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name}={value!r}; it must be a number")
        if self.temperature and not MIN_TEMPERATURE <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}; it must be 0, or at least {MIN_TEMPERATURE} and finite")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}; it must be above 0 and at most 1")
        stop_ids = _listed(self.stop_tokens)
        if stop_ids is None or not all(_is_id(token) for token in stop_ids):
            raise ConfigError(f"stop_tokens={self.stop_tokens!r}; give token ids, for example (2,)")
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                f"samples={self.samples} with temperature=0: all of them would be the same; use a temperature above 0, or "
                "samples=1"
            )


def check_prompts(prompts: Any) -> list[list[int]]:
    """Return the prompts as lists of token ids.

    Args:
        prompts: The prompts, one sequence of token ids each.

    Raises:
        ConfigError: The prompts are padded, or are not sequences of token ids.
    """
    shape = getattr(prompts, "shape", None)
    if isinstance(prompts, Mapping) or hasattr(prompts, "keys") or shape is not None:
        kind = type(prompts).__name__ + ("" if shape is None else f" {list(shape)}")
        raise ConfigError(
            f"prompts is a {kind}, in which padding cannot be distinguished from tokens; give a list of token ids per prompt, "
            "or a PackedBatch"
        )
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts is a {type(prompts).__name__}; give a list of token ids per prompt, or a PackedBatch")
    checked = []
    for i, prompt in enumerate(prompts):
        ids = _listed(prompt)
        if ids is None or not all(_is_id(token) for token in ids):
            raise ConfigError(f"prompt {i} is {prompt!r:.60}; it must be a list of token ids")
        checked.append([int(token) for token in ids])
    return checked


def _listed(ids: Any) -> list[Any] | None:
    """Return the elements of a list, a tuple, or a one-dimensional tensor or array; None for anything else."""
    if hasattr(ids, "tolist") and getattr(ids, "ndim", 0) == 1:
        elements: list[Any] = ids.tolist()
        return elements
    return list(ids) if isinstance(ids, list | tuple) else None


def _is_id(token: Any) -> bool:
    return not isinstance(token, bool) and hasattr(token, "__index__")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generated response.

    Args:
        prompt: The token ids of the prompt.
        response: The token ids of the response, including the stop token that ended it.
        log_probs: The log-probability of each response token at the sampling temperature (1 if that is 0), before top_p and
            top_k.
        finished: Whether a stop token ended the response, and not the length limit.
    """

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    finished: bool


class RolloutEngine(Protocol):
    """The interface of an inference engine. There is one per process, and each holds the entire model."""

    def generate(
        self, prompts: Sequence[Sequence[int]], options: SamplingOptions, rows: Sequence[int]
    ) -> list[list[Generation]]:
        """Generate `options.samples` responses to each prompt, in order.

        Args:
            prompts: The token ids of this process's shard of the prompts.
            options: The sampling options.
            rows: The number of each prompt in the global batch. Seeds derived from it and `options.seed` give the same
                responses on any process, and different responses for an equal prompt in another row.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights, under their Hugging Face names as on disk: all of the model's, tied ones once.

        After an error the engine must not generate until it has loaded a complete set of weights.
        """
        ...

    def to(self, place: str) -> None:
        """Offload the model to `host`, or reload it to the `device`."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The configuration of a role that generates responses.

    Args:
        model: The model. Only path, added_tokens and trust_remote_code are used.
        engine: A function that builds the inference engine from this configuration; None uses transformers. In a group of
            processes these find it by its name, so define it at the top level of a module.
        dtype: The data type of the weights: float32 or bfloat16.
        batch_tokens: The number of tokens in a batch, counting prompts and responses of maximum length.
        continuous: Whether to use the continuous batching of transformers, which reuses the memory of finished responses at
            once. Worth its startup time on a GPU, for many responses of different lengths. `batch_tokens` is then the size of
            its cache, and top_p and top_k are not supported.
        pad: The token id of padding; None uses the tokenizer's, or 0.
    """

    model: ModelConfig
    engine: "Callable[[RolloutConfig], RolloutEngine] | None" = None
    dtype: str = "float32"
    batch_tokens: int = 16384
    continuous: bool = False
    pad: int | None = None


def to_padded(generations: Sequence[Generation], pad: int = 0) -> dict[str, Any]:
    """Convert responses to the padded format of RL frameworks: prompts padded on the left, responses on the right.

    Args:
        generations: B generated responses.
        pad: The token id of padding.

    Returns:
        `input_ids` and `attention_mask` `[B, P + R]`, `responses`, `response_mask` and `rollout_log_probs` `[B, R]`.
    """
    rows, p = len(generations), max((len(g.prompt) for g in generations), default=0)
    r = max((len(g.response) for g in generations), default=0)
    ids, mask = torch.full((rows, p + r), pad, dtype=torch.int64), torch.zeros(rows, p + r, dtype=torch.int64)
    log_probs = torch.zeros(rows, r)
    for row, g in enumerate(generations):
        begin, end = p - len(g.prompt), p + len(g.response)
        ids[row, begin:end] = torch.tensor([*g.prompt, *g.response])
        mask[row, begin:end] = 1
        log_probs[row, : len(g.response)] = torch.tensor(g.log_probs)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "responses": ids[:, p:],
        "response_mask": mask[:, p:],
        "rollout_log_probs": log_probs,
    }
