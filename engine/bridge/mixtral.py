"""Mixtral: Mistral as a mixture of experts, with its own tensor names."""

from .decoder import ExpertSettings, read_decoder
from .family import Family
from .llama import ATTENTION, OUTER
from .rules import ExpertColumns, ExpertRows, Replicated, Rule

MIXTURE: dict[str, Rule] = {
    "mlp.router": Replicated("block_sparse_moe.gate"),
    # In Mixtral's names, w1 is gate, w3 is up and w2 is down.
    "mlp.experts.linear_fc1": ExpertRows("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
    "mlp.experts.linear_fc2": ExpertColumns("block_sparse_moe.experts.{e}.w2"),
}

FAMILY = Family(
    decoder=lambda config: read_decoder(
        config,
        experts=ExpertSettings(
            count=config.num_local_experts,
            per_token=config.num_experts_per_tok,
            ffn=config.intermediate_size,
            normalized=True,
            layers=(True,) * config.num_hidden_layers,
        ),
    ),
    layer={**ATTENTION, **MIXTURE},
    outer=OUTER,
)
