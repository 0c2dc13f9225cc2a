"""torch.compile, layer by layer, and for the elementwise work of the head."""

from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from ..hf.model import decoder_of
from ..ops.head_regions import compile_regions
from ..torch_private import compile_settings
from .packed_model import PackedModel
from .shard import decoder_layers

GRAPHS = 64
"""Graphs for all layers of all models of a process: two or three for each model and mode."""

RECOMPUTES_INSIDE = "__call__" not in vars(GradientCheckpointingLayer)
"""Whether layers recompute their activations inside of the compiled code. Those of transformers 5.17 do outside of it, where the products
of a compiled layer cannot be told from its other operations, so that selective recomputation runs them all again."""


def compile_model(root: PackedModel, backend: Any = "inductor") -> None:
    """Compile each layer of the decoder, and the head's work on its logits, for micro-batches of all lengths.

    Args:
        root: The model, whose layers recompute their activations already if they are to; one graph then covers both passes.
        backend: The backend of torch.compile.
    """
    for layer in decoder_layers(decoder_of(root.lm)):
        layer.compile(backend=backend, dynamic=True, **compile_settings(GRAPHS))
    root.head_regions = compile_regions(backend)
