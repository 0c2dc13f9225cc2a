"""How the tokens of vLLM's requests are drawn, by the places of these in its batch. Imports no vLLM.

Axes: B rows of a batch, V vocabulary.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..options import SamplingOptions
from ..sampling import Draw, UniformNumbers, choose

KEY = "drivetrain"
"""The name of a request's settings among the additional arguments of its sampling parameters."""


class _Request:
    def __init__(self, settings: Mapping[str, Any], output: Sequence[int]) -> None:
        self._options = SamplingOptions(temperature=settings["temperature"], top_p=settings["top_p"], top_k=settings["top_k"])
        self._uniform, self._begun, self._output = UniformNumbers(settings["seed"]), settings["begun"], output
        self._prompt = settings["prompt"]

    def draw(self, length: int | None) -> Draw:
        # While a part of the prompt is processed, vLLM asks for a token that it then drops.
        count = len(self._output) if length is None else max(length - self._prompt, 0)
        return Draw(self._options, self._uniform[self._begun + count] if self._options.temperature else 0.0)


class RequestDraws:
    """The requests in vLLM's batch that carry settings of ours, and the tokens that are drawn for them."""

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}

    def begin(self, slot: int, extra_args: Mapping[str, Any] | None, output: Sequence[int] = ()) -> bool:
        """Note that a request begins in a slot, whose former request has ended.

        Args:
            slot: The slot.
            extra_args: The additional arguments of the request's sampling parameters.
            output: The tokens that vLLM has generated, which grow as it does; not needed if `choose` is given lengths.

        Returns:
            Whether the request carries settings of ours.
        """
        settings = (extra_args or {}).get(KEY)
        if settings is None:
            self._requests.pop(slot, None)
        else:
            self._requests[slot] = _Request(settings, output)
        return settings is not None

    def end(self, slots: Iterable[int]) -> None:
        """Note that the requests in these slots have ended."""
        for slot in slots:
            self._requests.pop(slot, None)

    def move(self, source: int, target: int, *, swap: bool) -> None:
        """Note that a request has another slot now, and with `swap` that the one which was there has the former slot."""
        first, second = self._requests.pop(source, None), self._requests.pop(target, None)
        if first is not None:
            self._requests[target] = first
        if swap and second is not None:
            self._requests[source] = second

    def choose(self, logits: Tensor, slots: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
        """Leave one token to choose from in the rows of requests that carry settings; other rows stay as they are.

        Args:
            logits: The logits `[B, V]`, which are changed. The logit that is left is the log-probability of its token at the
                request's temperature, before top_p and top_k.
            slots: The slot of each row.
            lengths: The number of tokens of each row's request so far, with its prompt; None counts the `output` of each request.

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
