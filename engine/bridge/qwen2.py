"""Qwen 2: Llama with biases on query, key and value."""

from dataclasses import replace

from . import llama
from .decoder import read_decoder

# The biases are fixed in the model's code: its config has no `attention_bias` to read them from.
FAMILY = replace(llama.FAMILY, decoder=lambda config: read_decoder(config, qkv_bias=True, proj_bias=False))
