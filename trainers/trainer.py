"""The trainers on given answers as Python classes, on which the commands are written."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from ..engine.errors import ConfigError
from ..engine.loss import Loss
from .config.data import DataConfig
from .config.runs import DPOConfig, RMConfig, RunConfig, SFTConfig
from .data.python_data import EVAL, TRAIN, Formatting, PythonData, Rows
from .dry_run import DryRun, dry_run
from .loop.answer_metrics import Metric
from .loop.parts import Callback
from .methods.base import TrainingMethod
from .methods.preference import PreferenceMethod
from .methods.reward import RewardMethod
from .methods.sft import SFTMethod
from .run import Extensions, RunOutcome, run

C = TypeVar("C", bound=RunConfig)


class Trainer(Generic[C]):
    """A trainer on given answers: the base class of `SFTTrainer`, `DPOTrainer` and `RewardTrainer`.

    In a notebook it runs in this process; under torchrun every process makes the same trainer and calls `train`.

    Args:
        config: The settings, such as `SFTConfig.parse("recipe=sft", "model.path=MODEL")`.
        train_data: Rows to train on, a list of dicts or a `datasets.Dataset`, instead of those that `data.train` names.
        eval_data: Rows to evaluate on, instead of those that `data.eval` names.
        formatting: A function that makes of each row one that the trainer reads, also of rows of files; a text that it returns
            stands for a row with the column `text`.
        loss: The loss to minimize, instead of that of the settings. For DPO the batches hold the reference's log-probabilities,
            unless the loss has an attribute `needs_reference` that is False.
        metrics: Functions of any of `prompt`, `answer` and `wanted`, which measure the answers of `trainer.generate`.
        callbacks: Code that the training loop calls on every rank.

    Raises:
        ConfigError: An argument is of another type, or contradicts the settings.
    """

    config_class: ClassVar[type[RunConfig]]
    method_class: ClassVar[type[TrainingMethod]]

    def __init__(
        self,
        config: C,
        *,
        train_data: Rows | None = None,
        eval_data: Rows | None = None,
        formatting: Formatting | None = None,
        loss: Loss | None = None,
        metrics: Sequence[Metric] = (),
        callbacks: Sequence[Callback] = (),
    ) -> None:
        if not isinstance(config, self.config_class):
            raise ConfigError(
                f"config is a {type(config).__name__}; {type(self).__name__} needs a {self.config_class.__name__}"
            )
        _check_callbacks(callbacks)
        _check_loss(loss)
        self._extensions = Extensions(
            data=PythonData.of(train_data, eval_data, formatting), metrics=tuple(metrics), callbacks=tuple(callbacks)
        )
        self.config: C = replace(config, data=_data_of(config.data, self._extensions.data))
        self._loss = loss

    def train(self) -> RunOutcome:
        """Train from start to finish, or from the last checkpoint on. Collective over all processes of the job.

        Returns:
            How training ended, and where its outputs are.

        Raises:
            DrivetrainError: A setting, a file, a row or a callback is wrong; the message names it. Raised on all ranks.
        """
        return run(self.config, self._method(), self._extensions)

    def dry_run(self) -> DryRun:
        """Do everything up to and including the first step, write nothing, and report the memory. Collective.

        Raises:
            DrivetrainError: A setting, a file, a row or the model is wrong; the message names it. Raised on all ranks.
        """
        return dry_run(self.config, self._method(), self._extensions)

    def _method(self) -> TrainingMethod:
        return self.method_class(self.config, self._loss)


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    hooks = [name for name in dir(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks has {callback!r}, which is no Callback; derive its class from drivetrain.Callback")
        # A method that nothing calls would be taken for one that does nothing.
        unknown = sorted(name for name in dir(callback) if name.startswith("on_") and name not in hooks)
        if unknown:
            raise ConfigError(
                f"{type(callback).__name__} has the method {unknown[0]}, which nothing calls; a Callback has {', '.join(hooks)}"
            )


def _check_loss(loss: Loss | None) -> None:
    if loss is None:
        return
    missing = [name for name in ("request", "linear", "tokens", "weights", "__call__") if not hasattr(loss, name)]
    if missing or isinstance(loss, type):
        what = (
            "a class; give an object of it" if isinstance(loss, type) else f"without {', '.join(missing)}; see docs/python.md"
        )
        raise ConfigError(f"loss is {loss!r}, {what}")


def _data_of(data: DataConfig, python: PythonData) -> DataConfig:
    """Return the settings with the names of the rows in memory."""
    given: dict[str, Any] = {}
    for name, setting in ((TRAIN, "train"), (EVAL, "eval")):
        if name not in python.rows:
            continue
        if named := getattr(data, setting):
            raise ConfigError(f"{name} is given, and data.{setting}={list(named)} too; give one of them")
        given[setting] = (name,)
    if EVAL in python.rows and not (data.train or TRAIN in python.rows):
        raise ConfigError(f"{EVAL} is given, but neither {TRAIN} nor data.train; give the rows or the files to train on")
    return replace(data, **given)


class SFTTrainer(Trainer[SFTConfig]):
    """Supervised fine-tuning. The arguments are those of `Trainer`."""

    config_class = SFTConfig
    method_class = SFTMethod


class DPOTrainer(Trainer[DPOConfig]):
    """Preference learning: `dpo.loss`. The arguments are those of `Trainer`."""

    config_class = DPOConfig
    method_class = PreferenceMethod


class RewardTrainer(Trainer[RMConfig]):
    """Reward models. The arguments are those of `Trainer`."""

    config_class = RMConfig
    method_class = RewardMethod
