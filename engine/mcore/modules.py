"""Our modules inside Megatron-core's layers, put there by its module specs.

Axes: T tokens of this rank's slice, H query heads, K key/value heads, D head size, F rotary frequencies.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..bridge.decoder import Decoder
from ..errors import ModelError
from ..ops.attention import packed_attention
from ..rank_slice import RankSlice


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

    def __init__(
        self, config: TransformerConfig, *, scale: float, window: int | None, softcap: float | None, **_: Any
    ) -> None:
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
        offset: added to the weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, offset: float = 0.0, **_: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        # Each rank normalises its part of the sequence; megatron adds such gradients up over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """As the input."""
        weight = self.weight + self.offset if self.offset else self.weight
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


class BiasedRowParallelLinear(RowParallelLinear):
    """A row-parallel layer with a bias in a model whose other linear layers have none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "bias": True})


class Rotary(nn.Module):
    """Angles of rotary embeddings (Su et al. 2021, arXiv:2104.09864), from each token's place in its document.

    The frequencies are transformers' own, for every kind that does not depend on the batch.

    Args:
        config: the Hugging Face config.
        decoder: sizes.

    Raises:
        ModelError: an unknown kind.
    """

    inv_freq_f: Tensor

    def __init__(self, config: PreTrainedConfig, decoder: Decoder) -> None:
        super().__init__()
        frequencies, self.factor = rotary_frequencies(config)
        self.register_buffer("inv_freq_f", frequencies, persistent=False)

    def get_rotary_seq_len(
        self, inference: Any, block: Any, hidden: Any, config: Any, packed_seq_params: PackedSeqParams | None
    ) -> Tensor:
        """Megatron asks for a length and hands it to `forward`; ours is the positions themselves."""
        return slice_of(packed_seq_params).position_ids

    def forward(self, positions_t: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Positions `[T]` -> angles `[T, 1, 1, 2 F]`, float32."""
        angles_tf = torch.outer(positions_t.to(self.inv_freq_f.dtype), self.inv_freq_f)
        return torch.cat((angles_tf, angles_tf), -1)[:, None, None, :]


def rotary_frequencies(config: PreTrainedConfig) -> tuple[Tensor, float]:
    """Frequencies `[F]` and the factor on sine and cosine (YaRN's attention factor).

    Raises:
        ModelError: transformers does not know the kind.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotated = int(size * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(f"rope_type={kind} in the model's config is not known; there are {', '.join(ROPE_INIT_FUNCTIONS)}")
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, float(factor)
