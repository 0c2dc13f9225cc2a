"""The reference that a policy is compared with: a frozen model, the policy's base model, or cached log-probabilities."""

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
from ...engine.hf.model_path import fingerprint, resolve_folder
from ...engine.loss import OutputRequest
from ...engine.parallel.collectives import all_gather_object, call_on_first, collective_errors
from ...engine.registry import engine_class, options_class
from ...losses.sequences import sequence_sums
from ..config.runs import DPOConfig
from ..data.dataset import TokenDataset
from ..data.loader import GlobalBatch, Loader
from ..data.order import Sampler
from ..data.tokenize import Bar, cache_folder
from ..data.vocabulary import check_same_vocabulary

log = logging.getLogger(__name__)

FORMAT = 1


def log_probs_of(engine: BaseEngine, global_batch: GlobalBatch, *, training: bool = False) -> Tensor:
    """Compute the log-probability of each document's supervised tokens.

    Collective over the engine's ranks, which are all ranks of the job.

    Args:
        engine: The initialized engine of the model.
        global_batch: The global batch.
        training: Whether to use the same micro-batches as a training step.

    Returns:
        `[D]` float64: the values of the entire global batch, on all ranks.
    """
    shard = global_batch.shard_of(engine)
    # With the micro-batches of training, equal weights in the same layout give bitwise equal numbers, so that policy
    # and reference can agree exactly before the first step.
    log_probs = engine.infer_batch(shard.batch, OutputRequest(log_probs=True), as_in_training=training)["log_probs"]
    # The loss uses the difference of two such sums, which is small compared with them, so add in float64.
    sums = sequence_sums(log_probs.double(), shard.batch).tolist()
    result = torch.zeros(len(global_batch), dtype=torch.float64)
    for is_output_rank, positions, values in engine.topology.all_gather_object(
        (engine.topology.is_output_rank, shard.positions, sums)
    ):
        if is_output_rank:
            # Ranks that share a shard have the same values; the output rank's are taken.
            result[positions] = torch.tensor(values, dtype=torch.float64)
    return result


class ReferenceModel(ABC):
    """A reference that provides log-probabilities of documents."""

    @abstractmethod
    def log_probs(self, global_batch: GlobalBatch, *, training: bool = False) -> Tensor:
        """Return the documents' log-probabilities, `[D]` float64. Collective.

        Args:
            global_batch: The global batch.
            training: Whether to use the same micro-batches as a training step.
        """

    def close(self) -> None:  # noqa: B027  # some references have nothing to free
        """Free the reference's resources."""


class FrozenModel(ReferenceModel):
    """A frozen model in a separate engine.

    Args:
        engine: The model's initialized engine.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self._engine = engine

    def log_probs(self, global_batch: GlobalBatch, *, training: bool = False) -> Tensor:
        """Compute the log-probabilities with a forward pass. Collective."""
        return log_probs_of(self._engine, global_batch, training=training)

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()


class PolicyBase(ReferenceModel):
    """The policy's base model.

    Args:
        engine: The policy's engine, which must be initialized before the first call of `log_probs`.
    """

    def __init__(self, engine: BaseEngine) -> None:
        self._engine = engine

    def log_probs(self, global_batch: GlobalBatch, *, training: bool = False) -> Tensor:
        """Compute the log-probabilities with the policy's forward pass, adapters disabled. Collective."""
        with self._engine.disable_adapter():
            return log_probs_of(self._engine, global_batch, training=training)


class CachedReference(ReferenceModel):
    """Log-probabilities that were computed earlier.

    Args:
        tables: The log-probabilities of each dataset, `[documents]` float64, keyed by the dataset's digest.
    """

    def __init__(self, tables: dict[str, NDArray[Any]]) -> None:
        self._tables = tables

    def log_probs(self, global_batch: GlobalBatch, *, training: bool = False) -> Tensor:
        """Look up the log-probabilities."""
        assert global_batch.numbers is not None
        return torch.from_numpy(self._tables[global_batch.digest][global_batch.numbers])


def resolved_mode(config: DPOConfig) -> str:
    """Return `reference.mode` with `auto` resolved."""
    if config.reference.mode == "auto":
        return "base" if _has_base(config) and config.reference.path is None else "model"
    return config.reference.mode


def _has_base(config: DPOConfig) -> bool:
    """Return whether the policy without its adapters is the model that training began with."""
    return config.model.lora.rank > 0 and not config.model.lora.modules_to_save


def reference_engine(config: DPOConfig) -> BaseEngine:
    """Return the engine of a frozen reference, not initialized."""
    settings, engine_config = config.reference, config.engine
    model = replace(
        config.model,
        path=settings.path or config.model.path,
        # The frozen model: without adapters, and without everything that only changes gradients or is trained.
        lora=LoraConfig(),
        freeze=(),
        router_aux_loss_coef=0.0,
        router_bias_update_rate=0.0,
    )
    engine = replace(engine_config, recompute="none", offload=OffloadConfig(params=settings.offload))
    if settings.backend is not None:
        # Another backend has other options, so it gets its defaults.
        options = engine_config.options if settings.backend == engine_config.backend else None
        if options is None and (kind := options_class(settings.backend)) is not None:
            options = kind()
        engine = replace(engine, backend=settings.backend, parallel=settings.parallel, options=options)
    reference: BaseEngine = engine_class(engine.backend)(model=model, engine=engine)
    return reference


