"""The trainers on a fixed dataset, as Python classes that the commands also use."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from ...engine.errors import ConfigError
from ...engine.loss import Loss
from ..base_trainer import BaseTrainer
from ..config.data import DataConfig
from ..config.runs import DPOConfig, RMConfig, RunConfig, SFTConfig
from ..data.python_data import EVAL, TRAIN, Formatting, PythonData, Rows
from ..loop.callbacks import Callback, check_callbacks
from ..loop.completion_metrics import CompletionMetrics, Metric
from ..loop.early_stopping import EarlyStopping
from ..methods.base import TrainingMethod
from ..methods.preference import PreferenceMethod
from ..methods.reward import RewardMethod
from ..methods.sft import SFTMethod
from ..validate import check_outputs
from .dry_run import DryRun, measure
from .run import OfflineRun, evaluation_metrics, open_run

C = TypeVar("C", bound=RunConfig)


class Trainer(BaseTrainer[C, DryRun]):
    """A trainer on a fixed dataset: the base class of `SFTTrainer`, `DPOTrainer` and `RewardTrainer`.

    In a notebook it runs in this process. Under torchrun, every process creates the same trainer and calls `train`.

    Args:
        config: The settings, such as `SFTConfig.parse("recipe=sft", "model.path=MODEL")`.
        train_data: Rows to train on, a list of dicts or a `datasets.Dataset`, instead of those that `data.train` names.
        eval_data: Rows to evaluate on, instead of those that `data.eval` names.
        formatting: A function that converts each row, also of files, to one that the trainer reads. If it returns a text, the row
            has the single column `text`.
        loss: The loss to minimize, instead of that of the settings. For DPO, batches hold the reference's log-probabilities
            unless the loss has an attribute `needs_reference` that is False.
        metrics: Functions of any of `prompt`, `completion` and `expected`, which score the completions of `trainer.eval_completions`.
        callbacks: Code that the training loop calls on every rank.

    Raises:
        ConfigError: An argument has the wrong type, or contradicts the settings.
    """

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
        super().__init__(config)
        check_callbacks(callbacks)
        _check_loss(loss)
        self._python = PythonData.of(train_data, eval_data, formatting)
        self._loss, self._metrics, self._callbacks = loss, tuple(metrics), tuple(callbacks)
        self.config = replace(config, data=_data_of(config.data, self._python))

    def check(self) -> None:
        """Check everything that can be checked without data and without a model. Not collective.

        Raises:
            ConfigError: A setting is wrong; the message names the setting, its value and how to fix it.
        """
        trainer, method = self.config.trainer, self.make_method()
        self.config.check()
        method.check()
        # Metrics that never run would leave their curves empty without an error.
        if self._metrics and not trainer.eval_completions:
            raise ConfigError(
                "metrics are given, which measure generated answers, but trainer.eval_completions=0; set it to their number"
            )
        EarlyStopping.of(trainer, evaluation_metrics(method, self._completion_metrics))
        check_outputs(trainer)

    def open_run(self, *, is_dry: bool = False) -> AbstractContextManager[OfflineRun]:
        """Read the data, initialize the engine and resume. Collective over all processes of the job.

        Args:
            is_dry: Whether nothing is to be written.
        """
        return open_run(
            self.config,
            self.make_method(),
            self._completion_metrics,
            python=self._python,
            callbacks=self._callbacks,
            is_dry=is_dry,
        )

    def make_first_step(self) -> DryRun:
        """Make a step on the longest samples, and report its memory. Collective.

        No folder is created or locked, so that it may run beside the run itself, if there is enough memory.
        """
        with self.open_run(is_dry=True) as run:
            return measure(run)

    def make_method(self) -> TrainingMethod:
        """Return the training method, with the loss of the program if it has given one."""
        return self.method_class(self.config, self._loss)

    @property
    def _completion_metrics(self) -> CompletionMetrics:
        return CompletionMetrics.of(self.config.trainer.metrics, self._metrics)


def _check_loss(loss: Loss | None) -> None:
    if loss is None:
        return
    # Checked by attributes, since a loss need not derive from a class.
    missing = [name for name in ("request", "linear", "tokens", "weights", "__call__") if not hasattr(loss, name)]
    if missing or isinstance(loss, type):
        what = (
            "a class; give an object of it" if isinstance(loss, type) else f"without {', '.join(missing)}; see docs/python.md"
        )
        raise ConfigError(f"loss is {loss!r}, {what}")


def _data_of(data: DataConfig, python: PythonData) -> DataConfig:
    """Return the settings with the names of the rows in memory."""
    names: dict[str, Any] = {}
    for name, setting in ((TRAIN, "train"), (EVAL, "eval")):
        if name not in python.rows:
            continue
        if named := getattr(data, setting):
            raise ConfigError(f"{name} is given, and data.{setting}={list(named)} too; give one of them")
        names[setting] = (name,)
    if EVAL in python.rows and not (data.train or TRAIN in python.rows):
        raise ConfigError(f"{EVAL} is given, but neither {TRAIN} nor data.train; give the rows or the files to train on")
    return replace(data, **names)


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
