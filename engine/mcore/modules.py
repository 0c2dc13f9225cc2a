"""Our modules inside Megatron-core's layers, put there by its module specs.

Axes: T tokens of this rank's slice, H query heads, K key/value heads, D head size, F rotary frequencies.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..bridge.decoder import Decoder
from ..errors import ModelError
from ..ops.attention import packed_attention
from ..rank_slice import RankSlice
from .config import DecoderConfig
from .lora import AdaptedRowParallelLinear


@dataclass
class PackedParams(PackedSeqParams):
    """What travels with a micro-batch through all layers. Megatron's own fields stay empty: its attention never runs.

    Args:
        part: this rank's slice.
    """

    part: RankSlice | None = None


def slice_of(params: PackedSeqParams | None) -> RankSlice:
    """The slice that travels with a micro-batch."""
    assert isinstance(params, PackedParams)
    assert params.part is not None
    return params.part


class PackedAttention(nn.Module):
    """Core attention over packed documents, context-parallel by Ulysses. Megatron's signature.

    Args:
        config: of the model.
        scale: of the logits.
        window: of the layer.
        softcap: of the logits.
    """

    def __init__(self, config: DecoderConfig, *, scale: float, window: int | None, softcap: float | None, **_: Any) -> None:
        super().__init__()
        self.scale, self.window, self.softcap = scale, window, softcap

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
        """`[T, 1, H, D]`, `[T, 1, K, D]` -> `[T, 1, H * D]`."""
        out_thd = packed_attention(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            slice_of(packed_seq_params).context,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )
        return out_thd.flatten(1).unsqueeze(1)


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), also under sequence parallelism.

    Args:
        config: of the model.
        hidden_size: elements of the last axis.
        eps: under the root.
    """

    def __init__(self, config: DecoderConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, config.norm_offset
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Each rank normalises its part of the sequence; megatron adds such gradients up over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """As the input."""
        weight = self.weight + self.offset if self.offset else self.weight
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


class BiasedRowParallelLinear(AdaptedRowParallelLinear):
    """A row-parallel layer with a bias in a model whose other linear layers have none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


class NormedRowParallelLinear(AdaptedRowParallelLinear):
    """A row-parallel layer and the norm of what it gives, before that is added to the residual (Gemma 2, arXiv:2408.00118)."""

    def __init__(self, input_size: int, output_size: int, *, config: DecoderConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_norm = Norm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """The normed output, and no bias."""
        out, bias = super().forward(input_)
        assert bias is None
        return self.post_norm(out), None


class PackedSelfAttention(SelfAttention):
    """Self-attention that takes the angles of its layer's own kind of rotary embedding.

    Args:
        rotary_kind: index among the model's kinds.
    """

    def __init__(self, *args: Any, rotary_kind: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_kind = rotary_kind

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:
        """Angles `[kinds, T, 1, 1, 2 F]` come for all kinds."""
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=rotary_pos_emb[self.rotary_kind], **kwargs)


class Rotary(nn.Module):
    """Angles of rotary embeddings (Su et al. 2021, arXiv:2104.09864), from each token's place in its document.

    The frequencies are transformers' own, for every kind that does not depend on the batch.

    Args:
        config: the Hugging Face config.
        decoder: sizes.

    Raises:
        ModelError: an unknown kind.
    """

    inv_freq_kf: Tensor

    def __init__(self, config: PreTrainedConfig, decoder: Decoder) -> None:
        super().__init__()
        frequencies = [rotary_frequencies(config, kind)[0] for kind in decoder.rotary_kinds]
        self.register_buffer("inv_freq_kf", torch.stack(frequencies), persistent=False)

    def get_rotary_seq_len(
        self, inference: Any, block: Any, hidden: Any, config: Any, packed_seq_params: PackedSeqParams | None
    ) -> Tensor:
        """Megatron asks for a length and hands it to `forward`; ours is the positions themselves."""
        return slice_of(packed_seq_params).position_ids

    def forward(self, positions_t: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Positions `[T]` -> angles `[kinds, T, 1, 1, 2 F]`, float32."""
        angles_ktf = positions_t.to(self.inv_freq_kf.dtype)[None, :, None] * self.inv_freq_kf[:, None, :]
        return torch.cat((angles_ktf, angles_ktf), -1)[:, :, None, None, :]


def rotary_frequencies(config: PreTrainedConfig, layer_kind: str) -> tuple[Tensor, float]:
    """Frequencies `[F]` and the factor on sine and cosine (YaRN's attention factor).

    Args:
        config: of the model.
        layer_kind: a key of `rope_parameters`, or "" where all layers have the same.

    Raises:
        ModelError: transformers does not know the kind.
    """
    config = copy.copy(config)
    rope = config.rope_parameters = config.rope_parameters[layer_kind] if layer_kind else config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(f"rope_type={kind} in the model's config is not known; there are {', '.join(ROPE_INIT_FUNCTIONS)}")
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, float(factor)
