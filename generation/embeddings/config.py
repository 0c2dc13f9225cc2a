"""The settings of an embedding model."""

from dataclasses import dataclass
from typing import Literal

from ...engine.config import ModelConfig
from ...engine.errors import ConfigError

Pooling = Literal["last", "mean", "cls"]


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """The configuration of a role that embeds texts.

    Args:
        model: The model. Only path and trust_remote_code are used.
        pooling: How the hidden states of a text become one vector: that of its last token (`last`), of its first one (`cls`), or the
            mean of all (`mean`). None uses the setting in the folder's sentence-transformers files; without these, `last` for a
            causal language model and `mean` for any other.
        normalize: Whether embeddings have length 1. None uses the setting in these files; without them, True.
        dtype: The data type of the weights: float32 or bfloat16.
        max_batch_size: The number of texts in a forward pass.
        target_tokens_per_batch: The number of tokens in a forward pass. Texts are added until it is reached.
    """

    model: ModelConfig
    pooling: Pooling | None = None
    normalize: bool | None = None
    dtype: str = "float32"
    max_batch_size: int = 256
    target_tokens_per_batch: int = 8192

    def __post_init__(self) -> None:
        if self.pooling not in (None, "last", "mean", "cls"):
            raise ConfigError(f"pooling={self.pooling!r}; it must be last, mean or cls")
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={self.dtype}; the dtype of an embedding model must be float32 or bfloat16")
        for name in ("max_batch_size", "target_tokens_per_batch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}={value!r}; it must be an integer of at least 1")
