"""Media in packed batches: the placeholder tokens of each item, and the division of the encoders' work among ranks.

The features of an item replace the embeddings of its placeholder tokens, all in one document. Under context parallelism each item is
encoded by one rank, which sends the features to the ranks whose slices contain the tokens.

Axes: M rows of a media field, F features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from .checkpoint.local_shards import host_bytes
from .errors import BatchError
from .hf.media_family import MediaFamily, Modality
from .packing.batch import Kind, PackedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Items:
    """The items of one kind in a batch.

    Args:
        rows: The number of rows in the encoder's input for each item.
        features: The number of features of each item.
        tokens: `[S]` int64 on the host, ascending: the placeholder tokens, which features replace.
        index: `[S]` int64 on the host, the feature of each of these tokens, counted over all items. Tokens may have the same feature if
            documents share a prefix. None if the features are used once each, in order.
        fields: The fields of the kind, on any device.
    """

    rows: list[int]
    features: list[int]
    tokens: Tensor
    fields: Mapping[str, Tensor]
    index: Tensor | None = None

    def computed(self, origin: Tensor, modality: Modality) -> "Items":
        """Return the items of a micro-batch with shared prefixes, so that each shared item is encoded once.

        Args:
            origin: `[T]` int64, the computed token of each token; see `SharedLayout`.
            modality: The kind of the items.
        """
        # The computed placeholder tokens, and for each of them one of the tokens that it represents.
        places, first = np.unique(origin[self.tokens].numpy(), return_index=True)
        item_of = np.repeat(np.arange(len(self.features)), self.features)
        # The first feature of each item.
        begins = np.cumsum([0, *self.features])[:-1]
        # Items with the same first computed token are one item, even if each document computes the last token of a prefix itself.
        _, earliest, copies = np.unique(origin[self.tokens[begins]].numpy(), return_index=True, return_inverse=True)
        original = earliest[copies]
        feature = np.arange(len(item_of)) - begins[item_of] + begins[original[item_of]]
        kept = np.unique(original)
        # Renumber the features of the remaining items.
        number = np.cumsum(np.isin(item_of, kept)) - 1
        return Items(
            rows=[self.rows[i] for i in kept],
            features=[self.features[i] for i in kept],
            tokens=torch.from_numpy(places),
            index=torch.from_numpy(number[feature[first]]),
            fields=select_items(self, modality, kept.tolist()),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class EncoderExchange:
    """The part of the items that a rank encodes, and the exchange of their features.

    Args:
        items: The indices of the items, in order.
        sent: `[S']` int64, the features that this rank sends, as indices into those that it encodes, in the order of the ranks.
        send: The number of features sent to each rank.
        receive: The number of features from each rank.
        order: `[F']` int64, the received feature that replaces each of this rank's placeholder tokens.
    """

    items: list[int]
    sent: Tensor
    send: list[int]
    receive: list[int]
    order: Tensor

    def to(self, device: torch.device) -> "EncoderExchange":
        """Return a copy with its tensors on a device."""
        sent, order = (t.to(device, non_blocking=True) for t in (self.sent, self.order))
        return replace(self, sent=sent, order=order)


@dataclass(frozen=True, kw_only=True)
class MediaSummary:
    """The media of a rank's batch.

    Args:
        kinds: The kinds that the batch has items of.
        stray: For each other kind, the error for placeholder tokens without items. They are treated as text unless some rank has items
            of the kind.
        sizes: The numbers of features and of parts of each item, by kind.
    """

    kinds: Sequence[Kind] = ()
    stray: Mapping[Kind, str] = field(default_factory=dict)
    sizes: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)


def check_media(batch: PackedBatch, family: MediaFamily | None, model: str) -> MediaSummary:
    """Check the media of a batch.

    Args:
        batch: The batch.
        family: The model's family; None if it takes no media.
        model: The name of the model, for messages.

    Raises:
        BatchError: A field is missing, unknown or malformed, or a document has more or fewer placeholder tokens than features.
    """
    modalities = {} if family is None else family.modalities
    names = [name for modality in modalities.values() for name in (*modality.fields, *modality.optional)]
    if unknown := sorted(set(batch.media) - set(names)):
        takes = (
            f"takes {', '.join(names)}" if names else "takes no media on this backend; see docs/families.md for those that do"
        )
        raise BatchError(f"the batch has the media field {unknown[0]!r}, but {model} {takes}")
    if family is None:
        return MediaSummary()
    if batch.position_ids.dim() == 2 and len(batch.position_ids) != family.axes:
        raise BatchError(
            f"position_ids has {len(batch.position_ids)} axes, but {model} has {family.axes}; give [T], and the other axes are computed"
        )
    kinds = kinds_of(batch, family)
    stray: dict[Kind, str] = {}
    for kind in family.modalities:
        token = family.tokens[kind]
        # The number of placeholder tokens up to each boundary; differences are the numbers in the documents.
        present = (batch.input_ids == token).long().cumsum(0)
        tokens = torch.cat([present.new_zeros(1), present])[list(batch.bounds)].diff().tolist()
        counts = expected = [0] * batch.num_sequences
        if kind in kinds:
            counts, expected = _check_items(batch, family, kind, model)
        for i, (has, needs) in enumerate(zip(tokens, expected, strict=True)):
            if has == needs:
                continue
            message = (
                f"{batch.name_of(i)} has {has} {kind} tokens (id {token}), but {counts[i]} {kind}s, which take {needs}; let the model's "
                f"processor write the tokens, and do not cut off any {kind}"
            )
            if kind in kinds:
                raise BatchError(message)
            stray.setdefault(kind, message)
    sizes: dict[str, Sequence[tuple[int, int]]] = {}
    for kind in kinds:
        media = fields_of(batch, family, kind)
        sizes[kind] = list(zip(family.features_of(kind, media), family.parts(kind, media), strict=True))
    return MediaSummary(kinds=kinds, stray=stray, sizes=sizes)


def kinds_of(batch: PackedBatch, family: MediaFamily) -> list[Kind]:
    """Return the kinds of media in a batch, in the family's order. Fields without rows do not count."""
    present = {name for name, media in batch.media.items() if len(media.values)}
    return [kind for kind, m in family.modalities.items() if present & {*m.fields, *m.optional}]


