"""Recurrent layers: subclasses of transformers' own whose state starts anew at the boundaries of packed documents.

No function of transformers is replaced: as FSDP does with the modules that it wraps, the class of each such module is replaced with a subclass, which has the
same parameters but our own `forward`.

Axes: t tokens of a rank, H hidden size; those of `mixers`.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import ModelError, TopologyError
from ..ops.packed_context import PackedContext
from ..ops.scan.carrier import StateCarrier
from ..ops.scan.mixers import gated_delta_net, lightning_attention, mamba, short_conv, state_space_duality


class RecurrentLayer(nn.Module):
    """A layer with state over one row of packed documents, or over the tokens of a generation step.

    The arguments that the model passes down determine where the states come from: `packed`, a `PackedContext`, or `states`, whose
    `of_layer` returns a `StateCarrier` for the number of a layer.
    """

    stands_for: ClassVar[str]
    """The name of transformers' class."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        """Return the output `[1, t, H]` of one row of hidden states, in the form that the original layer returns.

        Raises:
            ModelError: The model does not pass the documents, or it passes a cache or a mask.
        """
        context: StateCarrier | None = others.get("packed")
        name = self.stands_for
        if context is None and (states := others.get("states")) is not None:
            layer: Any = self
            context = states.of_layer(layer.layer_idx)
        if context is None:
            raise ModelError(
                f"the model does not pass its arguments down to {name}, so packed documents would affect each other; this family "
                "cannot run here"
            )
        caches = [key for key in ("cache_params", "past_key_values") if others.get(key) is not None]
        if attention_mask is not None or caches:
            raise ModelError(f"{name} got {', '.join(caches) or 'a mask'}; packed sequences have neither a cache nor a mask")
        if hidden_states.shape[0] != 1:
            raise ModelError(f"{name} got {hidden_states.shape[0]} rows; packed sequences are one row")
        return self.mix(hidden_states[0], context).unsqueeze(0)

    def mix(self, x: Tensor, context: StateCarrier) -> Tensor:
        """Return the output `[t, H]` of hidden states `[t, H]`."""
        raise NotImplementedError

    def heads(self) -> int | None:
        """Return the number of heads that can be split over ranks; None if every rank needs all of them."""
        layer: Any = self
        count: int = layer.num_heads
        return count


class GatedDeltaLayer(RecurrentLayer):
    """A gated DeltaNet; subclasses name its projections."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values, `[t, heads, size]` each, gates `[t, H V]`, decays and rates `[t, H]`."""
        raise NotImplementedError

    def heads(self) -> int:
        """See `RecurrentLayer.heads`."""
        layer: Any = self
        count: int = layer.num_v_heads
        return count

    def mix(self, x: Tensor, context: StateCarrier) -> Tensor:
        """Return the output `[t, H]` of hidden states `[t, H]`."""
        layer: Any = self
        q, k, v, gate, decay, rate = self.project(x)
        out = gated_delta_net(
            q,
            k,
            v,
            decay.unsqueeze(-1),
            rate,
            kernel_cw=layer.conv1d.weight.squeeze(1),
            a_log_h=layer.A_log,
            dt_bias_he=layer.dt_bias.unsqueeze(-1),
            activation=ACT2FN[layer.activation],
            largest_rate=2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0,
            context=context,
        )
        # The norm and its gate are of single heads: `[t * heads, V]`.
        norm, project = (layer.o_norm, layer.o_proj) if hasattr(layer, "o_norm") else (layer.norm, layer.out_proj)
        return project(norm(out.flatten(0, 1), gate.reshape(-1, layer.head_v_dim)).view(len(x), -1))


class Qwen3NextLayer(GatedDeltaLayer):
    """The gated DeltaNet of Qwen3-Next, whose projections are interleaved by key head."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values, gates, decays and rates; see `GatedDeltaLayer.project`."""
        layer: Any = self
        q, k, v, gate, rate, decay = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(x).unsqueeze(0), layer.in_proj_ba(x).unsqueeze(0)
        )
        return q[0], k[0], v[0], gate[0], decay[0], rate[0]


