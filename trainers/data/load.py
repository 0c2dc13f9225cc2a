"""From the settings of the data to a tokenizer and datasets."""

from dataclasses import dataclass
from typing import Any

from ...engine.hf.tokenizer import load_tokenizer
from ...engine.parallel.collectives import collective_errors
from ..config.runs import RunConfig
from .dataset import Budget, Dataset
from .encode import Kind
from .tokenize import load_token_caches


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a run reads.

    Args:
        tokenizer: The model's tokenizer.
        train: The samples to train on.
        held_out: The samples to evaluate on; None without `data.eval`.
    """

    tokenizer: Any
    train: Dataset
    held_out: Dataset | None


def load_data(config: RunConfig, kind: Kind, budget: Budget) -> RunData:
    """Load the tokenizer and the datasets, before any weight is read. Collective over all processes of the job.

    Args:
        config: The run's settings.
        kind: What the trainer learns from.
        budget: The tokens that a sample may have.

    Raises:
        DrivetrainError: A file, a row or the tokenizer cannot be used; on every rank.
    """
    with collective_errors():
        tokenizer = load_tokenizer(config.model)

    def dataset(names: tuple[str, ...], *, training: bool) -> Dataset:
        caches = load_token_caches(names, tokenizer, config.data, training=training, kind=kind)
        with collective_errors():
            made = Dataset(caches, config.data, budget, names)
        return made

    return RunData(
        tokenizer=tokenizer,
        train=dataset(config.data.train, training=True),
        held_out=dataset(config.data.eval, training=False) if config.data.eval else None,
    )
