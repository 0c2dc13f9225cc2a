"""Linear layers of a transformers model to whose output several adapters add, each for its own rows."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..adapters.bank import HEAD, RunningPass
from ..adapters.config import Target
from ..adapters.slot import AdaptedLayer
from ..ops.adapter_products import adapter_outputs
from .lora import KERNEL_WEIGHTS
from .model import decoder_of

FEED_FORWARD = {"mlp", "feed_forward", "ffn", "shared_mlp", "shared_expert", "shared_experts", "moe"}
TOKEN_MIXERS = ("attn", "attention", "mixer", "mamba", "conv")
ROUTERS = {"router", "gate", "shared_expert_gate"}


class MultiAdapterLinear(nn.Module):
    """A linear layer with the adapters of the rows that are running.

    Args:
        base_layer: The layer, which is frozen.
        layer: Its description.
        running: The rows.
    """

    def __init__(self, base_layer: nn.Module, layer: AdaptedLayer, running: RunningPass) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.layer = layer
        self.running = running

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, `[..., T, O]`, of an input `[..., T, I]` whose other axes are of size 1."""
        out: Tensor = self.base_layer(x)
        spans = self.running.spans(self.layer.name, x.dtype)
        if not spans:
            return out
        added = adapter_outputs(x.reshape(-1, x.shape[-1]), spans, out.shape[-1], self.running.anchor)
        return out + added.view(out.shape)


def adapted_layers(lm: PreTrainedModel) -> tuple[AdaptedLayer, ...]:
    """Return the layers of a model on the meta device that adapters can adapt, in order: linear layers of its decoder, and its head."""
    decoder, head = decoder_of(lm), lm.get_output_embeddings()
    names = {id(module): name for name, module in lm.named_modules()}
    without_effect = KERNEL_WEIGHTS.get(lm.config.get_text_config().model_type, set())
    layers: list[AdaptedLayer] = []
    for module in decoder.modules():
        if not isinstance(module, nn.Linear | Conv1D) or module is head:
            continue
        name = names[id(module)]
        target = _target(name)
        if target is not None and name.rpartition(".")[2] not in without_effect:
            inputs, outputs = module.weight.shape if isinstance(module, Conv1D) else reversed(module.weight.shape)
            layers.append(AdaptedLayer(name=name, target=target, inputs=inputs, outputs=outputs))
    if isinstance(head, nn.Linear):
        outputs, inputs = head.weight.shape
        layers.append(AdaptedLayer(name=HEAD, target="unembedding", inputs=inputs, outputs=outputs))
    return tuple(layers)


def _target(name: str) -> Target | None:
    *path, leaf = name.split(".")
    # What is outside of the repeated layers, such as the projection of embeddings, belongs to neither.
    if leaf in ROUTERS or not any(part.isdigit() for part in path):
        return None
    if FEED_FORWARD & set(path):
        return "mlp"
    return "attention" if any(mixer in part for part in path for mixer in TOKEN_MIXERS) else None


def install_adapters(lm: PreTrainedModel, layers: Sequence[AdaptedLayer], running: RunningPass) -> None:
    """Let the layers of a model add the adapters of the rows that are running. The head does so where its outputs are computed."""
    for layer in layers:
        if layer.name == HEAD:
            continue
        parent_name, _, leaf = layer.name.rpartition(".")
        parent: Any = lm.get_submodule(parent_name)
        setattr(parent, leaf, MultiAdapterLinear(lm.get_submodule(layer.name), layer, running))
