"""Continuous batching with transformers' manager: requests join and leave the batch at every step, with a paged KV cache.

The manager is advanced from outside, one step at a time, instead of by its own thread: weights change, requests are cancelled and
errors are handled between two steps. Tokens are sampled and reported here, so every request has its own temperature, top_p,
top_k and seed, and keeps its tokens when it is cancelled.
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import RequestState

from ..engine.errors import ConfigError, ModelError, is_out_of_memory
from ..engine.hf.experts import expert_modules, use_invariant_experts
from ..engine.hf.model import decoder_of
from ..engine.hf.shape import experts_of
from ..engine.hf.state_layers import reset_states_between_documents
from ..engine.ops.invariance import PassSizes
from .adapters import GeneratorAdapters
from .causal_lm_generator import CausalLMGenerator
from .invariant import invariant_pass_sizes, pad_pass
from .media import PromptMedia
from .memory import PAGE_TOKENS_CUDA
from .options import RolloutConfig, SamplingOptions
from .paged_attention import IMPLEMENTATION, SUPPORTED, prepare_step
from .sampling import Draw, sample_tokens
from .states import CHILD, RequestStates
from .token_stream import TokenStream

# The library logs the size of every cache that it creates.
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)

PAGE_TOKENS = 32
"""The number of tokens in a page of the cache on a CPU."""
CHECK_TOKENS = 4
"""The number of tokens in the prompt that checks a model's attention; their ids are 0, 1, 2, ..., which every vocabulary has."""
_ANY = Draw(SamplingOptions(temperature=0.0), 0.0)
"""How a token is chosen for a request whose result is no longer needed."""


