"""Our modules inside Megatron-core's layers, inserted through its module specs.

Axes: T tokens of this rank's slice, H query heads, K key/value heads, D head size, F rotary frequencies.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..bridge.decoder import Decoder
from ..errors import ModelError
from ..ops.attention import packed_attention
from ..rank_slice import RankSlice
from ..rope import BY_LENGTH
from .config import DecoderConfig
from .lora import AdaptedRowParallelLinear


@dataclass
class PackedParams(PackedSeqParams):
    """Data that accompanies a micro-batch through all layers.

    Megatron's own fields stay empty, because its attention never runs.

    Args:
        part: This rank's slice of the micro-batch.
        deepstack: The features that are added to the outputs of the first layers, `[r, 1, H]` each; see `encoders.py`.
    """

    part: RankSlice | None = None
    deepstack: Sequence[Tensor] = ()


def slice_of(params: PackedSeqParams | None) -> RankSlice:
    """Return the rank's slice of a micro-batch from the parameters that accompany it."""
    assert isinstance(params, PackedParams)
    assert params.part is not None
    return params.part


class PackedAttention(nn.Module):
    """Core attention over packed documents with megatron's signature, context-parallel with Ulysses.

    Args:
        config: The model's configuration.
        scale: The scale of the logits.
        window: The layer's attention window; None for full attention.
        softcap: The soft cap of the logits, or None.
        partial: The size of the rotated part of a head, and the factor of its rotation if it is not 1. None if heads are rotated entirely;
            the factor is then a part of the scale.
        sinks: The number of this rank's heads that have a sink (a learned logit without a value); 0 for none.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        partial: tuple[int, float] | None = None,
        sinks: int = 0,
        **_: Any,
    ) -> None:
        super().__init__()
        self.sinks: nn.Parameter | None = nn.Parameter(torch.empty(sinks, dtype=config.params_dtype)) if sinks else None
        self.scale, self.window, self.softcap, self.partial = scale, window, softcap, partial

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend: query `[T, 1, H, D]`, key and value `[T, 1, K, D]` -> `[T, 1, H * D]`."""
        if self.partial is not None:
            size, factor = self.partial
            query, key = (torch.cat((x[..., :size] * factor, x[..., size:]), -1) for x in (query, key))
        out_thd = packed_attention(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            slice_of(packed_seq_params).context,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks_h=self.sinks,
        )
        return out_thd.flatten(1).unsqueeze(1)


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), also with sequence parallelism.

    Args:
        config: The model's configuration.
        hidden_size: The size of the last axis.
        eps: The number added under the root.
    """

    def __init__(self, config: DecoderConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, config.norm_offset
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Each rank normalizes its part of the sequence; megatron sums gradients with this mark over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last axis; the result has the input's shape."""
        weight = self.weight + self.offset if self.offset else self.weight
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


