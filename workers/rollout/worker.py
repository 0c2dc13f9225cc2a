"""The rollout role: answers prompts with the policy's weights."""

from collections.abc import Iterable, Sequence
from typing import Self

from torch import Tensor

from ...engine.errors import ConfigError
from ...engine.packing.batch import PackedBatch
from ...engine.packing.convert import to_lists
from ..dispatch import register
from .engine import Generation, RolloutConfig, RolloutEngine, SamplingOptions, check_prompts


class RolloutWorker:
    """An inference engine in every process, each of which answers a share of the prompts.

    Args:
        config: of the role.
        ranks: unused: processes answer alone.
    """

    def __init__(self, config: RolloutConfig, ranks: Sequence[int] | None = None) -> None:
        if config.dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"dtype={config.dtype}; a rollout's weights are float32 or bfloat16")
        self.config = config
        self._engine: RolloutEngine | None = None

    def initialize(self) -> Self:
        """Load the model."""
        if self.config.engine is not None:
            self._engine = self.config.engine(self.config)
        else:
            from .hf import TransformersRollout

            self._engine = TransformersRollout(self.config)
        return self

    @register("dp", returns="objects")
    def generate(self, prompts: PackedBatch | Sequence[Sequence[int]], options: SamplingOptions) -> list[list[Generation]]:
        """`options.samples` answers to each prompt, in order.

        Args:
            prompts: token ids; this process's share. A PackedBatch may have a field `row` `[N]`, the number of each prompt in the
                global batch, on which its draws depend beside the seed; a group adds it. Without it prompts are counted here.
            options: of the sampling.
        """
        texts = to_lists(prompts) if isinstance(prompts, PackedBatch) else check_prompts(prompts)
        numbers = prompts.sequence_fields.get("row") if isinstance(prompts, PackedBatch) else None
        rows = range(len(texts)) if numbers is None else numbers.tolist()
        return self._started.generate([[int(t) for t in text] for text in texts], options, rows)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take an actor's weights, as its `weights()` streams them."""
        self._started.load_weights(weights)

    @register("all")
    def to(self, place: str) -> None:
        """Rest on `host`, or come back to the `device`."""
        self._started.to(place)

    @property
    def _started(self) -> RolloutEngine:
        if self._engine is None:
            raise ConfigError("this rollout worker is not initialised; call initialize() first")
        return self._engine

    def close(self) -> None:
        """Free the model."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