class ContinuousGenerator(CausalLMGenerator):
    """A generator with the continuous batching of transformers.

    A prompt that several waiting requests share is processed once, and prompts with a common prefix share full pages of the cache.
    Requests begin in order of arrival; a request that does not fit into the cache blocks the ones after it.

    With `config.invariant` a completion is bitwise independent of the other requests. Each forward pass has a number of rows at which a
    row does not depend on the others. Attention has shapes that follow from a token's own position. A request begins only when the cache
    has room for all of its tokens, so that none is recomputed. Prompts of different requests do not share pages.

    Args:
        config: The configuration.

    Raises:
        ModelError: The model cannot be loaded.
        ConfigError: Its attention has no paged form, or `config.invariant` cannot hold.
    """

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config)
        self._most_rows = config.target_tokens_per_batch
        self._row_multiple = 1
        if config.invariant:
            self._row_multiple, largest = self._find_pass_sizes()
            self._most_rows = min(self._most_rows, largest)
        self._page = PAGE_TOKENS_CUDA if self._lm.device.type == "cuda" else PAGE_TOKENS
        self._sampler = _Sampler(self)
        self._processor: Any = None
        self._streams: dict[str, TokenStream] = {}
        self._names: dict[int | str, str] = {}
        self._pending_forks: set[str] = set()
        self._media: dict[str, PromptMedia] = {}
        self._families = 0
        self._states: RequestStates | None = None
        """The states of requests; None if the model has only attention layers."""
        self._attending: dict[int, str] | None = None
        """The attention layers and their kinds, in order, for a model that also has other layers; None if all are attention layers."""
        self._check_attention()
        self._install_adapters()

    def _find_pass_sizes(self) -> PassSizes:
        model, path = self._lm.model, self.config.model.path
        if self._lm.device.type == "cuda":
            raise ConfigError(
                f"invariant=true for {path} on {self._lm.device}: on this device the order of summation in attention and matrix products depends on the batch "
                "size; use invariant=false, or a CPU (CUDA_VISIBLE_DEVICES=)"
            )
        if not SUPPORTED:
            raise ConfigError("invariant=true needs transformers 5.20 or later")
        text = model.config.get_text_config(decoder=True)
        if experts_of(text) is not None and not expert_modules(model):
            raise ConfigError(
                f"invariant=true for {path}: the experts of {text.model_type} are not dispatched through transformers' experts interface, so the number "
                "of rows of each depends on the other requests; use invariant=false"
            )
        use_invariant_experts(model)
        with torch.inference_mode():
            return invariant_pass_sizes(model, path)

    def _check_attention(self) -> None:
        """Compare a token's log-probability with that of a plain forward pass: for some models the pages have the wrong shape or scale."""
        # Different tokens, whose values differ: the average of equal values is the same whatever the weights of attention are.
        prompt = list(range(min(CHECK_TOKENS, self._lm.model.config.get_text_config().vocab_size)))
        # First, because the manager switches the model to an attention that only the manager can run.
        with torch.inference_mode():
            ids = torch.tensor([prompt], device=self._lm.device)
            expected = self._lm.model(input_ids=ids).logits[0, -1].float().log_softmax(-1).tolist()
        kinds = getattr(self._lm.model.config.get_text_config(), "layer_types", None) or ()
        if "chunked_attention" in kinds:
            raise self._unfit(ModelError("its attention is limited to chunks of a sequence, which the cache does not support"))
        if reset_states_between_documents(self._lm.model):
            self._states = RequestStates(self._lm.device, self._row_multiple if self.config.invariant else None)
            self._attending = self._find_attention()
        stream = TokenStream(self.step, "check", prompt, SamplingOptions(max_tokens=1, temperature=0.0), frozenset(), 0)
        self.waiting[stream.id] = stream
        # Several steps if `target_tokens_per_batch` is smaller than the prompt.
        while not stream.tokens and stream.error is None:
            self.step()
        # Too little memory says nothing about the model, so another generator is not the way out.
        if stream.error is not None and is_out_of_memory(stream.error):
            raise stream.error
        if stream.error is not None:
            raise self._unfit(stream.error) from stream.error
        log_prob = stream.log_probs[0]
        # Written as a negation, so that NaN fails too.
        if not abs(expected[stream.tokens[0]] - log_prob) <= (1e-3 if self.config.dtype == "float32" else 0.1):
            raise self._unfit(
                ModelError(
                    f"a log-probability is {log_prob:.4f}, and {expected[stream.tokens[0]]:.4f} in a plain forward pass"
                )
            )
        # The check must leave no trace: neither pages of its prompt nor counts in the statistics.
        self.drop_caches()
        self.reset_stats()

    def _find_attention(self) -> dict[int, str]:
        layers: dict[int, str] = {}
        for module in decoder_of(self._lm.model).modules():
            # transformers' attention modules are found by their attribute `is_causal`.
            if hasattr(module, "is_causal"):
                window = getattr(module, "sliding_window", None)
                layers[module.layer_idx] = "full_attention" if window is None else "sliding_attention"
        if not SUPPORTED or not layers or min(layers) < 0:
            raise self._unfit(
                ModelError("it has no attention, or one shared by several layers, which the cache cannot tell apart")
            )
        return dict(sorted(layers.items()))

    def _unfit(self, error: Exception) -> ConfigError:
        way_out = "use generator=static" + (" with invariant=false" if self.config.invariant else "")
        return ConfigError(
            f"generator=continuous cannot run {self.config.model.path}: {type(error).__name__}: {error}; {way_out}"
        )

    def run_step(self) -> None:
        """Begin requests, and run a forward pass over one token of each running request and the tokens of new prompts."""
        if self._processor is None:
            self._processor = self._new_processor()
        self._admit_waiting()
        processor = self._processor
        if not processor.prepare_next_batch():
            # If all requests were evicted from a full cache, the scheduler waits for one of them to end.
            processor.scheduler.block_new_requests = False
            if not processor.prepare_next_batch():
                raise RuntimeError("transformers' scheduler has requests, but selects none of them")
        is_paged = self._lm.model.config._attn_implementation == IMPLEMENTATION
        processor._generation_step(_SteppedModel(self, is_paged=is_paged))
        processor.update_batch()
        if self._states is not None:
            self._states.fork(processor.scheduler.active_requests)
        sampler = self._sampler
        self.prefill_tokens += sampler.prefill_tokens
        self._pending_forks.difference_update(sampler.names)
        for name, token, log_prob in zip(sampler.names, sampler.tokens, sampler.log_probs, strict=True):
            # A name without a stream was stopped before its first token, and could not be removed until now; see
            # `stop_request`.
            if name in self._streams:
                self.add_token(self._streams[name], token, log_prob)
            else:
                self._remove(name)

    def adapter_of(self, name: str) -> str:
        """Return the adapter of a request of the manager; empty if it has none, or if its result is no longer needed."""
        stream = self._streams.get(name)
        if stream is None and name not in self._streams:
            # Other requests may be forked from the prompt of a cancelled one.
            children = [other for child, other in self._streams.items() if child.startswith(name + CHILD)]
            stream = children[0] if children else None
        return "" if stream is None else stream.options.adapter

    def add_routes(self, routes: Tensor) -> None:
        """Add the routes of a step, `[T, L, K]`, to its requests; those of prompts also to the completions forked from them."""
        step, first = self._sampler, 0
        for name, past, count in zip(step.requests, step.pasts, step.queries, strict=True):
            # Until its first own token, a child shares the pass of its parent, and so the routes of the prompt.
            children = [other for other in self._pending_forks if other.startswith(name + CHILD)]
            for owner in (name, *children):
                if owner in self._streams:
                    self._streams[owner].routes.add(past, routes[first : first + count])
            first += count

    def _admit_waiting(self) -> None:
        """Pass waiting requests to the manager's scheduler. It begins any request that fits, so it receives only those that fit."""
        # `static` with invariant=true runs with this class, but still one batch at a time; see `build_generator`.
        if self.running and self.config.generator == "static":
            return
        if self._processor.scheduler.waiting_requests:
            # A request that was passed on does not fit after all, because of unused prefixes in the cache. (Before transformers 5.20 these
            # are evicted automatically.)
            evict = getattr(self._processor.cache, "evict_cached_blocks", None)
            if evict is not None and evict():
                self._processor.cache.pool.try_to_free_sectors()
            return
        # Counted as if running requests shared no pages. Unused prefixes are left out, because they can be evicted.
        room = self._blocks - sum(self._pages(stream) for stream in self.running.values())
        begun, begun_alone = 0, None
        while self.waiting and len(self.running) < self.config.max_batch_size:
            first = next(iter(self.waiting.values()))
            # Later requests with the same prompt begin together with it, as far as they fit.
            same = [
                s
                for s in self.waiting.values()
                if s.inputs == first.inputs and s.tokens == first.tokens and s.options.adapter == first.options.adapter
            ]
            fits = min(len(same), self.config.max_batch_size - len(self.running), room // self._pages(first))
            # With nothing running, the first request begins even if it does not seem to fit: otherwise nothing would
            # ever run.
            if self.running and fits < 1:
                return
            # The prompts of this step fill a pass. More of them would only wait in the scheduler.
            if begun and begun + first.length > self.config.target_tokens_per_batch:
                return
            family = same[: max(fits, 1)]
            if self._needs_page(first):
                # Begins separately; the others find its pages in the cache.
                family = family[:1]
                if begun_alone == first.so_far:
                    return
                begun_alone = first.so_far
            begun += first.length
            room -= len(family) * self._pages(first)
            for stream in family:
                self.admit(stream)
            self._begin(family)

    def _needs_page(self, stream: TokenStream) -> bool:
        """Return whether all tokens of a prompt except the last may be found in the cache.

        The scheduler holds back the last token of a prompt with several completions until these exist, and would have no work to do.
        """
        length = stream.length
        return self._processor.cache.use_prefix_sharing and length > 1 and (length - 1) % self._page == 0

    def _pages(self, stream: TokenStream) -> int:
        return -(-(stream.length + (stream.remaining if self.config.invariant else 1)) // self._page)

    def _begin(self, family: list[TokenStream]) -> None:
        self._families += 1
        name = str(self._families)
        # A prompt of one token cannot be held back either; then nothing is shared.
        parents = [family] if family[0].length > 1 else [[stream] for stream in family]
        for number, (parent, *children) in enumerate(parents):
            parent_name = f"{name}.{number}"
            for i, stream in enumerate((parent, *children)):
                request_name = f"{parent_name}{CHILD}{i - 1}" if i else parent_name
                self._streams[request_name], self._names[stream.id] = stream, request_name
                if stream.media is not None:
                    # The manager may continue a request whose result is no longer needed, because others are forked from its prompt.
                    self._media[request_name] = stream.media.retained()
                if children:
                    self._pending_forks.add(request_name)
            self._processor.scheduler.add_waiting_request(
                RequestState(
                    request_id=parent_name,
                    initial_tokens=parent.so_far,
                    num_children=len(children),
                    # The end of a completion is detected here, because each request has its own stop conditions.
                    max_new_tokens=None,
                )
            )

    def stop_request(self, stream: TokenStream) -> None:
        """Remove a request from the manager."""
        name = self._names.pop(stream.id)
        del self._streams[name]
        # Children are created with the parent's first token, so until then neither can be removed separately.
        if name not in self._pending_forks:
            self._remove(name)

    def _remove(self, name: str) -> None:
        if self._states is not None:
            self._states.remove(name)
        self._processor.scheduler.set_request_cancellation(name)
        media = self._media.pop(name, None)
        if media is not None:
            media.release()

    def drop_caches(self) -> None:
        """Forget all requests, and free the cache with all prefixes in it."""
        self._processor = None
        for media in self._media.values():
            media.release()
        if self._states is not None:
            self._states.clear()
        self._streams, self._names, self._pending_forks, self._media = {}, {}, set(), {}

    def invalidate_caches(self) -> None:
        """Forget all requests and prefixes, but keep the memory of the cache, whose size does not depend on the weights."""
        processor = self._processor
        self.drop_caches()
        # Before transformers 5.20, prefixes would survive a reset.
        if processor is not None and hasattr(processor.cache, "reset"):
            # Its tensors were created in inference mode, so they can only be modified in it.
            with torch.inference_mode():
                processor.reset()
                processor.cache.reset()
            self._processor = processor

    def _new_processor(self) -> Any:
        blocks = -(-self.config.max_batch_total_tokens // self._page)
        chunk, in_chunks = self._most_rows, self.config.enable_chunked_prefill or self.config.invariant
        settings: dict[str, Any] = {
            "page_size": self._page,
            "num_blocks": blocks,
            "max_batch_tokens": min(chunk, blocks * self._page) if in_chunks else blocks * self._page,
            "max_requests_per_batch": self.config.max_batch_size,
            # Tokens are read after every step.
            "use_async_batching": False,
            "use_cuda_graph": False,
            # Flash attention has no float32.
            "auto_switch_to_flash": self.config.dtype == "bfloat16",
            # Requests are admitted in `_admit_waiting`; above 0, the manager would hold back some that were found to
            # fit.
            "safety_margin": 0.0,
        }
        field_names = {field.name for field in fields(ContinuousBatchingConfig)}
        if "page_size" not in field_names:
            # The name before transformers 5.20.
            settings["block_size"] = self._page
        manager = _Manager(
            self._lm.model,
            # The manager takes the argmax of the sampler's scores, and no token id ends a request: -1 disables this.
            GenerationConfig(do_sample=False, max_new_tokens=1, eos_token_id=-1),
            ContinuousBatchingConfig(**{name: value for name, value in settings.items() if name in field_names}),
            self._sampler,
            self._attending,
        )
        self._blocks = blocks
        # It seeds torch's random state, which belongs to models that train in this process.
        with torch.random.fork_rng(devices=[self._lm.device] if self._lm.device.type == "cuda" else []):
            processor = manager._create_batch_processor()
        if self._states is not None or self._lm.recorder is not None or self.config.invariant or self.config.max_adapters:
            # A page from the cache would lack the states of stateful layers and the routes of its tokens. With invariant, tokens of a
            # completion are computed one by one, unlike those of a prompt. And the page may belong to another adapter.
            processor.cache.use_prefix_sharing = False
        return processor

    def close(self) -> None:
        """Free the model and the cache."""
        self.drop_caches()
        self._lm.close()


class _Manager(ContinuousBatchingManager):
    """A manager whose logits processor samples the tokens, and whose cache has only the attention layers."""

    def __init__(
        self,
        model: Any,
        settings: GenerationConfig,
        config: ContinuousBatchingConfig,
        sampler: "_Sampler",
        attending: Mapping[int, str] | None,
    ) -> None:
        self._has_states = attending is not None
        if attending is not None:
            cached = {"layer_types": list(attending.values()), "num_hidden_layers": len(attending)}
            text = _Overlay(model.config.get_text_config(), **cached)
            model = _Overlay(model, config=_Overlay(model.config, get_text_config=lambda *_, **__: text, **cached))
            # The manager keeps the returned object, which would otherwise be the model itself.
            model.eval = lambda: model
        super().__init__(model, settings, config)
        # After the constructor of the base class, which creates a processor from the generation config.
        self.logit_processor = sampler

    def switch_to_cb_friendly_attn(self, model: Any, *switches: bool) -> None:
        """Switch the decoder to kernels that read pages, or to our own attention if there are none. Encoders keep theirs."""
        if isinstance(model, _Overlay):
            model = model.of
        config = model.config
        encoders = {
            key: part._attn_implementation
            for key in config.sub_configs
            if (part := getattr(config, key)) is not None and part is not config.get_text_config(decoder=True)
        }
        self._switch(model, *switches)
        if encoders:
            model.set_attn_implementation(encoders)

    def _switch(self, model: Any, *switches: bool) -> None:
        if not SUPPORTED:
            if "paged|" not in model.config._attn_implementation and model.dtype == torch.float32:
                # The manager would choose flash attention, which does not support float32.
                model.set_attn_implementation(f"paged|{model.config._attn_implementation}")
            super().switch_to_cb_friendly_attn(model)
            return
        if model.config._attn_implementation == IMPLEMENTATION:
            return
        if model.device.type == "cuda" and not self._has_states:
            super().switch_to_cb_friendly_attn(model, *switches)
        if "flash" not in model.config._attn_implementation:
            model.set_attn_implementation(IMPLEMENTATION)
        if model.config._attn_implementation != IMPLEMENTATION:
            # A model with custom attention cannot be switched either.
            super().switch_to_cb_friendly_attn(model, *switches)


class _Overlay:
    """A proxy of an object that overrides some of its attributes."""

    def __init__(self, of: Any, **attributes: Any) -> None:
        self.of = of
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


class _SteppedModel:
    """A model that also receives the arguments that our attention and media need in a step."""

    def __init__(self, generator: ContinuousGenerator, *, is_paged: bool) -> None:
        self._generator, self._model, self._sampler = generator, generator._lm.model, generator._sampler
        self._is_paged = is_paged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        """Run the model."""
        self._give_media(inputs)
        sampler, invariant = self._sampler, self._generator.config.invariant
        if self._is_paged:
            attending = self._generator._attending
            numbers = None if attending is None else {layer: i for i, layer in enumerate(attending)}
            prompts = sampler.prompts if invariant else None
            inputs["paged"] = prepare_step(
                inputs["cache"], inputs, sampler.queries, sampler.pasts, self._model, numbers, prompts
            )
        if invariant:
            pad_pass(inputs, sum(sampler.queries), self._generator._row_multiple)
        if self._generator._side_by_side is not None:
            self._select_adapters(inputs, self._generator._side_by_side)
        if self._generator._states is not None:
            inputs["states"] = self._generator._states.begin_step(sampler.requests, sampler.queries, sampler.pasts)
        recorder = self._generator._lm.recorder
        with nullcontext() if recorder is None else recorder.recording():
            output = self._model(**inputs)
        if recorder is not None:
            self._generator.add_routes(recorder.take())
        # The logits of padded rows are cut off: the manager expects one row for each request that gets a token.
        if invariant and "logits_to_keep" in inputs:
            output.logits = output.logits[:, : len(sampler.names)]
        return output

    def _select_adapters(self, inputs: dict[str, Any], adapters: GeneratorAdapters) -> None:
        """Select the adapter of each row: rows of a request are contiguous, in the order of requests."""
        sampler, of_request = self._sampler, self._generator.adapter_of
        rows = [(of_request(name), count) for name, count in zip(sampler.requests, sampler.queries, strict=True)]
        padding = inputs["input_ids"].shape[-1] - sum(sampler.queries)
        # Rows that pad a pass belong to no request.
        rows += [("", padding)] if padding else []
        head_rows = rows
        if "logits_to_keep" in inputs:
            kept = len(inputs["logits_to_keep"])
            head_rows = [(of_request(name), 1) for name in sampler.names]
            head_rows += [("", kept - len(head_rows))] if kept > len(head_rows) else []
        adapters.select(rows, head_rows)

    def _give_media(self, inputs: dict[str, Any]) -> None:
        """Replace the numbers that stand for features by the features, and set the positions of all axes."""
        features, media_of_requests = self._generator._lm.media, self._generator._media
        media = [media_of_requests.get(name) for name in self._sampler.requests]
        if features is None or not any(media):
            return
        parts = list(zip(media, self._sampler.pasts, self._sampler.queries, strict=True))
        # Only prompts contain features. A step in which all requests are past their prompts keeps its token ids.
        if any(one is not None and past < len(one.ids) for one, past, _ in parts):
            inputs |= features.inputs(inputs.pop("input_ids"))
        if features.axes == 1:
            return
        positions = [
            torch.arange(past, past + count).expand(features.axes, -1)
            if one is None or one.positions is None
            else one.positions_of(past, count)
            for one, past, count in parts
        ]
        inputs["position_ids"] = torch.cat(positions, -1)[:, None].to(inputs["position_ids"].device)


class _Sampler(ContinuousBatchingLogitsProcessorList):
    """Samples the tokens of a step, and leaves the manager no other choice."""

    def __init__(self, generator: ContinuousGenerator) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self._generator = generator
        self.names: list[str] = []
        """The manager's names of the requests that get a token in this step."""
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.prefill_tokens = 0
        self.requests: list[str] = []
        """The manager's names of the requests in the step."""
        self.queries: list[int] = []
        """The number of tokens of each request in the step."""
        self.pasts: list[int] = []
        """The number of previously processed tokens of each."""
        self.prompts: list[int] = []
        """The initial number of tokens of each."""

    def prepare_tensor_args(self, requests_in_batch: Any, arg_storage: Any) -> Any:
        """Record which requests get a token."""
        self.names = [request.state.request_id for request in requests_in_batch if request.has_new_token]
        self.requests = [request.state.request_id for request in requests_in_batch]
        self.queries = [request.query_length for request in requests_in_batch]
        # The manager has already advanced the offset by the tokens of this step.
        self.pasts = [request.state.position_offset - request.query_length for request in requests_in_batch]
        if self._generator.config.invariant and any(r.state._true_initial_tokens for r in requests_in_batch):
            raise ModelError(
                "the cache had no room for all tokens of a request, which was recomputed in different chunks, so invariant=true does not hold; "
                "raise max_batch_total_tokens"
            )
        self.prompts = [len(request.state.initial_tokens) for request in requests_in_batch]
        self.prefill_tokens = sum(r.query_length for r in requests_in_batch if not r.state.generated_tokens)
        return arg_storage

    def __call__(self, input_ids: Any, scores: Any, logits_processor_args: Any) -> Any:
        """Sample from the logits `[B, V]`, and return scores in which the sampled tokens are the highest."""
        streams = self._generator._streams
        draws = [streams[name].draw() if name in streams else _ANY for name in self.names]
        # The remaining rows belong to requests whose prompt was only partly processed.
        excluded = self._generator._lm.excluded
        self.tokens, self.log_probs = sample_tokens(scores[: len(draws)], draws, excluded) if draws else ([], [])
        chosen = torch.tensor(self.tokens, dtype=torch.int64, device=scores.device)[:, None]
        # The manager then takes the argmax of each row.
        return torch.zeros_like(scores).scatter_(1, chosen, 1.0) if draws else scores
