"""The base class of all trainers."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, TypeVar

from ..engine.errors import ConfigError
from .config.rl import RLConfig
from .config.runs import RunConfig
from .loop.complete import complete
from .loop.logs import configure_logging
from .loop.loop import TrainResult
from .loop.training_run import TrainingRun

C = TypeVar("C", bound=RunConfig | RLConfig)
D = TypeVar("D")


class BaseTrainer(ABC, Generic[C, D]):
    """A trainer: the base class of `Trainer` and `RLTrainer`.

    Args:
        config: The settings, such as `SFTConfig.parse("recipe=sft", "model.path=MODEL")`.

    Raises:
        ConfigError: The settings are those of another trainer.
    """

    config_class: ClassVar[type[Any]]

    def __init__(self, config: C) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigError(
                f"config is a {type(config).__name__}; {type(self).__name__} needs a {self.config_class.__name__}"
            )
        self.config: C = config

    @abstractmethod
    def check(self) -> None:
        """Check everything that can be checked without data and without a model. Not collective.

        Raises:
            ConfigError: A setting is invalid; the message names the setting, its value and how to fix it.
        """

    @abstractmethod
    def open_run(self) -> AbstractContextManager[TrainingRun]:
        """Build everything that the run needs, and load the checkpoint that it resumes from. Collective over all processes of the job."""

    @abstractmethod
    def make_first_step(self) -> D:
        """Run only the first step, write nothing, and print and return the plan of the run. Collective."""

    def train(self) -> TrainResult:
        """Train to the end, from the start or from the last checkpoint. Collective over all processes of the job.

        Returns:
            How training ended, and where its outputs are.

        Raises:
            DrivetrainError: A setting, a file, a row, a reward or a callback is invalid, or a worker failed; the message says what to do.
                Raised on all ranks.
        """
        configure_logging()
        self.check()
        with self.open_run() as run:
            return complete(run)

    def dry_run(self) -> D:
        """Do everything up to and including the first step, write nothing, and report the memory use. Collective.

        Raises:
            DrivetrainError: As in `train`.
        """
        configure_logging()
        self.check()
        return self.make_first_step()
