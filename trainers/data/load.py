"""Loading of the tokenizer and the datasets that the settings specify."""

import os
from dataclasses import dataclass
from typing import Any

from ...engine.config import ModelConfig
from ...engine.hf.tokenizer import load_tokenizer
from ...engine.parallel.collectives import all_gather_object, broadcast_object, collective_errors
from ..config.data import DataConfig
from .dataset import Budget, TokenDataset, length_limit
from .encode import DataKind
from .media import MediaReader
from .python_data import PythonData
from .sources import check_columns, warn_about_repeated
from .stream import BroadcastFunction, Gather, SampleStream
from .tokenize import NO_PYTHON, Encoder, cache_folder, load_token_caches, open_training_source
from .turn_ends import ends_to_learn


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The tokenizer and the data of a run.

    Args:
        tokenizer: The model's tokenizer.
        source: The samples to train on, or the stream of them.
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
    model: ModelConfig,
    data: DataConfig,
    *,
    kind: DataKind,
    budget: Budget,
    python: PythonData = NO_PYTHON,
    gather: Gather = all_gather_object,
    broadcast: BroadcastFunction = broadcast_object,
) -> RunData:
    """Load the tokenizer and the datasets; no model weights are read. Collective over all processes of the job.

    Args:
        model: The settings of the model, whose tokenizer is used.
        data: The settings of the data.
        kind: The kind of data that the trainer uses.
        budget: The token limit of a sample.
        python: The rows in memory and the formatting function of a Python program.
        gather: Exchanges objects and errors between all ranks while data are streamed.
        broadcast: Passes an object of the first rank to all ranks while data are streamed.

    Raises:
        DrivetrainError: A file, a row or the tokenizer cannot be used; raised on all ranks.
    """
    with collective_errors():
        tokenizer = load_tokenizer(model)
        ends = ends_to_learn(model)
        media = MediaReader.of(model, data, tokenizer, cache_folder(data))

    limit = length_limit(data, budget)

    def open_dataset(names: tuple[str, ...], *, training: bool) -> TokenDataset:
        caches = load_token_caches(
            names, tokenizer, data, training=training, kind=kind, python=python, limit=limit, ends=ends, media=media
        )
        with collective_errors():
            dataset = TokenDataset(caches, data, budget, names, store=None if media is None else media.store)
        return dataset

    def open_stream(names: tuple[str, ...]) -> SampleStream:
        rank, sources = int(os.environ.get("RANK", "0")), []
        with collective_errors():
            # Only the first rank reads the sources; the others receive their rows from it.
            if rank == 0:
                check_columns(data.columns)
                sources = [open_training_source(name, data, python) for name in names]
                warn_about_repeated(sources, "data.train")
        return SampleStream(
            sources=sources,
            names=names,
            encoder=Encoder(tokenizer, data, kind, python, limit, ends, media),
            data=data,
            budget=budget,
            gather=gather,
            broadcast=broadcast,
            rank=rank,
            ranks=int(os.environ.get("WORLD_SIZE", "1")),
        )

    return RunData(
        tokenizer=tokenizer,
        source=open_stream(data.train) if data.streaming else open_dataset(data.train, training=True),
        held_out=open_dataset(data.eval, training=False) if data.eval else None,
    )
