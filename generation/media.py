"""Media in prompts: placeholder ids for features among token ids, and the features that the model receives in their place.

In a prompt with media, the tokens that features replace get ids beyond the vocabulary: a different id for each feature of each distinct
item. A cache or batch therefore treats prompts as equal only if their media are equal, and any part of a prompt determines which features
it needs. Each distinct item is encoded once.

Axes: T tokens of a prompt, F features of an item, A position axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedModel

from ..engine.checkpoint.local_shards import host_bytes
from ..engine.errors import BatchError, ConfigError
from ..engine.hf.media_family import MediaFamily
from ..engine.media import check_media, items_of, positions_of, select_items
from ..engine.packing.batch import Kind, MediaField, joined_rows
from ..engine.packing.convert import from_lists

MOST_NUMBERS = 2**31 - 1
"""transformers' continuous batching keeps token ids in 32 bits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PromptMedia:
    """A prompt with media in the form that a model receives.

    Args:
        ids: `[T]`, the token ids, with ids beyond the vocabulary for features.
        items: The first id of each item.
        positions: `[A, T]` int64, the positions; None for a single axis, which counts the tokens.
        features: The holder of the features of its media.
        following: The position after the prompt, with several axes.
    """

    ids: list[int]
    items: tuple[int, ...]
    positions: Tensor | None
    features: "MediaFeatures"
    following: int = 0

    def retained(self) -> Self:
        """Register another use and return this object; `release` ends the use."""
        self.features.retain(self)
        return self

    def release(self) -> None:
        """End a use of the media."""
        self.features.release(self)

    def positions_of(self, start: int, count: int) -> Tensor:
        """Return the positions `[A, count]` of tokens, including those after the prompt."""
        assert self.positions is not None
        if start >= len(self.ids):
            # After the prompt, all axes continue from the largest position.
            behind = torch.arange(start, start + count) + (self.following - len(self.ids))
            return behind.expand(len(self.positions), -1)
        inside = self.positions[:, start : start + count]
        behind = torch.arange(max(0, start + count - len(self.ids))) + self.following
        return torch.cat([inside, behind.expand(len(self.positions), -1)], -1)


@dataclass(kw_only=True, eq=False)
class _Item:
    """An item that is used by at least one request.

    Args:
        kind: Its kind.
        first: Its first id.
        count: The number of its features, F.
        fields: The fields that its encoder reads.
        digest: A digest of all of the above.
        users: The number of requests that use it.
        features: The output of its encoder; None if the encoder has not run with the current weights.
    """

    kind: Kind
    first: int
    count: int
    fields: Mapping[str, Tensor]
    digest: str
    users: int = 0
    features: Tensor | None = None


