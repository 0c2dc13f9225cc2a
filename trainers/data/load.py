"""Loading of the tokenizer and the datasets that the settings specify."""

from dataclasses import dataclass
from typing import Any

from ...engine.hf.tokenizer import load_tokenizer
from ...engine.parallel.collectives import collective_errors
from ..config.runs import RunConfig
from .dataset import Budget, Dataset
from .encode import Kind
from .python_data import PythonData
from .tokenize import NO_PYTHON, load_token_caches


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The tokenizer and the data of a run.

    Args:
        tokenizer: The model's tokenizer.
        train: The samples to train on.
        held_out: The samples to evaluate on, or None if `data.eval` is not set.
    """

    tokenizer: Any
    train: Dataset
    held_out: Dataset | None


def load_data(config: RunConfig, kind: Kind, budget: Budget, python: PythonData = NO_PYTHON) -> RunData:
    """Load the tokenizer and the datasets; no model weights are read. Collective over all processes of the job.

    Args:
        config: The run's settings.
        kind: The kind of data that the trainer learns from.
        budget: The token limit of a sample.
        python: The rows in memory and the formatting function of a Python program.

    Raises:
        DrivetrainError: A file, a row or the tokenizer cannot be used; raised on all ranks.
    """
    with collective_errors():
        tokenizer = load_tokenizer(config.model)

    def open_dataset(names: tuple[str, ...], *, training: bool) -> Dataset:
        caches = load_token_caches(names, tokenizer, config.data, training=training, kind=kind, python=python)
        with collective_errors():
            dataset = Dataset(caches, config.data, budget, names)
        return dataset

    return RunData(
        tokenizer=tokenizer,
        train=open_dataset(config.data.train, training=True),
        held_out=open_dataset(config.data.eval, training=False) if config.data.eval else None,
    )
