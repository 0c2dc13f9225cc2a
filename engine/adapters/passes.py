"""How the documents of several calls are divided into passes. Imports no torch.

A segment is a run of documents of one call, whose rows are contiguous. With equal numbers in any company (`EngineConfig.invariant`), a call is
cut into segments by itself alone, and each is padded to a multiple of rows of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BudgetError
from ..packing.microbatch import invariant_partition


@dataclass(frozen=True, kw_only=True)
class PassLimits:
    """What a pass holds at most.

    Args:
        tokens: The number of tokens, `engine.micro_batch.max_tokens`.
        setting: The name of the setting that determines it, for messages.
        invariant_size: The number of rows up to which documents share a pass, if numbers are equal in any company; 0 if none do. None if
            they need not be.
        multiple: The number of which that of a segment's rows is a multiple.
    """

    tokens: int
    setting: str = "engine.micro_batch.max_tokens"
    invariant_size: int | None = None
    multiple: int = 1


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Documents of one call that are computed side by side.

    Args:
        call: The index of the call.
        documents: Their indices in the call's batch, in order.
        tokens: The number of their tokens.
        padding: The number of rows that follow them.
    """

    call: int
    documents: tuple[int, ...]
    tokens: int
    padding: int

    @property
    def rows(self) -> int:
        """The number of rows that it takes."""
        return self.tokens + self.padding


def plan_passes(lengths: Sequence[Sequence[int]], adapters: Sequence[str | None], limits: PassLimits) -> list[list[Segment]]:
    """Return the segments of each pass. Those of one adapter are in the order of its calls, over all passes.

    Args:
        lengths: The number of tokens in each document of each call.
        adapters: The adapter of each call.
        limits: What a pass holds.

    Raises:
        BudgetError: A document exceeds the budget of tokens.
    """
    passes: list[list[Segment]] = []
    used: list[int] = []
    # The first pass that may have an adapter's next segment.
    first: dict[str | None, int] = {}
    size = limits.tokens if limits.invariant_size is None else min(limits.tokens, limits.invariant_size)
    for call, (of_call, adapter) in enumerate(zip(lengths, adapters, strict=True)):
        for segment in _segments(call, of_call, limits):
            begin = first.get(adapter, 0)
            number = next((n for n in range(begin, len(passes)) if used[n] + segment.rows <= size), len(passes))
            if number == len(passes):
                passes.append([])
                used.append(0)
            passes[number].append(segment)
            used[number] += segment.rows
            first[adapter] = number
    return passes if limits.invariant_size is not None else [_joined(one) for one in passes]


def _segments(call: int, lengths: Sequence[int], limits: PassLimits) -> list[Segment]:
    if limits.invariant_size is None:
        return _by_budget(call, lengths, limits)
    # A segment's rows have to fit with its padding.
    size = min(limits.invariant_size, limits.tokens) // limits.multiple * limits.multiple
    parts = invariant_partition(lengths, limits.tokens, size, setting=limits.setting)
    return [_segment(call, part, lengths, limits.multiple) for part in parts]


def _by_budget(call: int, lengths: Sequence[int], limits: PassLimits) -> list[Segment]:
    """Return a segment for each document, so that passes can be filled."""
    for document, length in enumerate(lengths):
        if length > limits.tokens:
            raise BudgetError(
                f"document {document} of a call has {length} tokens, more than {limits.setting}={limits.tokens}; raise the budget, or shorten "
                "the document"
            )
    return [_segment(call, [document], lengths, limits.multiple) for document in range(len(lengths))]


def _segment(call: int, documents: Sequence[int], lengths: Sequence[int], multiple: int) -> Segment:
    tokens = sum(lengths[document] for document in documents)
    return Segment(call=call, documents=tuple(documents), tokens=tokens, padding=-tokens % multiple)


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Return the segments of a pass with those of one call as one; none has padding."""
    result: list[Segment] = []
    for segment in segments:
        last = result[-1] if result else None
        if last is not None and last.call == segment.call:
            result[-1] = Segment(
                call=last.call,
                documents=(*last.documents, *segment.documents),
                tokens=last.tokens + segment.tokens,
                padding=0,
            )
        else:
            result.append(segment)
    return result
