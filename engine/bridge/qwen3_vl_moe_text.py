"""The decoder of Qwen 3 with vision as a mixture of experts, whose matrices are stacked on disk."""

from dataclasses import replace
from typing import Any

from . import qwen3
from .decoder import Decoder
from .qwen3_moe import read_experts
from .qwen3_vl_text import read_decoder_with_axes
from .rules import Replicated, TransposedExperts


def _decoder(config: Any) -> Decoder:
    return replace(read_decoder_with_axes(config), experts=read_experts(config, normalized=True))


FAMILY = replace(
    qwen3.FAMILY,
    decoder=_decoder,
    layer={
        **qwen3.FAMILY.layer,
        "mlp.router": Replicated("mlp.gate"),
        # Under their full names, since the tensors on disk are parameters without the leaf `weight`.
        "mlp.experts.linear_fc1.weight": TransposedExperts("mlp.experts.gate_up_proj", joined=2),
        "mlp.experts.linear_fc2.weight": TransposedExperts("mlp.experts.down_proj", joined=1),
    },
)
