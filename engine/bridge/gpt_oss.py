"""gpt-oss: attention sinks, biases everywhere, and experts with a clamped activation whose matrices are stacked on disk."""

from .decoder import ExpertSettings, read_decoder
from .family import Family
from .llama import ATTENTION, OUTER
from .rules import ColumnParallel, ExpertBiases, Replicated, Rule, StackedExperts

LAYER: dict[str, Rule] = {
    **ATTENTION,
    # One logit per query head, split like the heads.
    "self_attention.core_attention.sinks": ColumnParallel("self_attn.sinks"),
    "mlp.router": Replicated("mlp.router"),
    # Full names, because the tensors on disk have no leaf. Gate and up alternate in the columns of `gate_up_proj`, so a
    # contiguous slice of columns has them in pairs and needs no reordering.
    "mlp.experts.linear_fc1.weight": StackedExperts("mlp.experts.gate_up_proj", split=1),
    "mlp.experts.linear_fc1.bias": ExpertBiases("mlp.experts.gate_up_proj_bias", split=True),
    "mlp.experts.linear_fc2.weight": StackedExperts("mlp.experts.down_proj", split=0),
    "mlp.experts.linear_fc2.bias": ExpertBiases("mlp.experts.down_proj_bias", split=False),
}

FAMILY = Family(
    decoder=lambda config: read_decoder(
        config,
        sinks=True,
        experts=ExpertSettings(
            count=config.num_local_experts,
            per_token=config.num_experts_per_tok,
            ffn=config.intermediate_size,
            normalized=True,
            layers=(True,) * config.num_hidden_layers,
            clamped=(config.swiglu_alpha, config.swiglu_limit),
        ),
    ),
    layer=LAYER,
    outer=OUTER,
)
