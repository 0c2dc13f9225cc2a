"""Tokenized samples as arrays, in files or in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...media.store import MediaKey
from .media import KINDS
from .sample import MediaSpan, Sample


class TokenArrays:
    """Tokenized documents, concatenated.

    Args:
        fields: The arrays of `EncodedSamples`, by name.
        names: The names of the files, by number.
        width: The number of documents in a sample: 2 for pairs, otherwise 1.
        compared: Whether each document is labeled as chosen or not.
        equal: The number of pairs with equal sides that were left out, and the first such pair.
        large: The number of rows with media that are too large, which were left out, and the first such row.
        digest: A digest of all of them; empty if there is none.
    """

    def __init__(
        self,
        fields: Mapping[str, NDArray[Any]],
        names: Sequence[str],
        *,
        width: int,
        compared: bool,
        equal: Sequence[Any],
        large: Sequence[Any] = (0,),
        digest: str = "",
    ) -> None:
        self.width, self.compared, self.equal, self.large, self.digest = width, compared, equal, large, digest
        self._names = names
        self._ids, self._supervised = fields["ids"], fields["supervised"]
        self.lengths = np.asarray(fields["lengths"])
        """`[documents]`: the number of tokens in each document."""
        self._files, self._rows, self._parts = fields["files"], fields["rows"], fields["parts"]
        self._chosen, self._margins = fields["chosen"], fields["margins"]
        # `[documents + 1]`: the first item of each document.
        self._media_of = np.concatenate([[0], np.cumsum(fields["media_counts"], dtype=np.int64)])
        self._media = {
            name: fields[name] for name in ("media_kinds", "media_digests", "media_first", "media_last", "media_parts")
        }
        # Lengths are int32, but their sums may exceed it.
        self.starts = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])
        """`[documents + 1]`: the first token of each document."""

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def split_chats(self) -> int:
        """The number of rows that were split into one sample per assistant turn."""
        return int((self._parts == 1).sum())

    def name(self, index: int) -> str:
        """Return a document's file, row and part of the row, for messages."""
        part, chosen = int(self._parts[index]), int(self._chosen[index])
        which = (
            f" (completion {part})"
            if part
            else ""
            if chosen < 0 or self.width == 1
            else " (chosen)"
            if chosen
            else " (rejected)"
        )
        return f"{self._names[self._files[index]]}:{self._rows[index]}{which}"

    def sample(self, index: int, first: int, last: int) -> Sample:
        """Return tokens `first` to `last` of a document, between which no item of its media is cut."""
        # Positions of a sample count from its first remaining token, those of the
        # arrays from the first token of all documents.
        start = self.starts[index]
        tokens = slice(start + first, start + last)
        chosen = None if self._chosen[index] < 0 else bool(self._chosen[index])
        ids, supervised = self._ids[tokens].tolist(), self._supervised[tokens].tolist()
        media = tuple(
            replace(span, first=span.first - first, last=span.last - first)
            for span in self.media(index)
            if first <= span.first and span.last <= last
        )
        return Sample(self.name(index), ids, supervised, chosen, float(self._margins[index]), media=media)

    @property
    def has_media(self) -> bool:
        """Whether any document has media."""
        return bool(self._media_of[-1])

    def media(self, index: int) -> list[MediaSpan]:
        """Return the media of a document."""
        items = range(self._media_of[index], self._media_of[index + 1])
        kinds, digests, first, last, parts = self._media.values()
        return [
            MediaSpan(
                key=MediaKey(kind=KINDS[kinds[i]], digest=digests[i].decode()),
                first=int(first[i]),
                last=int(last[i]),
                parts=int(parts[i]),
            )
            for i in items
        ]

    def media_tokens(self) -> dict[str, NDArray[Any]]:
        """Return the number of tokens from the first to the last of each item of media, by kind."""
        tokens = self._media["media_last"] - self._media["media_first"]
        return {kind: np.asarray(tokens[self._media["media_kinds"] == i]) for i, kind in enumerate(KINDS)}

    def media_keys(self) -> list[MediaKey]:
        """Return the names of all media in the store, each once."""
        digests, where = np.unique(self._media["media_digests"], return_index=True)
        kinds = self._media["media_kinds"][where]
        return [MediaKey(kind=KINDS[kind], digest=digest.decode()) for kind, digest in zip(kinds, digests, strict=True)]

    @property
    def supervised_tokens(self) -> int:
        """The number of supervised tokens."""
        return int(self._supervised.sum())

    def arrays(self, first: int, last: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the token ids of consecutive documents, and whether each token is supervised.

        Args:
            first: The first document.
            last: The document after the last one.
        """
        tokens = slice(self.starts[first], self.starts[last])
        return self._ids[tokens], self._supervised[tokens]

    def supervised_in(self, indices: NDArray[Any], first: NDArray[Any], last: NDArray[Any]) -> NDArray[Any]:
        """Return for each document whether its tokens `first` to `last` contain a target; the first token is never one."""
        return np.array(
            [
                # The first token of a piece has no predecessor in it, from which it could be predicted.
                bool(self._supervised[self.starts[i] + a + 1 : self.starts[i] + b].any())
                for i, a, b in zip(indices, first, last, strict=True)
            ],
            np.bool_,
        )
