"""Our modules inside Megatron-core's layers, put there by its module specs.

Axes: T tokens of this rank's slice, H query heads, K key/value heads, D head size, F rotary frequencies.
"""

import copy
from dataclasses import dataclass
from itertools import pairwise
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

    The frequencies are transformers' own. Where they depend on the length of what the model sees, that is each document's
    own length: packed or alone, it is rotated alike.

    Args:
        config: the Hugging Face config.
        decoder: sizes.

    Raises:
        ModelError: an unknown kind.
    """

    inv_freq_kf: Tensor

    def __init__(self, config: PreTrainedConfig, decoder: Decoder) -> None:
        super().__init__()
        self.config, self.kinds = config, decoder.rotary_kinds
        self.by_length = any(rotary_settings(config, kind).get("rope_type") in _BY_LENGTH for kind in self.kinds)
        self.register_buffer("inv_freq_kf", self._frequencies(None), persistent=False)

    def _frequencies(self, length: int | None) -> Tensor:
        return torch.stack([rotary_frequencies(self.config, kind, length)[0] for kind in self.kinds])

    def get_rotary_seq_len(
        self, inference: Any, block: Any, hidden: Any, config: Any, packed_seq_params: PackedSeqParams | None
    ) -> RankSlice:
        """Megatron asks for a length and hands it to `forward`; ours is the slice, which knows positions and borders."""
        return slice_of(packed_seq_params)

    def forward(self, part: RankSlice, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Angles `[kinds, T, 1, 1, 2 F]` of the slice's tokens, float32."""
        inv_freq_ktf = self._of_documents(part) if self.by_length else self.inv_freq_kf[:, None, :]
        angles_ktf = part.position_ids.to(inv_freq_ktf.dtype)[None, :, None] * inv_freq_ktf
        return torch.cat((angles_ktf, angles_ktf), -1)[:, :, None, None, :]

    def _of_documents(self, part: RankSlice) -> Tensor:
        """`[kinds, T, F]`: for each token the frequencies of its document."""
        context, tokens = part.context, len(part.input_ids)
        lengths = [end - start for start, end in pairwise(context.bounds)]
        known = {length: self._frequencies(length) for length in set(lengths)}
        inv_freq_knf = torch.stack([known[length] for length in lengths], 1).to(self.inv_freq_kf.device)
        first = 0 if context.cp_group is None else context.cp_group.rank() * tokens
        places = torch.arange(first, first + tokens, device=context.cu_seqlens.device)
        return inv_freq_knf[:, torch.searchsorted(context.cu_seqlens, places, right=True) - 1]


_BY_LENGTH = ("dynamic", "longrope")


def rotary_settings(config: PreTrainedConfig, layer_kind: str) -> dict[str, Any]:
    """What `rope_parameters` say of one kind of layers, "" where all layers have the same."""
    found: dict[str, Any] = config.rope_parameters[layer_kind] if layer_kind else config.rope_parameters
    return found


def rotary_frequencies(config: PreTrainedConfig, layer_kind: str, length: int | None = None) -> tuple[Tensor, float]:
    """Frequencies `[F]` and the factor on sine and cosine (YaRN's attention factor).

    Args:
        config: of the model.
        layer_kind: a key of `rope_parameters`, or "" where all layers have the same.
        length: tokens of the document; None for no more than the model was trained on.

    Raises:
        ModelError: transformers does not know the kind.
    """
    config = copy.copy(config)
    rope = config.rope_parameters = rotary_settings(config, layer_kind)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ModelError(f"rope_type={kind} in the model's config is not known; there are {', '.join(ROPE_INIT_FUNCTIONS)}")
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    return frequencies, float(factor)
