"""The embedding role: computes vectors of texts."""

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from ...engine.errors import ConfigError
from ...engine.packing.batch import PackedBatch
from ...engine.packing.convert import to_lists
from ...generation.embeddings.config import EmbeddingConfig
from ...generation.embeddings.embedder import Embedder
from ...generation.embeddings.text_scheduler import EmbeddingsScheduler
from ...generation.scheduler import SchedulerSettings
from .dispatch import register


class EmbeddingWorker:
    """A worker with an embedding model in every process; each process embeds its shard of the texts.

    Args:
        config: The configuration of the role.
        ranks: Unused, because the processes work independently.
    """

    needs_process_group = False
    """Whether it needs torch's default process group even with a single process."""

    def __init__(self, config: EmbeddingConfig, ranks: Sequence[int] | None = None) -> None:
        self.config = config
        self._embedder: Embedder | None = None

    def initialize(self) -> Self:
        """Load the model."""
        self._embedder = Embedder(self.config)
        return self

    @property
    def embedder(self) -> Embedder:
        """The model.

        Raises:
            ConfigError: The worker is not initialized.
        """
        if self._embedder is None:
            raise ConfigError("this embedding worker is not initialized; call initialize() first")
        return self._embedder

    @register("dp", returns="rows")
    def embed(self, texts: PackedBatch | Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Compute embeddings.

        Args:
            texts: The N texts: a PackedBatch, or the token ids of each.

        Returns:
            `embeddings`: `[N, D]` in float32.
        """
        ids = to_lists(texts) if isinstance(texts, PackedBatch) else texts
        return {"embeddings": self.embedder.embed([[int(token) for token in text] for text in ids])}

    def scheduler(self, settings: SchedulerSettings) -> EmbeddingsScheduler:
        """Return a scheduler with which a model worker serves single texts."""
        return EmbeddingsScheduler(self.embedder, settings, self.config.max_batch_size, self.config.target_tokens_per_batch)

    def close(self) -> None:
        """Free the model."""
        if self._embedder is not None:
            self._embedder.close()
            self._embedder = None
