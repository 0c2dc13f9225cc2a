"""The settings of generation: sampling options, and the configuration of a role that generates."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine.config import ModelConfig
from ..engine.errors import ConfigError

MIN_TEMPERATURE = 1e-4
"""The smallest temperature above 0. Dividing logits by less exceeds the range of float32."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How completions are sampled.

    Args:
        max_tokens: The maximum number of tokens in a completion.
        temperature: The value that logits are divided by; 0 selects the most likely token.
        top_p: The probability mass to sample from, as the smallest set of most likely tokens that reaches it.
        top_k: The number of most likely tokens to sample from; 0 means all.
        samples: The number of completions per prompt.
        stop_tokens: Token ids that end a completion, in addition to those of the model's generation config.
        ignore_eos: Whether only `stop_tokens` end a completion, and not the tokens of the model's generation config.
        seed: The random seed; None uses a new one for every call.
        evaluation: Whether the completions are only for evaluation and never trained on. In a group with an actor, their
            temperature may then differ from the actor's.
        adapter: The name of the adapter to generate with, if the generator has several; empty for the model without adapters.

    Raises:
        ConfigError: A setting is out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    samples: int = 1
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    evaluation: bool = False
    adapter: str = ""

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 1), ("top_k", 0), ("samples", 1)):
            value = getattr(self, name)
            # In Python, True is an int; as a number of tokens it would mean 1.
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
            raise ConfigError(f"stop_tokens={self.stop_tokens!r}; pass token ids, for example (2,)")
        if self.samples > 1 and self.temperature == 0:
            raise ConfigError(
                f"samples={self.samples} with temperature=0: all completions would be the same; use a temperature above 0, or "
                "samples=1"
            )


def check_prompts(prompts: Any) -> list[list[int]]:
    """Return the prompts as lists of token ids.

    Args:
        prompts: The prompts, one sequence of token ids each.

    Raises:
        ConfigError: The prompts are padded, or are not sequences of token ids.
    """
    # A tensor or a batch of a tokenizer: rows have equal lengths, so shorter prompts are padded.
    shape = getattr(prompts, "shape", None)
    if isinstance(prompts, Mapping) or hasattr(prompts, "keys") or shape is not None:
        kind = type(prompts).__name__ + ("" if shape is None else f" {list(shape)}")
        raise ConfigError(
            f"prompts is a {kind}, in which padding cannot be distinguished from tokens; pass a list of token ids per prompt, "
            "or a PackedBatch"
        )
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts is a {type(prompts).__name__}; pass a list of token ids per prompt, or a PackedBatch")
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
    # Integers of any type, such as numpy's, but no fractions.
    return not isinstance(token, bool) and hasattr(token, "__index__")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The configuration of a role that generates completions.

    Args:
        model: The model. Only path, added_tokens, overrides and trust_remote_code are used; for adapters that are sent separately also
            lora.
        generator: The generator: a name listed by `drivetrain generators`, or `module:class`.
        dtype: The data type of the weights: float32 or bfloat16. A role also accepts auto: bfloat16 on CUDA and float32 elsewhere.
        max_batch_size: The maximum number of completions that are generated at the same time.
        max_batch_total_tokens: The maximum number of tokens of these completions and their prompts together, which bounds the memory of
            the cache. 0: as many as fit in the GPU memory that is free before the generator is built, or 32,768 without a GPU.
        target_tokens_per_batch: The target number of tokens in a forward pass. Prompts are added until it is reached.
        enable_chunked_prefill: Whether a prompt that exceeds the rest of `target_tokens_per_batch` is processed in several
            forward passes, so that running completions do not wait for it. For the generators `continuous` and `vllm`.
        pad: The token id of padding; None uses the tokenizer's, or 0.
        invariant: Whether a completion's tokens and log-probabilities are bitwise independent of the other requests in the batch and of
            the order of arrival. For the generators `static` and `continuous`, on a CPU.
        return_routed_experts: Whether completions report the experts that their tokens were routed to; see `Generation.routed_experts`.
        held_versions: The number of versions of the weights that a role holds at the same time. One is in the generator; the others
            are in host memory until a call requests them. With 1, new weights replace the old ones at once.
        max_adapters: The maximum number of adapters side by side; 0 for none. Each can be loaded and dropped while the generator runs,
            and is used by the requests that name it. For the generators `static`, `continuous` and `vllm`.
        base_dtype: Where adapters are sent separately, the data type in which their engine keeps the base weights: float32 or bfloat16.
        options: The settings specific to this generator.
    """

    model: ModelConfig
    generator: str = "static"
    dtype: str = "float32"
    max_batch_size: int = 256
    max_batch_total_tokens: int = 16384
    target_tokens_per_batch: int = 8192
    enable_chunked_prefill: bool = True
    pad: int | None = None
    invariant: bool = False
    return_routed_experts: bool = False
    held_versions: int = 1
    max_adapters: int = 0
    base_dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (
            ("max_batch_size", 1),
            ("max_batch_total_tokens", 0),
            ("target_tokens_per_batch", 1),
            ("held_versions", 1),
            ("max_adapters", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r}; it must be an integer of at least {least}")
