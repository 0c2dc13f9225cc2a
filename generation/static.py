"""Static batching with a plain transformers model: a batch of prompts is generated to completion before the next one begins.

Axes: P different prompts, B rows of a batch, L tokens of the longest prompt and its completion so far.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig

from ..engine.errors import ConfigError
from .adapters import GeneratorAdapters
from .causal_lm import CausalLM
from .causal_lm_generator import CausalLMGenerator
from .options import RolloutConfig
from .sampling import sample_tokens
from .token_stream import TokenStream

DROP_SHARE = 0.25
"""Ended rows are dropped from a batch when they make up this fraction of it. Dropping them copies the cache."""


class StaticGenerator(CausalLMGenerator):
    """A generator that pads prompts of similar length into a batch.

    Each distinct prompt of a batch is processed once, however many completions it gets.

    Args:
        config: The configuration.

    Raises:
        ModelError: The model cannot be loaded.
        ConfigError: The configuration has `invariant`, for which `build_generator` builds another class.
    """

    def __init__(self, config: RolloutConfig) -> None:
        if config.invariant:
            raise ConfigError(
                "invariant=true with generator=static needs the steps of ContinuousGenerator; build it with build_generator"
            )
        super().__init__(config)
        self._batch: _Batch | None = None
        self._install_adapters()

    def run_step(self) -> None:
        """Begin a batch, or generate the next token of its rows."""
        if self._batch is None or not self._batch.live():
            # The batch with the oldest request comes first, so that longer prompts that arrive later do not overtake it
            # each time.
            streams = next(batch for batch in self._batches() if next(iter(self.waiting.values())) in batch)
            for stream in streams:
                self.admit(stream)
            self._batch = _Batch(self._lm, streams, self._side_by_side)
            logits = self._batch.prefill()
            self.prefill_tokens += self._batch.prefill_tokens
        else:
            logits = self._batch.decode()
        live = self._batch.live()
        # Rows that have ended are still computed, until enough of them are dropped together.
        if len(live) < len(logits):
            logits = logits[torch.tensor(live, device=logits.device)]
        batch = self._batch
        streams = [batch.streams[row] for row in live]
        tokens, log_probs = sample_tokens(logits, [stream.draw() for stream in streams], self._lm.excluded)
        batch.set_tokens(live, tokens)
        for stream, token, log_prob in zip(streams, tokens, log_probs, strict=True):
            self.add_token(stream, token, log_prob)

    def _batches(self) -> Iterator[list[TokenStream]]:
        """Yield batches of waiting requests, grouped by similar length."""
        batch: list[TokenStream] = []
        most = 0
        # A stable sort, so that equal prompts stay together in order of arrival.
        for stream in sorted(self.waiting.values(), key=lambda s: -s.length):
            # The first prompt of a batch is the longest; all others are padded to its length.
            longest = batch[0].length if batch else stream.length
            most = max(most, stream.remaining) if batch else stream.remaining
            rows = len(batch) + 1
            full = rows > self.config.max_batch_size or rows * (longest + most) > self.config.max_batch_total_tokens
            # A model that does not take padding gets only prompts of equal length.
            if batch and (full or (stream.length < longest and not self._lm.takes_padding)):
                yield batch
                batch, most = [], stream.remaining
            batch.append(stream)
        yield batch

    def stop_request(self, stream: TokenStream) -> None:
        """Leave a row of the batch unused."""
        if self._batch is not None:
            self._batch.drop(stream)

    def drop_caches(self) -> None:
        """Forget the batch."""
        self._batch = None

    def close(self) -> None:
        """Free the model."""
        self._batch = None
        self._lm.close()


def new_cache(config: PreTrainedConfig) -> Any:
    """Return an empty cache for a transformers model."""
    if config.model_type != "minimax":
        return DynamicCache(config=config)
    # The only family whose model accepts only its own cache.
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    return MiniMaxCache()


def select_rows(cache: Any, rows: Tensor) -> None:
    """Keep these rows of a cache, in this order; a row may occur several times."""
    # Made for beam search, it selects arbitrary rows of keys and values and of the states of linear attention.
    cache.reorder_cache(rows)
    if hasattr(cache, "linear_cache"):
        cache.linear_cache = [
            state.index_select(0, rows) if isinstance(state, Tensor) else state for state in cache.linear_cache
        ]


class _Batch:
    """The rows of a batch, with their cache.

    Args:
        lm: The model.
        streams: The request of each row.
        adapters: The adapters of the model, if it supports several.
    """

    def __init__(self, lm: CausalLM, streams: Sequence[TokenStream], adapters: GeneratorAdapters | None = None) -> None:
        self._lm, self.streams, self._adapters = lm, list(streams), adapters
        self._ended: set[int] = set()
        self._cache = new_cache(lm.model.config.get_text_config(decoder=True))
        self.prefill_tokens = 0
        self._axes = 1 if lm.media is None else lm.media.axes

    def live(self) -> list[int]:
        """Return the rows that have not ended."""
        return [row for row in range(len(self.streams)) if row not in self._ended]

    def drop(self, stream: TokenStream) -> None:
        """Leave a row unused."""
        self._ended.add(next(row for row, other in enumerate(self.streams) if other is stream))

    def set_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Set the last token of rows."""
        self._last = torch.full((len(self.streams), 1), self._lm.pad, dtype=torch.int64)
        self._last[list(rows), 0] = torch.tensor(tokens)

    def prefill(self) -> Tensor:
        """Process the prompts and return the logits `[B, V]` of the first tokens."""
        device = self._lm.device
        # Equal prompts of one adapter are computed once, and their cache is copied to all of their rows below.
        rows_of: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for row, stream in enumerate(self.streams):
            rows_of.setdefault((stream.options.adapter, tuple(stream.so_far)), []).append(row)
        prompts = [prompt for _, prompt in rows_of]
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self._lm.pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt) :] = torch.tensor(prompt)
            mask[i, width - len(prompt) :] = 1
        self.prefill_tokens = sum(map(len, prompts))
        # Padding is on the left, so that all rows end in the same column. Its positions are arbitrary, because it is
        # masked.
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        following = mask.sum(1, keepdim=True)
        media = [self.streams[rows[0]].media for rows in rows_of.values()]
        if any(one is not None and one.positions is not None for one in media):
            positions = positions.repeat(self._axes, 1, 1)
            for i, one in enumerate(media):
                if one is not None and one.positions is not None:
                    positions[:, i, width - len(prompts[i]) :] = one.positions_of(0, len(prompts[i]))
            # With several axes, the position after the prompt follows from the largest one, not from the number of
            # tokens.
            following = positions.amax((0, 2))[:, None] + 1
        self._mask, self._next = mask.to(device), following.to(device)
        self._padded = any(len(prompt) < width for prompt in prompts)
        self._select_adapters([adapter for adapter, _ in rows_of], width)
        logits = self._forward(ids.to(device), positions.to(device), prompt=True)
        if (recorder := self._lm.recorder) is not None:
            for prompt, rows, routes in zip(prompts, rows_of.values(), recorder.take().unflatten(0, ids.shape), strict=True):
                for row in rows:
                    self.streams[row].routes.add(0, routes[width - len(prompt) :])
        if len(prompts) < len(self.streams):
            # The prompt of each row: from here on the cache has one row for each request.
            source = [0] * len(self.streams)
            for i, rows in enumerate(rows_of.values()):
                for row in rows:
                    source[row] = i
            logits = self._select(source, logits)
        return logits

    def decode(self) -> Tensor:
        """Process the last token of each row and return the logits `[B, V]` of the next ones."""
        if len(self._ended) >= DROP_SHARE * len(self.streams):
            live = self.live()
            self._last = self._last[live]
            self._select(live)
            self.streams, self._ended = [self.streams[row] for row in live], set()
        # All position axes of a token outside of media are equal.
        positions = self._next if self._axes == 1 else self._next.expand(self._axes, -1, -1)
        self._next = self._next + 1
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], 1)
        self._select_adapters([stream.options.adapter for stream in self.streams], 1)
        logits = self._forward(self._last.to(self._lm.device), positions)
        if (recorder := self._lm.recorder) is not None:
            for row, routes in enumerate(recorder.take()):
                if row not in self._ended:
                    # The token that was processed is the last one of the stream.
                    self.streams[row].routes.add(self.streams[row].length - 1, routes[None])
        return logits

    def _select_adapters(self, adapters: Sequence[str], width: int) -> None:
        """Select the adapter of each row of the next pass, which is `width` tokens long."""
        if self._adapters is not None:
            # The head runs on the kept tokens only, so its rows are fewer than those of the layers.
            kept = 1 if "logits_to_keep" in self._lm.parameters else width
            self._adapters.select([(name, width) for name in adapters], [(name, kept) for name in adapters])

    def _select(self, rows: list[int], logits: Tensor | None = None) -> Any:
        index = torch.tensor(rows, device=self._lm.device)
        select_rows(self._cache, index)
        self._mask, self._next = self._mask[index], self._next[index]
        return None if logits is None else logits[index]

    def _forward(self, ids: Tensor, positions: Tensor, *, prompt: bool = False) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": ids}
        if prompt and self._lm.media is not None and any(stream.media is not None for stream in self.streams):
            inputs = self._lm.media.inputs(ids)
        inputs |= {"past_key_values": self._cache, "use_cache": True}
        # Without padding, attention needs no mask.
        inputs["attention_mask"] = self._mask if self._padded else None
        if "position_ids" in self._lm.parameters:
            inputs["position_ids"] = positions
        if "logits_to_keep" in self._lm.parameters:
            inputs["logits_to_keep"] = 1
        with nullcontext() if self._lm.recorder is None else self._lm.recorder.recording():
            # Models without `logits_to_keep` return the logits of all tokens.
            logits: Tensor = self._lm.model(**inputs).logits[:, -1]
        return logits
