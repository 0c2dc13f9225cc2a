"""FSDPEngine: FSDP2 and Ulysses for any decoder of transformers."""

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from ..adapters.bank import AdapterBank
from ..backend import Adapters, check_adapters
from ..base import BaseEngine
from ..capabilities import Capabilities
from ..checkpoint.local_shards import LocalShard
from ..config import OptimConfig, ParallelConfig
from ..errors import ConfigError
from ..flops import ModelShape
from ..hf.config import wants_adapters
from ..hf.files import save_model_files
from ..hf.lora import adapters_disabled
from ..hf.media import media_config
from ..hf.routers import router_biases
from ..hf.state_layers import check_context_parallelism
from ..hf.weights import seed_ranks
from ..model_types import HEAD_PREFIX
from ..offload import StatePart, host_cores, host_threads
from ..ops.expert_loads import check_bias_rate
from ..ops.expert_routes import RouterShape
from ..ops.invariance import PassSizes
from ..ops.norm import sum_of_squares
from ..rank_slice import RankSlice
from ..resolve import MemoryNeeds, choose
from ..resolve import describe as describe_needs
from ..step import MicroBatchConsumer
from ..step_plan import MediaModel, MicroBatch
from ..torch_private import foreach_mul_
from . import compile as compile_module
from .build import FSDPBuild, ModelPlan, build, check_config, describe
from .invariant import WholeModel, pass_sizes
from .memory import memory_needs
from .optimizer import ShardOptimizer
from .options import FSDPOptions
from .packed_model import PackedModel
from .replicas import sum_gradients
from .shard import needs_fsdp
from .state import parameter_shards, stored_slices_of, stream_weights, tensor_shards, weight_shapes
from .torch_private import clear_unsharded_gradients, take_unsharded_gradients, unsharded_gradients


