"""SmolLM3: Llama with rotary embeddings in three of four layers."""

from .decoder import read_decoder
from .family import Family
from .llama import ATTENTION, DENSE, OUTER

FAMILY = Family(
    decoder=lambda config: read_decoder(
        config,
        supported=("no_rope_layers",),
        # Despite its name, `no_rope_layers` is 1 for a layer with rotary embeddings.
        rotary=tuple("" if rotated else None for rotated in config.no_rope_layers),
        windows=tuple(
            config.sliding_window if config.use_sliding_window and kind == "sliding_attention" else None
            for kind in config.layer_types
        ),
    ),
    layer={**ATTENTION, **DENSE},
    outer=OUTER,
)
