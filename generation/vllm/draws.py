"""The sampling of tokens for vLLM's requests, tracked by their slots in its batch. Does not import vLLM.

Axes: B rows of a batch, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..options import SamplingOptions
from ..sampling import Draw, UniformNumbers, choose

KEY = "drivetrain"
"""The key of our settings in the extra arguments of a request's sampling parameters."""


class _Request:
    def __init__(self, settings: Mapping[str, Any], output: Sequence[int]) -> None:
        self._options = SamplingOptions(temperature=settings["temperature"], top_p=settings["top_p"], top_k=settings["top_k"])
        self._uniform, self._begun, self._output = UniformNumbers(settings["seed"]), settings["begun"], output
        self._prompt = settings["prompt"]

    def draw(self, length: int | None) -> Draw:
        # While a prompt is only partly processed, vLLM samples a token that it then drops.
        count = len(self._output) if length is None else max(length - self._prompt, 0)
        return Draw(self._options, self._uniform[self._begun + count] if self._options.temperature else 0.0)


class RequestDraws:
    """The requests in vLLM's batch that carry our settings, and the tokens sampled for them."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}

    def begin(self, slot: int, extra_args: Mapping[str, Any] | None, output: Sequence[int] = ()) -> bool:
        """Record that a request begins in a slot, whose previous request has ended.

        Args:
            slot: The slot.
            extra_args: The additional arguments of the request's sampling parameters.
            output: vLLM's list of generated tokens, which grows during generation; not needed if `choose` receives lengths.

        Returns:
            Whether the request carries our settings.
        """
        settings = (extra_args or {}).get(KEY)
        if settings is None:
            self._requests.pop(slot, None)
        else:
            self._requests[slot] = _Request(settings, output)
        return settings is not None

    def end(self, slots: Iterable[int]) -> None:
        """Record that the requests in these slots have ended."""
        for slot in slots:
            self._requests.pop(slot, None)

    def move(self, source: int, target: int, *, swap: bool) -> None:
        """Record that a request has moved to another slot; with `swap` the two requests have exchanged slots."""
        # Both are taken out first: without `swap`, the request that was in the target has ended.
        first, second = self._requests.pop(source, None), self._requests.pop(target, None)
        if first is not None:
            self._requests[target] = first
        if swap and second is not None:
            self._requests[source] = second

    def choose(self, logits: Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        """Leave a single candidate token in the rows of requests that carry settings; other rows are unchanged.

        Args:
            logits: The logits `[B, V]`, modified in place. The remaining logit is the log-probability of its token at the
                request's temperature, before top_p and top_k.
            slots: The slot of each row.
            lengths: The number of tokens of each row's request so far, including its prompt; None counts the `output` of each request.

        Returns:
            The logits.
        """
        rows = [row for row, slot in enumerate(slots) if slot in self._requests]
        if not rows:
            return logits
        draws = [self._requests[slots[row]].draw(None if lengths is None else lengths[row]) for row in rows]
        if len(rows) == len(logits):
            chosen, log_probs = choose(logits, draws)
            return logits.fill_(-torch.inf).scatter_(1, chosen[:, None], log_probs[:, None].to(logits.dtype))
        index = torch.tensor(rows, device=logits.device)
        chosen, log_probs = choose(logits[index], draws)
        return logits.index_fill_(0, index, -torch.inf).index_put_((index, chosen), log_probs.to(logits.dtype))
