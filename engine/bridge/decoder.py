"""A decoder's sizes and options under names that are common to all families."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ModelError
from ..rope import rope_by_kind


@dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """The settings of a mixture of experts.

    Args:
        count: The number of experts per layer.
        per_token: The number of experts that each token is routed to.
        ffn: The inner size of one expert.
        normalized: Whether the weights of the chosen experts add up to one.
        layers: For each layer, whether it is a mixture.
        sigmoid: Whether the scores are sigmoids, with a bias that affects the choice of experts but not their weights;
            otherwise they are a softmax.
        groups: The number of groups of experts; a token may be routed to some of them. None without groups.
        chosen_groups: The number of groups that a token may be routed to.
        factor: The factor on the experts' weights.
        shared_ffn: The inner size of the shared experts, which process every token; None if there are none.
        shared_gate: Whether the shared experts' output is multiplied by a separate sigmoid gate.
        clamped: Whether the router and the experts have biases, with a clamped activation: its factor and limit; see
            `engine.mcore.experts.ClampedExperts`.
    """

    count: int
    per_token: int
    ffn: int
    normalized: bool
    layers: tuple[bool, ...]
    sigmoid: bool = False
    groups: int | None = None
    chosen_groups: int | None = None
    factor: float | None = None
    shared_ffn: int | None = None
    shared_gate: bool = False
    clamped: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Latent:
    """The settings of multi-head latent attention.

    Args:
        query_rank: The rank of the queries' latent; None if the queries have no latent.
        kv_rank: The rank of the keys' and values' latent.
        plain: The size of the part of a head without rotation.
        rotated: The size of the rotated part of a head.
        value: The size of a value head.
        interleaved: Whether the two halves of a rotation are next to each other.
        scale: The factor on the logits (YaRN's, for all dimensions).
    """

    query_rank: int | None
    kv_rank: int
    plain: int
    rotated: int
    value: int
    interleaved: bool
    scale: float


@dataclass(frozen=True, kw_only=True)
class DeltaNet:
    """The settings of gated DeltaNet layers.

    Args:
        key_heads: The number of heads of queries and keys.
        value_heads: The number of heads of values, a multiple of the former.
        key_dim: The size of a key head.
        value_dim: The size of a value head.
        taps: The number of tokens that the preceding convolution reads.
        layers: For each layer, whether it is such a layer; the others use attention.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    layers: tuple[bool, ...]

    @property
    def key_size(self) -> int:
        """The size of all key heads together."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """The size of all value heads together."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The properties of a decoder that Megatron-core needs.

    Args:
        hidden: The size of the hidden states.
        layers: The number of layers.
        heads: The number of query heads.
        kv_heads: The number of key/value heads.
        head_dim: The size of a head.
        ffn: The inner size of the dense feed-forward layers.
        vocabulary: The number of rows of the embeddings.
        positions: The maximum document length that the model supports.
        norm_eps: The epsilon of the norms.
        norm_offset: The constant that is added to the norms' weights (Gemma's 1).
        activation: The activation of the feed-forward layers' gate.
        qkv_bias: Whether the query, key and value projections have biases.
        proj_bias: Whether the output projection of attention has a bias.
        qk_norm: Whether there is a norm on each query and key head (`head`), or one on all of them together (`all`).
        pre_norm: Whether there are norms before attention and before the feed-forward layer.
        post_norm: Whether there are norms after attention and after the feed-forward layer, before the residual additions.
        scale: The scale of the attention logits; None for head_dim ** -0.5.
        softcap: The soft cap of the attention logits; None for no soft cap.
        sinks: Whether each head has a learned logit that takes part in the softmax of attention.
        windows: For each layer, the number of tokens that a token attends to; None for all.
        rotary: For each layer, the kind of its rotary embedding, a key of the config's rope_parameters; "" if there is only
            one kind; None for a layer without rotary embeddings.
        rotary_axes: For each rotary frequency, the axis of the positions that it applies to; None for positions with one axis.
        embedding_scale: The factor on the embeddings.
        tied: Whether the head shares the matrix of the embeddings.
        experts: The settings of the mixture; None for a dense model.
        latent: The settings of multi-head latent attention; None for regular attention.
        output_gate: Whether the output of attention is multiplied by the sigmoid of a gate per query head.
        delta: The settings of gated DeltaNet layers; None if all layers use attention.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    positions: int
    norm_eps: float
    norm_offset: float = 0.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    proj_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    pre_norm: bool = True
    post_norm: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    windows: tuple[int | None, ...]
    rotary: tuple[str | None, ...]
    rotary_axes: tuple[int, ...] | None = None
    embedding_scale: float = 1.0
    tied: bool = False
    experts: ExpertSettings | None = None
    latent: Latent | None = None
    output_gate: bool = False
    delta: DeltaNet | None = None

    @property
    def rotary_kinds(self) -> tuple[str, ...]:
        """The kinds of rotary embeddings in use, in the order of their first layer."""
        return tuple(dict.fromkeys(kind for kind in self.rotary if kind is not None))


ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