def _check_items(batch: PackedBatch, family: MediaFamily, kind: Kind, model: str) -> tuple[list[int], list[int]]:
    """Check the fields of a kind; return the number of items and the number of features of each document."""
    modality = family.modalities[kind]
    if lacking := [name for name in modality.fields if name not in batch.media]:
        present = next(name for name in (*modality.fields, *modality.optional) if name in batch.media)
        raise BatchError(f"the batch has {present} without {lacking[0]}, which {model} needs beside it")
    media, counts = fields_of(batch, family, kind), _item_counts(batch, family, kind)
    edges = [0, *accumulate(counts)]
    if (problem := family.problem(kind, media)) is not None:
        item, what = problem
        document = "the batch" if item is None else batch.name_of(next(i for i, end in enumerate(edges[1:]) if item < end))
        raise BatchError(f"{document} has media of the kind {kind} with {what}" if item is not None else what)
    rows, features = family.rows(kind, media), family.features_of(kind, media)
    row_counts = batch.media[modality.values].counts.tolist()
    for i, (has, (start, end)) in enumerate(zip(row_counts, pairwise(edges), strict=True)):
        needs = sum(rows[start:end])
        if has != needs:
            raise BatchError(
                f"{batch.name_of(i)} has {has} rows of {modality.values}, but by its "
                f"{', '.join(modality.items) or modality.values} it should have {needs}"
            )
    return counts, [sum(features[start:end]) for start, end in pairwise(edges)]