class MediaFeatures:
    """The features of the media of all requests.

    Args:
        model: The model, with its encoders.
        family: How the model takes media.
        name: Its name, for messages.
    """

    def __init__(self, model: PreTrainedModel, family: MediaFamily, name: str) -> None:
        self._model: Any = model
        self._family, self._name = family, name
        embeddings: Any = model.get_input_embeddings()
        self._vocabulary: int = embeddings.num_embeddings
        self._next = self._vocabulary
        self._firsts: dict[str, int] = {}
        self._items: dict[int, _Item] = {}
        self._last: tuple[Mapping[str, Tensor], list[int], PromptMedia] | None = None
        self.encoded = 0
        """The number of items that have been encoded."""

    @property
    def axes(self) -> int:
        """The number of position axes, A."""
        return self._family.axes

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of tokens that a completion must not contain."""
        return self._family.reserved_tokens

    @property
    def _base(self) -> Any:
        return getattr(self._model, self._model.base_model_prefix)

    def add(self, prompt: Sequence[int], fields: Mapping[str, Tensor], title: str = "the prompt") -> PromptMedia | None:
        """Return a prompt with media in the form that the model receives; None if it has no media. `PromptMedia.release` ends its use.

        Args:
            prompt: The token ids, with as many tokens for each item as it has features.
            fields: The fields that the model's encoders read, with rows for each item in order.
            title: The name of the prompt in messages.

        Raises:
            ConfigError: The fields are not those that the model takes, or do not fit the prompt.
        """
        last = self._last
        # The same object, not equal values: comparing pixels would cost as much as hashing them.
        if last is not None and last[0] is fields and last[1] == list(prompt):
            # Another completion of the same prompt.
            return last[2].retained()
        media = {name: MediaField(values=value, counts=torch.tensor([len(value)])) for name, value in fields.items()}
        try:
            batch = from_lists([prompt], media=media, names=[title])
            summary = check_media(batch, self._family, self._name)
            kinds = summary.kinds
            for stray in summary.stray.values():
                # Mixed with the features of another prompt, the model would lack those of this token.
                raise ConfigError(stray)
            for kind in kinds:
                if kind in self._family.block_kinds:
                    raise ConfigError(
                        f"{title} has media of the kind {kind}, whose tokens attend to each other in both directions in {self._name}; generators on "
                        "transformers do not do that"
                    )
            positions = positions_of(batch, self._family, self._base, kinds) if kinds and self._family.axes > 1 else None
        except BatchError as e:
            raise ConfigError(str(e)) from e
        if not kinds:
            return None
        # Ids are assigned on local values first, so that a refusal below leaves this object unchanged.
        ids, new = list(prompt), self._next
        items: list[_Item] = []
        for kind in kinds:
            of_kind = items_of(batch, self._family, kind)
            starts, places = [0, *accumulate(of_kind.features)], of_kind.tokens.tolist()
            for i, count in enumerate(of_kind.features):
                of_item = select_items(of_kind, self._family.modalities[kind], [i])
                digest = _digest(kind, of_item)
                # A repeated item keeps its ids, so that a cache can still match its keys and values.
                first = self._firsts.get(digest) or next((item.first for item in items if item.digest == digest), None)
                if first is None:
                    first, new = new, new + count
                items.append(_Item(kind=kind, first=first, count=count, fields=of_item, digest=digest))
                for number, place in enumerate(places[starts[i] : starts[i + 1]]):
                    ids[place] = first + number
        if new > MOST_NUMBERS:
            raise ConfigError(
                f"{self._name} has received more distinct media since its last weights than there are ids; load weights, or restart it"
            )
        self._next = new
        for item in items:
            self._firsts[item.digest] = item.first
            self._items.setdefault(item.first, item).users += 1
        following = 0 if positions is None else int(positions.max()) + 1
        taken = PromptMedia(
            ids=ids, items=tuple(item.first for item in items), positions=positions, features=self, following=following
        )
        self._last = fields, list(prompt), taken
        return taken

    def retain(self, media: PromptMedia) -> None:
        """Begin another use of a prompt's media."""
        for first in media.items:
            self._items[first].users += 1

    def release(self, media: PromptMedia) -> None:
        """End a use of a prompt's media."""
        for first in media.items:
            item = self._items[first]
            item.users -= 1
            if not item.users:
                del self._items[first]
                # It may refer to this item. A digest keeps its ids, because a cache may still hold pages with them.
                self._last = None

    def drop(self) -> None:
        """Forget all features, because the weights change or leave the device, together with the caches."""
        for item in self._items.values():
            item.features = None
        # The caches are empty now, so the ids of items without a user can be assigned again. Those in use are part of
        # requests.
        self._firsts = {digest: first for digest, first in self._firsts.items() if first in self._items}
        if not self._items:
            self._next = self._vocabulary

    def inputs(self, ids: Tensor) -> dict[str, Any]:
        """Return the model arguments that replace `input_ids`.

        Args:
            ids: `[B, T]` on the model's device, with ids beyond the vocabulary for features.
        """
        numbers = ids.cpu().numpy()
        beyond = numbers >= self._vocabulary
        if not beyond.any():
            return {"input_ids": ids}
        # The item of each id is the last one that begins at or before it.
        items = [self._items[first] for first in sorted(self._items)]
        item_of = np.searchsorted([item.first for item in items], numbers[beyond], "right") - 1
        ends = np.array([item.first + item.count for item in items])
        # The id may also lie behind the end of the last item before it, if its own item is gone.
        if not items or (item_of < 0).any() or (numbers[beyond] >= ends[item_of]).any():
            raise RuntimeError("a request continues with media that were released")
        used = [items[i] for i in np.unique(item_of)]
        self._encode(used)
        tokens = numbers.copy()
        # The model receives the family's placeholder token in these positions, because the ids are not in its
        # embedding.
        tokens[beyond] = np.array([self._family.tokens[item.kind] for item in items])[item_of]
        plain = torch.from_numpy(tokens).to(ids.device)
        rows: dict[Kind, Tensor] = {}
        # Features of a kind are concatenated over its items; an id is turned into a row of them by adding the offset of
        # its item.
        for kind in dict.fromkeys(item.kind for item in used):
            of_kind = [item for item in used if item.kind == kind]
            begins = dict(
                zip((item.first for item in of_kind), accumulate((i.count for i in of_kind), initial=0), strict=False)
            )
            offsets = np.array([begins.get(item.first, 0) - item.first for item in items])
            is_kind = np.array([item.kind == kind for item in items])[item_of]
            index = torch.from_numpy((numbers[beyond] + offsets[item_of])[is_kind]).to(ids.device)
            features: list[Any] = [item.features for item in of_kind]
            rows[kind] = torch.cat(features).index_select(0, index)
        if self._family.takes_outputs:
            return {
                "input_ids": plain,
                "mm_encoder_outputs": {kind: self._family.encoded(value) for kind, value in rows.items()},
            }
        text_ids = self._family.text_ids(plain)
        embeddings = self._model.get_input_embeddings()(text_ids)
        for kind, value in rows.items():
            # Row by row, `masked_scatter` consumes the features in the order of the tokens, in which `index` selected
            # them.
            mask = (plain == self._family.tokens[kind]) & (ids >= self._vocabulary)
            embeddings = embeddings.masked_scatter(mask.unsqueeze(-1), value.to(embeddings.dtype))
        return {"inputs_embeds": embeddings, **self._family.decoder_arguments(self._base, text_ids.flatten())}

    def _encode(self, used: Sequence[_Item]) -> None:
        """Run the encoders on items without features, one batch per kind."""
        by_kind: dict[Kind, list[_Item]] = {}
        for item in used:
            if item.features is None:
                by_kind.setdefault(item.kind, []).append(item)
        device, dtype = self._model.device, self._model.dtype
        for kind, items in by_kind.items():
            values = self._family.modalities[kind].values
            joined = joined_rows({name: [item.fields[name] for item in items] for name in items[0].fields})
            media = self._family.trimmed(kind, joined)
            fields = {name: value.to(device, dtype if name == values else value.dtype) for name, value in media.items()}
            features = self._family.encode(self._base, kind, fields)
            for item, part in zip(items, features.split([item.count for item in items]), strict=True):
                item.features = part
            self.encoded += len(items)


def _digest(kind: Kind, fields: Mapping[str, Tensor]) -> str:
    digest = xxhash.xxh3_128(kind.encode())
    for name, value in sorted(fields.items()):
        # The name, the shape and the data type are hashed too: equal bytes of another shape are another item.
        digest.update(f"{name} {list(value.shape)} {value.dtype}".encode())
        digest.update(host_bytes(value))
    return digest.hexdigest()
