"""Answers by transformers' own generation."""

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

MOST_AT_ONCE = 8192
"""Tokens of a forward pass under continuous batching, at most."""


def _scheduler(tokens: int) -> ContinuousBatchingConfig:
    """With room for so many tokens. Left to itself it takes nearly all memory that is free, which roles beside it need."""
    blocks = -(-tokens // ContinuousBatchingConfig.page_size)
    return ContinuousBatchingConfig(return_logprobs=True, num_blocks=blocks, max_batch_tokens=min(tokens, MOST_AT_ONCE))


class TransformersRollout:
    """A plain transformers model that generates.

    Args:
        config: of the role.

    Raises:
        ModelError: the model cannot be loaded.
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
        model, told = loaded
        check_head(told["unexpected_keys"], config.model)
        if missing := sorted(told["missing_keys"]):
            raise ModelError(
                f"model.path={path} lacks {len(missing)} tensors that a language model needs, {', '.join(missing[:3])} among them; its "
                "answers would be chance"
            )
        self._model: Any = model.to(self._device).eval()
        broken = _not_finite((name, parameter) for name, parameter in self._model.named_parameters())
        if broken:
            raise ModelError(f"model.path={path}: {_named(broken)} not finite (NaN or infinity); the weights are damaged")
        # generate() fills what it is not told from the model's own settings: they are replaced, not argued with.
        asked, self._model.generation_config = self._model.generation_config, GenerationConfig()
        self._ends = _ids(asked.eos_token_id)
        self._pad = config.pad if config.pad is not None else asked.pad_token_id or 0
        if ignored := _asked_for(asked):
            log.warning(
                "%s asks for %s in generation_config.json or config.json, which rollout does not follow: answers are drawn as "
                "SamplingOptions says, or their log-probabilities would not be the policy's",
                path,
                ", ".join(f"{name}={value}" for name, value in ignored.items()),
            )
        self._whole = True
        self._warned = False

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], options: SamplingOptions, rows: Sequence[int]
    ) -> list[list[Generation]]:
        """See `RolloutEngine.generate`. Prompts of like length share a batch.

        Raises:
            ConfigError: a prompt is empty, has a token that the model does not know, or does not fit `batch_tokens` or the model's
                positions with its answers.
            ModelError: the last weights were not taken to their end; or the model computes NaN.
        """
        if self._config.continuous and (options.top_p < 1 or options.top_k):
            raise ConfigError(
                f"continuous=True with top_p={options.top_p}, top_k={options.top_k}: transformers' scheduler says how likely a token was "
                "only among those that are left, so importance ratios would be wrong; use top_p=1 and top_k=0, or continuous=False"
            )
        if not self._whole:
            raise ModelError(
                "the rollout's weights are of two models: it failed while it took new ones; give it a whole set (sync_weights)"
            )
        known = self._model.get_input_embeddings().num_embeddings
        context = context_of(self._model.config.get_text_config())
        longest = max((len(prompt) for prompt in prompts), default=0)
        if context is not None and longest < context < longest + options.max_tokens and not self._warned:
            self._warned = True
            log.warning(
                "a prompt of %d tokens with an answer of max_tokens=%d may go beyond the %d positions that %s was made for",
                longest,
                options.max_tokens,
                context,
                self._config.model.path,
            )
        for i, prompt in enumerate(prompts):
            if context is not None and len(prompt) >= context:
                raise ConfigError(
                    f"prompt {i} has {len(prompt)} tokens, which leaves no room for an answer in the {context} positions of "
                    f"{self._config.model.path}; give a shorter one"
                )
            need = (len(prompt) + options.max_tokens) * options.samples
            if not prompt or need > self._config.batch_tokens:
                raise ConfigError(
                    f"prompt {i} has {len(prompt)} tokens; with {options.samples} answers of at most {options.max_tokens} it needs room for {need} "
                    f"(batch_tokens={self._config.batch_tokens}), and at least one token"
                )
            if not 0 <= min(prompt) <= max(prompt) < known:
                raise ConfigError(
                    f"prompt {i} has tokens from {min(prompt)} to {max(prompt)}; the model knows those below {known}"
                )
        settings = self._settings(options)
        if self._config.continuous:
            return self._continuous(prompts, options, settings)
        found: list[list[Generation]] = [[] for _ in prompts]
        for batch in self._batches(prompts, options):
            sampler = TokenSampler(options, [rows[i] for i in batch], self._device)
            for i, answers in zip(batch, self._static([prompts[i] for i in batch], options, settings, sampler), strict=True):
                found[i] = answers
        return found

    def _settings(self, options: SamplingOptions) -> GenerationConfig:
        """All that `generate` is told; nothing of the model folder but the tokens that end an answer."""
        drawn = self._config.continuous and options.temperature > 0
        return GenerationConfig(
            max_new_tokens=options.max_tokens,
            num_return_sequences=1,
            num_beams=1,
            use_cache=True,
            eos_token_id=sorted({*self._ends, *options.stop_tokens}) or None,
            pad_token_id=self._pad,
            # The sampler leaves one token to choose. Only the continuous scheduler draws by itself.
            do_sample=drawn,
            temperature=options.temperature if drawn else 1.0,
            top_p=options.top_p if drawn else 1.0,
            top_k=options.top_k if drawn else 50,
        )

    def _batches(self, prompts: Sequence[Sequence[int]], options: SamplingOptions) -> Iterator[list[int]]:
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        batch: list[int] = []
        for i in order:
            # The longest is the batch's first: all others are padded to it.
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
                f"rollout: {self._config.model.path} computes NaN or infinity for a prompt of this batch: its weights, or its number format (dtype="
                f"{self._config.dtype}), are at fault"
            )
        responses, log_probs = out[:, width:].tolist(), torch.stack(sampler.log_probs, 1).tolist()
        stops = settings.eos_token_id or []
        rows = [
            self._answer(prompts[row // options.samples], response, told, stops)
            for row, (response, told) in enumerate(zip(responses, log_probs, strict=True))
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
                f"continuous=True with {self._config.model.path}, which has no token that ends an answer: transformers' scheduler needs one; "
                "give SamplingOptions(stop_tokens=...), or use continuous=False"
            )
        asked = [i for i in range(len(prompts)) for _ in range(options.samples)]
        devices = [self._device] if self._device.type == "cuda" else []
        # The scheduler draws from torch's random state: processes that answer the same prompt must not draw the same answers,
        # and a model that trains in this one keeps its own.
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed_of(options.seed, dist.get_rank() if dist.is_initialized() else 0))
            outs = self._model.generate_batch(
                inputs=[list(prompts[i]) for i in asked],
                generation_config=settings,
                continuous_batching_config=_scheduler(self._config.batch_tokens),
            )
        # Requests are named by their number, and come back in the order in which they ended.
        for name, out in sorted(outs.items(), key=lambda pair: int(pair[0].rpartition("_")[2])):
            if out.error:
                nan = (
                    "computes NaN or infinity: its weights, or its number format, are at fault"
                    if "nan" in out.error
                    else "failed"
                )
                raise ModelError(f"rollout: {self._config.model.path} {nan} (request {name}: {out.error})")
        ordered = [out for _, out in sorted(outs.items(), key=lambda pair: int(pair[0].rpartition("_")[2]))]
        if any(math.isnan(number) for out in ordered for number in out.logprobs):
            raise ModelError(
                f"rollout: {self._config.model.path} computes NaN: its weights, or its number format, are at fault"
            )
        found: list[list[Generation]] = [[] for _ in prompts]
        for i, out in zip(asked, ordered, strict=True):
            found[i].append(
                self._answer(prompts[i], list(out.generated_tokens), list(out.logprobs), settings.eos_token_id or [])
            )
        return found

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine.load_weights`.

        Raises:
            ModelError: a tensor belongs to no parameter, has another shape or numbers that are not finite, or parameters are left
                without. It answers no more until it has taken others.
        """
        self._whole = False
        layout = DiskLayout(self._model)
        places: dict[str, list[tuple[Tensor, tuple[int, ...]]]] = {}
        parameters = dict(self._model.named_parameters(remove_duplicate=True))
        for name, parameter in parameters.items():
            for segment in layout.segments(name, parameter.shape):
                part = parameter[segment.box.within((0,) * parameter.dim())]
                places.setdefault(segment.name, []).append((part, tuple(segment.shape)))
        unknown, tied = [], set(self._model.all_tied_weights_keys)
        sums: list[tuple[str, Tensor]] = []
        for name, tensor in weights:
            sums.append((name, _sum(tensor)))
            found = places.pop(name, None)
            if found is None:
                if name not in tied:
                    unknown.append(name)
                continue
            for part, shape in found:
                if tuple(tensor.shape) != shape:
                    raise ModelError(
                        f"{name} is {list(tensor.shape)}, the rollout model's is {list(shape)}; they are not one model"
                    )
                part.copy_(tensor.to(part.device).view(part.shape))
        if unknown or places:
            raise ModelError(
                f"the weights are not those of {self._config.model.path}: {len(unknown)} tensors belong nowhere ({', '.join(unknown[:3]) or 'none'}), "
                f"{len(places)} parameters got none ({', '.join(list(places)[:3]) or 'none'})"
            )
        if broken := [name for name, total in sums if not math.isfinite(float(total))]:
            raise ModelError(f"{_named(broken)} not finite (NaN or infinity); the weights that were sent are damaged")
        self._whole = True

    def to(self, place: str) -> None:
        """See `RolloutEngine.to`.

        Raises:
            ConfigError: there is no such place.
        """
        if place not in ("device", "host"):
            raise ConfigError(f"to({place!r}): a rollout model can be on 'device' or 'host'")
        self._model.to(self._device if place == "device" else torch.device("cpu"))

    def close(self) -> None:
        """Free the model."""
        del self._model
        free_memory(self._device)


FOLLOWED = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config")
"""Of a folder's generation settings, what rollout takes over, and what asks for nothing."""


def _asked_for(settings: GenerationConfig) -> dict[str, Any]:
    """What a folder wants of generation that is not the default."""
    plain = GenerationConfig().to_dict()
    # Unset, both are what rollout does anyway.
    harmless = {"use_cache": True, "output_attentions": False, "output_hidden_states": False}
    return {
        name: value
        for name, value in settings.to_diff_dict().items()
        if name not in FOLLOWED and value is not None and value != harmless.get(name, plain.get(name))
    }


def _ids(tokens: int | list[int] | None) -> list[int]:
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def _sum(tensor: Tensor) -> Tensor:
    """NaN or infinite where one of the numbers is; on the tensor's device, so that nothing waits for it."""
    return tensor.sum(dtype=torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None)


def _not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    sums = [(name, _sum(tensor.detach())) for name, tensor in tensors]
    return [name for name, total in sums if not math.isfinite(float(total))]


def _named(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' and others' if len(names) > 3 else ''} {'has numbers' if len(names) == 1 else 'have numbers'}"
