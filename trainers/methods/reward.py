"""Reward modeling: of two answers, the chosen one scores higher."""

from ...engine.base import BaseEngine
from ...engine.errors import ConfigError
from ...engine.loss import Loss
from ...engine.packing.batch import PackedBatch
from ...workers.losses.reward import RewardLoss
from ..config.runs import RMConfig
from ..data.encode import Kind
from ..data.loader import GlobalBatch
from .base import PAIR_METRICS, Method


class RewardMethod(Method):
    """Training of a reward model.

    Args:
        config: of the run.
    """

    kind: Kind = "pairs"
    name = "reward modelling"
    head = "value"
    can_generate = False
    lower_is_better = PAIR_METRICS

    def __init__(self, config: RMConfig) -> None:
        super().__init__(config)
        try:
            self._loss = RewardLoss(centering=config.rm.centering)
        except ConfigError as e:
            raise ConfigError(f"rm.{e}") from e

    @property
    def loss(self) -> Loss:
        """Bradley-Terry."""
        return self._loss

    def batch(self, engine: BaseEngine, drawn: GlobalBatch, *, training: bool) -> PackedBatch:
        """The pairs as they are."""
        return drawn.share_of(engine).batch
