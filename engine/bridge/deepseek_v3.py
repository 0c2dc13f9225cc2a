"""DeepSeek-V3 (arXiv:2412.19437): latent attention, and a mixture whose router scores experts with sigmoids within groups."""

import math
from typing import Any

from ..errors import ModelError
from .decoder import Decoder, ExpertSettings, Latent, read_decoder
from .family import Family
from .llama import DENSE, OUTER
from .qwen3_moe import MIXTURE
from .rules import ColumnParallel, Replicated, RowParallel, Rule

# The down projections make one small latent for all heads and are the same on every rank; the up projections have rows
# for each head and are split.
LATENT: dict[str, Rule] = {
    "input_layernorm": Replicated("input_layernorm"),
    "self_attention.q_down": Replicated("self_attn.q_a_proj"),
    "self_attention.q_norm": Replicated("self_attn.q_a_layernorm"),
    "self_attention.q_up": ColumnParallel("self_attn.q_b_proj"),
    "self_attention.kv_down": Replicated("self_attn.kv_a_proj_with_mqa"),
    "self_attention.kv_norm": Replicated("self_attn.kv_a_layernorm"),
    "self_attention.kv_up": ColumnParallel("self_attn.kv_b_proj"),
    "self_attention.linear_proj": RowParallel("self_attn.o_proj"),
    "pre_mlp_layernorm": Replicated("post_attention_layernorm"),
}

SHARED: dict[str, Rule] = {
    # Under its full name, because the leaf on disk differs.
    "mlp.router.expert_bias": Replicated("mlp.gate.e_score_correction_bias"),
    "mlp.shared_experts.linear_fc1": ColumnParallel("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "mlp.shared_experts.linear_fc2": RowParallel("mlp.shared_experts.down_proj"),
}


def _decoder(config: Any) -> Decoder:
    # Megatron-core scores a group by its best `topk / chosen groups` experts, transformers by its best two.
    if not config.norm_topk_prob or config.q_lora_rank is None or config.num_experts_per_tok != 2 * config.topk_group:
        raise ModelError(
            f"norm_topk_prob={config.norm_topk_prob}, q_lora_rank={config.q_lora_rank}, num_experts_per_tok="
            f"{config.num_experts_per_tok}, topk_group={config.topk_group}: Megatron-core's router and this bridge require "
            "weights that add up to one, queries through a latent, and two experts for each chosen group; use "
            "engine.backend=fsdp"
        )
    rope = config.rope_parameters
    # `mscale_all_dim` belongs to YaRN; without scaled rotary embeddings it has no effect.
    all_dim = rope.get("mscale_all_dim", 0) if rope.get("rope_type", "default") != "default" else 0
    latent = Latent(
        query_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        plain=config.qk_nope_head_dim,
        rotated=config.qk_rope_head_dim,
        value=config.v_head_dim,
        interleaved=config.rope_interleave,
        # YaRN's factor for queries and for keys, hence squared in their product.
        scale=(0.1 * all_dim * math.log(rope["factor"]) + 1.0) ** 2 if all_dim and rope["factor"] > 1 else 1.0,
    )
    experts = ExpertSettings(
        count=config.n_routed_experts,
        per_token=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        normalized=True,
        # The first `first_k_dense_replace` layers are dense.
        layers=tuple(i >= config.first_k_dense_replace for i in range(config.num_hidden_layers)),
        sigmoid=True,
        groups=config.n_group,
        chosen_groups=config.topk_group,
        factor=config.routed_scaling_factor,
        shared_ffn=config.moe_intermediate_size * config.n_shared_experts,
    )
    return read_decoder(config, latent=latent, experts=experts, scale=(latent.plain + latent.rotated) ** -0.5 * latent.scale)


FAMILY = Family(decoder=_decoder, layer={**LATENT, **DENSE, **MIXTURE, **SHARED}, outer=OUTER)