def check_reference(config: DPOConfig) -> None:
    """Check that the reference can be compared with the policy. Reads no weights. Not collective.

    Raises:
        ConfigError: The reference does not fit; the message names the setting.
    """
    settings, mode = config.reference, resolved_mode(config)
    if mode == "base":
        if config.model.lora.rank <= 0:
            raise ConfigError("reference.mode=base needs adapters to disable (model.lora.rank); use model or cached")
        if not _has_base(config):
            raise ConfigError(
                f"reference.mode=base with model.lora.modules_to_save={list(config.model.lora.modules_to_save)}, which are trained in "
                "full, so that without its adapters the policy is another model; use model or cached"
            )
        for name, value in (("path", settings.path), ("backend", settings.backend), ("offload", settings.offload)):
            if value not in (None, "none"):
                raise ConfigError(
                    f"reference.{name}={value} with reference.mode=base, where the reference is the policy without its "
                    "adapters; use reference.mode=model"
                )
        return
    try:
        reference_engine(config).check()
    except DrivetrainError as e:
        hint = (
            " (it is model.path; reference.path is unset)" if settings.path is None else f" (reference.path={settings.path})"
        )
        raise ConfigError(f"the reference cannot be built{hint}: {e}") from e
    if settings.path is not None and settings.path != config.model.path:
        check_same_vocabulary(config.model, replace(config.model, path=settings.path), "reference.path")


def build_reference(config: DPOConfig, policy: BaseEngine, every: Sequence[TokenDataset]) -> ReferenceModel:
    """Build the reference. Collective over all ranks of the job.

    Args:
        config: The run's settings.
        policy: The policy's engine, which need not be initialized yet.
        every: All datasets for which log-probabilities will be needed.
    """
    mode = resolved_mode(config)
    if mode == "base":
        return PolicyBase(policy)
    if mode == "model":
        return FrozenModel(reference_engine(config).initialize())
    return _cached_reference(config, every)


def _identity(config: DPOConfig, engine: BaseEngine) -> str:
    """Return a hash of everything except the data that a reference's log-probabilities depend on. Collective.

    Only rank 0 computes the hash; another machine's copy of the model is not checked.
    """

    def compute() -> str:
        # A Hub name refers to the repository's latest commit, so hash the resolved folder.
        folder = resolve_folder(engine.model_config.path)
        inputs = {
            "format": FORMAT,
            "transformers": transformers.__version__,
            "weights": fingerprint(str(folder)),
            "config": (folder / "config.json").read_text(),
            "model": {**asdict(engine.model_config), "path": None},
            "precision": asdict(engine.config.precision),
            "seed": engine.config.seed if config.model.init == "random" else None,
        }
        return xxhash.xxh3_128_hexdigest(json.dumps(inputs, sort_keys=True).encode())

    return call_on_first(compute)


def _cached_reference(config: DPOConfig, datasets: Sequence[TokenDataset]) -> CachedReference:
    engine = reference_engine(config)
    identity = _identity(config, engine)
    tables: dict[str, NDArray[Any]] = {}
    missing: list[tuple[TokenDataset, Path]] = []
    for dataset in datasets:
        name = xxhash.xxh3_128_hexdigest(f"{identity} {dataset.digest}".encode())
        file = cache_folder(config.data) / f"reference-{name}.npy"
        table = _read(file, dataset.lengths.size)
        # If the table is missing on one machine, all ranks compute it.
        if all(all_gather_object(table is not None)):
            assert table is not None
            log.info("using the reference's log-probabilities from an earlier run: %s", file)
            tables[dataset.digest] = table
        else:
            missing.append((dataset, file))
    if missing:
        # Build the model only if a table is missing, and free it before the policy is built.
        engine.initialize()
        try:
            for dataset, file in missing:
                tables[dataset.digest] = _compute(config, engine, dataset, file)
        finally:
            engine.close()
    return CachedReference(tables)


def _read(file: Path, size: int) -> NDArray[Any] | None:
    try:
        # A pickle could execute code. The file is mapped, so that the processes of a machine share it.
        table: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return table if table.shape == (size,) and table.dtype == np.float64 else None


def _compute(config: DPOConfig, engine: BaseEngine, dataset: TokenDataset, file: Path) -> NDArray[Any]:
    # Every sample once, whatever the weights of its source are.
    sampler = Sampler(dataset.sizes, weights=None, seed=0, shuffle=False)
    table = np.zeros(dataset.lengths.size)
    done = 0
    with Bar("the reference's log-probabilities") as bar:
        for global_batch in Loader(dataset, sampler, batch_size=config.data.batch_size).once():
            assert global_batch.numbers is not None
            table[global_batch.numbers] = log_probs_of(engine, global_batch).numpy()
            done += len(global_batch) // global_batch.width
            bar.advance(len(global_batch) / dataset.lengths.size, done)
    with collective_errors():
        # One process of each machine writes, since machines may not share a folder. Where they do,
        # the last rename counts; the contents are the same.
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
