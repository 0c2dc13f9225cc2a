"""GLM-4.5 and later: half of each head is rotated, and DeepSeek-V3's router without its groups."""

from typing import Any

from ..errors import ModelError
from .decoder import Decoder, ExpertSettings, read_decoder
from .deepseek_v3 import SHARED
from .family import Family
from .llama import ATTENTION, DENSE, OUTER
from .qwen3 import HEAD_NORMS
from .qwen3_moe import MIXTURE


def _decoder(config: Any) -> Decoder:
    # With groups, Megatron-core would score them by other experts than transformers does; see `deepseek_v3`.
    if not config.norm_topk_prob or config.n_group != 1:
        raise ModelError(
            f"norm_topk_prob={config.norm_topk_prob}, n_group={config.n_group}: this bridge requires weights that add up to one, and "
            "experts in one group; use engine.backend=fsdp"
        )
    experts = ExpertSettings(
        count=config.n_routed_experts,
        per_token=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        normalized=True,
        layers=tuple(i >= config.first_k_dense_replace for i in range(config.num_hidden_layers)),
        sigmoid=True,
        factor=config.routed_scaling_factor,
        shared_ffn=config.moe_intermediate_size * config.n_shared_experts,
    )
    qk_norm = "head" if config.use_qk_norm else None
    # `attention_bias` is about query, key and value only: the output projection has none.
    return read_decoder(config, supported=("partial_rotary_factor",), proj_bias=False, qk_norm=qk_norm, experts=experts)


FAMILY = Family(decoder=_decoder, layer={**ATTENTION, **HEAD_NORMS, **DENSE, **MIXTURE, **SHARED}, outer=OUTER)
