"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) over packed documents.

Queries, keys and values are projected through low-rank latents, and all heads share the rotary part of a key. The down
projections are replicated on all tensor-parallel ranks; the up projections are split by heads.

Axes: T tokens, H heads of this rank, N and R sizes of a head's parts without and with rotation, V size of a value.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from ..bridge.decoder import Latent
from .config import DecoderConfig
from .lora import AdaptedColumnParallelLinear, AdaptedRowParallelLinear
from .modules import Norm, PackedAttention


@dataclass(frozen=True, kw_only=True)
class MLASettings:
    """The layer's settings in addition to megatron's configuration.

    Args:
        latent: The sizes of the latents.
        scale: The scale of the logits.
        factor: The factor on sine and cosine.
        window: The layer's attention window; None for full attention.
        rotary_kind: The index of the layer's kind among the model's kinds of rotary embeddings.
    """

    latent: Latent
    scale: float
    factor: float
    window: int | None
    rotary_kind: int


class MLASelfAttention(MegatronModule):
    """Self-attention with latents, with megatron's signature.

    Args:
        config: The model's configuration.
        settings: The layer's sizes and scales.
        pg_collection: The process groups.
    """

    def __init__(
        self, config: DecoderConfig, *, settings: MLASettings, pg_collection: ProcessGroupCollection, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.settings, self.tp = settings, pg_collection.tp
        sizes, hidden, heads = settings.latent, config.hidden_size, config.num_attention_heads
        self.heads = heads // self.tp.size()
        column: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "gather_output": False,
            "tp_group": self.tp,
        }
        self.q_down: nn.Linear | None = None
        if sizes.query_rank is not None:
            self.q_down = self._replicated_linear(hidden, sizes.query_rank)
            self.q_norm = Norm(config, sizes.query_rank, config.layernorm_epsilon)
        self.q_up = AdaptedColumnParallelLinear(sizes.query_rank or hidden, heads * (sizes.plain + sizes.rotated), **column)
        self.kv_down = self._replicated_linear(hidden, sizes.kv_rank + sizes.rotated)
        self.kv_norm = Norm(config, sizes.kv_rank, config.layernorm_epsilon)
        self.kv_up = AdaptedColumnParallelLinear(sizes.kv_rank, heads * (sizes.plain + sizes.value), **column)
        self.core_attention = PackedAttention(config, scale=settings.scale, window=settings.window, softcap=None)
        self.linear_proj = AdaptedRowParallelLinear(
            heads * sizes.value,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp,
        )

    def _replicated_linear(self, inputs: int, outputs: int) -> nn.Linear:
        linear = nn.Linear(inputs, outputs, bias=False, dtype=self.config.params_dtype)
        # With sequence parallelism, each rank has only the gradient of its own tokens; megatron sums gradients with this mark.
        linear.weight.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]
        return linear

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Map the hidden states of this rank's tokens and angles `[kinds, T, 1, 1, R]` to hidden states; return no bias."""
        sizes = self.settings.latent
        q_low = hidden_states if self.q_down is None else self.q_norm(self.q_down(hidden_states))
        q, _ = self.q_up(q_low)
        kv_low, key_r = self.kv_down(hidden_states).split([sizes.kv_rank, sizes.rotated], -1)
        kv, _ = self.kv_up(self.kv_norm(kv_low))
        # The heads of all ranks share the rotated part, so its gradient is the sum over ranks.
        if self.config.sequence_parallel:
            key_r = gather_from_sequence_parallel_region(key_r, group=self.tp)
        else:
            key_r = copy_to_tensor_model_parallel_region(key_r, group=self.tp)
        q_n, q_r = q.unflatten(-1, (self.heads, -1)).split([sizes.plain, sizes.rotated], -1)
        key_n, value = kv.unflatten(-1, (self.heads, -1)).split([sizes.plain, sizes.value], -1)
        angles = rotary_pos_emb[self.settings.rotary_kind]
        query = torch.cat([q_n, self._rotate(q_r, angles)], -1)
        # All heads share one rotated part of the key.
        key = torch.cat([key_n, self._rotate(key_r.unsqueeze(-2), angles).expand(-1, -1, self.heads, -1)], -1)

        out = self.core_attention(query, key, value, None, packed_seq_params=packed_seq_params)
        projected: tuple[Tensor, Tensor | None] = self.linear_proj(out)
        return projected

    def _rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate `[T, 1, H, R]` by the angles `[T, 1, 1, R]`."""
        if self.settings.latent.interleaved:
            # The two elements of a pair are adjacent on disk but in separate halves in the rotation.
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        first, second = x.chunk(2, -1)
        cos, sin = ((f * self.settings.factor).to(x.dtype) for f in (angles.cos(), angles.sin()))
        return x * cos + torch.cat((-second, first), -1) * sin
