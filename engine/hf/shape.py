"""The cost per token of a transformers decoder, read from its parameters and its config."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..config import ModelConfig
from ..errors import ModelError
from ..flops import EncoderShape, ModelShape
from ..ops.router import RouterSettings
from ..rope import rope_by_kind
from .media import FAMILIES
from .model import HFModel, decoder_of
from .state_layers import LAYERS as STATE_LAYERS


def model_shape(root: HFModel, config: PreTrainedConfig) -> ModelShape:
    """Count the parameters in the matrices of a model, which may be on any device, sharded or not."""
    lm: Any = root.lm
    head: Any = root.score if root.score is not None else lm.get_output_embeddings()
    of_head = [p for p in head.parameters() if p.dim() > 1]
    embeddings = {id(p) for m in root.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    experts = experts_of(config) or 1
    routed = experts_per_token(config) if experts > 1 else 1
    weights = trained = 0.0
    of_experts = 0
    # What multiplies every token: neither vectors nor embeddings, and not a head that the decoder shares.
    for parameter in decoder_of(lm).parameters():
        if parameter.dim() < 2 or id(parameter) in embeddings or any(parameter is other for other in of_head):
            continue
        # A mixture's experts are one parameter `[E, ...]`; each token uses only some of them.
        is_expert = parameter.dim() == 3 and len(parameter) == experts
        active = parameter.numel() * (routed / experts if is_expert else 1.0)
        of_experts += parameter.numel() * is_expert
        weights += active
        trained += active * parameter.requires_grad
    encoders = encoder_shapes(lm)
    return ModelShape(
        weights=weights,
        trained=trained,
        head=sum(p.numel() for p in of_head),
        head_trained=sum(p.numel() for p in of_head if p.requires_grad),
        attention=_attention(config, decoder_of(lm)),
        parameters=sum(p.numel() for p in root.parameters()),
        parameters_trained=sum(p.numel() for p in root.parameters() if p.requires_grad),
        positions=context_of(config),
        vocabulary=len(lm.get_input_embeddings().weight),
        hidden=config.hidden_size,
        experts=of_experts,
        encoders=encoders,
        media_costs=field_costs(lm, encoders, weights),
    )


CONNECTORS = ("merger", "projector", "connector", "embed_vision", "embed_audio")
"""Substrings in the names of modules that multiply features instead of patches."""


def encoder_shapes(lm: Any) -> dict[str, EncoderShape]:
    """Return the shapes of a model's encoders by kind of media; one encoder may serve several kinds."""
    base = getattr(lm, lm.base_model_prefix, lm)
    if base.config.model_type not in FAMILIES:
        return {}
    family = FAMILIES[base.config.model_type](base.config)
    decoder = {id(p) for p in decoder_of(lm).parameters()}
    embeddings = {id(p) for m in base.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    shapes: dict[str, EncoderShape] = {}
    for kind in family.modalities:
        counts = {"weights": 0.0, "trained": 0.0, "connector": 0.0, "connector_trained": 0.0}
        for name, parameter in base.named_parameters():
            # Learned positions are added, not multiplied. If they are not an embedding, their first axis is 1, or their name says so.
            added = id(parameter) in embeddings or len(parameter) == 1 or "position_embedding" in name
            matrix = parameter.dim() >= 2 and not added and id(parameter) not in decoder
            of_audio = "audio" in name or not hasattr(base.config, "vision_config")
            if not matrix or of_audio != (kind == "audio"):
                continue
            part = "connector" if any(word in name for word in CONNECTORS) else "weights"
            # The first convolution of audio precedes the one that halves the number of steps.
            active = parameter.numel() * (2 if of_audio and "conv1" in name else 1)
            counts[part] += active
            counts["trained" if part == "weights" else "connector_trained"] += active * parameter.requires_grad
        shapes[kind] = EncoderShape(
            **counts, attention=family.attention(kind), patches=family.patches(kind), padded=family.padded(kind)
        )
    return shapes


def field_costs(lm: Any, encoders: Mapping[str, EncoderShape], weights: float) -> dict[str, float]:
    """Return the cost of an element of each field that an encoder reads; see `ModelShape.media_costs`.

    Args:
        lm: The model.
        encoders: The shapes of its encoders.
        weights: The number of elements in the matrices that multiply every token.
    """
    if not encoders:
        return {}
    config = getattr(lm, lm.base_model_prefix).config
    family = FAMILIES[config.model_type](config)
    costs: dict[str, float] = {}
    for kind, modality in family.modalities.items():
        smallest = family.blank(kind)
        (features,) = family.features_of(kind, smallest)
        flops = encoders[kind].flops(features, 1, training=False)
        # The FLOPs of the smallest item, in units of one token's products, divided by the number of its elements.
        costs[modality.values] = flops / (2 * weights) / smallest[modality.values].numel()
    return costs


def context_of(config: PreTrainedConfig) -> int | None:
    """Return the maximum document length that a model supports, with its RoPE scaling; None if the config does not give it."""
    positions: int | None = getattr(config, "max_position_embeddings", None)
    scaled = [
        int(kind["factor"] * (kind.get("original_max_position_embeddings") or positions))
        for kind in rope_by_kind(config).values()
        if positions is not None and kind.get("factor")
    ]
    return max([positions, *scaled]) if positions is not None else None


def experts_of(config: PreTrainedConfig) -> int | None:
    """Return the number of experts of a mixture, under any of the names that families use; None for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((getattr(config, n) for n in names if getattr(config, n, None)), None)


def experts_per_token(config: PreTrainedConfig) -> int:
    """Return the number of experts that a router chooses for each token, under any of the names that families use.

    Raises:
        ModelError: The config has none of the names.
    """
    names = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
    # HunYuan may have one number per layer; the largest is an upper bound of the cost.
    count = next((getattr(config, n) for n in names if getattr(config, n, None)), None)
    if count is None:
        raise ModelError(
            f"the config of {config.model_type} does not give the number of experts per token; none of {', '.join(names)} is set"
        )
    return max(count) if isinstance(count, list) else int(count)


def router_aux_coef(config: PreTrainedConfig, model: ModelConfig) -> float:
    """Return the coefficient of a router's balancing loss: the setting, or else the value in the model's own config."""
    coefficient = model.router_aux_loss_coef
    if coefficient is None and getattr(config, "output_router_logits", False):
        coefficient = getattr(config, "router_aux_loss_coef", 0.0)
    return coefficient or 0.0


def router_settings(config: PreTrainedConfig, coefficient: float) -> RouterSettings | None:
    """Return the settings for the balancing loss, or None if it is not enabled.

    Raises:
        ModelError: The model has no router.
    """
    if not coefficient:
        return None
    experts = experts_of(config)
    if experts is None:
        raise ModelError(
            f"model.router_aux_loss_coef={coefficient}, but {config.model_type} is not a mixture of experts; unset it"
        )
    return RouterSettings(experts=experts, per_token=experts_per_token(config))


SCAN_WINDOW = 192
"""A layer with state costs about as much as attention to this many tokens: a chunk of 64, plus reading and writing the state."""


def _attention(config: PreTrainedConfig, decoder: nn.Module) -> tuple[tuple[int, int | None], ...]:
    # The components of each layer, if known: some layers neither attend nor carry a state, and some do both.
    modules = [list(layer.modules()) for layer in getattr(decoder, "layers", ())]
    attends = [any(hasattr(m, "is_causal") for m in inside) for inside in modules]
    carries = [any(type(m).__name__.removeprefix("Packed") in STATE_LAYERS for m in inside) for inside in modules]
    per_layer = any(attends) and len(modules) == config.num_hidden_layers
    layers, kinds = getattr(config, "per_layer_config", None), getattr(config, "layer_types", None)
    costs = []
    for i in range(config.num_hidden_layers):
        # The layers of a model may differ (Gemma 4); transformers then provides a config per layer.
        layer = config if layers is None else layers[i]
        heads = layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        query = getattr(layer, "qk_head_dim", None) or size
        value = getattr(layer, "v_head_dim", None) or size
        windowed = kinds is None or kinds[i] == "sliding_attention"
        window = getattr(layer, "sliding_window", None) if windowed else None
        if not per_layer or attends[i]:
            costs.append((heads * (query + value), window))
        if per_layer and carries[i]:
            costs.append((heads * (query + value), SCAN_WINDOW))
    return tuple(costs)