UNSUPPORTED: dict[str, Any] = {
    "no_rope_layers": None,
    "partial_rotary_factor": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "residual_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "clip_qkv": None,
    "router_jitter_noise": 0.0,
}
"""Config settings of some families that no bridge supports, each with the value that disables it."""


def read_decoder(config: Any, *, supported: Collection[str] = (), **different: Any) -> Decoder:
    """Read a decoder from a Hugging Face config that uses Llama's setting names.

    Args:
        config: The model's config.
        supported: The settings of `UNSUPPORTED` and `partial_rotary_factor` of rope_parameters that the family's bridge reads itself,
            or that our layers implement for this family.
        different: The fields that differ from Llama's in the family.

    Raises:
        ModelError: The activation is unknown, or no bridge supports a setting.
    """
    for name, plain in UNSUPPORTED.items():
        if name not in supported and getattr(config, name, None) not in (None, plain):
            raise ModelError(
                f"{name}={getattr(config, name)} in the config is not supported by any bridge to Megatron-core; use "
                "engine.backend=fsdp"
            )
    for name in ("rms_norm_eps", "rope_parameters", "num_key_value_heads"):
        if getattr(config, name, None) is None:
            raise ModelError(
                f"the config of {config.model_type} has no {name}: the bridge requires RMS norms, rotary embeddings and "
                "key/value heads; use engine.backend=fsdp"
            )
    # Gemma 2 and 3 have the second name.
    act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if act not in ACTIVATIONS:
        raise ModelError(f"hidden_act={act} in the config: the bridge supports {', '.join(ACTIVATIONS)}")
    layers = config.num_hidden_layers
    # Without `layer_types`, as in Mistral, a window applies to every layer; without a window, to none.
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",) * layers
    window = getattr(config, "sliding_window", None)
    rope = rope_by_kind(config)
    for part in rope.values():
        if "partial_rotary_factor" not in supported and part.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(
                f"partial_rotary_factor={part['partial_rotary_factor']} in rope_parameters: the bridge of {config.model_type} "
                "supports only the rotation of entire heads; use engine.backend=fsdp"
            )
    fields: dict[str, Any] = {
        "hidden": config.hidden_size,
        "layers": layers,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        # Some families set a size that is not hidden / heads.
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        # A config whose layers are all mixtures may lack it; the family then sets it.
        "ffn": getattr(config, "intermediate_size", None),
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
        "norm_eps": config.rms_norm_eps,
        "activation": ACTIVATIONS[act],
        "qkv_bias": bool(getattr(config, "attention_bias", False)),
        "proj_bias": bool(getattr(config, "attention_bias", False)),
        "windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        # With several kinds of rotary embeddings, their names are those of the kinds of layers.
        "rotary": ("",) * layers if "" in rope else tuple(kinds),
        # The config of a decoder within a larger model may leave this to the config of the whole model.
        "tied": bool(getattr(config, "tie_word_embeddings", False)),
    }
    # What the family says overrides this generic reading.
    return Decoder(**{**fields, **different})