def _item_counts(batch: PackedBatch, family: MediaFamily, kind: Kind) -> list[int]:
    modality = family.modalities[kind]
    names = [*(modality.items or (modality.values,)), *(name for name in modality.optional if name in batch.media)]
    first, *others = (batch.media[name].counts.tolist() for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if other != first:
            i = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
            raise BatchError(
                f"{batch.name_of(i)} has {first[i]} rows of {names[0]} and {other[i]} of {name}; each item needs one row of each"
            )
    counts: list[int] = first
    return counts


def fields_of(batch: PackedBatch, family: MediaFamily, kind: Kind) -> dict[str, Tensor]:
    """Return the fields of one kind in a batch."""
    modality = family.modalities[kind]
    return {name: batch.media[name].values for name in (*modality.fields, *modality.optional) if name in batch.media}


def items_of(batch: PackedBatch, family: MediaFamily, kind: Kind) -> Items:
    """Return the items of one kind; a batch may have none."""
    if kind not in kinds_of(batch, family):
        return Items(rows=[], features=[], tokens=torch.empty(0, dtype=torch.long), fields={})
    media = fields_of(batch, family, kind)
    tokens = (batch.input_ids == family.tokens[kind]).nonzero()[:, 0].cpu()
    return Items(rows=family.rows(kind, media), features=family.features_of(kind, media), tokens=tokens, fields=media)


def comparable_ids(batch: PackedBatch, family: MediaFamily, kinds: Sequence[Kind]) -> Tensor:
    """Return numbers `[T]` int64 on the host to compare tokens by: token ids, and hashes of items for placeholder tokens.

    Placeholder tokens are equal only if their items are.

    Args:
        batch: The batch, which is checked.
        family: The model's family.
        kinds: The kinds of media that it has.
    """
    ids = batch.input_ids.cpu().clone()
    for kind in kinds:
        items, values = items_of(batch, family, kind), family.modalities[kind].values
        rows, features = ([0, *accumulate(sizes)] for sizes in (items.rows, items.features))
        for item in range(len(items.rows)):
            digest = xxhash.xxh3_64()
            for name, value in items.fields.items():
                part = value[rows[item] : rows[item + 1]] if name == values else value[item : item + 1]
                digest.update(host_bytes(part))
            # Negative, so that a hash never equals a token id.
            # 63 bits of the hash, so that the number fits into an int64.
            ids[items.tokens[features[item] : features[item + 1]]] = -1 - (digest.intdigest() >> 1)
    return ids


def share_items(items: Items, rank: int, ranks: int, tokens: int) -> EncoderExchange:
    """Divide the items among the ranks that share a sequence, so that each rank computes about as many features.

    Args:
        items: The items.
        rank: The rank whose part is returned.
        ranks: The number of ranks.
        tokens: The number of tokens in the slice of each rank.
    """
    # Largest items first, each to the rank with the fewest features so far. All ranks compute the same division.
    loads = [0] * ranks
    owners = [0] * len(items.features)
    for item in sorted(range(len(owners)), key=lambda i: -items.features[i]):
        owners[item] = loads.index(min(loads))
        loads[owners[item]] += items.features[item]
    # For each feature, the rank that encodes it; for each placeholder token, its feature and the rank of that.
    encoder = torch.repeat_interleave(torch.tensor(owners, dtype=torch.long), torch.tensor(items.features, dtype=torch.long))
    feature = torch.arange(len(encoder)) if items.index is None else items.index
    owner = encoder[feature]
    # The rank whose slice has the token.
    target = items.tokens // tokens
    here = items.tokens[target == rank]
    # Features arrive rank by rank; those of a rank are in token order.
    arriving = torch.cat([here[owner[target == rank] == source] for source in range(ranks)])
    return EncoderExchange(
        items=[item for item, one in enumerate(owners) if one == rank],
        sent=((encoder == rank).cumsum(0) - 1)[feature[owner == rank]],
        send=torch.bincount(target[owner == rank], minlength=ranks).tolist(),
        receive=torch.bincount(owner[target == rank], minlength=ranks).tolist(),
        order=arriving.argsort(),
    )


def select_items(items: Items, modality: Modality, chosen: Sequence[int]) -> dict[str, Tensor]:
    """Return the fields of some items.

    Args:
        items: The items.
        modality: Their kind.
        chosen: The indices of the items to return.
    """
    if len(chosen) == len(items.rows):
        return dict(items.fields)
    edges = [0, *accumulate(items.rows)]
    index = [row for item in chosen for row in range(edges[item], edges[item + 1])]
    return {name: value[index if name == modality.values else list(chosen)] for name, value in items.fields.items()}


def positions_of(batch: PackedBatch, family: MediaFamily, base: Any, kinds: Sequence[Kind]) -> Tensor:
    """Return the positions `[A, T]` of a batch with media, computed document by document by the family's own code.

    Args:
        batch: The batch, which is checked.
        family: The model's family.
        base: The model without its head.
        kinds: The kinds of media that the batch has.

    Raises:
        BatchError: The tokens of a document are not in the order that the family expects.
    """
    ids = batch.input_ids.cpu()
    edges: dict[str, list[int]] = {}
    fields: dict[Kind, dict[str, Tensor]] = {}
    for kind in kinds:
        modality = family.modalities[kind]
        names = [name for name in (*modality.items, *modality.optional) if name in batch.media]
        fields[kind] = {name: batch.media[name].values.cpu() for name in names}
        edges |= {name: [0, *accumulate(batch.media[name].counts.tolist())] for name in names}
    parts = []
    for i, (start, end) in enumerate(pairwise(batch.bounds)):
        inside = {
            kind: {name: value[edges[name][i] : edges[name][i + 1]] for name, value in f.items()} for kind, f in fields.items()
        }
        inside = {kind: f for kind, f in inside.items() if all(len(value) for value in f.values())}
        if not inside:
            # A document of text has the same position on every axis.
            parts.append(batch.position_ids[start:end].cpu().expand(family.axes, -1))
            continue
        try:
            positions = family.positions(base, ids[start:end], inside)
        except Exception as e:  # the family's own code raises anything on malformed input
            raise BatchError(
                f"{batch.name_of(i)}: the positions of its {' and '.join(inside)} cannot be computed ({type(e).__name__}: {e}); let the model's "
                "processor write the tokens, including those between two items"
            ) from e
        parts.append(positions)
    return torch.cat(parts, -1)
