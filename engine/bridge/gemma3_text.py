"""Gemma 3: Gemma 2 without soft caps, with norms on query and key heads, and two kinds of rotary embeddings."""

from .family import Family
from .gemma import gemma_decoder
from .gemma2 import POST_NORMS
from .llama import ATTENTION, DENSE, OUTER
from .qwen3 import HEAD_NORMS

FAMILY = Family(
    # `layer_types` decides which layers have a window, and `rope_parameters` has an entry for each of these types.
    decoder=lambda config: gemma_decoder(config, post_norm=True, qk_norm="head", scale=config.query_pre_attn_scalar**-0.5),
    layer={**ATTENTION, **HEAD_NORMS, **POST_NORMS, **DENSE},
    outer=OUTER,
)