class Qwen35Layer(GatedDeltaLayer):
    """The gated DeltaNet of Qwen3.5."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values, gates, decays and rates; see `GatedDeltaLayer.project`."""
        layer: Any = self
        q, k, v = layer.in_proj_qkv(x).split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
        return *_heads(layer, q, k, v), layer.in_proj_z(x), layer.in_proj_a(x), layer.in_proj_b(x)


class OlmoHybridLayer(GatedDeltaLayer):
    """The gated DeltaNet of OLMo-Hybrid."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, values, gates, decays and rates; see `GatedDeltaLayer.project`."""
        layer: Any = self
        heads = _heads(layer, layer.q_proj(x), layer.k_proj(x), layer.v_proj(x))
        return *heads, layer.g_proj(x), layer.a_proj(x), layer.b_proj(x)


def _heads(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = (layer.num_k_heads, layer.head_k_dim)
    return q.unflatten(-1, keys), k.unflatten(-1, keys), v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim))


class KimiDeltaLayer(RecurrentLayer):
    """Kimi's delta attention, with a separate decay for each channel."""

    def mix(self, x: Tensor, context: StateCarrier) -> Tensor:
        """Return the output `[t, H]` of hidden states `[t, H]`."""
        layer: Any = self
        heads = (layer.num_heads, layer.head_dim)
        q, k, v = (projection(x).unflatten(-1, heads) for projection in (layer.q_proj, layer.k_proj, layer.v_proj))
        decays = layer.forget_gate
        out = gated_delta_net(
            q,
            k,
            v,
            decays.f_b_proj(decays.f_a_proj(x)).unflatten(-1, heads),
            layer.b_proj(x),
            kernel_cw=layer.conv1d.weight.squeeze(1),
            a_log_h=decays.A_log.flatten(),
            dt_bias_he=decays.dt_bias.view(heads),
            activation=ACT2FN[layer.activation],
            largest_rate=1.0,
            context=context,
        )
        gate = layer.g_b_proj(layer.g_a_proj(x)).unflatten(-1, heads)
        return layer.o_proj(layer.o_norm(out, gate).flatten(1))


class Mamba2Layer(RecurrentLayer):
    """Mamba 2, with the multipliers of Falcon-H1 if present."""

    def mix(self, x: Tensor, context: StateCarrier) -> Tensor:
        """Return the output `[t, H]` of hidden states `[t, H]`."""
        layer: Any = self
        inner, states = layer.intermediate_size, layer.n_groups * layer.ssm_state_size
        if hasattr(layer, "mup_vector"):
            # The multipliers are a buffer, which stays in float32 even if the layer computes in 16 bits.
            projected = layer.in_proj(x * layer.ssm_in_multiplier) * layer.mup_vector[0].to(x.dtype)
        else:
            projected = layer.in_proj(x)
        # The rows of the projection: gates, values, b, c and step sizes.
        gate, values, b, c, dt = projected.split([inner, inner, states, states, layer.num_heads], -1)
        groups = (layer.n_groups, layer.ssm_state_size)
        out = state_space_duality(
            values.unflatten(-1, (layer.num_heads, layer.head_dim)),
            b.unflatten(-1, groups),
            c.unflatten(-1, groups),
            dt,
            kernel_cw=layer.conv1d.weight.squeeze(1),
            kernel_bias_c=layer.conv1d.bias,
            a_log_h=layer.A_log,
            d_h=layer.D,
            dt_bias_h=layer.dt_bias,
            dt_limits=layer.time_step_limit,
            activation=ACT2FN[layer.activation],
            context=context,
        ).flatten(1)
        # A group's norm spans several heads, so it is applied after the heads have been gathered.
        normed = out * F.silu(gate) if isinstance(layer.norm, nn.Identity) else layer.norm(out[None], gate[None])[0]
        return layer.out_proj(normed.to(x.dtype))


