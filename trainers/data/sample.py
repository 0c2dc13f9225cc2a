"""A tokenized document."""

from collections.abc import Sequence
from dataclasses import dataclass

from ...media.store import MediaKey


@dataclass(frozen=True, kw_only=True)
class MediaSpan:
    """An image, video or audio of a document.

    Args:
        key: Its name in the store of processed media.
        first: The first of the tokens that its features replace.
        last: The token after the last of them.
        parts: The number of its parts, such as frames or tiles; patches attend only within a part.
    """

    key: MediaKey
    first: int
    last: int
    parts: int = 1


@dataclass(frozen=True)
class Sample:
    """A tokenized document.

    Args:
        name: The file and row that the document comes from, for messages.
        ids: The token ids.
        supervised: For each token, whether the loss is computed on it.
        chosen: Whether the document was preferred or labeled good; None if it has no such label.
        margin: The margin by which the chosen side of its pair is better, or 0 if the data have none.
        ended: Whether each supervised completion ends with a token at which generation can stop.
        media: Its media, in the order of their tokens.
    """

    name: str
    ids: Sequence[int]
    supervised: Sequence[bool]
    chosen: bool | None = None
    margin: float = 0.0
    ended: bool = True
    media: Sequence[MediaSpan] = ()
