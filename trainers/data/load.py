"""Loading of the tokenizer and the datasets that the settings specify."""

import os
from dataclasses import dataclass
from typing import Any

from ...engine.hf.tokenizer import load_tokenizer
from ...engine.parallel.collectives import all_gather_object, broadcast_object, collective_errors
from ..config.runs import RunConfig
from .dataset import Budget, TokenDataset, length_limit
from .encode import DataKind
from .python_data import PythonData
from .sources import check_columns, warn_about_repeated
from .stream import BroadcastFunction, Gather, SampleStream
from .tokenize import NO_PYTHON, Encoder, load_token_caches, open_training_source
from .turn_ends import ends_to_learn


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The tokenizer and the data of a run.

    Args:
        tokenizer: The model's tokenizer.
        source: The samples to train on, or what streams them.
        held_out: The samples to evaluate on, or None if `data.eval` is not set.
    """

    tokenizer: Any
    source: TokenDataset | SampleStream
    held_out: TokenDataset | None

    @property
    def train(self) -> TokenDataset:
        """The samples to train on, which are not streamed."""
        assert isinstance(self.source, TokenDataset)
        return self.source


def load_data(
    config: RunConfig,
    kind: DataKind,
    budget: Budget,
    python: PythonData = NO_PYTHON,
    *,
    gather: Gather = all_gather_object,
    broadcast: BroadcastFunction = broadcast_object,
) -> RunData:
    """Load the tokenizer and the datasets; no model weights are read. Collective over all processes of the job.

    Args:
        config: The run's settings.
        kind: The kind of data that the trainer learns from.
        budget: The token limit of a sample.
        python: The rows in memory and the formatting function of a Python program.
        gather: Exchanges objects and errors between all ranks while data are streamed.
        broadcast: Passes an object of the first rank to all ranks while data are streamed.

    Raises:
        DrivetrainError: A file, a row or the tokenizer cannot be used; raised on all ranks.
    """
    with collective_errors():
        tokenizer = load_tokenizer(config.model)
        ends = ends_to_learn(config.model)

    limit = length_limit(config.data, budget)

    def open_dataset(names: tuple[str, ...], *, training: bool) -> TokenDataset:
        caches = load_token_caches(
            names, tokenizer, config.data, training=training, kind=kind, python=python, limit=limit, ends=ends
        )
        with collective_errors():
            dataset = TokenDataset(caches, config.data, budget, names)
        return dataset

    def open_stream(names: tuple[str, ...]) -> SampleStream:
        rank, sources = int(os.environ.get("RANK", "0")), []
        with collective_errors():
            if rank == 0:
                check_columns(config.data.columns)
                sources = [open_training_source(name, config.data, python) for name in names]
                warn_about_repeated(sources, "data.train")
        return SampleStream(
            sources=sources,
            names=names,
            encoder=Encoder(tokenizer, config.data, kind, python, limit, ends),
            data=config.data,
            budget=budget,
            gather=gather,
            broadcast=broadcast,
            rank=rank,
            ranks=int(os.environ.get("WORLD_SIZE", "1")),
        )

    return RunData(
        tokenizer=tokenizer,
        source=open_stream(config.data.train) if config.data.streaming else open_dataset(config.data.train, training=True),
        held_out=open_dataset(config.data.eval, training=False) if config.data.eval else None,
    )
