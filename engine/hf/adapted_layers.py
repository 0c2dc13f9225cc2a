"""Linear layers of a transformers model with several adapters, each of which adds to the output of its own rows."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..adapters.bank import RunningPass
from ..adapters.config import Target
from ..adapters.slot import AdaptedLayer
from ..ops.adapter_products import adapter_outputs
from ..ops.lora import ALIGNED
from .experts import expert_modules, matrices_of
from .lora import KERNEL_WEIGHTS
from .model import decoder_of

FEED_FORWARD = {"mlp", "feed_forward", "ffn", "shared_mlp", "shared_expert", "shared_experts", "moe"}
"""The names of feed-forward networks and their parts in the models of transformers."""
TOKEN_MIXERS = ("attn", "attention", "mixer", "mamba", "conv")
"""Substrings in the names of token mixers."""
ROUTERS = {"router", "gate", "shared_expert_gate"}


class MultiAdapterLinear(nn.Module):
    """A linear layer with the adapters of the running pass.

    Args:
        base_layer: The layer, which is frozen.
        layer: Its description.
        running: The running pass.
    """

    def __init__(self, base_layer: nn.Module, layer: AdaptedLayer, running: RunningPass) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.layer = layer
        self.running = running

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, `[..., T, O]`, for an input `[..., T, I]` whose leading axes have size 1."""
        out: Tensor = self.base_layer(x)
        x_ti = x.reshape(-1, x.shape[-1])
        spans = self.running.spans(self.layer.name, x_ti)
        if not spans:
            return out
        added = adapter_outputs(x_ti, spans, out.shape[-1], self.running.anchor)
        return out + added.view(out.shape)


def adapted_layers(lm: PreTrainedModel) -> tuple[AdaptedLayer, ...]:
    """Return the layers of a model on the meta device that adapters can adapt, in order.

    These are the linear layers of the decoder, the experts, and the head.
    """
    decoder, head = decoder_of(lm), lm.get_output_embeddings()
    names = {id(module): name for name, module in lm.named_modules()}
    without_effect = KERNEL_WEIGHTS.get(lm.config.get_text_config().model_type, set())
    layers: list[AdaptedLayer] = []
    experts = {id(module) for _, module in expert_modules(decoder)}
    for module in decoder.modules():
        if id(module) in experts:
            layers += _matrices_of_experts(names[id(module)], module)
        if not isinstance(module, nn.Linear | Conv1D) or module is head:
            continue
        name = names[id(module)]
        target = _target(name)
        if target is not None and name.rpartition(".")[2] not in without_effect:
            # The weight of transformers' Conv1D (GPT-2) is [in, out]; that of a linear layer is [out, in].
            inputs, outputs = module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape)
            layers.append(AdaptedLayer(name=name, target=target, inputs=inputs, outputs=outputs))
    if isinstance(head, nn.Linear):
        outputs, inputs = head.weight.shape
        layers.append(AdaptedLayer(name=names[id(head)], target="unembedding", inputs=inputs, outputs=outputs))
    return tuple(layers)


def _matrices_of_experts(name: str, module: Any) -> list[AdaptedLayer]:
    """Return both matrices of a layer's experts; none if grouped products do not support their row size."""
    shapes: list[tuple[str, int, int, int]] = []
    for matrix in matrices_of(module):
        experts, *sizes = getattr(module, matrix).shape
        inputs, outputs = sizes if module.is_transposed else reversed(sizes)
        shapes.append((f"{name}.{matrix}", experts, inputs, outputs))
    if any(inputs % ALIGNED or outputs % ALIGNED for _, _, inputs, outputs in shapes):
        return []
    return [AdaptedLayer(name=n, target="mlp", inputs=i, outputs=o, experts=e) for n, e, i, o in shapes]


def _target(name: str) -> Target | None:
    *path, leaf = name.split(".")
    # Layers outside of the repeated layers, such as a projection of the embeddings, have no target. Nor do experts that are separate
    # modules, because they receive rows in a different order.
    if leaf in ROUTERS or "experts" in path or not any(part.isdigit() for part in path):
        return None
    if FEED_FORWARD & set(path):
        return "mlp"
    return "attention" if any(mixer in part for part in path for mixer in TOKEN_MIXERS) else None


def install_adapters(lm: PreTrainedModel, layers: Sequence[AdaptedLayer], running: RunningPass) -> None:
    """Make the layers of a model apply the adapters of the running pass. The head does so where its outputs are computed."""
    for layer in layers:
        if layer.target == "unembedding":
            running.head = layer.name
            continue
        if layer.experts is not None:
            experts: Any = lm.get_submodule(layer.name.rpartition(".")[0])
            experts.running, experts.adapted = (
                running,
                {**getattr(experts, "adapted", {}), layer.name.rpartition(".")[2]: layer.name},
            )
            continue
        parent_name, _, leaf = layer.name.rpartition(".")
        parent: Any = lm.get_submodule(parent_name)
        setattr(parent, leaf, MultiAdapterLinear(lm.get_submodule(layer.name), layer, running))
