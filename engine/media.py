"""Media in packed batches: which tokens stand for which items, and how the ranks that share a sequence divide the encoders' work.

The features of an item stand in the place of tokens of one document. Under context parallelism each item is encoded by one rank, and its
features are sent to the ranks whose slices have its tokens.

Axes: M rows of a media field, F features.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .errors import BatchError
from .hf.media import Kind, MediaFamily, kinds_of
from .packing.batch import PackedBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Items:
    """The items of one kind in a batch.

    Args:
        rows: The number of rows of the encoder's input of each item.
        features: The number of features of each item.
        tokens: `[F]` int64 on the host, the token in whose place each feature stands.
    """

    rows: list[int]
    features: list[int]
    tokens: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """The part of the items that a rank encodes, and the exchange of their features.

    Args:
        items: The indices of the items, in order.
        send: The number of features for each rank, in the order of the items.
        receive: The number of features from each rank.
        order: `[F']` int64, which of the received features stands in the place of each of this rank's tokens.
    """

    items: list[int]
    send: list[int]
    receive: list[int]
    order: Tensor

    def to(self, device: torch.device) -> "Share":
        """Return it with its tensor on a device."""
        return replace(self, order=self.order.to(device, non_blocking=True))


def check_media(batch: PackedBatch, family: MediaFamily | None, model: str) -> list[Kind]:
    """Check the media of a batch, and return their kinds.

    Args:
        batch: The batch.
        family: The model's family; None if it takes no media.
        model: The name of the model, for messages.

    Raises:
        BatchError: A field is missing or unknown, or the tokens of a document are not as many as the features of its items.
    """
    known = {} if family is None else family.modalities
    names = [name for modality in known.values() for name in (*modality.fields, *modality.optional)]
    if unknown := sorted(set(batch.media) - set(names)):
        takes = f"takes {', '.join(names)}" if names else "takes no media"
        raise BatchError(f"the batch has the media field {unknown[0]!r}, but {model} {takes}")
    if family is None:
        return []
    kinds = kinds_of(list(batch.media), family)
    for kind, modality in family.modalities.items():
        token, fields = family.tokens[kind], [name for name in modality.fields if name in batch.media]
        if kind in kinds and len(fields) < len(modality.fields):
            lacking = next(name for name in modality.fields if name not in fields)
            raise BatchError(f"the batch has {fields[0]} without {lacking}, which {model} needs beside it")
        present = (batch.input_ids == token).long().cumsum(0)
        edges = torch.cat([present.new_zeros(1), present])[batch.cu_seqlens.long()]
        tokens = edges.diff().tolist()
        expected = [0] * batch.num_sequences
        counts = expected
        if kind in kinds:
            media = fields_of(batch, family, kind)
            counts = _item_counts(batch, family, kind)
            rows, features = family.rows(kind, media), family.features_of(kind, media)
            edges_of_items = [0, *accumulate(counts)]
            expected = [sum(features[start:end]) for start, end in pairwise(edges_of_items)]
            row_counts = [sum(rows[start:end]) for start, end in pairwise(edges_of_items)]
            for i, (has, needs) in enumerate(zip(batch.media[modality.values].counts.tolist(), row_counts, strict=True)):
                if has != needs:
                    raise BatchError(
                        f"{batch.name_of(i)} has {has} rows of {modality.values}, but by its "
                        f"{', '.join(modality.items) or modality.values} it should have {needs}"
                    )
        for i, (has, needs) in enumerate(zip(tokens, expected, strict=True)):
            if has != needs:
                raise BatchError(
                    f"{batch.name_of(i)} has {has} {kind} tokens (id {token}), but {counts[i]} {kind}s, which take {needs}; let the model's own "
                    f"processor write the tokens, and cut no {kind} off"
                )
    return kinds


def _item_counts(batch: PackedBatch, family: MediaFamily, kind: Kind) -> list[int]:
    modality = family.modalities[kind]
    names = [*(modality.items or (modality.values,)), *(name for name in modality.optional if name in batch.media)]
    first, *others = (batch.media[name].counts.tolist() for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if other != first:
            i = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
            raise BatchError(
                f"{batch.name_of(i)} has {first[i]} rows of {names[0]} and {other[i]} of {name}; each item has one of both"
            )
    counts: list[int] = first
    return counts


def fields_of(batch: PackedBatch, family: MediaFamily, kind: Kind) -> dict[str, Tensor]:
    """Return the fields of a kind that a batch has."""
    modality = family.modalities[kind]
    return {name: batch.media[name].values for name in (*modality.fields, *modality.optional) if name in batch.media}


def items_of(batch: PackedBatch, family: MediaFamily, kind: Kind) -> Items:
    """Return the items of a kind, of which a batch may have none."""
    if kind not in kinds_of(list(batch.media), family):
        return Items(rows=[], features=[], tokens=torch.empty(0, dtype=torch.long))
    media = fields_of(batch, family, kind)
    tokens = (batch.input_ids == family.tokens[kind]).nonzero()[:, 0].cpu()
    return Items(rows=family.rows(kind, media), features=family.features_of(kind, media), tokens=tokens)


def share_items(items: Items, rank: int, ranks: int, tokens: int) -> Share:
    """Divide the items among the ranks that share a sequence, so that each has about as many rows to encode.

    Args:
        items: The items.
        rank: The rank whose part is returned.
        ranks: The number of ranks.
        tokens: The number of tokens in the slice of each rank.
    """
    loads = [0] * ranks
    owners = [0] * len(items.rows)
    for item in sorted(range(len(owners)), key=lambda i: -items.rows[i]):
        owners[item] = loads.index(min(loads))
        loads[owners[item]] += items.rows[item]
    owner = torch.repeat_interleave(torch.tensor(owners, dtype=torch.long), torch.tensor(items.features, dtype=torch.long))
    target = items.tokens // tokens
    here = items.tokens[target == rank]
    # Features arrive rank by rank, those of a rank in the order of the tokens.
    arriving = torch.cat([here[owner[target == rank] == source] for source in range(ranks)])
    return Share(
        items=[item for item, one in enumerate(owners) if one == rank],
        send=torch.bincount(target[owner == rank], minlength=ranks).tolist(),
        receive=torch.bincount(owner[target == rank], minlength=ranks).tolist(),
        order=arriving.argsort(),
    )


def select_items(
    media: Mapping[str, Tensor], family: MediaFamily, kind: Kind, rows: Sequence[int], items: Sequence[int]
) -> dict[str, Tensor]:
    """Return the fields of some items.

    Args:
        media: The fields of all items.
        family: The model's family.
        kind: The kind of the items.
        rows: The number of rows of the encoder's input of each item.
        items: The indices of the items to return.
    """
    if len(items) == len(rows):
        return dict(media)
    edges = [0, *accumulate(rows)]
    index = [row for item in items for row in range(edges[item], edges[item + 1])]
    values = family.modalities[kind].values
    return {name: value[index if name == values else list(items)] for name, value in media.items()}


def with_positions(batch: PackedBatch, family: MediaFamily, base: object) -> PackedBatch:
    """Return a batch with the positions of the family, computed document by document; as it is if it has several axes already.

    Args:
        batch: The batch, with or without media.
        family: The model's family.
        base: The model without its head.
    """
    if family.axes == 1 or batch.position_ids.dim() == 2:
        return batch
    kinds = kinds_of(list(batch.media), family)
    parts = []
    for sequence in range(batch.num_sequences):
        one = batch.select([sequence])
        media = {kind: fields_of(one, family, kind) for kind in kinds}
        media = {kind: fields for kind, fields in media.items() if len(fields[family.modalities[kind].values])}
        if media:
            parts.append(family.positions(base, one.input_ids, media))  # type: ignore[arg-type]
        else:
            parts.append(one.position_ids.expand(family.axes, -1))
    return batch.with_position_ids(torch.cat(parts, -1))
