"""The interface of generators: requests are submitted, advanced together one step at a time, and read as streams of tokens.

A generator must be used from a single thread. A scheduler in a model worker lets many clients share one.
"""

import logging
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine import progress
from ..engine.cancellation import cancelled
from ..engine.errors import ConfigError, ModelError, NoAdapterError, is_out_of_memory
from .options import RolloutConfig, SamplingOptions, check_prompts
from .placement import GeneratorPlacement
from .readiness import Readiness
from .result import FinishReason, Generation
from .sampling import seed_of
from .token_stream import CompletionLimits, RequestId, TokenStream, check_prompt

if TYPE_CHECKING:
    from ..engine.hf.adapter_weights import AdapterWeights
    from .media import PromptMedia

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GeneratorStats:
    """The state of a generator.

    Args:
        waiting: The number of pending requests, which have not begun.
        running: The number of requests that are being generated.
        version: The version of the weights.
        requests: The number of requests that have ended.
        tokens: The number of tokens that have been generated.
        prefill_tokens: The number of prompt tokens that have been processed, excluding those found in a cache.
        steps: The number of forward passes.
    """

    waiting: int
    running: int
    version: int
    requests: int
    tokens: int
    prefill_tokens: int
    steps: int


class BaseGenerator(ABC):
    """Generates completions to many requests at the same time.

    A custom generator implements the abstract methods. `run_step` moves requests from `waiting` to `running` with `admit` and
    reports their tokens with `add_token`. This class does the rest, such as validation, ending completions, cancellation, versions and
    recovery from errors.

    Args:
        config: The configuration.

    Raises:
        ConfigError: A setting is invalid; see `check`.
    """

    option_names: ClassVar[frozenset[str] | None] = frozenset()
    """The names in `RolloutConfig.options` that it supports; None if it checks them itself."""
    can_be_invariant: ClassVar[bool] = False
    """Whether it supports `RolloutConfig.invariant`."""
    returns_routes: ClassVar[bool] = False
    """Whether it reports the experts that tokens are routed to; see `RolloutConfig.return_routed_experts`."""
    takes_media: ClassVar[bool] = False
    """Whether it accepts media in prompts; see `submit`."""
    has_adapters: ClassVar[bool] = False
    """Whether it supports `RolloutConfig.max_adapters`."""
    loads_parts: ClassVar[bool] = False
    """Whether it implements `copy_part`."""
    joins_process_group: ClassVar[bool] = False
    """Whether all processes of the default process group, if there is one, build it together."""
    ranks_per_model = 1
    """The number of adjacent processes of the process group that hold one model together and receive the same calls."""

    def __init__(self, config: RolloutConfig) -> None:
        self.check(config, dist.get_world_size() if dist.is_initialized() else 1)
        self.config = config
        self.version = 0
        """The version of the weights. The initial weights are version 0."""
        self.waiting: dict[RequestId, TokenStream] = {}
        """The requests that have not begun or have to restart, in order of arrival."""
        self.running: dict[RequestId, TokenStream] = {}
        """The requests that are being generated, in the order in which they began."""
        self.reset_stats()
        self._readiness = Readiness()
        self._paused, self._warned = False, False
        self._adapters: AdapterWeights | None = None
        # A policy that keeps its weights in fewer bits would send them rounded, unlike those of the folder.
        self._follows_folder = config.base_dtype == "float32" or config.dtype == config.base_dtype
        """Whether the base weights are those of the model's folder, identical to the policy's."""

    @classmethod
    def check(cls, config: RolloutConfig, processes: int) -> None:
        """Validate what can be checked without reading weights.

        Args:
            config: The configuration.
            processes: The size of the process group that the generator is built in.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        if config.invariant and not cls.can_be_invariant:
            raise ConfigError(
                f"invariant=true with generator={config.generator}, whose numerics depend on the other requests in the batch; use continuous or "
                "static on a CPU, or invariant=false"
            )
        if config.max_adapters and not cls.has_adapters:
            raise ConfigError(
                f"max_adapters={config.max_adapters} with generator={config.generator}, which does not support several adapters; use continuous, static or vllm"
            )
        if config.return_routed_experts and not cls.returns_routes:
            raise ConfigError(
                f"return_routed_experts=true with generator={config.generator}, which does not report expert routing; use static, continuous, or vllm "
                "on a GPU (or rl.routing_replay=off or actor)"
            )
        if cls.option_names is not None and (unknown := sorted(set(config.options) - cls.option_names)):
            raise ConfigError(
                f"options.{unknown[0]} is unknown to generator={config.generator}; it has "
                f"{', '.join(sorted(cls.option_names)) or 'no options'}"
            )

    # ---- what a generator implements ---------------------------------------------------------------------------------

    @abstractmethod
    def limits(self) -> CompletionLimits:
        """Return the limits of this generator."""

    @abstractmethod
    def run_step(self) -> None:
        """Begin waiting requests, if there is room, and run one forward pass. Called only if there is work to do."""

    @abstractmethod
    def stop_request(self, stream: TokenStream) -> None:
        """Stop generating a running request."""

    @abstractmethod
    def drop_caches(self) -> None:
        """Forget all running requests, and everything computed with the current weights. May follow an error of `run_step`."""

    def invalidate_caches(self) -> None:
        """Do the same as `drop_caches`, before new weights are loaded into a working generator; memory may be kept for later requests."""
        self.drop_caches()

    @abstractmethod
    def copy_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights; see `load_weights`. No request is running."""

    def copy_part(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace some of the weights, if the generator has `loads_parts`; the others are kept. No request is running."""
        raise NotImplementedError(f"{type(self).__name__} sets loads_parts, but does not implement copy_part")

    @abstractmethod
    def move(self, target: GeneratorPlacement) -> None:
        """Move the parameters and the cache from `placement` to another one. No request is running, and the cache is empty."""

    @abstractmethod
    def close(self) -> None:
        """Free the model."""

    def read_images(self, prompt: list[int], images: Sequence[str]) -> tuple[list[int], Mapping[str, Tensor]]:
        """Return a prompt with the images' full number of image tokens, and the fields that the model's encoder reads.

        A generator that reads the images of a request itself returns no fields.

        Raises:
            ConfigError: The generator does not accept images, or these cannot be used.
        """
        raise ConfigError(
            f"generator={self.config.generator} does not accept images; use continuous, static or tensor_parallel"
        )

    def take_media(self, title: str, prompt: list[int], media: Mapping[str, Tensor]) -> "PromptMedia | None":
        """Return a prompt with media in the form that the model receives; None if it has no media.

        Raises:
            ConfigError: The generator does not accept media, or they do not fit the prompt.
        """
        if not media:
            return None
        raise ConfigError(
            f"{title} has media, which generator={self.config.generator} does not accept; use generator=continuous or static"
        )

    def admit(self, stream: TokenStream) -> None:
        """Mark a waiting request as running."""
        del self.waiting[stream.id]
        self.running[stream.id] = stream

    def add_token(self, stream: TokenStream, token: int, log_prob: float) -> None:
        """Add a token to a running request. If the completion ends with it, `stop_request` is called."""
        if not math.isfinite(log_prob):
            self.stop_request(stream)
            self._fail(
                stream,
                ModelError(
                    f"rollout: {self.config.model.path} computes NaN or infinity for this prompt; its weights or its dtype "
                    f"(dtype={self.config.dtype}) are at fault"
                ),
            )
            return
        stream.tokens.append(token)
        stream.log_probs.append(log_prob)
        stream.versions.append(self.version_of(stream))
        self._tokens += 1
        if token in stream.stop_tokens:
            self._finish(stream, "stop")
        elif not stream.remaining:
            self._finish(stream, "length")

    def version_of(self, stream: TokenStream) -> int:
        """Return the version of the weights that generates a request's tokens."""
        return self.version

    def adapter_names(self) -> list[str]:
        """Return the names of the adapters that requests may select."""
        return []

    def load_adapter(self, name: str, folder: str) -> int:
        """Load the factors of an adapter checkpoint next to those of other adapters, replacing any of the same name.

        Args:
            name: The name that requests select it by (`SamplingOptions.adapter`).
            folder: The folder of the checkpoint, or its URL; see `engine.adapter_checkpoint`.

        Returns:
            Its number of optimizer steps, which becomes the version of its tokens.

        Raises:
            CheckpointError: The checkpoint is damaged, or belongs to another model.
            ConfigError: The maximum number of adapters (`RolloutConfig.max_adapters`) is reached.
        """
        raise self._without_adapters(name)

    def drop_adapter(self, name: str) -> None:
        """Free an adapter, after the last request that uses it.

        Raises:
            ConfigError: There is no adapter of this name.
        """
        raise self._without_adapters(name)

    def _without_adapters(self, name: str) -> ConfigError:
        return ConfigError(
            f"adapter={name!r} with generator={self.config.generator} and max_adapters={self.config.max_adapters}: it does not hold several "
            "adapters; set max_adapters, with a generator that supports it: continuous, static or vllm"
        )

    def reset_stats(self) -> None:
        """Reset the counters."""
        self._numbered = self._ended = self._tokens = self._steps = self.prefill_tokens = 0

    # ---- what its users call -----------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        options: SamplingOptions,
        request_id: RequestId | None = None,
        *,
        row: int | None = None,
        sample: int = 0,
        images: Sequence[str] = (),
        media: Mapping[str, Tensor] | None = None,
    ) -> TokenStream:
        """Add a request.

        Args:
            prompt: The token ids of the prompt.
            options: The sampling options. `samples` is not used; a stream is one completion.
            request_id: The id for cancelling it; None assigns one.
            row: The number of the prompt in its batch, which seeds the completion together with `options.seed` and `sample`.
            sample: The number of the completion among those to the prompt.
            images: The images of the prompt as data URIs. The prompt has one image token per image, which is expanded to the number that
                the model needs; the completion is limited to the tokens that then fit.
            media: The fields that the model's encoders read, as in a `PackedBatch`, with rows for each item in order. The prompt must
                have as many tokens for each item as it has features.

        Raises:
            ConfigError: The prompt is empty, has a token outside the vocabulary or does not fit; or the id is already in use.
            ModelError: The last weights were not loaded completely.
        """
        return self._enqueue("the prompt", check_prompts([prompt])[0], options, request_id, row or 0, sample, images, media)

    def _enqueue(
        self,
        title: str,
        prompt: list[int],
        options: SamplingOptions,
        request_id: RequestId | None,
        row: int,
        sample: int,
        images: Sequence[str] = (),
        media: Mapping[str, Tensor] | None = None,
    ) -> TokenStream:
        self._readiness.check()
        if images:
            if media:
                raise ConfigError(f"{title} has images and media; pass only one of them")
            prompt, media = self.read_images(prompt, images)
        if options.adapter and options.adapter not in self.adapter_names():
            if not self.config.max_adapters:
                raise self._without_adapters(options.adapter)
            raise NoAdapterError(
                f"there is no adapter {options.adapter!r}; there are {', '.join(self.adapter_names()) or 'none'}: load it first"
            )
        limits = self.limits()
        if images:
            # The caller does not know how many tokens the images have.
            most = min(limits.tokens, limits.context or limits.tokens) - len(prompt)
            options = replace(options, max_tokens=max(1, min(options.max_tokens, most)))
        check_prompt(title, prompt, options, limits, self.config)
        self._warn_about_length(len(prompt), options.max_tokens, limits.context)
        if request_id is None:
            request_id = f"request-{self._numbered}"
            self._numbered += 1
        if request_id in self.waiting or request_id in self.running:
            raise ConfigError(f"there is already a request with the id {request_id!r}; choose another one")
        stop_tokens = frozenset(options.stop_tokens) | (frozenset() if options.ignore_eos else limits.end_tokens)
        # Last, after everything that can be refused: media are in use from here on, until the request ends.
        taken = self.take_media(title, prompt, media or {})
        seed = seed_of(options.seed, row, sample)
        stream = TokenStream(self.step, request_id, prompt, options, stop_tokens, seed, images, taken)
        self.waiting[request_id] = stream
        return stream

    def cancel(self, request_id: RequestId) -> bool:
        """End a request with the tokens so far; its finish reason is `aborted`. Return whether there was such a request."""
        stream = self.waiting.get(request_id)
        if stream is None:
            stream = self.running.get(request_id)
            if stream is None:
                return False
            self._stop(stream)
        self._end(stream, "aborted")
        return True

    def step(self) -> bool:
        """Advance all requests; return False if there is nothing to do, or the generator is paused.

        An error ends the running requests; see `TokenStream.error`. If memory ran out, only the latest request ends, and the
        others restart after the tokens that they have.
        """
        if self._paused or not (self.waiting or self.running):
            return False
        self._readiness.check()
        try:
            with torch.inference_mode():
                self.run_step()
        except Exception as e:
            self._recover(e)
        except BaseException:
            # Also on an interrupt: the step may have changed only a part of the caches.
            self._interrupt()
            raise
        self._steps += 1
        progress.advance()
        return True

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        rows: Sequence[int] | None = None,
        media: Sequence[Mapping[str, Tensor]] | None = None,
        partial_completions: Sequence[Sequence[Generation] | None] | None = None,
        first_samples: Sequence[int] | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> list[list[Generation]]:
        """Generate `options.samples` completions to each prompt, in order.

        A cancelled call (see `engine.cancellation`) ends after its current step, but runs at least one. Unfinished completions then have
        the tokens so far and the finish reason `aborted`.

        Args:
            prompts: The token ids of the prompts.
            options: The sampling options.
            rows: The number of each prompt in the global batch. Seeds derived from it and `options.seed` give the same completions on
                any process, and different completions for an equal prompt in another row. None numbers them from 0.
            media: The media of each prompt; see `submit`.
            partial_completions: For each prompt its completions from a cancelled call; None where there are none. Aborted completions continue from
                their tokens, regardless of the weights that generated them, and draw the same random numbers as without the interruption.
                The others are returned unchanged.
            first_samples: For each prompt the number of its first completion among all completions of its row, which seeds it; None is 0
                for all.
            max_tokens: For each prompt the maximum number of tokens of its completions, instead of that of the options.

        Raises:
            ConfigError: A prompt or a partial completion cannot be used, or the generator is paused.
            ModelError: The last weights were not loaded completely, or the model computes NaN.
        """
        streams: list[list[TokenStream]] = []
        try:
            checked = check_prompts(prompts)
            for i, (prompt, row) in enumerate(zip(checked, range(len(checked)) if rows is None else rows, strict=True)):
                streams.append([])
                of_prompt = None if media is None else media[i]
                before = None if partial_completions is None else partial_completions[i]
                if before is not None and len(before) != options.samples:
                    raise ConfigError(f"prompt {i} has {len(before)} partial completions, but samples={options.samples}")
                of_row = 0 if first_samples is None else first_samples[i]
                limited = options if max_tokens is None else replace(options, max_tokens=max_tokens[i])
                for sample in range(options.samples):
                    stream = self._enqueue(f"prompt {i}", prompt, limited, None, row, of_row + sample, (), of_prompt)
                    streams[-1].append(stream)
                    if before is not None:
                        self._resume(f"prompt {i}", stream, before[sample])
            open_streams = [stream for samples in streams for stream in samples if not stream.ended]
            while open_streams:
                if not self.step():
                    raise ConfigError("the generator is paused; call resume()")
                for stream in open_streams:
                    if stream.error is not None:
                        raise stream.error
                open_streams = [stream for stream in open_streams if not stream.ended]
                # Not before the first step: without a step, a process would not know the columns of its samples, such as routes.
                if self._is_cancelled():
                    break
        finally:
            for samples in streams:
                for stream in samples:
                    if not stream.ended:
                        self.cancel(stream.id)
        return [[stream.result() for stream in samples] for samples in streams]

    def pause(self) -> None:
        """Stop generating until `resume`. Requests and their caches are kept."""
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int | None = None) -> None:
        """Load new weights. Running requests continue after the tokens that they have, from an empty cache.

        Args:
            weights: All tensors of the model under their Hugging Face names as on disk, tied ones once.
            version: The version of the weights; None increments the current one.

        Raises:
            ModelError: Tensors are missing, unknown, of a wrong shape or not finite. The generator then refuses to run until it has
                loaded a complete set of weights; its requests wait.
            ConfigError: The parameters are absent.
        """
        self._replace_weights(self.copy_weights, weights, version)

    def load_adapters(self, adapters: Iterable[tuple[str, Tensor]], *, version: int | None = None) -> None:
        """Load only new adapters, which are added to the weights of the model's folder; otherwise like `load_weights`.

        Args:
            adapters: The adapters of `config.model.lora`, and the modules that are trained beside them, under peft's names.
            version: The version of the weights; None increments the current one.

        Raises:
            ModelError: They are not the adapters of the model, or are not finite.
            ConfigError: The parameters are absent.
        """
        complete = not (self.loads_parts and self._follows_folder and self.complete and not self.lacks_weights)
        copy = self.copy_weights if complete else self.copy_part
        # Marked incomplete from here on, so that older weights are not mistaken for the ones that were sent.
        self._readiness.loading()
        self._replace_weights(copy, self._adapter_source().merged(adapters, complete=complete), version)
        self._follows_folder = True

    def adapter_bytes(self) -> int:
        """Return the size of adapters that are sent separately, in bytes; 0 if the model has none."""
        return self._adapter_source().nbytes if self.config.model.lora.rank else 0

    def _adapter_source(self) -> "AdapterWeights":
        if self._adapters is None:
            from ..engine.hf.adapter_weights import AdapterWeights

            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
            self._adapters = AdapterWeights(self.config.model, getattr(torch, self.config.base_dtype), device)
        return self._adapters

    def _replace_weights(
        self,
        copy: Callable[[Iterable[tuple[str, Tensor]]], None],
        weights: Iterable[tuple[str, Tensor]],
        version: int | None,
    ) -> None:
        self._readiness.loading()
        # Before the copy, so that a failed one leaves it False.
        self._follows_folder = False
        self.invalidate_caches()
        self._restart_running()
        with torch.no_grad():
            copy(weights)
        self.version = self.version + 1 if version is None else version
        self._readiness.loaded()

    def discard_weights(self, reason: str) -> None:
        """Refuse to generate until complete weights have been loaded, because the current ones may be invalid.

        Args:
            reason: The reason, for messages.
        """
        self._interrupt()
        self._readiness.mark_invalid(reason)

    def to(self, place: str, part: str | None = None) -> None:
        """Move the model, or a part of it. Caches are dropped; requests wait until both parts are on the device.

        Args:
            place: `device`, `host`, or `absent`. `absent` frees the memory; before the next request the parameters must be moved back to
                the device and new weights loaded.
            part: `parameters` or `cache`; None is both. The cache is dropped when the parameters leave the device.

        Raises:
            ConfigError: There is no such place or part, or the cache would remain without parameters.
        """
        target = self.placement.moved(place, part)
        self._interrupt()
        self._readiness.moving(target)
        self.move(target)
        self._readiness.moved(target)

    def stats(self) -> GeneratorStats:
        """Return the state of the generator."""
        return GeneratorStats(
            waiting=len(self.waiting),
            running=len(self.running),
            version=self.version,
            requests=self._ended,
            tokens=self._tokens,
            prefill_tokens=self.prefill_tokens,
            steps=self._steps,
        )

    # ---- bookkeeping -------------------------------------------------------------------------------------------------

    @property
    def weight_dtype(self) -> str:
        """The data type of all parameters, in which new weights can be sent, such as `bfloat16`.

        Empty if weights are sent in their own data types.
        """
        return ""

    @property
    def complete(self) -> bool:
        """Whether the last weights were loaded completely."""
        return self._readiness.complete

    @property
    def lacks_weights(self) -> bool:
        """Whether the parameters have been absent since the last complete load, so they hold no values."""
        return self._readiness.lacks_weights

    @property
    def placement(self) -> GeneratorPlacement:
        """Where the parameters and the cache are."""
        return self._readiness.placement

    @property
    def ready(self) -> bool:
        """Whether `step` can advance requests: not paused, with a complete set of weights, and with the cache on the device."""
        return self._readiness.ready and not self._paused

    def _warn_about_length(self, length: int, max_tokens: int, context: int | None) -> None:
        if context is not None and length + max_tokens > context and not self._warned:
            self._warned = True
            logger.warning(
                "a prompt of %d tokens with a completion of max_tokens=%d may exceed the %d positions that %s supports",
                length,
                max_tokens,
                context,
                self.config.model.path,
            )

    def _is_cancelled(self) -> bool:
        """Return whether the call of `generate` should end; the same on all processes that hold a model together."""
        # Ranks that hold a model together could notice it after different steps, and would wait for each other in a
        # collective.
        return self.ranks_per_model == 1 and cancelled()

    def _resume(self, title: str, stream: TokenStream, before: Generation) -> None:
        """Add the tokens of a partial completion to a waiting request."""
        count = len(before.response)
        if before.prompt != stream.prompt or not count == len(before.log_probs) == len(before.versions):
            raise ConfigError(
                f"{title}: a partial completion belongs to another prompt, or has {count} tokens with {len(before.log_probs)} log-probabilities "
                f"and {len(before.versions)} versions"
            )
        if before.finish_reason == "aborted" and not count < stream.options.max_tokens:
            raise ConfigError(
                f"{title}: a partial completion has {count} tokens, which leaves none of max_tokens={stream.options.max_tokens}"
            )
        stream.take_over(before)
        if before.finish_reason != "aborted":
            self._end(stream, before.finish_reason)

    def _stop(self, stream: TokenStream) -> None:
        with torch.inference_mode():
            self.stop_request(stream)

    def _finish(self, stream: TokenStream, reason: FinishReason) -> None:
        self.stop_request(stream)
        self._end(stream, reason)

    def _end(self, stream: TokenStream, reason: FinishReason | None) -> None:
        self.waiting.pop(stream.id, None)
        self.running.pop(stream.id, None)
        if stream.media is not None:
            stream.media.release()
            stream.media = None
        stream.finish_reason = reason
        self._ended += 1

    def _fail(self, stream: TokenStream, error: Exception) -> None:
        stream.error = error
        self._end(stream, None)

    def _interrupt(self) -> None:
        """Drop all caches, and restart the running requests, ahead of the waiting ones."""
        self.drop_caches()
        self._restart_running()

    def _restart_running(self) -> None:
        self.waiting = {**self.running, **self.waiting}
        self.running = {}

    def _recover(self, error: Exception) -> None:
        # If the step failed before any request began, the first one fails, or the next step would fail on it again.
        streams = list(self.running.values()) or list(self.waiting.values())[:1]
        for stream in streams[-1:] if is_out_of_memory(error) else streams:
            self._fail(stream, error)
        # The traceback's frames hold the tensors of the step.
        traceback.clear_frames(error.__traceback__)
        self._interrupt()
