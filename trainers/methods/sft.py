"""Supervised fine-tuning: next-token prediction on the completions."""

from collections.abc import Mapping
from typing import ClassVar

from ...engine.base import BaseEngine
from ...engine.loss import Loss, OutputRequest
from ...engine.packing.batch import PackedBatch
from ...losses.sft import SFTLoss
from ..data.loader import GlobalBatch
from .base import TrainingMethod


class SFTMethod(TrainingMethod):
    """Supervised fine-tuning."""

    name = "SFT"
    lower_is_better: ClassVar[Mapping[str, bool]] = {"loss": True, "accuracy": False}

    @property
    def loss(self) -> Loss:
        """The negative log-likelihood of the completions."""
        return self.own_loss or SFTLoss()

    @property
    def evaluation_loss(self) -> Loss:
        """The loss with the additional metric of token accuracy."""
        return self.own_loss or SFTLoss(request=OutputRequest(log_probs=True, greedy=True))

    def batch(self, engine: BaseEngine, global_batch: GlobalBatch, *, training: bool) -> PackedBatch:
        """Return this rank's shard of the documents."""
        return global_batch.shard_of(engine).batch
