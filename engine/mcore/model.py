"""A GPTModel that takes packed documents and returns per-token outputs, and the chunks of it that a rank holds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..bridge.decoder import Decoder
from ..config import LoraConfig
from ..heads import HeadType, compute_outputs
from ..hf.media_family import MediaFamily
from ..ops.linear_head import LogitTransform, VocabularyShard, linear_head
from .config import DecoderConfig
from .delta_net import GatedDeltaNet
from .encoders import DeepstackLayer, Encoders
from .experts import ClampedExperts, GroupedExperts
from .lora import AdaptedColumnParallelLinear, AdaptedRowParallelLinear, embedding_addition, head_adapter
from .mla import MLASelfAttention, MLASettings
from .mlp import GatedMLP
from .modules import (
    BiasedRowParallelLinear,
    Norm,
    NormedRowParallelLinear,
    PackedAttention,
    PackedSelfAttention,
    Rotary,
    rotary_frequencies,
    slice_of,
)
from .moe import PackedMoELayer, RoutedLayer, Router


class PackedGPTModel(GPTModel):
    """One chunk of the decoder: some of its layers, with the embeddings on the first chunk and the head on the last.

    Args:
        config: Megatron's configuration.
        decoder: The decoder's sizes.
        hf_config: The Hugging Face config, for the rotary embeddings.
        layers: The specs of this chunk's layers.
        groups: The process groups.
        first: Whether the chunk has the embeddings.
        last: Whether the chunk has the head.
        stage: The chunk's virtual stage in an interleaved pipeline, or None.
        head: The type of the head that replaces the language-model head; None keeps the latter.
        transform: The transform of the logits.
        encoders: The encoders of media; None if the chunk has none.
    """

    def __init__(
        self,
        config: DecoderConfig,
        decoder: Decoder,
        hf_config: PreTrainedConfig,
        layers: Sequence[ModuleSpec],
        groups: ProcessGroupCollection,
        *,
        first: bool,
        last: bool,
        stage: int | None,
        head: HeadType | None,
        transform: LogitTransform,
        encoders: Encoders | None = None,
    ) -> None:
        tp = groups.tp.size()
        super().__init__(
            config,
            TransformerBlockSubmodules(layer_specs=list(layers), layer_norm=Norm),
            # Padded, because megatron gives every rank the same number of rows.
            -(-decoder.vocabulary // tp) * tp,
            decoder.positions,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=decoder.tied and head is None,
            position_embedding_type="rope",
            pg_collection=groups,
            vp_stage=stage,
        )
        self.rotary_pos_emb = Rotary(hf_config, decoder)
        self.decoder_sizes, self.transform = decoder, transform
        self.padding_id = padding_id(hf_config)
        self.encoders = encoders
        self.head = head
        self.score: nn.Module | None = None
        self.lora: LoraConfig | None = None
        """The LoRA settings, once the model has adapters."""
        if head is not None and last:
            self.output_layer = None
            self.score = head.module(decoder.hidden, config.params_dtype)

    def _preprocess(self, input_ids: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        inputs = super()._preprocess(input_ids, *args, packed_seq_params=packed_seq_params, **kwargs)
        if self.pre_process and self.padding_id is not None and inputs[0].requires_grad:
            padding_s = input_ids[0] == self.padding_id
            if self.config.sequence_parallel:
                tp = self.pg_collection.tp
                padding_s = padding_s.chunk(tp.size())[tp.rank()]
            # As with `padding_idx` in transformers' embeddings, lookups of the padding token give its row no gradient. A tied head
            # still does.
            inputs[0].register_hook(lambda grad: grad.masked_fill(padding_s[:, None, None], 0.0))
        if self.pre_process and self.lora is not None:
            addition = embedding_addition(
                self.embedding.word_embeddings,
                input_ids[0],
                self.lora.scale,
                self.padding_id,
                sequence_parallel=self.config.sequence_parallel,
            )
            inputs = inputs if addition is None else (inputs[0] + addition, *inputs[1:])
        if self.pre_process and self.training and not inputs[0].requires_grad:
            # With adapters, the embeddings are frozen, and a recomputed layer whose input does not require a gradient passes
            # none to its adapters.
            inputs = (inputs[0].detach().requires_grad_(), *inputs[1:])
        if self.pre_process and self.decoder_sizes.embedding_scale != 1.0:
            # As in transformers, the scale is rounded to the dtype of the embeddings first.
            embedded = inputs[0]
            inputs = (embedded * torch.tensor(self.decoder_sizes.embedding_scale, dtype=embedded.dtype), *inputs[1:])
        if self.encoders is not None:
            inputs = (self.encoders(inputs[0], packed_seq_params), *inputs[1:])
        return inputs

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """Return the hidden states for the next stage or, on the last stage, output name -> `[S]`."""
        if not self.post_process:
            return hidden_states
        part = slice_of(packed_seq_params)
        outputs, split = part.outputs, self.config.sequence_parallel
        tp = self.pg_collection.tp
        if self.head is not None and self.score is not None:
            if split:
                # Every rank computes the same outputs, so each takes its part of the gradient and nothing is summed.
                hidden_states = gather_from_sequence_parallel_region(
                    hidden_states, tensor_parallel_output_grad=False, group=tp
                )
            return compute_outputs(self.head, self.score, hidden_states[:, 0].index_select(0, part.selected), outputs.names)
        # Each rank multiplies by its rows of the vocabulary, so the hidden states' gradient is the sum over ranks.
        if split:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=tp)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=tp)
        layer: Any = self.output_layer
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else layer.weight
        first_row = tp.rank() * len(weight)
        real_rows = max(0, min(len(weight), self.decoder_sizes.vocabulary - first_row))
        hidden_sh = hidden_states[:, 0].index_select(0, part.selected)
        adapter = None
        if self.lora is not None:
            adapter = head_adapter(layer, hidden_sh, self.lora, real_rows, tp, training=self.training)
        head_outputs = linear_head(
            hidden_sh,
            weight if real_rows == len(weight) else weight[:real_rows],
            part.targets,
            adapter=adapter,
            transform=self.transform,
            temperature=outputs.temperature,
            entropy=outputs.entropy,
            greedy=outputs.greedy,
            sum_squared_probs=outputs.sum_squared_probs,
            top_k=outputs.top_k,
            expected=part.expected,
            shard=VocabularyShard(group=tp, first=first_row) if tp.size() > 1 else None,
        )
        return {name: value for name, value in head_outputs._asdict().items() if name in outputs.names}


def padding_id(config: PreTrainedConfig) -> int | None:
    """Return the token whose row in transformers' embeddings receives no gradient from lookups, or None.

    As in torch.nn.Embedding, a negative `pad_token_id` counts from the end of the vocabulary.
    """
    token: int | None = config.pad_token_id
    return token + config.vocab_size if token is not None and token < 0 else token


def row_parallel(decoder: Decoder, *, bias: bool) -> type[AdaptedRowParallelLinear]:
    """Return the class of the row-parallel layer that ends attention or a feed-forward layer."""
    if decoder.post_norm:
        return NormedRowParallelLinear
    return BiasedRowParallelLinear if bias else AdaptedRowParallelLinear


def layer_spec(
    decoder: Decoder, hf_config: PreTrainedConfig, number: int, groups: ProcessGroupCollection, *, deepstack: bool = False
) -> ModuleSpec:
    """Return the module spec of one layer.

    Args:
        decoder: The decoder's sizes.
        hf_config: The Hugging Face config, for the rotary embeddings.
        number: The layer's index in the model, starting at 0.
        groups: The process groups.
        deepstack: Whether features of media are added to the layer's output.
    """
    kind_name = decoder.rotary[number]
    kind = None if kind_name is None else decoder.rotary_kinds.index(kind_name)
    frequencies, rotary_factor = (torch.empty(0), 1.0) if kind_name is None else rotary_frequencies(hf_config, kind_name)
    scale = decoder.head_dim**-0.5 if decoder.scale is None else decoder.scale
    # First what mixes tokens: a layer with state, latent attention, or regular attention.
    if decoder.delta is not None and decoder.delta.layers[number]:
        attention = ModuleSpec(module=GatedDeltaNet, params={"net": decoder.delta})
    elif decoder.latent is not None:
        assert kind is not None
        attention = ModuleSpec(
            module=MLASelfAttention,
            params={
                "settings": MLASettings(
                    latent=decoder.latent, scale=scale, factor=rotary_factor, window=decoder.windows[number], rotary_kind=kind
                ),
            },
        )
    else:
        # A frequency rotates two elements of a head. If some elements are not rotated, the factor may not scale all
        # logits, so the attention multiplies the rotated part itself.
        rotated = 2 * len(frequencies)
        is_partial = 0 < rotated < decoder.head_dim
        attention = ModuleSpec(
            module=PackedSelfAttention,
            params={"attn_mask_type": AttnMaskType.causal, "rotary_kind": kind, "joint_norm": decoder.qk_norm == "all"},
            submodules=SelfAttentionSubmodules(
                linear_qkv=AdaptedColumnParallelLinear,
                core_attention=ModuleSpec(
                    module=PackedAttention,
                    params={
                        # Both query and key are multiplied by sine and cosine, so their factor enters the logits twice.
                        "scale": scale if is_partial else scale * rotary_factor**2,
                        "window": decoder.windows[number],
                        "softcap": decoder.softcap,
                        "sinks": decoder.heads // groups.tp.size() if decoder.sinks else 0,
                        "partial": (rotated, rotary_factor) if is_partial and rotary_factor != 1.0 else None,
                    },
                ),
                linear_proj=row_parallel(decoder, bias=decoder.proj_bias),
                q_layernorm=Norm if decoder.qk_norm == "head" else IdentityOp,
                k_layernorm=Norm if decoder.qk_norm == "head" else IdentityOp,
            ),
        )
    # Then the feed-forward part: one network, or a mixture of experts.
    linears = MLPSubmodules(linear_fc1=AdaptedColumnParallelLinear, linear_fc2=row_parallel(decoder, bias=False))
    sparse = decoder.experts is not None and decoder.experts.layers[number]
    # Megatron-core 0.16 passes the groups only to its own classes, not to subclasses; 0.19 passes them to all, as `pg_collection`.
    mlp = ModuleSpec(module=GatedMLP, params={"groups": groups}, submodules=linears)
    if sparse:
        assert decoder.experts is not None
        mlp = ModuleSpec(
            module=PackedMoELayer,
            params={"groups": groups, "number": sum(decoder.experts.layers[:number])},
            submodules=MoESubmodules(
                router=Router,
                experts=ModuleSpec(module=GroupedExperts if decoder.experts.clamped is None else ClampedExperts),
                shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears),
            ),
        )
    return ModuleSpec(
        module=DeepstackLayer if deepstack else RoutedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm if decoder.pre_norm else IdentityOp,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm if decoder.pre_norm else IdentityOp,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def build_chunks(
    config: DecoderConfig,
    decoder: Decoder,
    hf_config: PreTrainedConfig,
    groups: ProcessGroupCollection,
    *,
    head: HeadType | None,
    transform: LogitTransform,
    media: MediaFamily | None,
    encoders: Callable[[], PreTrainedModel],
) -> list[PackedGPTModel]:
    """Build this rank's chunks of the model with weights of zero: one chunk, or several in an interleaved pipeline.

    Args:
        config: Megatron's configuration.
        decoder: The decoder's sizes.
        hf_config: The Hugging Face config of the decoder.
        groups: The process groups.
        head: The type of the head that replaces the language-model head; None keeps the latter.
        transform: The transform of the logits.
        media: The model's handling of media; None if it supports none.
        encoders: A function that returns the model's encoders, for the first chunk.
    """
    stages, rank = groups.pp.size(), groups.pp.rank()
    interleaved = config.virtual_pipeline_model_parallel_size
    per_chunk = decoder.layers // (stages * (interleaved or 1))
    chunks = []
    for stage in range(interleaved or 1):
        offset = get_transformer_layer_offset(config, vp_stage=stage if interleaved else None, pp_rank=rank)
        first = rank == 0 and stage == 0
        deepstack = 0 if media is None else media.deepstack_layers
        chunk = PackedGPTModel(
            config,
            decoder,
            hf_config,
            [layer_spec(decoder, hf_config, offset + i, groups, deepstack=offset + i < deepstack) for i in range(per_chunk)],
            groups,
            first=first,
            last=rank == stages - 1 and stage == (interleaved or 1) - 1,
            stage=stage if interleaved else None,
            head=head,
            transform=transform,
            encoders=Encoders(encoders(), media, config, groups) if first and media is not None else None,
        )
        with torch.no_grad():
            # Megatron leaves the memory uninitialized (`perform_initialization`), and the rows that pad the
            # vocabulary are never loaded.
            for parameter in chunk.parameters():
                parameter.zero_()
        chunks.append(chunk)
    return chunks
