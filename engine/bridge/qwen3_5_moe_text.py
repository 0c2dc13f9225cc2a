"""Qwen3.5 as a mixture of experts in every layer, with a shared expert behind a gate."""

from dataclasses import replace
from typing import Any

from . import qwen3_5_text
from .decoder import Decoder, ExpertSettings
from .qwen2_moe import SHARED
from .qwen3_5_text import read_delta_decoder_with_axes
from .qwen3_moe import MIXTURE


def _decoder(config: Any) -> Decoder:
    experts = ExpertSettings(
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        normalized=True,
        layers=(True,) * config.num_hidden_layers,
        shared_ffn=config.shared_expert_intermediate_size,
        shared_gate=True,
    )
    # No layer is dense, so the config has no size for dense layers.
    return read_delta_decoder_with_axes(config, ffn=config.moe_intermediate_size, experts=experts)


FAMILY = replace(qwen3_5_text.FAMILY, decoder=_decoder, layer={**qwen3_5_text.FAMILY.layer, **MIXTURE, **SHARED})