class MambaLayer(RecurrentLayer):
    """Mamba with the norms of Jamba, whose inner projection mixes all channels."""

    def heads(self) -> None:
        """See `RecurrentLayer.heads`."""

    def mix(self, x: Tensor, context: StateCarrier) -> Tensor:
        """Return the output `[t, H]` of hidden states `[t, H]`."""
        layer: Any = self
        inner, gate = layer.in_proj(x).chunk(2, -1)
        inner = layer.act(short_conv(inner, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, context))
        sizes = [layer.time_step_rank, layer.ssm_state_size, layer.ssm_state_size]
        delta, b, c = layer.x_proj(inner).split(sizes, -1)
        delta = layer.dt_proj(layer.dt_layernorm(delta))
        out = mamba(
            inner,
            F.softplus(delta.to(torch.promote_types(delta.dtype, torch.float32))),
            layer.b_layernorm(b),
            layer.c_layernorm(c),
            a_log_dk=layer.A_log,
            d_d=layer.D,
            context=context,
        )
        return layer.out_proj(out * F.silu(gate))


class JambaLayer(nn.Module):
    """Jamba's layer around its Mamba, which does not pass arguments down."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **others: Any,
    ) -> Tensor:
        """Return the output `[1, t, H]` of hidden states `[1, t, H]`."""
        layer: Any = self
        mixed = layer.mamba(layer.input_layernorm(hidden_states), attention_mask, cache_params=past_key_values, **others)
        hidden_states = hidden_states + mixed
        return hidden_states + layer.feed_forward(layer.pre_ff_layernorm(hidden_states))


class ShortConvLayer(RecurrentLayer):
    """The short convolution of LFM2 between two gates."""

    def heads(self) -> int:
        """Return the number of channels, which are independent of each other."""
        layer: Any = self
        return len(layer.conv.weight)

    def mix(self, x: Tensor, context: StateCarrier) -> Tensor:
        """Return the output `[t, H]` of hidden states `[t, H]`."""
        layer: Any = self
        before, after, inner = layer.in_proj(x).chunk(3, -1)
        return layer.out_proj(after * short_conv(before * inner, layer.conv.weight.squeeze(1), layer.conv.bias, context))


class LightningLayer(RecurrentLayer):
    """Lightning attention of MiniMax-01."""

    def heads(self) -> int:
        """See `RecurrentLayer.heads`."""
        layer: Any = self
        count: int = layer.num_attention_heads
        return count

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any) -> tuple[Tensor, None]:
        """Return the output, and no attention weights; see `RecurrentLayer.forward`."""
        return super().forward(hidden_states, attention_mask, **others), None

    def mix(self, x: Tensor, context: StateCarrier) -> Tensor:
        """Return the output `[t, H]` of hidden states `[t, H]`."""
        layer: Any = self
        heads = (layer.num_attention_heads, 3 * layer.head_dim)
        q, k, v = layer.act_fn(layer.qkv_proj(x)).unflatten(-1, heads).split(layer.head_dim, -1)
        out = layer.norm(lightning_attention(q, k, v, layer.slope_rate.flatten(), context).flatten(1))
        return layer.out_proj(layer.output_gate(x).sigmoid() * out)


class Llama4Attention(nn.Module):
    """Attention of Llama 4, whose chunks and temperatures count the positions of a document."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Any = None,
        *,
        packed: PackedContext | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Return the output `[1, t, H]` of hidden states `[1, t, H]`, and no weights."""
        # Imported here, because otherwise every process would import the family, which takes a seventh of a second.
        from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

        layer: Any = self
        heads = (*hidden_states.shape[:2], -1, layer.head_dim)
        q, k, v = (project(hidden_states).view(heads) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
        if layer.use_rope:
            q, k = apply_rotary_emb(q, k, position_embeddings)
        elif layer.attn_temperature_tuning and packed is not None:
            # Length-dependent temperature (Nakanishi 2025, arXiv:2501.19399).
            steps = ((packed.positions.float() + 1.0) / layer.floor_scale).floor()
            q = (q * (steps.log1p() * layer.attn_scale + 1.0).view(1, -1, 1, 1)).to(q.dtype)
        kinds, chunk = layer.config.layer_types, None
        if kinds is not None and kinds[layer.layer_idx] == "chunked_attention":
            chunk = layer.config.attention_chunk_size
        if hasattr(layer, "qk_norm"):
            q, k = layer.qk_norm(q), layer.qk_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        dropout = layer.attention_dropout if layer.training else 0.0
        attend: Any = ALL_ATTENTION_FUNCTIONS[layer.config._attn_implementation]
        out, _ = attend(
            layer, q, k, v, attention_mask, scaling=layer.scaling, dropout=dropout, packed=packed, chunk=chunk, **others
        )
        return layer.o_proj(out.flatten(2)), None


LAYERS: dict[str, type[nn.Module]] = {
    "Qwen3NextGatedDeltaNet": Qwen3NextLayer,
    "Qwen3_5GatedDeltaNet": Qwen35Layer,
    "Qwen3_5MoeGatedDeltaNet": Qwen35Layer,
    "OlmoHybridGatedDeltaNet": OlmoHybridLayer,
    "KimiLinearDeltaAttention": KimiDeltaLayer,
    "NemotronHMamba2Mixer": Mamba2Layer,
    "BambaMixer": Mamba2Layer,
    "FalconH1Mixer": Mamba2Layer,
    "GraniteMoeHybridMambaLayer": Mamba2Layer,
    "Zamba2MambaMixer": Mamba2Layer,
    "JambaMambaMixer": MambaLayer,
    "JambaMambaDecoderLayer": JambaLayer,
    "Lfm2ShortConv": ShortConvLayer,
    "Lfm2MoeShortConv": ShortConvLayer,
    "MiniMaxLightningAttention": LightningLayer,
    "Llama4TextAttention": Llama4Attention,
}
"""Class name of transformers' recurrent layers -> the subclass that replaces it."""


