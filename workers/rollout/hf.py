"""Rollout with the generation of transformers."""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList

from ...engine.errors import ConfigError, ModelError
from ...engine.hf.layout import DiskLayout
from ...engine.hf.model_path import resolve_folder
from ...engine.hf.shape import context_of
from ...engine.hf.weights import check_head
from ...engine.offload import free_memory
from .engine import Generation, RolloutConfig, SamplingOptions
from .sampling import TokenSampler, seed_of

log = logging.getLogger(__name__)

MAX_FORWARD_TOKENS = 8192
"""The maximum number of tokens in a forward pass with continuous batching."""


def _scheduler(tokens: int) -> ContinuousBatchingConfig:
    """Return a configuration whose cache holds `tokens` tokens.

    By default the cache would take nearly all free memory, which other roles on the device need.
    """
    blocks = -(-tokens // ContinuousBatchingConfig.page_size)
    return ContinuousBatchingConfig(return_logprobs=True, num_blocks=blocks, max_batch_tokens=min(tokens, MAX_FORWARD_TOKENS))


class TransformersRollout:
    """An inference engine that generates with a plain transformers model.

    Args:
        config: The configuration of the role.

    Raises:
        ModelError: The model cannot be loaded.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self._config = config
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        path, folder = config.model.path, resolve_folder(config.model.path)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, config.dtype),
                trust_remote_code=config.model.trust_remote_code,
                output_loading_info=True,
            )
        except (OSError, ValueError) as e:
            raise ModelError(f"model.path={path} cannot be loaded for rollout: {e}") from e
        model, loading_info = loaded
        check_head(loading_info["unexpected_keys"], config.model)
        if missing := sorted(loading_info["missing_keys"]):
            raise ModelError(
                f"model.path={path} lacks {len(missing)} tensors that a language model needs, {', '.join(missing[:3])} among "
                "them; its responses would be random"
            )
        self._model: Any = model.to(self._device).eval()
        bad_names = _not_finite((name, parameter) for name, parameter in self._model.named_parameters())
        if bad_names:
            raise ModelError(
                f"model.path={path}: {_named(bad_names)} values that are not finite (NaN or infinity); the weights are damaged"
            )
        # generate() fills in unset options from the model's own generation config, so that config is replaced by an empty one.
        folder_settings, self._model.generation_config = self._model.generation_config, GenerationConfig()
        self._ends = _ids(folder_settings.eos_token_id)
        self._pad = config.pad if config.pad is not None else folder_settings.pad_token_id or 0
        if ignored := _ignored_settings(folder_settings):
            log.warning(
                "%s sets %s in generation_config.json or config.json, which rollout ignores: responses are sampled as set in "
                "SamplingOptions, because their log-probabilities would otherwise not be the policy's",
                path,
                ", ".join(f"{name}={value}" for name, value in ignored.items()),
            )
        self._complete = True
        self._warned = False

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], options: SamplingOptions, rows: Sequence[int]
    ) -> list[list[Generation]]:
        """Generate responses; see `RolloutEngine.generate`. Prompts of similar length share a batch.

        Raises:
            ConfigError: A prompt is empty, has a token outside the vocabulary, or does not fit into `batch_tokens` or the
                model's positions together with its responses.
            ModelError: The last weights were not loaded completely, or the model computes NaN.
        """
        if self._config.continuous and (options.top_p < 1 or options.top_k):
            raise ConfigError(
                f"continuous=True with top_p={options.top_p}, top_k={options.top_k}: transformers' scheduler reports "
                "log-probabilities only after this filtering, so importance ratios would be wrong; use top_p=1 and top_k=0, "
                "or continuous=False"
            )
        if not self._complete:
            raise ModelError(
                "the rollout's weights are a mix of two models because loading new ones failed; load a complete set "
                "(sync_weights)"
            )
        vocabulary_size = self._model.get_input_embeddings().num_embeddings
        context = context_of(self._model.config.get_text_config())
        longest = max((len(prompt) for prompt in prompts), default=0)
        if context is not None and longest < context < longest + options.max_tokens and not self._warned:
            self._warned = True
            log.warning(
                "a prompt of %d tokens with a response of max_tokens=%d may exceed the %d positions that %s supports",
                longest,
                options.max_tokens,
                context,
                self._config.model.path,
            )
        for i, prompt in enumerate(prompts):
            if context is not None and len(prompt) >= context:
                raise ConfigError(
                    f"prompt {i} has {len(prompt)} tokens, which leaves no room for a response in the {context} positions of "
                    f"{self._config.model.path}; shorten it"
                )
            needed = (len(prompt) + options.max_tokens) * options.samples
            if not prompt or needed > self._config.batch_tokens:
                raise ConfigError(
                    f"prompt {i} has {len(prompt)} tokens; it must have at least one, and with {options.samples} responses of "
                    f"up to {options.max_tokens} tokens it needs room for {needed} (batch_tokens={self._config.batch_tokens})"
                )
            if not 0 <= min(prompt) <= max(prompt) < vocabulary_size:
                raise ConfigError(
                    f"prompt {i} has token ids from {min(prompt)} to {max(prompt)}; "
                    f"the model only has those below {vocabulary_size}"
                )
        settings = self._settings(options)
        if self._config.continuous:
            return self._continuous(prompts, options, settings)
        generations: list[list[Generation]] = [[] for _ in prompts]
        for batch in self._batches(prompts, options):
            sampler = TokenSampler(options, [rows[i] for i in batch], self._device)
            for i, answers in zip(batch, self._static([prompts[i] for i in batch], options, settings, sampler), strict=True):
                generations[i] = answers
        return generations

    def _settings(self, options: SamplingOptions) -> GenerationConfig:
        """Return all options of `generate`. From the model folder they take only the tokens that end a response."""
        do_sample = self._config.continuous and options.temperature > 0
        return GenerationConfig(
            max_new_tokens=options.max_tokens,
            num_return_sequences=1,
            num_beams=1,
            use_cache=True,
            eos_token_id=sorted({*self._ends, *options.stop_tokens}) or None,
            pad_token_id=self._pad,
            # The TokenSampler leaves only one token to choose. Only the continuous scheduler samples by itself.
            do_sample=do_sample,
            temperature=options.temperature if do_sample else 1.0,
            top_p=options.top_p if do_sample else 1.0,
            top_k=options.top_k if do_sample else 50,
        )

    def _batches(self, prompts: Sequence[Sequence[int]], options: SamplingOptions) -> Iterator[list[int]]:
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        batch: list[int] = []
        for i in order:
            # The first prompt of a batch is the longest; all others are padded to its length.
            longest = len(prompts[batch[0]]) if batch else len(prompts[i])
            if batch and (len(batch) + 1) * options.samples * (longest + options.max_tokens) > self._config.batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _static(
        self,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        settings: GenerationConfig,
        sampler: TokenSampler,
    ) -> list[list[Generation]]:
        width = max(len(p) for p in prompts)
        ids = torch.full((len(prompts), width), int(settings.pad_token_id or 0), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, width - len(prompt) :] = 1
        out = self._model.generate(
            input_ids=ids.repeat_interleave(options.samples, 0).to(self._device),
            attention_mask=mask.repeat_interleave(options.samples, 0).to(self._device),
            generation_config=settings,
            logits_processor=LogitsProcessorList([sampler]),
        )
        if sampler.is_broken():
            raise ModelError(
                f"rollout: {self._config.model.path} computes NaN or infinity for a prompt of this batch; its weights or its "
                f"number format (dtype={self._config.dtype}) are at fault"
            )
        responses, log_probs = out[:, width:].tolist(), torch.stack(sampler.log_probs, 1).tolist()
        stops = settings.eos_token_id or []
        rows = [
            self._answer(prompts[row // options.samples], response, token_log_probs, stops)
            for row, (response, token_log_probs) in enumerate(zip(responses, log_probs, strict=True))
        ]
        return [rows[i : i + options.samples] for i in range(0, len(rows), options.samples)]

    def _answer(self, prompt: Sequence[int], response: list[int], log_probs: list[float], stops: Any) -> Generation:
        ended = next((i + 1 for i, token in enumerate(response) if token in stops), None)
        length = len(response) if ended is None else ended
        return Generation(
            prompt=list(prompt), response=response[:length], log_probs=log_probs[:length], finished=ended is not None
        )

    def _continuous(
        self,
        prompts: Sequence[Sequence[int]],
        options: SamplingOptions,
        settings: GenerationConfig,
    ) -> list[list[Generation]]:
        if settings.eos_token_id is None:
            raise ConfigError(
                f"continuous=True with {self._config.model.path}, which has no token that ends a response: transformers' "
                "scheduler needs one; give SamplingOptions(stop_tokens=...), or use continuous=False"
            )
        prompt_indices = [i for i in range(len(prompts)) for _ in range(options.samples)]
        devices = [self._device] if self._device.type == "cuda" else []
        # The scheduler samples from torch's random state. Processes with the same prompt must not generate the same responses,
        # and the random state of a model that trains in this process must not change.
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed_of(options.seed, dist.get_rank() if dist.is_initialized() else 0))
            results = self._model.generate_batch(
                inputs=[list(prompts[i]) for i in prompt_indices],
                generation_config=settings,
                continuous_batching_config=_scheduler(self._config.batch_tokens),
            )
        # Requests are named by their number and return in the order in which they finish.
        for name, result in sorted(results.items(), key=lambda pair: int(pair[0].rpartition("_")[2])):
            if result.error:
                problem = (
                    "computes NaN or infinity; its weights or its number format are at fault"
                    if "nan" in result.error
                    else "failed"
                )
                raise ModelError(f"rollout: {self._config.model.path} {problem} (request {name}: {result.error})")
        ordered = [result for _, result in sorted(results.items(), key=lambda pair: int(pair[0].rpartition("_")[2]))]
        if any(math.isnan(number) for result in ordered for number in result.logprobs):
            raise ModelError(f"rollout: {self._config.model.path} computes NaN; its weights or its number format are at fault")
        generations: list[list[Generation]] = [[] for _ in prompts]
        for i, result in zip(prompt_indices, ordered, strict=True):
            generations[i].append(
                self._answer(prompts[i], list(result.generated_tokens), list(result.logprobs), settings.eos_token_id or [])
            )
        return generations

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights; see `RolloutEngine.load_weights`.

        Raises:
            ModelError: A tensor matches no parameter, has the wrong shape or values that are not finite, or parameters are
                missing. Generation then fails until a complete set is loaded.
        """
        self._complete = False
        layout = DiskLayout(self._model)
        targets_by_name: dict[str, list[tuple[Tensor, tuple[int, ...]]]] = {}
        parameters = dict(self._model.named_parameters(remove_duplicate=True))
        for name, parameter in parameters.items():
            for segment in layout.stored_slices(name, parameter.shape):
                target = parameter[segment.box.within((0,) * parameter.dim())]
                targets_by_name.setdefault(segment.name, []).append((target, tuple(segment.shape)))
        unknown, tied = [], set(self._model.all_tied_weights_keys)
        sums: list[tuple[str, Tensor]] = []
        for name, tensor in weights:
            sums.append((name, _sum(tensor)))
            targets = targets_by_name.pop(name, None)
            if targets is None:
                if name not in tied:
                    unknown.append(name)
                continue
            for target, shape in targets:
                if tuple(tensor.shape) != shape:
                    raise ModelError(
                        f"{name} is {list(tensor.shape)}, but the rollout model's is {list(shape)}; they are different models"
                    )
                target.copy_(tensor.to(target.device).view(target.shape))
        if unknown or targets_by_name:
            raise ModelError(
                f"the weights are not those of {self._config.model.path}: {len(unknown)} tensors match no parameter "
                f"({', '.join(unknown[:3]) or 'none'}), {len(targets_by_name)} parameters have no tensor "
                f"({', '.join(list(targets_by_name)[:3]) or 'none'})"
            )
        if bad_names := [name for name, total in sums if not math.isfinite(float(total))]:
            raise ModelError(
                f"{_named(bad_names)} values that are not finite (NaN or infinity); the weights that were sent are damaged"
            )
        self._complete = True

    def to(self, place: str) -> None:
        """Offload or reload the model; see `RolloutEngine.to`.

        Raises:
            ConfigError: The place is neither `device` nor `host`.
        """
        if place not in ("device", "host"):
            raise ConfigError(f"to({place!r}): a rollout model can be on 'device' or 'host'")
        self._model.to(self._device if place == "device" else torch.device("cpu"))

    def close(self) -> None:
        """Free the model."""
        del self._model
        free_memory(self._device)


USED_SETTINGS = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
"""Settings of a folder's generation config that rollout either uses or that have no effect on generation."""


def _ignored_settings(settings: GenerationConfig) -> dict[str, Any]:
    """Return a folder's generation settings that differ from the defaults and that rollout does not follow."""
    defaults = GenerationConfig().to_dict()
    # Rollout uses these values anyway.
    harmless = {"use_cache": True, "output_attentions": False, "output_hidden_states": False}
    return {
        name: value
        for name, value in settings.to_diff_dict().items()
        if name not in USED_SETTINGS and value is not None and value != harmless.get(name, defaults.get(name))
    }


def _ids(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def _sum(tensor: Tensor) -> Tensor:
    """Return a sum that is NaN or infinite if any value is. It stays on the tensor's device, so that nothing waits for it."""
    return tensor.sum(dtype=torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None)


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    sums = [(name, _sum(tensor.detach())) for name, tensor in tensors]
    return [name for name, total in sums if not math.isfinite(float(total))]


def _named(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''} {'has' if len(names) == 1 else 'have'}"
