"""The states of requests in continuous batching, for models with stateful layers; see `engine.hf.state_layers`.

Axes: R requests of a step, S slots, T tokens of a step.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.ops.invariance import padded_rows
from ..engine.ops.scan.carrier import Scan, StateKind
from ..engine.ops.scan.segments import Segments

CHILD = "__child#"
"""The separator in the manager's names between a completion and the request that it was forked from."""


class RequestStates:
    """The states of all requests, each in its own slot.

    Args:
        device: The device of the model.
        multiple: Process tokens one by one, so that their numerics depend neither on the number of a request's tokens in a step nor on
            other requests; the number of requests processed together is padded to a multiple of this. None processes a request's tokens
            together.
    """

    def __init__(self, device: torch.device, multiple: int | None = None) -> None:
        self._device, self._multiple = device, multiple
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._values: dict[tuple[int, StateKind], Tensor] = {}

    def begin_step(self, requests: Sequence[str], queries: Sequence[int], pasts: Sequence[int]) -> "StepStates":
        """Return the states of a step.

        Args:
            requests: The names of the requests in the step.
            queries: The number of tokens of each in the step.
            pasts: The number of previously processed tokens of each; a request without any starts with a zero state.

        Raises:
            RuntimeError: The state of a continuing request is missing.
        """
        for name, past in zip(requests, pasts, strict=True):
            if past and name not in self._slots:
                raise RuntimeError(f"request {name} continues after {past} tokens, whose state is gone")
            self._slot(name)
        rows = torch.tensor([self._slots[name] for name in requests], device=self._device)
        # Slots are reused without being cleared, so the state of a request that begins must be read as zeros.
        fresh = torch.tensor([i for i, past in enumerate(pasts) if not past], dtype=torch.long, device=self._device)
        bounds = (0, *accumulate(queries))
        turns: list[TokenTurn] | None = None
        if self._multiple is not None:
            turns = [_turn(bounds, number, self._multiple) for number in range(max(queries))]
        return StepStates(self, Segments(bounds, self._device), rows, fresh, turns)

    def fork(self, requests: Iterable[str]) -> None:
        """Copy the states of requests to those forked from them. Must be called before any of them continues.

        Args:
            requests: The names of all requests that have begun.
        """
        for name in requests:
            parent = self._slots.get(name.partition(CHILD)[0])
            # Children of earlier steps are among them too; they already have a slot.
            if CHILD in name and name not in self._slots and parent is not None:
                slot = self._slot(name)
                for key in self._values:
                    values = self._grown(key)
                    values[slot] = values[parent]

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            self._slots[name] = self._free.pop() if self._free else len(self._slots)
        return self._slots[name]

    def remove(self, name: str) -> None:
        """Forget a request, if present."""
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Forget all requests, and free the memory."""
        self._slots, self._free, self._values = {}, [], {}

    def load(self, layer: int, kind: StateKind, rows: Tensor, fresh: Tensor) -> Tensor | None:
        """Return the states `[R, ...]` of slots, those of `fresh` rows as zeros; None if there are none yet."""
        if (layer, kind) not in self._values:
            return None
        states = self._grown((layer, kind)).index_select(0, rows)
        return states.index_fill_(0, fresh, 0.0) if len(fresh) else states

    def save(self, layer: int, kind: StateKind, rows: Tensor, states: Tensor) -> None:
        """Keep the states `[R, ...]` of slots."""
        if (layer, kind) not in self._values:
            self._values[layer, kind] = states.new_zeros(self._count, *states.shape[1:])
        self._grown((layer, kind)).index_copy_(0, rows, states)

    @property
    def _count(self) -> int:
        return len(self._slots) + len(self._free)

    def _grown(self, key: tuple[int, StateKind]) -> Tensor:
        values = self._values[key]
        if len(values) < self._count:
            # Grow by at least half, so that requests arriving one by one do not copy all states each time.
            more = max(self._count - len(values), len(values) // 2)
            values = self._values[key] = torch.cat([values, values.new_zeros(more, *values.shape[1:])])
        return values


class TokenTurn(NamedTuple):
    """One token of each request of a step that has at least that many.

    Args:
        tokens: `[N]` int64, the tokens, followed by padding.
        requests: `[N]` int64, the row of each token's request.
        real: The number of tokens without padding.
        segments: N segments of one token each.
    """

    tokens: Tensor
    requests: Tensor
    real: int
    segments: Segments


def _turn(bounds: Sequence[int], number: int, multiple: int) -> TokenTurn:
    requests = [i for i, (start, end) in enumerate(pairwise(bounds)) if number < end - start]
    count = len(requests)
    # Padding repeats the first request. Its results are computed again and dropped, since only `real` rows are kept.
    requests += requests[:1] * (padded_rows(count, multiple) - count)
    tokens = torch.tensor([bounds[i] + number for i in requests])
    return TokenTurn(tokens, torch.tensor(requests), count, Segments(range(len(requests) + 1), torch.device("cpu")))


class StepStates:
    """The states of the requests of a step.

    Args:
        states: The states of all requests.
        segments: The tokens of each request.
        rows: `[R]` int64, the slots.
        fresh: The rows of requests that begin.
        turns: The tokens one by one; None to process the tokens of a request together.
    """

    def __init__(
        self, states: RequestStates, segments: Segments, rows: Tensor, fresh: Tensor, turns: Sequence[TokenTurn] | None = None
    ) -> None:
        self.states, self.segments, self.rows, self.fresh, self.turns = states, segments, rows, fresh, turns

    def of_layer(self, layer: int) -> "LayerStates":
        """Return the carrier of a layer's states."""
        return LayerStates(self, layer)


class LayerStates:
    """The states of a layer in a step; a `StateCarrier`.

    Args:
        step: The states of the step.
        layer: The number of the layer.
    """

    cp_group = None
    handle = torch.zeros(1, dtype=torch.long)

    def __init__(self, step: StepStates, layer: int) -> None:
        self._step, self._layer = step, layer

    def carry(self, kind: StateKind, scan: Scan, inputs: Sequence[Tensor | None]) -> Tensor:
        """See `StateCarrier.carry`."""
        step = self._step
        before = step.states.load(self._layer, kind, step.rows, step.fresh)
        if step.turns is None:
            out, after = scan(inputs, step.segments, before)
        else:
            out, after = self._one_by_one(scan, inputs, before, step.turns)
        step.states.save(self._layer, kind, step.rows, after)
        return out

    def _one_by_one(
        self, scan: Scan, inputs: Sequence[Tensor | None], states: Tensor | None, turns: Sequence[TokenTurn]
    ) -> tuple[Tensor, Tensor]:
        out: Tensor | None = None
        for tokens, requests, real, segments in turns:
            rows = [None if x is None else x.index_select(0, tokens) for x in inputs]
            before = None if states is None else states.index_select(0, requests)
            computed, after = scan(rows, segments, before)
            if states is None:
                states = after.new_zeros(len(self._step.rows), *after.shape[1:])
            # The next turn continues from these states. Padding rows are left out: they would write to the same slot
            # twice.
            states = states.index_copy(0, requests[:real], after[:real])
            if out is None:
                # Empty rows after the tokens of requests have no state.
                most = max(len(x) for x in inputs if x is not None)
                out = computed.new_zeros(most, *computed.shape[1:])
            out.index_copy_(0, tokens[:real], computed[:real])
        assert out is not None
        assert states is not None
        return out, states
