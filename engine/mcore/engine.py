"""MCoreEngine: Megatron-core's parallel layouts behind the same contract."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from ..backend import Adapters
from ..base import BaseEngine
from ..bridge.family import find_family
from ..capabilities import Capabilities
from ..checkpoint.local_shards import Piece
from ..config import OptimConfig, ParallelConfig
from ..errors import CapabilityError, ModelError
from ..flops import ModelShape
from ..hf.config import check_model, logit_transform, read_config
from ..hf.files import save_model_files
from ..hf.shape import router_aux_coef, router_settings
from ..hf.weights import seed_ranks
from ..loss import HeadRequest, OutputRequest
from ..offload import Part
from ..ops.router import balancing_loss
from ..parallel.process_groups import init_distributed
from ..parallel.topology import Topology
from ..rank_slice import RankSlice
from ..step import Task
from ..step_plan import MicroBatch
from .config import check_layout, transformer_config
from .groups import MegatronState, in_megatron
from .lora import adapters_disabled
from .meta_model import Twin
from .model import build_chunks
from .modules import PackedParams
from .moe import keep_scores, take_scores
from .optimizer import MOMENTS, ShardedOptimizer
from .options import MCoreOptions
from .state import ModelState, add_adapters, held_parameters, shapes_of


class MCoreEngine(BaseEngine):
    """Matrices cut over tp, layers over pp, experts over ep, sequences over cp, optimizer state over dp_shard x cp."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        axes=frozenset({"dp_shard", "cp", "tp", "tp_sequence", "pp", "vpp", "ep", "etp"}),
        heads=frozenset({"lm", "value"}),
        lora=True,
        recompute=frozenset({"none", "full", "selective"}),
        compile=False,
        offload_params=frozenset({"none"}),
        offload_optimizer=frozenset({"none"}),
        precisions=frozenset({("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")}),
        optimizers=frozenset({"adamw"}),
    )

    _state: MegatronState
    _chunks: list[Any]
    _optimizer: ShardedOptimizer | None = None

    @property
    def options(self) -> MCoreOptions:
        """`engine.options`, or its defaults."""
        return self.config.options if isinstance(self.config.options, MCoreOptions) else MCoreOptions()

    @property
    def model_shape(self) -> ModelShape:
        """What a token costs."""
        return self._twin.shape

    # ---- build ---------------------------------------------------------------------------------------------------

    def _build_topology(self, ranks: Sequence[int] | None) -> Topology:
        return Topology.build(self.config.parallel, init_distributed(), ranks)

    def _check_model(self, parallel: ParallelConfig) -> None:
        self._hf_config = read_config(self.model_config)
        check_model(self._hf_config, self.model_config)
        self._family = find_family(self._hf_config.model_type)
        self._decoder = self._family.decoder(self._hf_config)
        check_layout(self._decoder, parallel, self._hf_config.model_type)
        if self.config.precision.params == "bfloat16" and self.optim_config is not None and not self.model_config.lora.rank:
            raise CapabilityError(
                "engine.precision.params=bfloat16 with all of the model trained: megatron's optimizer keeps float32 parameters beside "
                "those it computes with; set engine.precision.params=float32, which with compute=bfloat16 computes alike"
            )
        self._router = router_settings(self._hf_config, self._aux_coef())
        if self._router is not None and self._decoder.experts is not None and self._decoder.experts.sigmoid:
            raise CapabilityError(
                f"model.router_aux_loss_coef={self._aux_coef()}: a balancing loss is defined for routers that score by a softmax, which "
                f"{self._hf_config.model_type}'s does not; set it to 0"
            )
        if self._router is not None and (parallel.pp > 1 or self.config.recompute == "full"):
            raise CapabilityError(
                f"a router's balancing loss (model.router_aux_loss_coef={self._aux_coef()}) with engine.parallel.pp={parallel.pp} "
                f"and engine.recompute={self.config.recompute}: it is one number over all layers, which no pipeline stage and no "
                "recomputed layer knows in time; set the coefficient to 0, or pp to 1 and recompute to none or selective"
            )

    def _build_model(self) -> None:
        # Not before the layout is known to be possible: groups of experts are cut by its sizes.
        self._state = MegatronState(self.topology)
        # Each ends on all ranks before the next begins: an error of one rank must not leave the others in its collectives.
        with self.topology.collective_errors():
            self._build_chunks()
        with self.topology.collective_errors():
            self._adapt()
        self._twin.compare(self._held, self.topology)
        self._twin.choose_trainable(self._held)
        if self.optim_config is not None:
            self._wrap()

    @in_megatron
    def _build_chunks(self) -> None:
        self._twin = Twin(self._hf_config, self.model_config, getattr(torch, self.config.precision.params))
        model_parallel_cuda_manual_seed(
            self.config.seed, inference_rng_tracker=not torch.cuda.is_available(), force_reset_rng=True
        )
        chunks = build_chunks(
            transformer_config(self._decoder, self.config, self.options, self.topology.parallel),
            self._decoder,
            self._hf_config,
            self._state.groups,
            value_head=self.model_config.head == "value",
            transform=logit_transform(self._hf_config),
        )
        self._chunks = [chunk.to(self.topology.device) for chunk in chunks]
        keep_scores(self._chunks, self._router is not None)

    def _adapt(self) -> None:
        """Adapters where the twin has them.

        Raises:
            ModelError: a target has no parallel layer here.
        """
        lora, targets, groups = self.model_config.lora, self._twin.targets, self._state.groups
        found = add_adapters(self._chunks, self._family, self._decoder, groups, targets, lora) if targets else set()
        left = targets - set().union(*self.topology.all_gather_object(found))
        if left:
            leaves = sorted({name.rpartition(".")[2] for name in left})
            raise ModelError(
                f"model.lora.targets={list(lora.targets)}: {', '.join(leaves)} cannot be adapted by engine.backend=mcore, where it is no "
                "parallel layer of its own; name the others, or use engine.backend=fsdp"
            )
        self._held = held_parameters(self._chunks, self._family, self._decoder, groups)

    @in_megatron
    def _wrap(self) -> None:
        """Gradient buffers, and their reduction, around every chunk."""
        config = self._chunks[0].config
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.config.precision.reduce == "float32",
            overlap_grad_reduce=self.options.overlap_grad_reduce,
            bucket_size=self.options.bucket_size,
            use_distributed_optimizer=True,
        )
        self._chunks = [
            DistributedDataParallel(config, settings, chunk, disable_bucketing=i > 0, pg_collection=self._state.groups)
            for i, chunk in enumerate(self._chunks)
        ]
        config.finalize_model_grads_func = self._finish_gradients
        if self.options.overlap_grad_reduce:
            holds = [chunk.no_sync for chunk in self._chunks]
            config.no_sync_func = holds if len(holds) > 1 else holds[0]

    @in_megatron
    def _build_optimizer(self, optim: OptimConfig) -> None:
        compute = getattr(torch, self.config.precision.compute)
        self._optimizer = ShardedOptimizer(self._chunks, optim, self._state.groups, compute)

    @in_megatron
    def _finish_build(self) -> None:
        # Weights come after the optimizer: what is read goes into its shards, in their precision, and from there to all.
        stored = getattr(torch, self.config.precision.params)
        self._model_state = ModelState(self._held, self._optimizer, self.topology, self._state.groups, stored)
        self._twin.fill(list(self._model_state.values()), self.topology, self.config.seed)
        self._model_state.publish()
        self._plans = {kind: self._model_state.plan(adapters=kind == "only") for kind in ("folded", "only")}
        self._gradients: list[list[Tensor]] = []
        self._reduced = False
        seed_ranks(self.config.seed, self.topology.seed_rank)

    # ---- step ----------------------------------------------------------------------------------------------------

    def _run_micro_batches(self, micro_batches: Sequence[MicroBatch], task: Task, *, backward: bool) -> None:
        if backward and self._reduced:
            # Of an earlier call in the same step: they are summed over ranks, and must not be summed again.
            self._gradients.append([buffer.grad_data.clone() for buffer in self._buffers()])
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
        self._run_schedule(micro_batches, task, backward=backward)
        self._reduced = self._reduced or backward

    @in_megatron
    def _run_schedule(self, micro_batches: Sequence[MicroBatch], task: Task, *, backward: bool) -> None:
        iterators = [iter(micro_batches) for _ in self._chunks]
        get_forward_backward_func()(
            forward_step_func=partial(self.forward_step, task),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks,
            num_microbatches=len(micro_batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=not backward,
        )

    def forward_step(self, task: Task, micro_batches: Iterator[MicroBatch], chunk: nn.Module) -> tuple[Any, Any]:
        """Run one chunk of the model on the next micro-batch, as megatron's schedule asks.

        Returns:
            hidden states or, from the last chunk, outputs `[S]` by name; and what makes a loss of the outputs.
        """
        micro_batch = next(micro_batches)
        bare: Any = getattr(chunk, "module", chunk)
        if bare.post_process:
            request = task.request(micro_batch)
        else:
            nothing = torch.zeros(micro_batch.batch.num_tokens, dtype=torch.bool, device=micro_batch.batch.device)
            request = HeadRequest(outputs=OutputRequest(), mask=nothing)
        part = RankSlice.cut(micro_batch, request, self.topology)
        found = chunk(
            part.input_ids[None], part.position_ids[None], None, packed_seq_params=PackedParams(qkv_format="sbhd", part=part)
        )

        def loss(outputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
            # The count of tokens is megatron's own normalisation, which ours replaces.
            return task(micro_batch, part.whole(outputs), self._aux(part)), torch.zeros((), dtype=torch.int), {}

        return found, loss

    def _aux(self, part: RankSlice) -> Tensor | None:
        """The balancing loss of the micro-batch that was just run, where one is wanted."""
        if self._router is None:
            return None
        p, tp = self.topology.parallel, self.topology.tp_rank
        scores = [s.flatten(0, -2) for s in take_scores(self._chunks)]
        # Under tp_sequence this rank's routers saw its part of the slice.
        size = len(scores[0])
        real = max(0, min(size, part.real_tokens - (tp * size if p.tp_sequence else 0)))
        return balancing_loss(scores, self._router, real, self._state.groups.tp_cp if p.tp_sequence else self.topology.cp)

    def _aux_coef(self) -> float:
        return router_aux_coef(self._hf_config, self.model_config)

    def _finish_gradients(self, model: Any, num_tokens: Any = None, **options: Any) -> None:
        finalize_model_grads(model, None, pg_collection=self._state.groups)

    def _buffers(self) -> Iterator[Any]:
        for chunk in self._chunks:
            yield from chunk.buffers
            yield from chunk.expert_parallel_buffers

    @in_megatron
    def _reduce_and_clip(self, max_norm: float | None) -> float:
        assert self._optimizer is not None
        for earlier in self._gradients:
            for buffer, part in zip(self._buffers(), earlier, strict=True):
                buffer.grad_data.add_(part)
        self._gradients.clear()
        return self._optimizer.reduce_and_clip(max_norm, self.topology.device)

    @in_megatron
    def _optimizer_step(self, lr: float) -> None:
        assert self._optimizer is not None
        self._optimizer.step(lr)

    @in_megatron
    def _zero_grad(self) -> None:
        self._gradients.clear()
        self._reduced = False
        if self._optimizer is not None:
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()

    # ---- modes, residency, adapters ------------------------------------------------------------------------------

    def _set_training(self, training: bool) -> None:
        for chunk in self._chunks:
            chunk.train(training)

    def _tensors(self, part: Part) -> Iterator[Tensor]:
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
        """Run the base model alone."""
        return adapters_disabled(self._chunks)

    # ---- state ---------------------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[Piece]:
        return self._model_state.pieces()

    def _optimizer_scalars(self) -> dict[str, Any]:
        return {"step": self._model_state.step_counts()}

    @in_megatron
    def _restore_optimizer(self, scalars: Mapping[str, Any] | None) -> None:
        if scalars is not None:
            self._model_state.restore_step_counts(scalars["step"])
        self._model_state.publish()

    def _save_model_files(self, folder: Path) -> None:
        save_model_files(self._twin.root, self.model_config, self._twin.adapters, folder)

    def weight_shapes(self, *, adapters: Adapters = "folded") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See `BaseEngine.weight_shapes`."""
        return shapes_of(self._plans[adapters])

    def _stream_weights(self, adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
        return self._model_state.stream(self._plans[adapters])

    def _free(self) -> None:
        self._optimizer = None
        for name in ("_chunks", "_held", "_model_state", "_twin", "_gradients", "_plans", "_state"):
            if hasattr(self, name):
                delattr(self, name)
