"""The base class of the training methods, which differ in the data, the loss and the preparation of a batch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from ...engine.base import BaseEngine
from ...engine.errors import ConfigError
from ...engine.loss import Loss
from ...engine.packing.batch import PackedBatch
from ..config.runs import RunConfig
from ..data.dataset import Budget, TokenDataset, sample_budget
from ..data.encode import KINDS, DataKind
from ..data.loader import GlobalBatch

PAIR_METRICS: Mapping[str, bool] = {"loss": True, "reward_accuracy": False, "reward_margin": False}
"""The metrics of an evaluation on pairs, and for each whether lower is better."""


class TrainingMethod(ABC):
    """The base class of training methods, between the training loop and the engine.

    Args:
        config: The run's settings.
        loss: The loss to minimize, instead of the method's own.
    """

    kind: DataKind = "completions"
    name: ClassVar[str]
    head: ClassVar[str] = "lm"
    can_generate: ClassVar[bool] = True
    """Whether the trained model can generate completions."""
    lower_is_better: ClassVar[Mapping[str, bool]]
    """The evaluation metrics that can select the best checkpoint, and for each whether lower is better."""

    def __init__(self, config: RunConfig, loss: Loss | None = None) -> None:
        self.config, self.own_loss = config, loss

    @property
    def infers(self) -> bool:
        """Whether training samples also go through a forward pass without gradients."""
        return False

    @property
    def token_multiple(self) -> int:
        """The multiple that engines other than the policy's require for the number of tokens in a micro-batch."""
        return 1

    @cached_property
    def budget(self) -> Budget:
        """The maximum number of tokens in a sample that fits the layout's training and inference micro-batches.

        Raises:
            ConfigError: `data.max_length` is larger than this number.
        """
        return sample_budget(
            self.config.engine,
            self.config.data,
            infers=bool(self.config.data.eval) or self.infers,
            multiple=self.token_multiple,
        )

    @property
    @abstractmethod
    def loss(self) -> Loss:
        """The loss to minimize."""

    @property
    def evaluation_loss(self) -> Loss:
        """The loss with the additional metrics of an evaluation."""
        return self.loss

    def check(self) -> None:
        """Check that the settings are compatible with each other. Reads no weights. Not collective.

        Raises:
            ConfigError: Settings contradict each other; the message names them.
        """
        data, model = self.config.data, self.config.model
        if self.budget.tokens < 1:
            raise ConfigError(f"{self.budget.setting}: no sample would fit in a micro-batch; raise it")
        forms = KINDS[self.kind]
        if data.format not in ("auto", *forms):
            raise ConfigError(
                f"data.format={data.format}: {self.name} reads {' or '.join(forms)}; unset it, or use another trainer"
            )
        # A side that became several samples could not be compared as one.
        if self.kind != "completions" and data.turns == "per_turn":
            raise ConfigError("data.turns=per_turn: each side of a preference must be a single text; unset it")
        if self.kind != "completions":
            for name, value, usual in (
                ("too_long", data.too_long, "split"),
                ("train_on", data.train_on, "all"),
                ("train_on", data.train_on, "last_completion"),
            ):
                if value == usual:
                    raise ConfigError(f"data.{name}={value}: {self.name} compares entire completions; unset it")
        if model.head != self.head:
            target = "a language-model head" if self.head == "lm" else "a value head, which gives one number per text"
            raise ConfigError(f"model.head={model.head}: {self.name} trains {target}; set model.head={self.head}")
        if self.config.trainer.eval_completions and not self.can_generate:
            raise ConfigError(
                f"trainer.eval_completions={self.config.trainer.eval_completions}: {self.name} trains a model that cannot "
                "generate text; set it to 0"
            )

    def setup(self, engine: BaseEngine, tokenizer: Any, samples: TokenDataset | None, held_out: TokenDataset | None) -> None:  # noqa: B027
        """Set up what the loss needs in addition to the policy. Collective; called before the policy is built.

        Args:
            engine: The policy's engine, not initialized yet.
            tokenizer: The policy's tokenizer.
            samples: The dataset to train on; None if it is streamed.
            held_out: The dataset to evaluate on, or None.
        """

    @abstractmethod
    def batch(self, engine: BaseEngine, global_batch: GlobalBatch, *, training: bool) -> PackedBatch:
        """Return this rank's data-parallel shard of a global batch, with all fields that the loss needs. Collective.

        Args:
            engine: The policy's engine.
            global_batch: The global batch.
            training: Whether the batch is for a training step; otherwise it is for an evaluation.
        """

    def close(self) -> None:  # noqa: B027  # most methods have nothing to free
        """Free what `setup` created."""
