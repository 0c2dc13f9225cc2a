"""Encoders of media in front of a decoder: transformers' own modules, whose features replace placeholder tokens.

Every tensor-parallel rank of the first pipeline stage holds all encoders in full. Under context parallelism each item is encoded by one
rank. The optimizer shards their state over the data-parallel ranks like that of other parameters.

Axes: t tokens of this rank's slice, r tokens of this rank's part of it under sequence parallelism, F features in the slice, H hidden size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..hf.lora import factors as factors_of
from ..hf.lora import merged
from ..hf.media_family import MediaFamily
from ..packing.batch import Kind
from ..rank_slice import EncoderInput, RankSlice
from .config import DecoderConfig
from .modules import PackedParams
from .moe import RoutedLayer


class Encoders(nn.Module):
    """The encoders of a model, and the replacement of token embeddings with their features.

    Args:
        base: The model without its head and its decoder.
        family: The model's handling of media.
        config: Megatron's configuration.
        groups: The process groups.
    """

    def __init__(
        self, base: PreTrainedModel, family: MediaFamily, config: DecoderConfig, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.base, self.family, self._config, self._groups = base, family, config, groups
        for parameter in self.parameters():
            # Every rank of a tensor-parallel group has all features, but its part of the sequence uses only some, so megatron sums
            # gradients with this mark over the ranks. Without sequence parallelism, gradients are equal and averaged; see
            # `average_over_tp`.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, embeddings: Tensor, packed: PackedParams) -> Tensor:
        """Put features into the embeddings `[r, 1, H]`, and those for deeper layers into `packed.deepstack`."""
        part = packed.part
        assert part is not None
        encoded = {kind: self._encode(kind, media, part) for kind, media in part.media.items()}
        features = {kind: of_kind for kind, of_kind in encoded.items() if of_kind is not None}
        if not features:
            return embeddings
        hidden = embeddings.shape[-1]
        # The first H columns replace the embeddings; the others are added to the outputs of the first layers.
        first = {kind: of_kind[:, :hidden] for kind, of_kind in features.items()}
        mask = self._is_media(part, features)
        placed = torch.where(mask, self._place(first, part, embeddings.dtype), embeddings)
        deeper = {kind: of_kind[:, hidden:].to(embeddings.dtype) for kind, of_kind in features.items()}
        if not self.family.deepstack_layers:
            return placed
        joined = self._place(deeper, part, embeddings.dtype)
        if joined.requires_grad:
            leaf = joined.detach().requires_grad_()
            placed, joined = _Deferred.apply(placed, joined, [leaf]), leaf
        packed.deepstack = joined.split(hidden, -1)
        return placed

    def _encode(self, kind: Kind, media: EncoderInput, part: RankSlice) -> Tensor | None:
        """Return the features `[F, (1 + L) H]` of this slice's placeholder tokens; None if no rank that shares the slice has any."""
        if media.is_blank and media.share is None:
            return None
        values = self.family.modalities[kind].values
        fields = {**media.fields, values: media.fields[values].to(self._config.params_dtype)}
        return media.features_of_slice(self.family.encode(self.base, kind, fields), part.context.cp_group)

    def _place(self, features: Mapping[Kind, Tensor], part: RankSlice, dtype: torch.dtype) -> Tensor:
        """Scatter features `[F, W]` to the positions of this rank's placeholder tokens, `[r, 1, W]`, with zeros for other tokens."""
        width = next(iter(features.values())).shape[1]
        slots = torch.zeros(len(part.input_ids), width, dtype=dtype, device=part.input_ids.device)
        for kind, of_kind in features.items():
            mask = (part.input_ids == self.family.tokens[kind]).unsqueeze(-1)
            slots = slots.masked_scatter(mask, of_kind.to(dtype))
        return self._of_this_rank(slots)

    def _is_media(self, part: RankSlice, kinds: Mapping[Kind, Any]) -> Tensor:
        """Return a mask `[r, 1, 1]` of this rank's placeholder tokens."""
        masks = [part.input_ids == self.family.tokens[kind] for kind in kinds]
        return self._of_this_rank(torch.stack(masks).any(0).unsqueeze(-1))

    def _of_this_rank(self, rows: Tensor) -> Tensor:
        if self._config.sequence_parallel:
            # A copy, because a view would keep the rows of all ranks alive.
            rows = rows.chunk(self._groups.tp.size())[self._groups.tp.rank()].clone()
        return rows.unsqueeze(1)


class _Deferred(torch.autograd.Function):
    """Passes embeddings on; the backward pass returns the gradient that later layers have accumulated in a leaf to the features.

    A recomputed layer runs its own backward pass, which would go through the encoders if the layer saw their features. It sees a leaf
    instead. All layers come after the embeddings, so the gradient of the leaf is complete once the gradient of the embeddings is.
    """

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, features: Tensor, leaf: list[Tensor]) -> Tensor:
        # The leaf is not a tensor argument: its gradient would then wait for this backward pass, which returns it.
        (ctx.leaf,) = leaf
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        collected, ctx.leaf.grad = ctx.leaf.grad, None
        return grad, collected, None


class DeepstackLayer(RoutedLayer):
    """A layer that adds features of media to its output (DeepStack, arXiv:2406.04334)."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Run the layer with megatron's signature."""
        output, context = super().forward(*args, **kwargs)
        deepstack: Sequence[Tensor] = kwargs["packed_seq_params"].deepstack
        return (output + deepstack[self.layer_number - 1] if deepstack else output), context


@dataclass(frozen=True)
class AdaptedByPeft:
    """A linear layer of an encoder with an adapter, for `ParamShard.layer`.

    Args:
        layer: peft's layer.
    """

    layer: Any

    @property
    def factors(self) -> list[tuple[Any, Any]]:
        """The parameters A and B of the adapter, as a list of one pair."""
        return [factors_of(self.layer)]

    def merged(self, base: Tensor, factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the weight with the adapter merged, computed in float32."""
        ((down, up),) = factors
        return merged(self.layer, base, down, up)
