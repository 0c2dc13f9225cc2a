"""Generation with a model that is split over several devices, one completion at a time.

This process is rank 0. It sends every step to the other ranks, takes part in it, and samples the next token from the logits.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from ...engine.errors import ConfigError, ModelError, WorkerError
from ...engine.hf.model_path import resolve_folder
from ...engine.hf.shape import context_of
from ...engine.hf.weights import INDEX, WeightFolder
from ...generation.generator import BaseGenerator
from ...generation.options import RolloutConfig
from ...generation.placement import GeneratorPlacement
from ...generation.sampling import sample_tokens
from ...generation.token_stream import CompletionLimits, TokenStream
from ...generation.weight_files import write_weights
from ..protocol import messages as m
from .handlers import SteppedModel
from .model import parse_config
from .ranks import Ranks, RankSettings

MODEL_ID = "model"


class TensorParallelGenerator(BaseGenerator):
    """A generator whose model is split over the ranks of a group.

    Requests are served one at a time: splitting makes room for a larger model, but does not increase throughput. The beginning of a prompt
    is not processed again if it is in the cache. `RolloutConfig.options`:

    - `tp`: the number of ranks, each a process on this machine with its own device.
    - `quant`: `int8` for 8-bit weights; None for no quantization.
    - `start_s`, `timeout_s`, `watchdog_s`: see `RankSettings`.

    Args:
        config: The configuration.

    Raises:
        ConfigError: An option is unknown, or this process already has a process group.
        WorkerError: A rank cannot load the model; the cause is the original error.
    """

    option_names = frozenset({"tp", "quant", "start_s", "timeout_s", "watchdog_s"})

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        if config.model.trust_remote_code:
            raise ConfigError("generator=tensor_parallel runs no code of the model's folder; use generator=static")
        options = dict(config.options)
        self._quant = options.pop("quant", None)
        self._settings = RankSettings(**{"size" if name == "tp" else name: value for name, value in options.items()})
        folder = resolve_folder(config.model.path)
        self._config_json = _config_text(folder, config.dtype)
        self._files = _files_of(folder)
        self._spool: Path | None = None
        self._ranks: Ranks | None = None
        self._current: TokenStream | None = None
        self._cached: list[int] = []
        self._limits = self._read_limits(folder)
        self._image_token: int | None = getattr(parse_config(self._config_json), "image_token_id", None)
        self._closed = False
        self._names: frozenset[str] = frozenset()
        self._tied: frozenset[str] = frozenset()
        try:
            # Loads the model now, so that an error is raised here, and not by the first request.
            self._stepped()
        except BaseException as e:
            self.close()
            # An invalid setting or model is the caller's error, not one of a worker.
            if isinstance(e, WorkerError) and isinstance(e.__cause__, ConfigError | ModelError):
                raise e.__cause__ from e
            raise

    def _read_limits(self, folder: Path) -> CompletionLimits:
        model_config = parse_config(self._config_json)
        text = model_config.get_text_config()
        ends = text.eos_token_id if text.eos_token_id is not None else model_config.eos_token_id
        if (folder / "generation_config.json").is_file():
            # As in transformers' `generate`, the end tokens in this file take precedence over those of the model's
            # configuration.
            ends = GenerationConfig.from_pretrained(folder).eos_token_id or ends
        context = context_of(text)
        return CompletionLimits(
            vocabulary=text.vocab_size,
            context=context,
            tokens=self.config.max_batch_total_tokens,
            end_tokens=frozenset([ends] if isinstance(ends, int) else ends or ()),
        )

    def _stepped(self) -> SteppedModel:
        """Return rank 0's part of the model. If a rank has died, all ranks are restarted."""
        if self._closed:
            raise ConfigError("this generator was closed; build another one")
        if self._ranks is not None and self._ranks.lost:
            self._ranks.close()
            self._ranks = None
        if self._ranks is None:
            self._ranks = Ranks(self._settings)
        models = self._ranks.local.models
        if MODEL_ID not in models:
            self._cached = []
            self._ranks.ask(
                lambda: m.LoadDenseShard(
                    model_id=MODEL_ID,
                    config_json=self._config_json,
                    safetensors_paths=[str(file) for file in self._files],
                    quant=self._quant,
                )
            )
        model: SteppedModel = models[MODEL_ID]
        self._names, self._tied = model.lm.stored_names, model.lm.tied_names
        return model

    def limits(self) -> CompletionLimits:
        """Return the limits on prompts and completions."""
        return self._limits

    def read_images(self, prompt: list[int], images: Sequence[str]) -> tuple[list[int], Mapping[str, Tensor]]:
        """Return a prompt in which the token of each image is repeated as often as the image needs; each rank reads the images itself.

        Raises:
            ConfigError: The model does not take images, or the images cannot be used.
        """
        model = self._stepped()
        if not model.lm.sees_images or self._image_token is None:
            raise ConfigError(f"{self.config.model.path} takes no images; leave them out, or use a vision-language model")
        return model.reader.expand(prompt, self._image_token, model.reader.read(images).tokens), {}

    def run_step(self) -> None:
        """Start the next request, or continue the running one: process a part of its prompt, or generate a token."""
        model = self._stepped()
        if self._current is None:
            self._current = next(iter(self.waiting.values()))
            self.admit(self._current)
        stream = self._current
        tokens = stream.so_far
        if stream.images and len(self._cached) < len(stream.prompt):
            self._step_with_images(stream, tokens)
        else:
            # The last token is always processed, because its logits are needed.
            offset = min(_common(self._cached, tokens), len(tokens) - 1)
            part = tokens[offset : offset + self.config.target_tokens_per_batch]
            self._ask(m.GenerateStep(model_id=MODEL_ID, tokens=part, offset=offset))
            self._cached = tokens[: offset + len(part)]
            self.prefill_tokens += len(part) if offset + len(part) <= len(stream.prompt) or not stream.tokens else 0
        if len(self._cached) < len(tokens):
            return
        assert model.logits is not None
        (token,), (log_prob,) = sample_tokens(model.logits[None], [stream.draw()])
        self.add_token(stream, token, log_prob)

    def _step_with_images(self, stream: TokenStream, tokens: list[int]) -> None:
        # The cache may hold other images.
        self._cached = []
        self._ask(
            m.GenerateStepWithImages(
                model_id=MODEL_ID,
                tokens=tokens,
                offset=0,
                image_token_id=self._image_token or 0,
                image_data_uris=stream.images,
                chunk_size=self.config.target_tokens_per_batch,
            )
        )
        self._cached = tokens
        self.prefill_tokens += len(tokens)

    def _ask(self, request: m.Request) -> None:
        assert self._ranks is not None
        try:
            self._ranks.ask(lambda: request)
        except WorkerError:
            # The contents of the ranks' caches are unknown.
            self._cached = []
            raise

    def stop_request(self, stream: TokenStream) -> None:
        """Forget the request; its keys and values stay until another prompt replaces them."""
        self._current = None
        # The cache is compared with a prompt by token ids, which are equal for different images.
        if stream.images:
            self._cached = []

    def drop_caches(self) -> None:
        """Forget the request and the contents of the cache."""
        self._current, self._cached = None, []

    def copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write new weights to files, and let every rank load its part of them.

        Raises:
            ModelError: Tensors are missing, unknown, of a wrong shape or not finite.
        """
        spool = Path(tempfile.mkdtemp(prefix="drivetrain-weights-"))
        try:
            files = write_weights(spool, _checked(weights, self._names, self._tied))
            for file in self._files[0].parent.glob("*.json"):
                # For example, the configuration of the image processor.
                shutil.copy(file, spool / file.name)
            self._unload()
            # The old model has been freed, because there may not be enough memory for both.
            old_files, self._files = self._files, files
            try:
                if self.placement.parameters == "device":
                    self._stepped()
            except WorkerError as e:
                self._files = old_files
                if isinstance(e.__cause__, ModelError):
                    raise e.__cause__ from e
                raise
        except BaseException:
            shutil.rmtree(spool, ignore_errors=True)
            raise
        if self._spool is not None:
            shutil.rmtree(self._spool, ignore_errors=True)
        self._spool = spool

    def _unload(self) -> None:
        self._cached = []
        if self._ranks is not None and self._ranks.lost:
            self._ranks.close()
            self._ranks = None
        if self._ranks is not None and MODEL_ID in self._ranks.local.models:
            self._ranks.ask(lambda: m.UnloadModel(model_id=MODEL_ID))

    def move(self, target: GeneratorPlacement) -> None:
        """Free the model on all ranks, or load it again from its files. The cache has no separate memory between requests."""
        if target.parameters == self.placement.parameters:
            return
        self._unload()
        if target.parameters == "device":
            self._stepped()

    def close(self) -> None:
        """End all ranks."""
        self._closed = True
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if self._spool is not None:
            shutil.rmtree(self._spool, ignore_errors=True)
            self._spool = None


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def _config_text(folder: Path, dtype: str) -> str:
    try:
        values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise ModelError(f"{folder / 'config.json'} cannot be read: {e}") from e
    # The name of `dtype` in configurations of older versions of transformers; parts of a model may have their own.
    values.pop("torch_dtype", None)
    for part in values.values():
        if isinstance(part, dict):
            part.pop("torch_dtype", None)
            if "dtype" in part:
                part["dtype"] = dtype
    return json.dumps({**values, "dtype": dtype})


def _files_of(folder: Path) -> list[Path]:
    try:
        stored = WeightFolder(folder, str)
    except (ValueError, KeyError) as e:
        if isinstance(e, ModelError):
            raise
        raise ModelError(f"{folder / INDEX} cannot be read: {e}") from e
    return [folder / name for name in sorted({file for file, _ in stored.places})]


def _checked(
    weights: Iterable[tuple[str, Tensor]], names: frozenset[str], tied: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, and check at the end that the set is complete."""
    unknown, seen = [], set()
    for name, tensor in weights:
        if name in names and name not in seen:
            seen.add(name)
            yield name, tensor
        # A parameter that shares the tensor of another one may be sent or left out.
        elif name not in tied:
            unknown.append(name)
    missing = sorted(names - seen - tied)
    if unknown or missing:
        raise ModelError(
            f"the weights are not those of the model: {len(unknown)} tensors match no parameter ({', '.join(unknown[:3]) or 'none'}), "
            f"{len(missing)} parameters have no tensor ({', '.join(missing[:3]) or 'none'})"
        )
