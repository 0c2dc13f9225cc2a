"""The interface of an inference engine, what it is asked for and what it answers. Imports no engine."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...engine.config import ModelConfig
from ...engine.errors import ConfigError

LEAST_TEMPERATURE = 1e-4
"""Logits that are divided by less leave the range of float32."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How answers are drawn.

    Args:
        max_tokens: of an answer, at most.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_p: least probability mass that is sampled from.
        top_k: likeliest tokens that are sampled from; 0: all.
        samples: answers to each prompt.
        stop_tokens: that end an answer, beside those of the model's generation config.
        seed: of the sampling; None: another one in every call.
        evaluation: the answers are looked at, and nothing is learned from them: in a group with an actor they need not have its
            temperature then.
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
                raise ConfigError(f"{name}={value!r}; it must be a whole number of at least {least}")
        for name in ("temperature", "top_p"):
            if isinstance(value := getattr(self, name), bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name}={value!r}; it must be a number")
        if self.temperature and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature}; it must be 0, or at least {LEAST_TEMPERATURE} and finite")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p}; it is a probability above 0")
        stops = _listed(self.stop_tokens)
        if stops is None or not all(_is_id(token) for token in stops):
            raise ConfigError(f"stop_tokens={self.stop_tokens!r}; give token ids, as in (2,)")
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                f"samples={self.samples} with temperature=0: all of them would be the same; sample, or ask for one"
            )


def check_prompts(prompts: Any) -> list[list[int]]:
    """The prompts as lists of token ids.

    Args:
        prompts: to be answered.

    Raises:
        ConfigError: they are padded, or no lists of token ids.
    """
    shape = getattr(prompts, "shape", None)
    if isinstance(prompts, Mapping) or hasattr(prompts, "keys") or shape is not None:
        kind = type(prompts).__name__ + ("" if shape is None else f" {list(shape)}")
        raise ConfigError(
            f"prompts is a {kind}: padding could not be told from tokens; give a list of token ids for each prompt, or a PackedBatch"
        )
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts is a {type(prompts).__name__}; give a list of token ids for each prompt, or a PackedBatch")
    checked = []
    for i, prompt in enumerate(prompts):
        ids = _listed(prompt)
        if ids is None or not all(_is_id(token) for token in ids):
            raise ConfigError(f"prompt {i} is {prompt!r:.60}; it must be a list of token ids")
        checked.append([int(token) for token in ids])
    return checked


def _listed(ids: Any) -> list[Any] | None:
    """The elements of a list, a tuple, or a tensor or array of one axis; None of anything else."""
    if hasattr(ids, "tolist") and getattr(ids, "ndim", 0) == 1:
        found: list[Any] = ids.tolist()
        return found
    return list(ids) if isinstance(ids, list | tuple) else None


def _is_id(token: Any) -> bool:
    return not isinstance(token, bool) and hasattr(token, "__index__")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One answer.

    Args:
        prompt: token ids.
        response: token ids, with the one that ended it.
        log_probs: of each token of the response, at the sampling's temperature (1 where it is 0), before top_p and top_k.
        finished: a stop token ended it, not its length.
    """

    prompt: list[int]
    response: list[int]
    log_probs: list[float]
    finished: bool


class RolloutEngine(Protocol):
    """What answers prompts. One for each process; it knows the whole model."""

    def generate(
        self, prompts: Sequence[Sequence[int]], options: SamplingOptions, rows: Sequence[int]
    ) -> list[list[Generation]]:
        """`options.samples` answers to each prompt, in order.

        Args:
            prompts: token ids; this process's share.
            options: of the sampling.
            rows: of each prompt, its number in the global batch. Seeds made of it and `options.seed` draw the same answers
                whoever draws them, and others for an equal prompt in another row.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights, under Hugging Face names as on disk: all of the model's, tied ones once. After an error it must
        not answer until it has taken others."""
        ...

    def to(self, place: str) -> None:
        """Rest on `host`, or come back to the `device`."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """A role that answers.

    Args:
        model: which model; of its settings path, added_tokens and trust_remote_code count.
        engine: makes the inference engine from these settings; None: transformers.
        dtype: of the weights: float32 or bfloat16.
        batch_tokens: tokens of a batch, prompts and the longest possible answers together.
        continuous: batch answers continuously, by transformers' own scheduler: finished ones make room at once. Worth its start-up
            on a GPU, for many answers of different lengths. `batch_tokens` is then the room of its cache; top_p and top_k are refused.
        pad: token id of padding; None: the tokenizer's, or 0.
    """

    model: ModelConfig
    engine: "Callable[[RolloutConfig], RolloutEngine] | None" = None
    dtype: str = "float32"
    batch_tokens: int = 16384
    continuous: bool = False
    pad: int | None = None


def to_padded(generations: Sequence[Generation], pad: int = 0) -> dict[str, Any]:
    """Answers as RL frameworks hold them: prompts padded on the left, responses on the right.

    Args:
        generations: B answers.
        pad: token id of padding.

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
