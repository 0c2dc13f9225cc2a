"""The reference that a policy is compared with: a frozen model, the policy's own base, or numbers kept from an earlier pass."""

import json
import logging
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from ...engine.base import BaseEngine
from ...engine.config import LoraConfig, OffloadConfig
from ...engine.errors import ConfigError, DrivetrainError
from ...engine.hf.config import read_config
from ...engine.hf.model_path import fingerprint, resolve_folder
from ...engine.hf.tokenizer import load_tokenizer
from ...engine.loss import OutputRequest
from ...engine.parallel.collectives import all_gather_object, collective_errors
from ...engine.registry import engine_class, options_class
from ...workers.losses.sequences import sequence_sums
from ..config.runs import DPOConfig
from ..data.dataset import Dataset
from ..data.loader import GlobalBatch, Loader, Sampler
from ..data.tokenize import Bar, cache_folder

log = logging.getLogger(__name__)

FORMAT = 1


def log_probs_of(engine: BaseEngine, drawn: GlobalBatch, *, training: bool = False) -> Tensor:
    """`[D]` float64: the log-probability of each document's supervised tokens, of the whole global batch, on every rank.
    Collective over the engine's ranks, which are all of the job.

    Args:
        engine: initialised.
        drawn: the documents.
        training: over the micro-batches that a training step makes of them.
    """
    share = drawn.share_of(engine)
    found = engine.infer_batch(share.batch, OutputRequest(log_probs=True), as_in_training=training)["log_probs"]
    sums = sequence_sums(found.double(), share.batch).tolist()
    every = torch.zeros(len(drawn), dtype=torch.float64)
    for answers, places, values in engine.topology.all_gather_object((engine.topology.is_output_rank, share.places, sums)):
        if answers:
            every[places] = torch.tensor(values, dtype=torch.float64)
    return every


class Reference(ABC):
    """Says how likely the reference finds documents."""

    @abstractmethod
    def log_probs(self, drawn: GlobalBatch, *, training: bool = False) -> Tensor:
        """`[D]` float64, as `log_probs_of`. Collective."""

    def close(self) -> None:  # noqa: B027  # some have nothing to free
        """Free it."""


class FrozenModel(Reference):
    """A model in an engine of its own, which never trains.

    Args:
        engine: initialised.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self._engine = engine

    def log_probs(self, drawn: GlobalBatch, *, training: bool = False) -> Tensor:
        """By its forward pass."""
        return log_probs_of(self._engine, drawn, training=training)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()


class WithoutAdapters(Reference):
    """The policy's base.

    Args:
        engine: the policy's, initialised by the time of the first question.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self._engine = engine

    def log_probs(self, drawn: GlobalBatch, *, training: bool = False) -> Tensor:
        """By the policy's forward pass with its adapters off."""
        with self._engine.disable_adapter():
            return log_probs_of(self._engine, drawn, training=training)


class CachedReference(Reference):
    """Numbers that were computed before.

    Args:
        tables: by the digest of the samples, `[documents]` float64.
    """

    def __init__(self, tables: dict[str, NDArray[Any]]) -> None:
        self._tables = tables

    def log_probs(self, drawn: GlobalBatch, *, training: bool = False) -> Tensor:
        """Looked up."""
        assert drawn.numbers is not None
        return torch.from_numpy(self._tables[drawn.digest][drawn.numbers])


def mode_of(config: DPOConfig) -> str:
    """`reference.mode`, with `auto` resolved."""
    if config.reference.mode == "auto":
        return "base" if config.model.lora.rank > 0 and config.reference.path is None else "model"
    return config.reference.mode


def reference_engine(config: DPOConfig) -> BaseEngine:
    """The engine of a frozen reference, not initialised."""
    asked, own = config.reference, config.engine
    model = replace(config.model, path=asked.path or config.model.path, lora=LoraConfig(), freeze=(), router_aux_loss_coef=0.0)
    engine = replace(own, recompute="none", offload=OffloadConfig(params=asked.offload))
    if asked.backend is not None:
        options = own.options if asked.backend == own.backend else None
        if options is None and (kind := options_class(asked.backend)) is not None:
            options = kind()
        engine = replace(engine, backend=asked.backend, parallel=asked.parallel, options=options)
    made: BaseEngine = engine_class(engine.backend)(model=model, engine=engine)
    return made


def check_reference(config: DPOConfig) -> None:
    """Refuse a reference that cannot be compared with the policy. Reads no weight. Not collective.

    Raises:
        ConfigError: names the setting.
    """
    asked, mode = config.reference, mode_of(config)
    if mode == "base":
        if config.model.lora.rank <= 0:
            raise ConfigError("reference.mode=base needs adapters to switch off (model.lora.rank); use model or cached")
        for name, value in (("path", asked.path), ("backend", asked.backend), ("offload", asked.offload)):
            if value not in (None, "none"):
                raise ConfigError(
                    f"reference.{name}={value} with reference.mode=base, where the reference is the policy without its adapters; use reference.mode=model"
                )
        return
    try:
        reference_engine(config).check()
    except DrivetrainError as e:
        where = " (it is model.path; reference.path is unset)" if asked.path is None else f" (reference.path={asked.path})"
        raise ConfigError(f"the reference cannot be built{where}: {e}") from e
    if asked.path is not None and asked.path != config.model.path:
        _check_vocabulary(config)


