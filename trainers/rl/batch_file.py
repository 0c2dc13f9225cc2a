"""A packed batch as the named tensors of a file."""

from collections.abc import Collection, Mapping

from torch import Tensor

from ...engine.packing.batch import MediaField, PackedBatch

_STRUCTURE = ("input_ids", "position_ids", "labels", "cu_seqlens")


def tensors_of(batch: PackedBatch) -> dict[str, Tensor]:
    """Return the tensors of a batch by name, for a file."""
    tensors = {name: getattr(batch, name) for name in _STRUCTURE}
    tensors |= {f"token/{name}": values for name, values in batch.token_fields.items()}
    tensors |= {f"sequence/{name}": values for name, values in batch.sequence_fields.items()}
    tensors |= {f"media/{name}": field.values for name, field in batch.media.items()}
    tensors |= {f"media_counts/{name}": field.counts for name, field in batch.media.items()}
    # safetensors refuses to save tensors that are not contiguous.
    return {name: values.contiguous() for name, values in tensors.items()}


def batch_from(tensors: Mapping[str, Tensor], extra_fields: Collection[str]) -> PackedBatch:
    """Return the batch of the tensors of a file.

    Args:
        tensors: The tensors of a file by name; unknown ones are left out.
        extra_fields: The names of optional fields.

    Raises:
        KeyError: A tensor is missing.
        BatchError: A shape, a dtype, a boundary or a label violates the format.
    """

    def named(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): values for name, values in tensors.items() if name.startswith(prefix)}

    input_ids, position_ids, labels, cu_seqlens = (tensors[name] for name in _STRUCTURE)
    return PackedBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        labels=labels,
        cu_seqlens=cu_seqlens,
        token_fields=named("token/"),
        sequence_fields=named("sequence/"),
        media={
            name: MediaField(values=values, counts=tensors[f"media_counts/{name}"]) for name, values in named("media/").items()
        },
        extra_fields=frozenset(extra_fields),
    )