def reset_states_between_documents(model: nn.Module) -> bool:
    """Replace the class of each layer with state with a subclass that supports packed documents; return whether there is any."""
    subclasses: dict[type, type] = {}
    for module in model.modules():
        ours = LAYERS.get(type(module).__name__)
        if ours is not None:
            # One subclass for all layers, which then share their compiled code.
            theirs, name = type(module), type(module).__name__
            if theirs not in subclasses:
                subclasses[theirs] = type(f"Packed{name}", (ours, theirs), {"stands_for": name})
            module.__class__ = subclasses[theirs]
    return bool(subclasses)


def has_state(model: nn.Module) -> bool:
    """Return whether a model whose layers were replaced by `reset_states_between_documents` has recurrent layers."""
    return any(isinstance(module, RecurrentLayer) for module in model.modules())


def has_biased_state(model: nn.Module) -> bool:
    """Return whether a layer with state, still of transformers' own class, has a bias before the recurrence."""
    layers = [module for module in model.modules() if type(module).__name__ in LAYERS]
    return any(getattr(getattr(layer, "in_proj", None), "bias", None) is not None for layer in layers)


def check_context_parallelism(model: nn.Module, family: str, cp: int) -> None:
    """Check that recurrent layers can be split over the ranks that share a sequence.

    Raises:
        TopologyError: They cannot be split.
    """
    if cp == 1:
        return
    for module in model.modules():
        if not isinstance(module, RecurrentLayer):
            continue
        heads = module.heads()
        if heads is None:
            raise TopologyError(
                f"engine.parallel.cp={cp} with {family}: each channel of {module.stands_for} depends on all others, so its layers "
                "cannot be split over ranks; set cp to 1"
            )
        if heads % cp:
            legal = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise TopologyError(
                f"engine.parallel.cp={cp} does not divide the {heads} heads of {module.stands_for} in {family}; use one of {legal}"
            )
