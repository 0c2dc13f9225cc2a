"""The interface between the training loop and the runs of all trainers."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...engine.errors import disk_error
from ..config.rl import RLConfig
from ..config.runs import RunConfig
from ..config.trainer import LoopConfig
from ..data.order import changed_sources
from .callbacks import Callback, StepHook, call_all
from .early_stopping import EarlyStopping
from .loggers import Display, Logger
from .ranks import TrainerRanks
from .samples import HeldOutCompletion
from .signals import StopSignal

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """An evaluation.

    Args:
        metrics: Its metrics by name.
        tokens: The number of tokens that the model was evaluated on.
        completions: The model's completions, for people to read.
    """

    metrics: Mapping[str, float]
    tokens: int
    completions: Sequence[HeldOutCompletion] = ()


@dataclass(kw_only=True, eq=False)
class TrainingRun(ABC):
    """A run of a trainer, driven by `train`. Methods that are not properties are collective over `ranks` unless they say otherwise.

    Args:
        settings: All settings, as in `config.yaml`.
        ranks: The processes that run the trainer.
        early_stopping: The tracker of the best evaluation.
        display: The presentation of the run's numbers.
        total_steps: The number of the last step.
        callbacks: User code, called on every rank.
    """

    settings: RunConfig | RLConfig
    ranks: TrainerRanks
    early_stopping: EarlyStopping
    display: Display
    total_steps: int
    callbacks: Sequence[Callback] = ()
    step: int = field(default=0, init=False)
    """The number of the last completed step; 0 before the first."""
    evaluates_first: bool = field(default=False, init=False)
    """Whether an evaluation comes before the first step."""
    loggers: Sequence[Logger] = field(default=(), init=False)
    """The loggers, on the first rank while the loop runs."""
    last_evaluation: Mapping[str, float] = field(default_factory=dict, init=False)
    """The metrics of the last evaluation."""
    changed_data: Sequence[str] = field(default=(), init=False)
    """The sources whose contents have changed since the checkpoint that the run resumed from, each after the setting that names it."""
    is_finished: bool = field(default=False, init=False)
    """Whether the run resumed from its last step, so that it trains no more."""
    is_asked_to_stop: bool = field(default=False, init=False)
    """Whether a callback has asked to stop."""

    def __post_init__(self) -> None:
        self.resumed_step = self._saved_step = self.step
        self.is_finished = self.step > 0 and (self.step >= self.total_steps or self.early_stopping.stop)

    @property
    def config(self) -> LoopConfig:
        """The `trainer` settings, such as how often to evaluate and save."""
        return self.settings.trainer

    # ---- what a trainer implements -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def checkpoint_root(self) -> str:
        """The folder or URL of the run's checkpoints."""

    @property
    @abstractmethod
    def has_evaluation(self) -> bool:
        """Whether there is anything to evaluate on."""

    @property
    @abstractmethod
    def has_adapters(self) -> bool:
        """Whether adapters are trained; they are also exported separately."""

    @abstractmethod
    def make_step(self) -> dict[str, Any]:
        """Make step number `self.step + 1`, set `self.step` to it, and return its record for the loggers."""

    @abstractmethod
    def evaluate(self, stop: StopSignal) -> EvaluationResult | None:
        """Evaluate the model; return None if the run was asked to stop before the evaluation was complete."""

    @abstractmethod
    def write_checkpoint(self, *, evaluation_due: bool, last: bool) -> None:
        """Save the state after the last completed step, keep the best checkpoint and delete older ones; see `save`."""

    @abstractmethod
    def restore_step(self, step: int) -> None:
        """Load the model of an earlier step from its checkpoint."""

    @abstractmethod
    def export_model(self, folder: Path, *, adapters_only: bool) -> str:
        """Write the model in Hugging Face format, or its adapters in peft format; return the path."""

    def wait(self) -> None:  # noqa: B027  # most runs write nothing in the background
        """Wait until background writes are complete."""

    def failure(self) -> Exception | None:
        """Return this rank's error in background work, without waiting. Not collective."""
        return None

    # ---- what the loop needs -----------------------------------------------------------------------------------------

    def compare_data(self, train: Sequence[str], saved_eval: Mapping[str, str], held_out: Mapping[str, str]) -> None:
        """Set `changed_data`.

        Args:
            train: The sources of `data.train` whose contents have changed.
            saved_eval: The digests of the sources of `data.eval` in the checkpoint, by name.
            held_out: The digests of the sources of `data.eval`, by name.
        """
        changed = {"data.train": train, "data.eval": changed_sources(saved_eval, held_out)}
        self.changed_data = [f"{setting}: the contents of {name}" for setting, names in changed.items() for name in names]

    def is_due(self, every: int | None) -> bool:
        """Return whether a periodic action, which also happens at the end, is due after the last completed step.

        Not collective.
        """
        return self.step == self.total_steps or bool(every and self.step % every == 0)

    def notify(self, hook: StepHook, *args: Any) -> None:
        """Call a method of every callback with this run and the number of the last completed step."""
        asked = call_all(self.callbacks, hook, self.ranks, self, self.step, *args)
        # The return value of other methods has no meaning.
        self.is_asked_to_stop |= asked and hook in ("on_step_end", "on_evaluate")

    def log(self, record: Mapping[str, Any], completions: Sequence[HeldOutCompletion] = ()) -> Exception | None:
        """Pass a record and completions to the loggers. Not collective.

        Returns:
            The error, if any, for the next exchange between the ranks to raise on all of them.
        """
        try:
            for logger in self.loggers:
                logger.log(record)
                if completions:
                    logger.log_completions(self.step, completions)
        except OSError as e:
            return disk_error(f"the metrics of step {self.step}", e)
        except Exception as e:  # a logger's library may raise anything
            return e
        return None

    def save(self, *, evaluation_due: bool = False, last: bool = False) -> None:
        """Save a checkpoint with everything that a resumed run needs.

        Args:
            evaluation_due: Whether the evaluation of this step still has to be done.
            last: Whether no step follows, so that the checkpoint must be complete on return.
        """
        self.write_checkpoint(evaluation_due=evaluation_due, last=last)
        self._saved_step = self.step
        self.notify("on_save")

    @contextmanager
    def saved_on(self, error: type[Exception], what: str, *, evaluation_due: bool = False) -> Iterator[None]:
        """Save the last completed step if the block fails, and raise the error. Saving is collective.

        Args:
            error: The class of errors to save on. All ranks must raise an error of this class, or the others would wait in the save.
            what: A description of the block, for messages.
            evaluation_due: Whether the evaluation of that step still has to be done.
        """
        try:
            yield
        except error:
            # Nothing is lost otherwise: the run has not made a step since its checkpoint.
            if self.step > self.resumed_step:
                if self.step > self._saved_step:
                    self.save(evaluation_due=evaluation_due, last=True)
                else:
                    # The checkpoint may still be in a background write, which can fail.
                    self.wait()
                log.error("%s failed; step %d was saved, from which the same command resumes", what, self.step)
            raise

    def export(self, folder: Path) -> dict[str, str]:
        """Export the current model, and its adapters separately if it has any; return their paths by name."""
        outputs = {"adapter": self.export_model(folder / "adapter", adapters_only=True)} if self.has_adapters else {}
        return {**outputs, "model": self.export_model(folder / "hf", adapters_only=False)}
