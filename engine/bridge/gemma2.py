"""Gemma 2: norms before and after attention and the feed-forward layer, soft caps, and a window in every other layer."""

from .family import Family
from .gemma import gemma_decoder
from .llama import ATTENTION, DENSE, OUTER
from .rules import Replicated, Rule

# In Llama `post_attention_layernorm` is the norm before the feed-forward layer; here it normalizes the output of
# attention. So these rules come after `ATTENTION` and replace its `pre_mlp_layernorm`.
POST_NORMS: dict[str, Rule] = {
    "self_attention.linear_proj.post_norm": Replicated("post_attention_layernorm"),
    "pre_mlp_layernorm": Replicated("pre_feedforward_layernorm"),
    "mlp.linear_fc2.post_norm": Replicated("post_feedforward_layernorm"),
}

FAMILY = Family(
    # The scale of the logits has a setting of its own, because it is not always that of `head_dim`.
    decoder=lambda config: gemma_decoder(
        config, post_norm=True, scale=config.query_pre_attn_scalar**-0.5, softcap=config.attn_logit_softcapping
    ),
    layer={**ATTENTION, **POST_NORMS, **DENSE},
    outer=OUTER,
)
