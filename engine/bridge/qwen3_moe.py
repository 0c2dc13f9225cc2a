"""Qwen 3 as a mixture of experts."""

from typing import Any

from .decoder import ExpertSettings, read_decoder
from .family import Family
from .llama import ATTENTION, DENSE, OUTER
from .qwen3 import HEAD_NORMS
from .rules import ExpertColumns, ExpertRows, Replicated, Rule

MIXTURE: dict[str, Rule] = {
    "mlp.router": Replicated("mlp.gate"),
    "mlp.experts.linear_fc1": ExpertRows("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
    "mlp.experts.linear_fc2": ExpertColumns("mlp.experts.{e}.down_proj"),
}


def read_experts(config: Any, **different: Any) -> ExpertSettings:
    """Read the settings of a mixture from a config with Qwen's setting names; `different` are the fields that differ."""
    # The rule of transformers: every `decoder_sparse_step`-th layer is a mixture, except those listed as dense.
    sparse = tuple(
        i not in config.mlp_only_layers and (i + 1) % config.decoder_sparse_step == 0 for i in range(config.num_hidden_layers)
    )
    return ExpertSettings(
        count=config.num_experts,
        per_token=config.num_experts_per_tok,
        ffn=config.moe_intermediate_size,
        layers=sparse,
        **(different if "normalized" in different else {"normalized": config.norm_topk_prob, **different}),
    )


FAMILY = Family(
    decoder=lambda config: read_decoder(config, qk_norm="head", experts=read_experts(config)),
    layer={**ATTENTION, **HEAD_NORMS, **DENSE, **MIXTURE},
    outer=OUTER,
)
