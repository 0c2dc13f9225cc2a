"""torch.compile, layer by layer."""

from typing import Any

from torch import nn

from ..torch_private import compile_settings
from .shard import decoder_layers

GRAPHS = 64
"""Graphs for all layers of all models of a process: two or three for each model and mode."""


def compile_layers(root: nn.Module, backend: Any = "inductor") -> None:
    """Compile each decoder layer for micro-batches of all lengths.

    Args:
        root: The model, whose layers recompute their activations already if they are to; one graph then covers both passes.
        backend: The backend of torch.compile.
    """
    for layer in decoder_layers(root):
        layer.compile(backend=backend, dynamic=True, **compile_settings(GRAPHS))
