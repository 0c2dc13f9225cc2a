"""The division of the documents of several calls into passes.

A segment is a run of documents of one call, with contiguous rows. With `EngineConfig.invariant`, a call is divided into segments
independently of other calls, and each segment is padded to a multiple of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import BudgetError
from ..packing.microbatch import invariant_partition


@dataclass(frozen=True, kw_only=True)
class PassLimits:
    """The limits of a pass.

    Args:
        tokens: The maximum number of tokens, `engine.micro_batch.max_tokens`.
        setting: The name of the setting that determines `tokens`, for messages.
        invariant_size: With `EngineConfig.invariant`, the maximum number of rows in a segment of several documents; 0 if each document is
            a segment by itself. None without `EngineConfig.invariant`.
        multiple: The number of rows in a segment is padded to a multiple of this number.
    """

    tokens: int
    setting: str = "engine.micro_batch.max_tokens"
    invariant_size: int | None = None
    multiple: int = 1


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Documents of one call that are computed in one pass.

    Args:
        call: The index of the call.
        documents: The indices of the documents in the call's batch, in order.
        tokens: The number of tokens in the documents.
        padding: The number of padding rows after the tokens.
    """

    call: int
    documents: tuple[int, ...]
    tokens: int
    padding: int

    @property
    def rows(self) -> int:
        """The number of rows, including padding."""
        return self.tokens + self.padding


def plan_passes(lengths: Sequence[Sequence[int]], adapters: Sequence[str | None], limits: PassLimits) -> list[list[Segment]]:
    """Return the segments of each pass. Across all passes, the segments of an adapter are in the order of its calls.

    Args:
        lengths: The number of tokens in each document of each call.
        adapters: The adapter of each call.
        limits: The limits of a pass.

    Raises:
        BudgetError: A document exceeds the maximum number of tokens.
    """
    passes: list[list[Segment]] = []
    used: list[int] = []
    # The first pass that may contain an adapter's next segment.
    first: dict[str | None, int] = {}
    size = limits.tokens if limits.invariant_size is None else min(limits.tokens, limits.invariant_size)
    for call, (of_call, adapter) in enumerate(zip(lengths, adapters, strict=True)):
        for segment in _segments(call, of_call, limits):
            begin = first.get(adapter, 0)
            # The first pass with room, starting at the pass of the adapter's last segment, so that its segments stay in order.
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
    # Rounded down, so that a segment fits together with its padding.
    size = min(limits.invariant_size, limits.tokens) // limits.multiple * limits.multiple
    parts = invariant_partition(lengths, limits.tokens, size, setting=limits.setting)
    return [_segment(call, part, lengths, limits.multiple) for part in parts]


def _by_budget(call: int, lengths: Sequence[int], limits: PassLimits) -> list[Segment]:
    """Return one segment per document, so that passes can be filled as far as possible."""
    for document, length in enumerate(lengths):
        if length > limits.tokens:
            raise BudgetError(
                f"document {document} of a call has {length} tokens, more than {limits.setting}={limits.tokens}; raise the setting, or shorten "
                "the document"
            )
    return [_segment(call, [document], lengths, limits.multiple) for document in range(len(lengths))]


def _segment(call: int, documents: Sequence[int], lengths: Sequence[int], multiple: int) -> Segment:
    tokens = sum(lengths[document] for document in documents)
    return Segment(call=call, documents=tuple(documents), tokens=tokens, padding=-tokens % multiple)


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Merge the segments of each call in a pass. The segments must have no padding."""
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
