"""Reward modeling: a model that scores the chosen completion higher than the rejected one."""

from ...engine.base import BaseEngine
from ...engine.errors import ConfigError
from ...engine.loss import Loss
from ...engine.packing.batch import PackedBatch
from ...losses.reward import RewardLoss
from ..config.runs import RMConfig
from ..data.encode import DataKind
from ..data.loader import GlobalBatch
from .base import PAIR_METRICS, TrainingMethod


class RewardMethod(TrainingMethod):
    """Reward-model training.

    Args:
        config: The run's settings.
        loss: The loss to minimize, instead of the Bradley-Terry loss.
    """

    kind: DataKind = "pairs"
    name = "reward modeling"
    head = "value"
    can_generate = False
    lower_is_better = PAIR_METRICS

    def __init__(self, config: RMConfig, loss: Loss | None = None) -> None:
        super().__init__(config, loss)
        try:
            self._loss = loss or RewardLoss(centering=config.rm.centering)
        except ConfigError as e:
            raise ConfigError(f"rm.{e}") from e

    @property
    def loss(self) -> Loss:
        """The Bradley-Terry loss."""
        return self._loss

    def batch(self, engine: BaseEngine, global_batch: GlobalBatch, *, training: bool) -> PackedBatch:
        """Return this rank's shard of the pairs."""
        return global_batch.shard_of(engine).batch
