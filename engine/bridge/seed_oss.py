"""Seed-OSS: Llama with biases on query, key and value, and optionally on the attention output."""

from .decoder import read_decoder
from .family import Family
from .llama import ATTENTION, DENSE, OUTER

FAMILY = Family(
    decoder=lambda config: read_decoder(config, qkv_bias=config.attention_bias, proj_bias=config.attention_out_bias),
    layer={**ATTENTION, **DENSE},
    outer=OUTER,
)
