"""Packed batches as columns of samples, and back.

Axes: T tokens, N sequences, A position axes, M rows of a media field.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from ...engine.errors import BatchError
from ...engine.packing.batch import MediaField, PackedBatch
from .plan import MEDIA, Column
from .sequence_buffer import check_dtype
from .store import DTYPE_NAMES, DTYPES, DataStore

STRUCTURE = ("input_ids", "position_ids", "labels")

Columns = list[tuple[Column, Tensor]]


def columns_of(batch: PackedBatch) -> Columns:
    """Return a batch as columns: their types and their rows, in host memory.

    Args:
        batch: The batch.

    Raises:
        BatchError: Two fields have the same name, or a field has a data type that cannot be stored.
    """
    # [A, T] becomes [T, A]: a column has one row for each token.
    positions = batch.position_ids if batch.position_ids.dim() == 1 else batch.position_ids.T
    fields: list[tuple[str, Literal["token", "sequence", "media"], Tensor]] = [
        ("input_ids", "token", batch.input_ids),
        ("position_ids", "token", positions),
        ("labels", "token", batch.labels),
        *((name, "token", values) for name, values in batch.token_fields.items()),
        *((name, "sequence", values) for name, values in batch.sequence_fields.items()),
        *((MEDIA + name, "media", media.values) for name, media in batch.media.items()),
    ]
    columns: Columns = []
    names: set[str] = set()
    for name, per, values in fields:
        if name in names:
            raise BatchError(f"the batch has two fields called {name!r}; rename one of them")
        # The keys of the stores separate a name from its version by an @; see `key_of`.
        if "@" in name:
            raise BatchError(f"the batch has the field {name!r}; a name with an @ cannot be stored")
        names.add(name)
        rows = tuple(batch.media[name.removeprefix(MEDIA)].counts.tolist()) if per == "media" else ()
        columns.append(column_of(name, per, values, rows))
    return columns


def column_of(
    key: str, per: Literal["token", "sequence", "media"], values: Tensor, rows: tuple[int, ...] = ()
) -> tuple[Column, Tensor]:
    """Return the type of a column, and its values in host memory.

    Raises:
        BatchError: Its data type cannot be stored.
    """
    host = values.detach().to("cpu")
    dtype = DTYPE_NAMES.get(host.dtype, str(host.dtype))
    check_dtype(dtype, key)
    return Column(key, dtype, per, tuple(host.shape[1:]), rows), host


def batch_of(
    store: DataStore,
    ids: Sequence[str],
    fields: Mapping[str, Column],
    *,
    group_ids: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    extra_fields: Collection[str] = (),
) -> PackedBatch:
    """Return samples of a store as a batch, which may be changed in place.

    Args:
        store: The store.
        ids: The samples, in order; empty on a rank without samples, if there are fewer samples than ranks.
        fields: The fields of the batch, with their columns in the store.
        group_ids: The group of each sample.
        names: The name of each sample, for messages.
        extra_fields: The names of fields that nothing needs to read.

    Raises:
        DataMissingError: A sample, or one of its columns, is not in the store.
        BatchError: The samples have no token ids, or do not make up a batch.
    """
    if missing := [name for name in STRUCTURE if name not in fields]:
        raise BatchError(
            f"the samples have no {missing[0]}, so they are not a batch; join the reference that has them, with |"
        )
    lengths = store.lengths(ids)
    # A rank without samples takes the types from the request, because its store has none.
    pairs = {
        name: store.get(ids, column.key, copy=True) if ids else (column, _no_rows(column)) for name, column in fields.items()
    }
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    positions = pairs["position_ids"][1]
    other_fields = {name: pair for name, pair in pairs.items() if name not in STRUCTURE}
    return PackedBatch(
        input_ids=pairs["input_ids"][1],
        position_ids=positions if positions.dim() == 1 else positions.T.contiguous(),
        cu_seqlens=bounds,
        labels=pairs["labels"][1],
        token_fields={name: values for name, (column, values) in other_fields.items() if column.per == "token"},
        sequence_fields={name: values for name, (column, values) in other_fields.items() if column.per == "sequence"},
        media={
            name.removeprefix(MEDIA): MediaField(values=values, counts=torch.tensor(column.rows, dtype=torch.int64))
            for name, (column, values) in other_fields.items()
            if column.per == "media"
        },
        group_ids=None if group_ids is None else torch.tensor(group_ids, dtype=torch.int64),
        names=None if names is None else tuple(names),
        extra_fields=frozenset(extra_fields),
    )


def _no_rows(column: Column) -> Tensor:
    return torch.empty((0, *column.tail), dtype=DTYPES[column.dtype])
