"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) over packed documents, split by heads over tensor-parallel ranks.

Axes: T tokens, G key heads and H value heads of this rank, K key size, V value size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from ..bridge.decoder import DeltaNet
from ..ops.scan.mixers import gated_delta_net
from .config import DecoderConfig
from .lora import AdaptedColumnParallelLinear, AdaptedRowParallelLinear
from .modules import slice_of


class GatedDeltaNet(MegatronModule):
    """A layer with state that replaces self-attention, with megatron's signature.

    Args:
        config: The model's configuration.
        net: The sizes of the layer.
        pg_collection: The process groups.
    """

    def __init__(self, config: DecoderConfig, *, net: DeltaNet, pg_collection: ProcessGroupCollection, **_: Any) -> None:
        super().__init__(config=config)
        self.net, self.tp = net, pg_collection.tp
        ranks, dtype = self.tp.size(), config.params_dtype
        self.key_heads, self.value_heads = net.key_heads // ranks, net.value_heads // ranks
        self.in_proj = AdaptedColumnParallelLinear(
            config.hidden_size,
            2 * (net.key_size + net.value_size + net.value_heads),
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp,
        )
        channels = (2 * net.key_size + net.value_size) // ranks
        # Only holds the weight; `gated_delta_net` convolves.
        self.conv1d = nn.Conv1d(channels, channels, net.taps, groups=channels, bias=False, dtype=dtype)
        self.A_log = nn.Parameter(torch.empty(self.value_heads, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads, dtype=dtype))
        self.norm = GatedNorm(config, net.value_dim, pg_collection)
        self.out_proj = AdaptedRowParallelLinear(
            net.value_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=self.tp,
        )

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map the hidden states of this rank's tokens to hidden states; return no bias."""
        projected, _ = self.in_proj(hidden_states)
        keys, values = self.key_heads * self.net.key_dim, self.value_heads * self.net.value_dim
        # Queries, keys, values, gates, rates and decays; megatron's hidden states have a batch axis of size 1.
        sizes = [keys, keys, values, values, self.value_heads, self.value_heads]
        q, k, v, gate, rate, decay = projected[:, 0].split(sizes, -1)
        heads = (self.value_heads, self.net.value_dim)
        out = gated_delta_net(
            q.unflatten(-1, (self.key_heads, self.net.key_dim)),
            k.unflatten(-1, (self.key_heads, self.net.key_dim)),
            v.unflatten(-1, heads),
            decay.unsqueeze(-1),
            rate,
            kernel_cw=self.conv1d.weight.squeeze(1),
            a_log_h=self.A_log,
            dt_bias_he=self.dt_bias.unsqueeze(-1),
            activation=F.silu,
            largest_rate=1.0,
            context=slice_of(packed_seq_params).context,
        )
        normed = self.norm(out, gate.unflatten(-1, heads))
        result: tuple[Tensor, Tensor | None] = self.out_proj(normed.flatten(1).unsqueeze(1))
        return result


class GatedNorm(nn.Module):
    """RMSNorm of each head, multiplied by the SiLU of a gate. All heads share one weight.

    Args:
        config: The model's configuration.
        size: The size of a head.
        pg_collection: The process groups.
    """

    def __init__(self, config: DecoderConfig, size: int, pg_collection: ProcessGroupCollection) -> None:
        super().__init__()
        self.eps, self.tp = config.layernorm_epsilon, pg_collection.tp
        self.weight = nn.Parameter(torch.empty(size, dtype=config.params_dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize `[T, H, V]` over the last axis."""
        # The heads of all ranks share the weight, so its gradient is the sum over ranks.
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp)
        dtype = torch.promote_types(x.dtype, torch.float32)
        normed = weight * F.rms_norm(x.to(dtype), (x.shape[-1],), None, self.eps).to(x.dtype)
        return (normed * F.silu(gate.to(dtype))).to(x.dtype)
