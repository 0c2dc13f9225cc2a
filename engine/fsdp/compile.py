"""torch.compile, layer by layer, and for the elementwise work of the head."""

from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from ..hf.model import decoder_of
from ..ops.head_regions import compile_regions
from ..torch_private import compile_settings, unchecked_operators
from .packed_model import PackedModel
from .shard import decoder_layers

GRAPHS = 64
"""The maximum number of graphs for all layers of all models in a process: two or three per model and mode."""

RECOMPUTES_INSIDE = "__call__" not in vars(GradientCheckpointingLayer)
"""Whether layers recompute their activations inside the compiled code. In transformers 5.17 they do so outside. The products of a compiled
layer then cannot be told from its other operations, so selective recomputation reruns all of them."""


def compile_model(root: PackedModel, backend: Any = "inductor") -> None:
    """Compile each layer of the decoder, and the head's work on its logits, for micro-batches of all lengths.

    Args:
        root: The model. Activation checkpointing must already be enabled, so that one graph covers both passes.
        backend: The backend of torch.compile.
    """
    for layer in decoder_layers(decoder_of(root.lm)):
        layer.compile(backend=backend, dynamic=True, **compile_settings(GRAPHS))
    root.layer_context = unchecked_operators
    root.head_regions = compile_regions(backend)
