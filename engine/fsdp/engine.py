"""FSDPEngine: FSDP2 and Ulysses over any decoder of transformers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ..backend import Adapters
from ..base import BaseEngine
from ..capabilities import Capabilities
from ..checkpoint.local_shards import Piece
from ..config import OptimConfig, ParallelConfig
from ..flops import ModelShape
from ..hf.config import read_config
from ..hf.files import save_model_files
from ..hf.lora import adapters_disabled
from ..hf.shape import router_aux_coef
from ..hf.weights import seed_ranks
from ..loss import HeadRequest, TokenOutputs
from ..offload import Part
from ..ops.norm import sum_of_squares
from ..parallel.process_groups import init_distributed
from ..parallel.topology import Topology
from ..rank_slice import RankSlice
from ..step import Task
from ..step_plan import MicroBatch
from ..torch_private import clear_unsharded_gradients, foreach_mul_
from .build import Built, build, check_config
from .optimizer import ShardOptimizer
from .options import FSDPOptions
from .state import segments_of, stream_weights, tensor_pieces, value_pieces, weight_shapes


class FSDPEngine(BaseEngine):
    """Parameters sharded by FSDP2 over dp_shard x cp, replicated over dp_replicate; sequences shared over cp."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        axes=frozenset({"dp_replicate", "dp_shard", "cp", "ep"}),
        heads=frozenset({"lm", "value"}),
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
    )

    _built: Built
    _optimizer: ShardOptimizer | None = None

    @property
    def options(self) -> FSDPOptions:
        """`engine.options`, or its defaults."""
        return self.config.options if isinstance(self.config.options, FSDPOptions) else FSDPOptions()

    @property
    def model_shape(self) -> ModelShape:
        """What a token costs."""
        return self._built.shape

    # ---- build ---------------------------------------------------------------------------------------------------

    def _build_topology(self, ranks: Sequence[int] | None) -> Topology:
        return Topology.build(self.config.parallel, init_distributed(), ranks)

    def _check_model(self, parallel: ParallelConfig) -> None:
        self._hf_config = read_config(self.model_config)
        check_config(self._hf_config, self.model_config, parallel, self.options)

    def _build_model(self) -> None:
        self._built = build(self._hf_config, self.model_config, self.config, self.options, self.topology, self._aux_coef())
        self._root = self._built.root
        seed_ranks(self.config.seed, self.topology.seed_rank)

    def _build_optimizer(self, optim: OptimConfig) -> None:
        on_host = self.config.offload.optimizer == "host"
        self._optimizer = ShardOptimizer(self._root, optim, on_host=on_host)

    def _aux_coef(self) -> float:
        return router_aux_coef(self._hf_config, self.model_config)

    # ---- step ----------------------------------------------------------------------------------------------------

    def forward_step(self, micro_batch: MicroBatch, request: HeadRequest) -> tuple[TokenOutputs, Tensor | None]:
        """Run the model on one micro-batch.

        Returns:
            outputs over the whole documents of the micro-batch, and a router's balancing loss (before its coefficient) or None.
        """
        part = RankSlice.cut(micro_batch, request, self.topology)
        found = self._root(part)
        aux = found.pop("router_aux", None)
        return part.whole(found), aux

    def _run_micro_batches(self, micro_batches: Sequence[MicroBatch], task: Task, *, backward: bool) -> None:
        for micro_batch in micro_batches:
            loss = task(micro_batch, *self.forward_step(micro_batch, task.request(micro_batch)))
            if backward:
                self._backward(loss, micro_batch)

    def _backward(self, loss: Tensor, micro_batch: MicroBatch) -> None:
        # Gradients of earlier micro-batches stay unsharded and are reduced once, with the last.
        sync = micro_batch.is_last or self.options.reduce_each_micro_batch
        if isinstance(self._root, FSDPModule):
            self._root.set_requires_gradient_sync(sync)
        loss.backward()

    def _reduce_and_clip(self, max_norm: float | None) -> float:
        assert self._optimizer is not None
        grads = self._optimizer.gradients()
        total = sum_of_squares(grads, self.topology.device)
        # Replicas hold equal gradients; only the shards of one of them add up.
        dist.all_reduce(total, group=self.topology.shard)
        norm = float(total.sqrt())
        if max_norm is not None and norm > max_norm and norm < float("inf"):
            # torch.nn.utils.clip_grad_norm_'s formula, so that a plain loop clips alike.
            foreach_mul_(grads, max_norm / (norm + 1e-6))
        return norm

    def _optimizer_step(self, lr: float) -> None:
        assert self._optimizer is not None
        self._optimizer.step(lr)

    def _zero_grad(self) -> None:
        for parameter in self._root.parameters():
            parameter.grad = None
        clear_unsharded_gradients(self._root)
        if self._optimizer is not None:
            self._optimizer.forget_gradients()

    # ---- modes, residency, adapters ------------------------------------------------------------------------------

    def _set_training(self, training: bool) -> None:
        self._root.train(training)
        # Without a backward pass modules may stay gathered: state would show whole tensors where shards are expected.
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _tensors(self, part: Part) -> Iterator[Tensor]:
        if part == "optimizer":
            for name in self._optimizer.counts if self._optimizer is not None else ():
                yield from self._optimizer.moments(name).values()  # type: ignore[union-attr]
            return
        for parameter in self._root.parameters():
            tensor = parameter if part == "params" else parameter.grad
            if tensor is not None:
                yield tensor

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the base model alone."""
        return adapters_disabled(self._root) if self._built.adapters is not None else nullcontext()

    # ---- state ---------------------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[Piece]:
        trainable = {n for n, p in self._root.named_parameters() if p.requires_grad}
        adapters = self._built.adapters is not None
        for piece in value_pieces(self._root, self._built.layout, self._built.experts, self.topology):
            # The base of adapters is frozen, and comes back from model.path or the seed.
            if not adapters or piece.name.startswith("base_model.model.") or piece.name.startswith("score."):
                yield piece
        if self._optimizer is None:
            return
        parameters = dict(self._root.named_parameters())
        for name in sorted(trainable):
            for kind, local in self._optimizer.moments(name).items():
                yield from tensor_pieces(
                    kind, name, parameters[name], local, self._built.layout, self._built.experts, self.topology
                )

    def _optimizer_scalars(self) -> dict[str, Any]:
        if self._optimizer is None or not self._optimizer.counts:
            return {}
        return {"step": {disk: count for name, count in self._optimizer.counts.items() for disk in self._disk_names(name)}}

    def _disk_names(self, name: str) -> list[str]:
        parameter = self._root.get_parameter(name)
        return [segment.name for segment in segments_of(self._built.layout, self._built.experts, name, parameter)]

    def _restore_optimizer(self, scalars: Mapping[str, Any] | None) -> None:
        if scalars is not None and self._optimizer is not None and self._optimizer.counts:
            # One parameter may be several tensors on disk, which another engine may hold apart.
            step = scalars["step"]
            self._optimizer.restore({n: max(step[disk] for disk in self._disk_names(n)) for n in self._optimizer.counts})

    def _save_model_files(self, folder: Path) -> None:
        save_model_files(self._root, self.model_config, self._built.adapters, folder)

    def weight_shapes(self, *, adapters: Adapters = "folded") -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See `BaseEngine.weight_shapes`."""
        return weight_shapes(self._root, self._built.layout, self._built.experts, only_adapters=adapters == "only")

    def _stream_weights(self, adapters: Adapters) -> Iterator[tuple[str, Tensor]]:
        return stream_weights(self._root, self._built.layout, self._built.experts, only_adapters=adapters == "only")

    def _free(self) -> None:
        self._optimizer = None
        for name in ("_built", "_root"):
            if hasattr(self, name):
                delattr(self, name)
