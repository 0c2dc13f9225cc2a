"""The functions that serve generation steps of models that are split over the ranks; a controller drives them token by token."""

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.errors import CapabilityError, ConfigError, RemoteError
from ...engine.parallel.collectives import collective_errors
from ..process.handlers import check_joined
from ..process.worker import ModelWorker, OpError
from ..protocol import messages as m
from .model import ShardedLM, parse_config
from .vision import ImageReader, Pixels, check_image_tokens, check_sees_images, step_with_images

_DIGEST_BYTES = 32


class SteppedModel:
    """A loaded model.

    Args:
        lm: The model.
        folder: The folder of its files.
    """

    def __init__(self, lm: ShardedLM, folder: Path) -> None:
        self.lm = lm
        self.logits: Tensor | None = None
        """The logits `[V]` after the last step, from which the controller samples if it is rank 0 itself."""
        self._folder = folder
        self._reader: ImageReader | None = None

    @property
    def reader(self) -> ImageReader:
        """The reader that prepares images for the model."""
        if self._reader is None:
            self._reader = ImageReader(self._folder)
        return self._reader


def load_dense_shard(worker: ModelWorker, request: m.LoadDenseShard) -> m.LoadDenseShardOk:
    """Load this rank's slices of a model."""
    _check_ranks(worker)
    # If one rank fails, no rank keeps the model.
    with _errors_of_all(worker):
        if request.model_id in worker.models:
            raise OpError(
                "already_loaded", f"there is a model {request.model_id!r} already; unload it first, or choose another id"
            )
        try:
            device = torch.device("cuda", worker.settings.device) if torch.cuda.is_available() else torch.device("cpu")
            config = parse_config(request.config_json)
            group = dist.group.WORLD if worker.settings.world_size > 1 else None
            lm = ShardedLM(config, request.safetensors_paths, device, group, request.quant)
        except CapabilityError as e:
            raise OpError("unsupported_arch", str(e)) from e
        except ConfigError as e:
            raise OpError("bad_request", str(e)) from e
    worker.models[request.model_id] = SteppedModel(lm, Path(request.safetensors_paths[0]).parent)
    return m.LoadDenseShardOk()


def generate_step(worker: ModelWorker, request: m.GenerateStep) -> m.GenerateStepOk:
    """Process tokens."""
    _check_ranks(worker)
    with _Agreed(worker, request) as agreed:
        model = _model(worker, request.model_id)
        model.lm.check(request.tokens, request.offset)
        agreed.digest([request.model_id, request.tokens, request.offset])
    model.logits = model.lm.step(request.tokens, request.offset)
    return m.GenerateStepOk()


def generate_step_with_images(worker: ModelWorker, request: m.GenerateStepWithImages) -> m.GenerateStepOk:
    """Process a prompt with images."""
    _check_ranks(worker)
    with _Agreed(worker, request) as agreed:
        model = _model(worker, request.model_id)
        model.lm.check(request.tokens, request.offset)
        check_sees_images(model.lm)
        pixels: Pixels = model.reader.read(request.image_data_uris)
        check_image_tokens(request.tokens, request.image_token_id, pixels)
        agreed.digest(
            [
                request.model_id,
                request.tokens,
                request.offset,
                request.image_token_id,
                request.chunk_size,
                # Of the pixels, not of the URIs, so that ranks that have prepared an image differently are found as
                # well.
                hashlib.sha256(pixels.values.contiguous().numpy().tobytes()).hexdigest(),
            ]
        )
    model.logits = step_with_images(
        model.lm, request.tokens, request.offset, request.image_token_id, pixels, request.chunk_size
    )
    return m.GenerateStepOk()


def clear_kv_cache(worker: ModelWorker, request: m.ClearKvCache) -> m.KvCacheCleared:
    """Empty the cache of a model."""
    _model(worker, request.model_id).lm.clear()
    return m.KvCacheCleared()


def unload_model(worker: ModelWorker, request: m.UnloadModel) -> m.Unloaded:
    """Free a model."""
    model = _model(worker, request.model_id)
    del worker.models[request.model_id]
    model.lm.close()
    return m.Unloaded()


def _model(worker: ModelWorker, model_id: str) -> SteppedModel:
    if model_id not in worker.models:
        raise OpError("model_not_loaded", f"there is no model {model_id!r}; send load_dense_shard first")
    model: SteppedModel = worker.models[model_id]
    return model


def _check_ranks(worker: ModelWorker) -> None:
    if worker.settings.world_size > 1:
        check_joined()


def _errors_of_all(worker: ModelWorker) -> AbstractContextManager[None]:
    return collective_errors() if worker.settings.world_size > 1 else nullcontext()


class _Agreed:
    """A block after which all ranks continue with the same step, or none does.

    Ranks that process different tokens would generate nonsense, and a single rank that fails would leave the others waiting in a collective.

    Args:
        worker: The worker.
        request: The request.
    """

    def __init__(self, worker: ModelWorker, request: m.GenerateStep | m.GenerateStepWithImages) -> None:
        self._worker, self._request = worker, request
        self._digest = bytes(_DIGEST_BYTES)

    def digest(self, values: list[Any]) -> None:
        """Set the values that must be the same on all ranks."""
        self._digest = hashlib.sha256(json.dumps(values).encode()).digest()

    def __enter__(self) -> "_Agreed":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        size = self._worker.settings.world_size
        if size > 1 and (error is None or isinstance(error, Exception)):
            # Every rank takes part, also one with an error, because the others already wait here.
            own_digest = torch.frombuffer(bytearray(self._digest), dtype=torch.uint8)
            # A digest of zeros stands for an error.
            all_digests = [torch.empty_like(own_digest) for _ in range(size)]
            dist.all_gather(all_digests, own_digest)
            digests = [bytes(one.tolist()) for one in all_digests]
            failed = [rank for rank, digest in enumerate(digests) if not any(digest)]
            if error is None and failed:
                raise RemoteError(f"rank {failed[0]} refused the step, so no rank ran it; its reply says why")
            if error is None and len(set(digests)) > 1:
                other = next(rank for rank, digest in enumerate(digests) if digest != self._digest)
                raise OpError(
                    "forward_failed",
                    f"rank {self._worker.settings.rank} and rank {other} were sent different tokens or offsets, so no rank ran the "
                    "step; send all ranks the same",
                )
        if isinstance(error, CapabilityError):
            raise OpError("unsupported_arch", str(error)) from error
        if isinstance(error, ConfigError):
            raise OpError("bad_request", str(error)) from error
