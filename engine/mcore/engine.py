"""MCoreEngine: Megatron-core's parallel layouts behind the common engine contract."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .. import progress
from ..adapters.bank import AdapterBank
from ..adapters.slot import AdaptedLayer
from ..backend import Adapters, check_adapters
from ..base import BaseEngine
from ..bridge.family import PARTS, find_family
from ..capabilities import Capabilities
from ..checkpoint.local_shards import LocalShard
from ..config import ModelConfig, OptimConfig, ParallelConfig
from ..errors import CapabilityError, ConfigError, ModelError
from ..flops import ModelShape
from ..hf.config import check_model, wants_adapters
from ..hf.files import save_model_files
from ..hf.lora import as_peft_stores
from ..hf.media import FAMILIES, media_config
from ..hf.names import peft_shape
from ..hf.shape import router_settings
from ..hf.weights import seed_ranks
from ..loss import HeadRequest, OutputRequest
from ..offload import StatePart
from ..ops.expert_loads import check_bias_rate
from ..ops.expert_routes import RouterShape
from ..ops.router import balancing_loss
from ..rank_slice import RankSlice, computed_tokens, padded_size
from ..resolve import ITEMSIZE, MemoryNeeds
from ..step import MicroBatchConsumer
from ..step_plan import MediaModel, MicroBatch
from .adapter_turns import AdapterTurns, adaptable_layers, with_places
from .build import Architecture, Loaded, MCoreBuild, build_model, load, wrap_chunks
from .config import check_layout, check_media
from .groups import MegatronState, in_megatron
from .lora import adapters_disabled
from .meta_model import MetaModel
from .modules import PackedParams
from .moe import clear_replayed_routes, expert_biases, numbers_of_routers, take_scores
from .optimizer import MOMENTS, ShardedOptimizer, average_over_tp
from .options import MCoreOptions
from .quiet import ignore_warnings
from .state import shapes_of


class MCoreEngine(BaseEngine):
    """Engine with Megatron-core.

    Matrices are split over tp, layers over pp, experts over ep, sequences over cp, and optimizer state over dp_shard x cp.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        axes=frozenset({"dp_shard", "cp", "tp", "tp_sequence", "pp", "vpp", "ep", "etp"}),
        heads=None,
        lora=True,
        recompute=frozenset({"none", "full", "selective"}),
        compile=False,
        offload_params=frozenset({"none"}),
        offload_optimizer=frozenset({"none"}),
        precisions=frozenset({("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")}),
        optimizers=frozenset({"adamw"}),
        shared_prefixes=True,
        media=True,
        adapters=True,
        adapters_in_turns=True,
    )

    options_type = MCoreOptions
    options: MCoreOptions
    _model: MCoreBuild | None = None
    _weights: Loaded | None = None
    _optimizer: ShardedOptimizer | None = None
    _meta: MetaModel | None = None
    _turns: AdapterTurns | None = None
    _padded_tokens: int | None = None

    @property
    def _built(self) -> MCoreBuild:
        if self._model is None:
            raise ConfigError("the engine has no model; call initialize() first")
        return self._model

    @property
    def _loaded(self) -> Loaded:
        if self._weights is None:
            raise ConfigError("the engine has no weights; call initialize() first")
        return self._weights

    @property
    def _state(self) -> MegatronState:
        return self._built.state

    @property
    def _chunks(self) -> list[Any]:
        return self._built.chunks

    @cached_property
    def _architecture(self) -> Architecture:
        check_model(self.hf_config, self.model_config)
        family = find_family(self.hf_config.model_type)
        if self._media_config is None and self.hf_config.model_type in PARTS:
            raise ModelError(
                f"model.path={self.model_config.path} is a model whose decoder is {self.hf_config.model_type}, but not of a family that takes media "
                "here (docs/families.md); save the supported part, such as the thinker of an omni model, as a separate model"
            )
        decoder = family.decoder(self.hf_config)
        if self._media_config is not None:
            decoder = replace(decoder, tied=bool(getattr(self._media_config, "tie_word_embeddings", False)))
        return Architecture(
            hf_config=self.hf_config,
            family=family,
            decoder=decoder,
            router=router_settings(self.hf_config, self.router_aux_coef),
        )

    @property
    def model_shape(self) -> ModelShape:
        """The model's sizes, which determine the cost of a token."""
        return self._meta_model.shape

    @property
    def _meta_model(self) -> MetaModel:
        if self._meta is None:
            dtype = getattr(torch, self.config.precision.params)
            try:
                self._meta = MetaModel(self.hf_config, self._model_with_places, dtype, self._media_config)
            except ModelError as e:
                if not self.model_config.max_adapters:
                    raise
                raise CapabilityError(
                    f"model.max_adapters={self.model_config.max_adapters} with engine.backend=mcore: some adaptable layers of "
                    f"{self.hf_config.model_type} have no place for an adapter ({e}); use engine.backend=fsdp"
                ) from e
        return self._meta

    @cached_property
    def _adaptable(self) -> tuple[AdaptedLayer, ...]:
        dtype = getattr(torch, self.config.precision.params)
        tied = self._architecture.decoder.tied
        return adaptable_layers(self.hf_config, self.model_config, dtype, self._media_config, tied=tied)

    @property
    def _model_with_places(self) -> ModelConfig:
        """The model settings, with a single adapter as the place that several adapters share in turn."""
        model = self.model_config
        return with_places(model, self._adaptable) if model.max_adapters else model

    @property
    def adapters(self) -> AdapterBank | None:
        """See `Backend.adapters`."""
        return None if self._turns is None else self._turns.bank

    @cached_property
    def _media_config(self) -> PreTrainedConfig | None:
        """The config of the whole model, if it takes media."""
        return media_config(self.model_config, self.hf_config)

    @property
    def routers(self) -> RouterShape | None:
        """See `Backend.routers`."""
        experts = self._architecture.decoder.experts
        if experts is None:
            return None
        return RouterShape(
            layers=sum(experts.layers), per_token=experts.per_token, experts=experts.count, biased=experts.sigmoid
        )

    def router_biases(self) -> dict[int, Tensor]:
        """See `Backend.router_biases`."""
        return expert_biases(self._chunks)

    @property
    def media(self) -> MediaModel | None:
        """See `Backend.media`."""
        meta = self._meta_model
        return None if meta.media is None else MediaModel(family=meta.media, base=meta.root.base)

    # ---- build ---------------------------------------------------------------------------------------------------

    def check_model(self, parallel: ParallelConfig) -> None:
        decoder, router = self._architecture.decoder, self._architecture.router
        check_layout(decoder, parallel, self.hf_config.model_type)
        check_bias_rate(
            self.model_config.router_bias_update_rate,
            self.routers,
            model_type=self.hf_config.model_type,
            adapters=wants_adapters(self.model_config.lora),
        )
        if self._media_config is not None:
            check_media(FAMILIES[self._media_config.model_type](self._media_config), decoder, parallel)
            if self.options.overlap_grad_reduce and self.optim_config is not None and self._meta_model.trains_encoders:
                raise ConfigError(
                    f"engine.options.overlap_grad_reduce=true with {self._media_config.model_type}, whose encoders have no gradients in "
                    "steps without media, while megatron's buckets would wait for them; set it to false, or model.freeze=[encoders]"
                )
        if router is not None and decoder.experts is not None and decoder.experts.sigmoid:
            raise CapabilityError(
                f"model.router_aux_loss_coef={self.router_aux_coef}: a balancing loss is defined only for "
                f"routers that score with a softmax, and {self.hf_config.model_type}'s router does not; set it to 0"
            )
        if router is not None and (parallel.pp > 1 or self.config.recompute == "full"):
            raise CapabilityError(
                f"a router's balancing loss (model.router_aux_loss_coef={self.router_aux_coef}) with "
                f"engine.parallel.pp={parallel.pp} and engine.recompute={self.config.recompute}: it is one number over all "
                "layers, which a pipeline stage or a recomputed layer does not have in time; set the coefficient to 0, "
                "or pp to 1 and recompute to none or selective"
            )

    def memory_needs(self) -> MemoryNeeds:
        shape, p = self.model_shape, self.topology.parallel
        bytes_each = float(ITEMSIZE[self.config.precision.compute])
        sharded = 0.0
        if self.optim_config is not None:
            # A buffer holds all gradients of this rank's part. Moments are sharded, and so are float32 copies of 16-bit parameters.
            trained = shape.parameters_trained / max(1, shape.parameters)
            bytes_each += trained * ITEMSIZE[self.config.precision.reduce]
            sharded = trained * 4 * (2 if self.config.precision.compute == "float32" else 3)
        encoders = self._meta_model.encoder_parameters
        dense = shape.parameters - shape.experts - encoders
        # The first pipeline stage has the encoders.
        part = encoders + dense / (p.tp * p.pp) + shape.experts / (p.ep * p.etp * p.pp)
        needs = super().memory_needs()
        # Only the results of activation functions are recomputed, a fifth of the activations that a layer keeps.
        kept = {**needs.activations, "selective": 0.8 * needs.activations["none"]}
        # The moments of encoders are sharded over the ranks of the first stage that do not split matrices.
        moments = (shape.parameters - encoders) / self.topology.size + encoders * p.tp * p.pp / self.topology.size
        return replace(needs, state=part * bytes_each + moments * sharded, activations=kept)

    def resolve_auto(self, memory: float) -> None:
        if self.config.recompute == "auto" and self._architecture.router is not None:
            # The balancing loss is one number over all layers, which is not available to a recomputed layer.
            self.config = replace(self.config, recompute="selective")
        super().resolve_auto(memory)

    def build_model(self) -> None:
        ignore_warnings()
        self._model = build_model(
            self._meta_model, self._architecture, self._model_with_places, self.config, self.options, self.topology
        )
        if self.model_config.max_adapters:
            self._turns = AdapterTurns(
                self._model.chunks,
                self._model.param_shards,
                self._model_with_places.lora,
                self._adaptable,
                self.topology.device,
                self.model_config.max_adapters,
            )
            # What is in their places is whichever adapter has its turn, and no part of the frozen model.
            self._model.leave_out_adapters()

    def build_optimizer(self, optim: OptimConfig) -> None:
        built = self._built
        with built.state.active():
            built.chunks = wrap_chunks(built, self.config, self.options, self._finish_gradients)
            compute = getattr(torch, self.config.precision.compute)
            encoders = [p for chunk in built.chunks if (e := chunk.module.encoders) is not None for p in e.parameters()]
            self._optimizer = ShardedOptimizer(built.chunks, optim, built.state.groups, compute, sometimes=encoders)

    @in_megatron
    def finish_build(self) -> None:
        self._weights = load(self._built, self._optimizer, self.config, self.topology)
        self._earlier_gradients: list[list[Tensor]] = []
        self._reduced = False
        seed_ranks(self.config.seed, self.topology.seed_rank)

    # ---- step ----------------------------------------------------------------------------------------------------

    def run_micro_batches(self, micro_batches: Sequence[MicroBatch], consumer: MicroBatchConsumer, *, backward: bool) -> None:
        if backward and self._reduced:
            # The gradients of an earlier call in the same step are already summed over ranks and must not be summed again.
            self._earlier_gradients.append([buffer.grad_data.clone() for buffer in self._buffers()])
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
        # The micro-batches of a call are of one adapter, whose turn it is.
        names = {row.adapter for micro_batch in micro_batches for row in micro_batch.adapters}
        assert len(names) <= 1
        turn = nullcontext() if self._turns is None else self._turns.turn(next(iter(names), None), train=backward)
        try:
            with turn:
                self._run_schedule(micro_batches, consumer, backward=backward)
        finally:
            clear_replayed_routes(self._chunks)
        # Adapters that take turns have separate gradients.
        self._reduced = self._reduced or (backward and self._turns is None)

    @in_megatron
    def _run_schedule(self, micro_batches: Sequence[MicroBatch], consumer: MicroBatchConsumer, *, backward: bool) -> None:
        def forward_step(data: Iterator[MicroBatch], chunk: nn.Module) -> tuple[Any, Any]:
            output, scalar_of = self.forward_step(next(data), consumer, chunk)
            progress.advance()
            # The token count is for megatron's own normalization, which ours replaces.
            return output, lambda last: (scalar_of(last), torch.zeros((), dtype=torch.int), {})

        # Pipeline stages must know the size of the hidden states that they receive.
        sizes = [padded_size(computed_tokens(micro_batch), self.topology) for micro_batch in micro_batches]
        self._padded_tokens = max(sizes) if self.topology.pp is not None else None
        iterators = [iter(micro_batches) for _ in self._chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks,
            num_microbatches=len(micro_batches),
            # Unused without a pipeline.
            seq_length=self._padded_tokens or 1,
            micro_batch_size=1,
            forward_only=not backward,
        )

    def forward_step(
        self, micro_batch: MicroBatch, consumer: MicroBatchConsumer, chunk: nn.Module | None = None
    ) -> tuple[Any, Callable[[Any], Tensor]]:
        """Run one chunk of the model on one micro-batch; see `Backend.forward_step`."""
        chunk = self._chunks[0] if chunk is None else chunk
        bare: Any = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
        # Only the chunk with the head computes outputs; the others get an empty request.
        if bare.post_process:
            request = consumer.request(micro_batch)
        else:
            empty_mask = torch.zeros(micro_batch.batch.num_tokens, dtype=torch.bool, device=micro_batch.batch.device)
            request = HeadRequest(outputs=OutputRequest(), mask=empty_mask)
        part = RankSlice.from_micro_batch(
            micro_batch,
            request,
            self.topology,
            padded_tokens=self._padded_tokens,
            family=self._meta_model.media,
            encodes=bare.encoders is not None,
            routers=self.routers,
            records_routes=consumer.records_routes,
            counts_experts=consumer.counts_experts,
        )
        output = chunk(
            part.input_ids[None], part.position_ids[None], None, packed_seq_params=PackedParams(qkv_format="sbhd", part=part)
        )
        layers = numbers_of_routers(bare)
        if layers and (routes := part.context.routes) is not None:
            routes.check(layers)
            tp = self._state.groups.tp if self.topology.parallel.tp_sequence else None
            consumer.take_routes(micro_batch, routes, lambda: part.gather_routes(layers, tp))
        return output, lambda last: consumer(micro_batch, part.gather_outputs(last), self._aux(part))

    def _aux(self, part: RankSlice) -> Tensor | None:
        """Return the balancing loss of the micro-batch that just ran, or None if the loss is off."""
        router = self._architecture.router
        if router is None:
            return None
        p, tp = self.topology.parallel, self.topology.tp_rank
        scores = [s.flatten(0, -2) for s in take_scores(self._chunks)]
        # With tp_sequence, this rank's routers see only its part of the slice.
        size = len(scores[0])
        real_tokens = max(0, min(size, part.real_tokens - (tp * size if p.tp_sequence else 0)))
        return balancing_loss(scores, router, real_tokens, self._state.groups.tp_cp if p.tp_sequence else self.topology.cp)

    def _finish_gradients(self, model: Any, num_tokens: Any = None, **options: Any) -> None:
        # None instead of a token count: the loss is divided already, by the weight of the global batch, which a loss may choose and
        # which need not be an integer.
        finalize_model_grads(model, None, pg_collection=self._state.groups)
        p = self.topology.parallel
        if p.tp > 1 and not p.tp_sequence:
            for chunk in self._chunks:
                if chunk.module.encoders is not None:
                    average_over_tp(chunk.module.encoders.parameters(), self._state.groups.tp)

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    @in_megatron
    def reduce_and_clip(self, max_norm: float | None) -> float:
        assert self._optimizer is not None
        for earlier in self._earlier_gradients:
            for buffer, part in zip(self._buffers(), earlier, strict=True):
                buffer.grad_data.add_(part)
        self._earlier_gradients.clear()
        return self._optimizer.reduce_and_clip(max_norm, self.topology.device)

    @in_megatron
    def update_parameters(self, lr: float) -> None:
        assert self._optimizer is not None
        self._optimizer.step(lr)

    def set_optimizer_settings(self, optim: OptimConfig) -> None:
        """See `BaseEngine.set_optimizer_settings`."""
        assert self._optimizer is not None
        self._optimizer.set_settings(optim)

    @in_megatron
    def drop_gradients(self) -> None:
        self._earlier_gradients.clear()
        self._reduced = False
        if self._optimizer is not None:
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()

    # ---- modes, offload, adapters --------------------------------------------------------------------------------

    def set_training(self, training: bool) -> None:
        for chunk in self._chunks:
            chunk.train(training)

    def state_tensors(self, part: StatePart) -> Iterator[Tensor]:
        if part == "params":
            for chunk in self._chunks:
                yield from chunk.parameters()
        elif self._optimizer is None:
            return
        elif part == "grads":
            for buffer in self._buffers():
                yield buffer.grad_data
        else:
            for shard in self._optimizer.shards.values():
                yield shard.main
                yield from (shard.state[kind] for kind in MOMENTS)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context in which the base model runs without its adapters."""
        return adapters_disabled(self._chunks) if self._built.adapters is not None else nullcontext()

    # ---- state ---------------------------------------------------------------------------------------------------

    def local_shards(self) -> Iterator[LocalShard]:
        return self._loaded.model_state.local_shards()

    def optimizer_scalars(self) -> dict[str, Any]:
        return {"step": self._loaded.model_state.step_counts()}

    @in_megatron
    def restore_optimizer(self, scalars: Mapping[str, Any] | None) -> None:
        if scalars is not None:
            self._loaded.model_state.restore_step_counts(scalars["step"])
        self._loaded.model_state.sync_params()

    def save_model_files(self, folder: Path) -> None:
        save_model_files(self._built.meta_model.root, self.model_config, self._built.adapters, folder)

    def weight_shapes(self, *, adapters: Adapters = "merged") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See `BaseEngine.weight_shapes`."""
        check_adapters(adapters)
        shapes = shapes_of(self._loaded.plans[adapters])
        if adapters == "merged":
            return shapes
        return {name: (dtype, peft_shape(name, shape)) for name, (dtype, shape) in shapes.items()}

    def stream_weights(self, adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
        stream = self._loaded.model_state.stream(self._loaded.plans[adapters])
        return stream if adapters == "merged" else ((name, as_peft_stores(name, value)) for name, value in stream)

    def release(self) -> None:
        self._model = self._weights = self._optimizer = self._meta = self._turns = None
        self._earlier_gradients = []
