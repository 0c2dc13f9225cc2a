"""What tells one trainer from another: the data it reads, its loss, and what a batch needs before a step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ...engine.base import BaseEngine
from ...engine.errors import ConfigError
from ...engine.loss import Loss
from ...engine.packing.batch import PackedBatch
from ..config.runs import RunConfig
from ..data.dataset import Dataset
from ..data.encode import KINDS, Kind
from ..data.loader import GlobalBatch

PAIR_METRICS: Mapping[str, bool] = {"loss": True, "reward_accuracy": False, "reward_margin": False}
"""What an evaluation of pairs measures, and whether less of it is better."""


class Method(ABC):
    """A way of training, between the loop and an engine.

    Args:
        config: of the run.
    """

    kind: Kind = "completions"
    name: ClassVar[str]
    head: ClassVar[str] = "lm"
    can_generate: ClassVar[bool] = True
    """Whether the model can answer, to be read."""
    lower_is_better: ClassVar[Mapping[str, bool]]
    """What an evaluation measures that a best checkpoint can be chosen by, and whether less of it is better."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    @property
    def infers(self) -> bool:
        """Whether training samples also go through a forward pass without gradients."""
        return False

    @property
    def token_multiple(self) -> int:
        """What another engine than the policy's asks of a micro-batch's tokens."""
        return 1

    @property
    @abstractmethod
    def loss(self) -> Loss:
        """What to minimise."""

    @property
    def evaluation_loss(self) -> Loss:
        """The same, with the metrics that only an evaluation has."""
        return self.loss

    def check(self) -> None:
        """Refuse settings that do not go together. Reads no weight. Not collective.

        Raises:
            ConfigError: names the setting.
        """
        data, model = self.config.data, self.config.model
        forms = KINDS[self.kind]
        if data.format not in ("auto", *forms):
            raise ConfigError(
                f"data.format={data.format}: {self.name} reads {' or '.join(forms)}; unset it, or use another trainer"
            )
        if self.kind != "completions" and data.turns == "per_turn":
            raise ConfigError("data.turns=per_turn: a side of a preference is one text; unset it")
        if model.head != self.head:
            what = "a language-model head" if self.head == "lm" else "a value head, one number for a text"
            raise ConfigError(f"model.head={model.head}: {self.name} trains {what}; set model.head={self.head}")
        if self.config.trainer.generate and not self.can_generate:
            raise ConfigError(
                f"trainer.generate={self.config.trainer.generate}: {self.name} trains a model that says nothing; set it to 0"
            )

    def setup(self, engine: BaseEngine, tokenizer: Any, samples: Dataset, held_out: Dataset | None) -> None:  # noqa: B027
        """Make what the loss needs beside the policy. Collective; called before the policy is built.

        Args:
            engine: the policy's, not initialised yet.
            tokenizer: the policy's.
            samples: to train on.
            held_out: to evaluate on.
        """

    @abstractmethod
    def batch(self, engine: BaseEngine, drawn: GlobalBatch, *, training: bool) -> PackedBatch:
        """This rank's share of a global batch, with all that the loss asks for. Collective.

        Args:
            engine: the policy's.
            drawn: the documents.
            training: for a training step, otherwise for an evaluation.
        """

    def close(self) -> None:  # noqa: B027  # most have nothing to free
        """Free what `setup` made."""