def _check_vocabulary(config: DPOConfig) -> None:
    model = replace(config.model, path=config.reference.path or "")
    try:
        theirs = load_tokenizer(model)
    except DrivetrainError as e:
        raise ConfigError(f"reference.path={model.path}: {e}") from e
    mine = load_tokenizer(config.model)
    here, there = mine.get_vocab(), theirs.get_vocab()
    if here != there:
        apart = sorted(token for token in here.keys() | there.keys() if here.get(token) != there.get(token))
        raise ConfigError(
            f"reference.path={model.path} has another tokenizer ({len(theirs)} tokens) than model.path={config.model.path} ({len(mine)}; {len(apart)} "
            f"differ, {apart[0]!r} is one): the same text would be other tokens; use a reference with the policy's own"
        )
    rows = read_config(model).vocab_size
    if rows < len(mine):
        raise ConfigError(
            f"reference.path={model.path} has embeddings for {rows} tokens, the tokenizer has {len(mine)}; use a reference that knows them all"
        )


def build_reference(config: DPOConfig, policy: BaseEngine, every: Sequence[Dataset]) -> Reference:
    """Make the reference. Collective over all ranks of the job.

    Args:
        config: of the run.
        policy: its engine, which may not be initialised yet.
        every: samples that will be asked about.
    """
    mode = mode_of(config)
    if mode == "base":
        return WithoutAdapters(policy)
    if mode == "model":
        return FrozenModel(reference_engine(config).initialize())
    return _kept(config, every)


def _identity(config: DPOConfig, engine: BaseEngine) -> str:
    """All that a reference's numbers depend on beside the samples; the first rank's, as another machine's copy of the model is not
    looked at. Collective."""
    digest = ""
    with collective_errors():
        if os.environ.get("RANK", "0") == "0":
            # A name on the Hub stands for whatever commit is its newest.
            folder = resolve_folder(engine.model_config.path)
            said = {
                "format": FORMAT,
                "transformers": transformers.__version__,
                "weights": fingerprint(str(folder)),
                "config": (folder / "config.json").read_text(),
                "model": {**asdict(engine.model_config), "path": None},
                "precision": asdict(engine.config.precision),
                "seed": engine.config.seed if config.model.init == "random" else None,
            }
            digest = xxhash.xxh3_128_hexdigest(json.dumps(said, sort_keys=True).encode())
    return str(all_gather_object(digest)[0])


def _kept(config: DPOConfig, every: Sequence[Dataset]) -> CachedReference:
    engine = reference_engine(config)
    known = _identity(config, engine)
    tables: dict[str, NDArray[Any]] = {}
    missing: list[tuple[Dataset, Path]] = []
    for samples in every:
        name = xxhash.xxh3_128_hexdigest(f"{known} {samples.digest}".encode())
        file = cache_folder(config.data) / f"reference-{name}.npy"
        table = _read(file, samples.lengths.size)
        # Where one machine lacks it, all compute it.
        if all(all_gather_object(table is not None)):
            assert table is not None
            log.info("the reference's log-probabilities were computed before: %s", file)
            tables[samples.digest] = table
        else:
            missing.append((samples, file))
    if missing:
        engine.initialize()
        try:
            for samples, file in missing:
                tables[samples.digest] = _compute(config, engine, samples, file)
        finally:
            engine.close()
    return CachedReference(tables)


def _read(file: Path, size: int) -> NDArray[Any] | None:
    try:
        table: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return table if table.shape == (size,) and table.dtype == np.float64 else None


def _compute(config: DPOConfig, engine: BaseEngine, samples: Dataset, file: Path) -> NDArray[Any]:
    order = Sampler(samples.sizes, weights=None, seed=0, shuffle=False)
    table = np.zeros(samples.lengths.size)
    done = 0
    with Bar("the reference's log-probabilities") as bar:
        for drawn in Loader(samples, order, batch_size=config.data.batch_size).once():
            assert drawn.numbers is not None
            table[drawn.numbers] = log_probs_of(engine, drawn).numpy()
            done += len(drawn) // drawn.width
            bar.advance(len(drawn) / samples.lengths.size, done)
    with collective_errors():
        if os.environ.get("LOCAL_RANK", "0") == "0":
            temporary = file.with_name(f".tmp-{uuid.uuid4().hex}.npy")
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                np.save(temporary, table, allow_pickle=False)
                temporary.rename(file)
            except OSError as e:
                raise ConfigError(
                    f"the reference's log-probabilities cannot be written to {file.parent}: {e.strerror}; set data.cache_dir"
                ) from e
    return table