class SplitHeadNorm(nn.Module):
    """RMSNorm over all heads together, which tensor-parallel ranks share (OLMo 2, arXiv:2501.00656).

    Args:
        config: The model's configuration.
        hidden_size: The size of a head.
        eps: The number added under the root.
        heads: The number of heads of this rank.
        group: The tensor-parallel group.
    """

    def __init__(
        self, config: DecoderConfig, hidden_size: int, eps: float, *, heads: int, group: ProcessGroup, **_: Any
    ) -> None:
        super().__init__()
        self.eps, self.group = eps, group
        self.weight = nn.Parameter(torch.empty(heads * hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `[T, 1, H, D]` over its last two axes and over all ranks."""
        wide = x.flatten(-2).to(torch.promote_types(x.dtype, torch.float32))
        total = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True), group=self.group)
        # Every rank uses the sum, so its gradient is also summed over ranks.
        total = copy_to_tensor_model_parallel_region(total, group=self.group)
        normalized = wide * torch.rsqrt(total / (wide.shape[-1] * self.group.size()) + self.eps)
        return (self.weight * normalized).to(x.dtype).view_as(x)


class BiasedRowParallelLinear(AdaptedRowParallelLinear):
    """A row-parallel layer with a bias, in a model whose other linear layers have none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


class NormedRowParallelLinear(AdaptedRowParallelLinear):
    """A row-parallel layer whose output is normalized before it is added to the residual (Gemma 2, arXiv:2408.00118)."""

    def __init__(self, input_size: int, output_size: int, *, config: DecoderConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_norm = Norm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the normalized output, and no bias."""
        out, bias = super().forward(input_)
        assert bias is None
        return self.post_norm(out), None


class PackedSelfAttention(SelfAttention):
    """Self-attention that uses the angles of its layer's kind of rotary embeddings.

    Args:
        args: Arguments of megatron's class.
        rotary_kind: The index of the layer's kind among the model's kinds of rotary embeddings; None for a layer without rotary embeddings.
        joint_norm: Whether queries, and likewise keys, are normalized over all heads together.
        kwargs: Keyword arguments of megatron's class.
    """

    def __init__(self, *args: Any, rotary_kind: int | None, joint_norm: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_kind = rotary_kind
        if joint_norm:
            # Not in the layer's spec: there, megatron-core 0.19 accepts norms only with `qk_layernorm`, which is wrong here (`config.py`).
            self.q_layernorm, self.k_layernorm = (
                SplitHeadNorm(
                    self.config,
                    self.hidden_size_per_attention_head,
                    self.config.layernorm_epsilon,
                    heads=heads,
                    group=self.pg_collection.tp,
                )
                for heads in (self.num_attention_heads_per_partition, self.num_query_groups_per_partition)
            )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """Run self-attention with the layer's kind of the angles `[kinds, T, 1, 1, 2 F]`."""
        angles = None if self.rotary_kind is None else rotary_pos_emb[self.rotary_kind]
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=angles, **kwargs)


class Rotary(nn.Module):
    """Angles of rotary embeddings (Su et al. 2021, arXiv:2104.09864), from each token's positions in its document.

    The frequencies are those of transformers. If they depend on the length of the input, the length of each document is
    used, so that a document is rotated identically whether or not it is packed with others.

    Args:
        config: The Hugging Face config.
        decoder: The decoder's sizes.

    Raises:
        ModelError: A kind of rotary embeddings is unknown.
    """

    inv_freq_kf: Tensor

    def __init__(self, config: PreTrainedConfig, decoder: Decoder) -> None:
        super().__init__()
        self.config, self.kinds = config, decoder.rotary_kinds
        axes = decoder.rotary_axes
        # Not an integer buffer, because megatron would convert its dtype with the model.
        self.axes_f = None if axes is None else torch.tensor(axes)
        self.by_length = any(rotary_settings(config, kind).get("rope_type") in BY_LENGTH for kind in self.kinds)
        self.register_buffer("inv_freq_kf", self._frequencies(None), persistent=False)

    def _frequencies(self, length: int | None) -> Tensor:
        return torch.stack([rotary_frequencies(self.config, kind, length)[0] for kind in self.kinds])

    def get_rotary_seq_len(
        self, inference: Any, block: Any, hidden: Any, config: Any, packed_seq_params: PackedSeqParams | None
    ) -> RankSlice:
        """Return this rank's slice, which has positions and document boundaries.

        Megatron expects a length here, but only passes it to `forward`.
        """
        return slice_of(packed_seq_params)

    def forward(self, part: RankSlice, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Return the angles `[kinds, T, 1, 1, 2 F]` of the slice's tokens in float32."""
        inv_freq_ktf = self._of_documents(part) if self.by_length else self.inv_freq_kf[:, None, :]
        positions = part.position_ids.to(inv_freq_ktf.dtype)
        if positions.dim() == 1 or self.axes_f is None:
            positions_tf = positions.view(-1, len(part.input_ids))[0, :, None]
        else:
            self.axes_f = self.axes_f.to(positions.device)
            # For each frequency the position on its axis.
            positions_tf = positions.index_select(0, self.axes_f).T
        angles_ktf = positions_tf * inv_freq_ktf
        # Both halves of a head rotate by the same angles.
        return torch.cat((angles_ktf, angles_ktf), -1)[:, :, None, None, :]

    def _of_documents(self, part: RankSlice) -> Tensor:
        """Return the frequencies `[kinds, T, F]`: for each token, the frequencies of its document."""
        context, tokens = part.context, len(part.input_ids)
        lengths = [end - start for start, end in pairwise(context.bounds)]
        # Once for each length, since transformers computes frequencies for one length at a time.
        by_length = {length: self._frequencies(length) for length in set(lengths)}
        inv_freq_knf = torch.stack([by_length[length] for length in lengths], 1).to(self.inv_freq_kf.device)
        # The place of this rank's tokens in the whole sequence, whose boundaries the context has.
        first = 0 if context.cp_group is None else context.cp_group.rank() * tokens
        positions = torch.arange(first, first + tokens, device=context.cu_seqlens.device)
        return inv_freq_knf[:, torch.searchsorted(context.cu_seqlens, positions, right=True) - 1]


def rotary_settings(config: PreTrainedConfig, layer_kind: str) -> dict[str, Any]:
    """Return the `rope_parameters` of one kind of layer; the kind is "" if all layers share them."""
    settings: dict[str, Any] = config.rope_parameters[layer_kind] if layer_kind else config.rope_parameters
    return settings


def rotary_frequencies(config: PreTrainedConfig, layer_kind: str, length: int | None = None) -> tuple[Tensor, float]:
    """Return the frequencies `[F]` and the factor on sine and cosine (YaRN's attention factor).

    Args:
        config: The Hugging Face config.
        layer_kind: A key of `rope_parameters`, or "" if all layers share them.
        length: The document's number of tokens; None for a document no longer than those the model was trained on.

    Raises:
        ModelError: transformers has no such kind of rotary embeddings.
    """
    config = copy.copy(config)
    rope = config.rope_parameters = rotary_settings(config, layer_kind)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = int(size * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(f"rope_type={kind} in the model's config is unknown; use one of {', '.join(ROPE_INIT_FUNCTIONS)}")
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    return frequencies, float(factor)