class FSDPEngine(BaseEngine):
    """Engine with FSDP2 and Ulysses.

    Parameters are sharded over dp_shard x cp and replicated over dp_replicate, and sequences are split over cp.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        axes=frozenset({"dp_replicate", "dp_shard", "cp", "ep"}),
        heads=None,
        lora=True,
        recompute=frozenset({"none", "full", "selective"}),
        compile=True,
        offload_params=frozenset({"none", "host"}),
        offload_optimizer=frozenset({"none", "host"}),
        precisions=frozenset(
            {
                ("float32", "float32"),
                ("float32", "bfloat16"),
                ("bfloat16", "bfloat16"),
                ("float64", "float64"),
            }
        ),
        optimizers=frozenset({"adamw", "sgd"}),
        shared_prefixes=True,
        media=True,
        invariant=True,
        adapters=True,
    )

    options_type = FSDPOptions
    options: FSDPOptions
    _model: FSDPBuild | None = None
    _optimizer: ShardOptimizer | None = None
    _meta: ModelPlan | None = None
    _cores = 1
    _pass_sizes: PassSizes | None = None

    @property
    def _built(self) -> FSDPBuild:
        if self._model is None:
            raise ConfigError("the engine has no model; call initialize() first")
        return self._model

    @property
    def _root(self) -> PackedModel:
        return self._built.root

    @property
    def model_shape(self) -> ModelShape:
        """The model's sizes, which determine the cost of a token."""
        return self._described.shape if self._model is None else self._model.shape

    @property
    def _described(self) -> ModelPlan:
        if self._meta is None:
            dtype = getattr(torch, self.config.precision.params)
            self._meta = describe(
                self.hf_config,
                self.model_config,
                dtype,
                self.router_aux_coef,
                self._media_config,
                invariant=self.config.invariant,
            )
        return self._meta

    @cached_property
    def _media_config(self) -> PreTrainedConfig | None:
        """The config of the whole model, if it takes media."""
        return media_config(self.model_config, self.hf_config)

    # ---- build ---------------------------------------------------------------------------------------------------

    @property
    def media(self) -> MediaModel | None:
        """See `Backend.media`."""
        return None if self._root.media is None else MediaModel(family=self._root.media, base=self._root.base)

    @classmethod
    def whole_model(cls, lm: Any, config: PreTrainedConfig, path: str) -> WholeModel:
        """See `Backend.whole_model`."""
        return WholeModel(lm, config, path)

    @property
    def invariant_size(self) -> int | None:
        """See `Backend.invariant_size`."""
        return None if self._pass_sizes is None else self._pass_sizes.largest

    @property
    def row_multiple(self) -> int:
        """See `Backend.row_multiple`."""
        return 1 if self._pass_sizes is None else self._pass_sizes.multiple

    @property
    def adapters(self) -> AdapterBank | None:
        """See `Backend.adapters`."""
        return self._built.bank

    @property
    def transposed_weights(self) -> bool:
        """See `Backend.transposed_weights`."""
        return any(isinstance(module, Conv1D) for module in self._root.modules())

    @property
    def routers(self) -> RouterShape | None:
        """See `Backend.routers`."""
        return self._root.routers

    def router_biases(self) -> dict[int, Tensor]:
        """See `Backend.router_biases`."""
        return router_biases(self._root.lm)

    def check_model(self, parallel: ParallelConfig) -> None:
        if self.config.invariant and torch.cuda.is_available():
            raise ConfigError(
                "engine.invariant=true on CUDA, where the order of sums in products and attention depends on the size of a micro-batch; set it "
                "to false, or use a CPU (CUDA_VISIBLE_DEVICES=)"
            )
        if self.config.compile is True and parallel.ep > 1:
            raise ConfigError(
                f"engine.compile=true with engine.parallel.ep={parallel.ep}: layers that exchange tokens between experts cannot be "
                "compiled; set engine.compile to auto or false, or ep to 1"
            )
        check_config(self.hf_config, self.model_config, parallel, self.options, self._media_config)
        check_bias_rate(
            self.model_config.router_bias_update_rate,
            self._described.meta_model.routers,
            model_type=self.hf_config.model_type,
            adapters=wants_adapters(self.model_config.lora),
        )
        check_context_parallelism(self._described.meta_model, self.hf_config.model_type, parallel.cp)

    def memory_needs(self) -> MemoryNeeds:
        p, root = self.topology.parallel, self._described.meta_model if self._model is None else self._root
        split = (p.dp_shard or 1) * p.cp > 1 or p.ep > 1
        return memory_needs(
            self.model_shape,
            self.config,
            self.options,
            self.optim_config,
            p,
            ranks=self.topology.size,
            device=self.topology.device.type,
            wrapped=split or needs_fsdp(root, self.config),
        )

    def resolve_auto(self, memory: float) -> None:
        config, options = self.config, self.options
        if config.recompute != "auto" and options.reduce_each_micro_batch != "auto":
            return
        allowed = self.capabilities.recompute if self.optim_config is not None else frozenset({"none"})
        if self._selective_is_full:
            allowed -= {"selective"}
        needs = self.memory_needs()
        choice = choose(needs, memory, config.recompute, options.reduce_each_micro_batch, allowed)
        options = replace(options, reduce_each_micro_batch=choice.reduce_each)
        self.config = replace(config, recompute=choice.recompute, options=options)
        self.memory_estimate = describe_needs(needs, choice)
        if needs.unsharded_gradients:
            each = "every micro-batch" if choice.reduce_each else "the last micro-batch of a step"
            self.memory_estimate += f"; gradients are reduced after {each}"

    @property
    def _selective_is_full(self) -> bool:
        """Whether selective recomputation takes as long as full recomputation."""
        return self.config.compile is True and not compile_module.RECOMPUTES_INSIDE

    def describe_settings(self) -> list[str]:
        """See `BaseEngine.describe_settings`."""
        lines = super().describe_settings()
        if self.config.recompute == "selective" and self._selective_is_full:
            lines.append(
                f"engine.recompute=selective with compiled layers takes as long as full recomputation with transformers "
                f"{transformers.__version__}; use auto, none or full, engine.compile=false, or transformers 5.23"
            )
        return lines

    def build_model(self) -> None:
        self._model = build(self._described, self.hf_config, self.model_config, self.config, self.options, self.topology)
        self._meta = None
        seed_ranks(self.config.seed, self.topology.seed_rank)

    def build_optimizer(self, optim: OptimConfig) -> None:
        on_host = self.config.offload.optimizer == "host"
        self._optimizer = ShardOptimizer(self._root, optim, on_host=on_host)

    def finish_build(self) -> None:
        # The norm and AdamW's step then run on the host, where launchers set one thread per process.
        if self.config.offload.params == "host" and self.topology.device.type == "cuda":
            machine = socket.gethostname()
            self._cores = host_cores(self.topology.all_gather_object(machine).count(machine))
        if self.config.invariant:
            self._pass_sizes = pass_sizes(self._root, self.topology)
            self._reshard()

    def step_threads(self) -> AbstractContextManager[None]:
        return host_threads(self._cores)

    # ---- step ----------------------------------------------------------------------------------------------------

    def forward_step(
        self, micro_batch: MicroBatch, consumer: MicroBatchConsumer, chunk: nn.Module | None = None
    ) -> tuple[Any, Callable[[Any], Tensor]]:
        """Run the model on one micro-batch; see `Backend.forward_step`."""
        request = consumer.request(micro_batch)
        part = RankSlice.from_micro_batch(
            micro_batch,
            request,
            self.topology,
            family=self._root.media,
            routers=self._root.routers,
            records_routes=consumer.records_routes,
            counts_experts=consumer.counts_experts,
            row_multiple=None if self._pass_sizes is None else self._pass_sizes.multiple,
        )

        def scalar_of(output: dict[str, Tensor]) -> Tensor:
            aux = output.pop("router_aux", None)
            return consumer(micro_batch, part.gather_outputs(output), aux)

        if self._built.bank is not None:
            rows = len(part.input_ids)
            self._built.bank.select(micro_batch.adapters, self.topology.cp_rank * rows, rows)
        output = (chunk or self._root)(part)
        if self._root.routers is not None and (routes := part.context.routes) is not None:
            layers = range(self._root.routers.layers)
            routes.check(layers)
            consumer.take_routes(micro_batch, routes, lambda: part.gather_routes(layers))
        return output, scalar_of

    def run_backward(self, scalar: Tensor, micro_batch: MicroBatch) -> None:
        # Gradients of earlier micro-batches stay unsharded and are reduced once, with the last one. With a single rank they are not reduced
        # at all.
        sync = micro_batch.is_last or self.options.reduce_each_micro_batch is True
        if isinstance(self._root, FSDPModule):
            self._root.set_requires_gradient_sync(sync and not self._holds_all)
            if self.topology.size == 1 and self.options.reshard_after_forward == "auto":
                self._root.set_reshard_after_backward(micro_batch.is_last)
        scalar.backward()

    @property
    def _holds_all(self) -> bool:
        """Whether this rank holds all parameters on the device by itself, so its unsharded gradients are the parameters' gradients."""
        return self.topology.size == 1 and isinstance(self._root, FSDPModule) and self.config.offload.params == "none"

    def reduce_and_clip(self, max_norm: float | None) -> float:
        assert self._optimizer is not None
        if self._holds_all:
            take_unsharded_gradients(self._root)
        # Without FSDP, replicas have not summed their gradients yet.
        if self.topology.replicate is not None and not isinstance(self._root, FSDPModule):
            sum_gradients(self._root.parameters(), self.topology.replicate)
        grads = self._optimizer.gradients()
        total = sum_of_squares(grads, self.topology.device)
        # Replicas hold equal gradients, so only the shards of one replica are summed.
        dist.all_reduce(total, group=self.topology.shard)
        norm = float(total.sqrt())
        if max_norm is not None and norm > max_norm and norm < float("inf"):
            # This is the formula of torch.nn.utils.clip_grad_norm_, so that a plain loop clips identically.
            foreach_mul_(grads, max_norm / (norm + 1e-6))
        return norm

    def update_parameters(self, lr: float) -> None:
        assert self._optimizer is not None
        self._optimizer.step(lr)

    def set_optimizer_settings(self, optim: OptimConfig) -> None:
        """See `BaseEngine.set_optimizer_settings`."""
        assert self._optimizer is not None
        self._optimizer.set_settings(optim)

    def drop_gradients(self) -> None:
        for parameter in self._root.parameters():
            parameter.grad = None
        clear_unsharded_gradients(self._root)
        if self._optimizer is not None:
            self._optimizer.clear_gradients()

    # ---- modes, offload, adapters --------------------------------------------------------------------------------

    def set_training(self, training: bool) -> None:
        self._root.train(training)
        if self._built.bank is not None:
            # With dropout, the random numbers of an adapter's rows would depend on the other rows in its pass.
            for module in self._root.modules():
                if isinstance(module, nn.Dropout):
                    module.eval()
        self._reshard()

    def _reshard(self) -> None:
        """Free gathered parameters. Without a backward pass modules may stay gathered, and would be read instead of shards."""
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def state_tensors(self, part: StatePart) -> Iterator[Tensor]:
        if part == "optimizer":
            for name in self._optimizer.counts if self._optimizer is not None else ():
                yield from self._optimizer.moments(name).values()  # type: ignore[union-attr]
            return
        for parameter in self._root.parameters():
            tensor = parameter if part == "params" else parameter.grad
            if tensor is not None:
                yield tensor
        if part == "grads":
            yield from unsharded_gradients(self._root)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Return a context that disables the adapters of the base model."""
        return adapters_disabled(self._root) if self._built.adapters is not None else nullcontext()

    # ---- state ---------------------------------------------------------------------------------------------------

    def local_shards(self) -> Iterator[LocalShard]:
        self._reshard()
        trainable = {n for n, p in self._root.named_parameters() if p.requires_grad}
        adapters = self._built.adapters is not None
        trained = {disk_name for name in trainable for disk_name in self._disk_names(name)}
        for local_shard in parameter_shards(self._root, self._built.layout, self._built.experts, self.topology):
            # The base weights under adapters are frozen, and are restored from model.path or the seed.
            if not adapters or local_shard.name in trained or local_shard.name.startswith(HEAD_PREFIX):
                yield local_shard
        if self._optimizer is None:
            return
        parameters = dict(self._root.named_parameters())
        for name in sorted(trainable):
            for kind, local in self._optimizer.moments(name).items():
                yield from tensor_shards(
                    kind, name, parameters[name], local, self._built.layout, self._built.experts, self.topology
                )

    def optimizer_scalars(self) -> dict[str, Any]:
        if self._optimizer is None or not self._optimizer.counts:
            return {}
        return {
            "step": {
                disk_name: count for name, count in self._optimizer.counts.items() for disk_name in self._disk_names(name)
            }
        }

    def _disk_names(self, name: str) -> list[str]:
        parameter = self._root.get_parameter(name)
        return [
            stored_slice.name for stored_slice in stored_slices_of(self._built.layout, self._built.experts, name, parameter)
        ]

    def restore_optimizer(self, scalars: Mapping[str, Any] | None) -> None:
        if scalars is not None and self._optimizer is not None and self._optimizer.counts:
            # One parameter may be several tensors on disk, which another engine may hold separately.
            step_counts = scalars["step"]
            self._optimizer.restore(
                {n: max(step_counts[disk_name] for disk_name in self._disk_names(n)) for n in self._optimizer.counts}
            )

    def save_model_files(self, folder: Path) -> None:
        save_model_files(self._root, self.model_config, self._built.adapters, folder)

    def weight_shapes(self, *, adapters: Adapters = "merged") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See `BaseEngine.weight_shapes`."""
        check_adapters(adapters)
        self._reshard()
        return weight_shapes(self._root, self._built.layout, self._built.experts, only_adapters=adapters == "only")

    def stream_weights(self, adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
        self._reshard()
        return stream_weights(self._root, self._built.layout, self._built.experts, only_adapters=adapters == "only")

    def release(self) -> None:
        self._model = self._optimizer = self._meta = None
