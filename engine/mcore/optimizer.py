"""Megatron's distributed optimizer over this rank's chunks: its shards as plain tensors, its norm and clipping as ours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from ..config import OptimConfig
from ..lr_schedule import is_decayed
from ..ops.norm import sum_of_squares
from ..torch_private import foreach_mul_
from .megatron_private import copy_main_params, local_range

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of a parameter that this rank's optimizer updates.

    Args:
        main: `[end - start]`, the numbers that are updated: the parameter's own memory, or float32 beside 16 bits.
        start: where it begins in the flattened parameter.
        end: past its last element.
        state: torch's, by name.
    """

    main: Tensor
    start: int
    end: int
    state: dict[str, Tensor]


class ShardedOptimizer:
    """AdamW, its state spread over data- and context-parallel ranks.

    Args:
        chunks: of the model, wrapped.
        optim: settings; the learning rate comes with every step.
        groups: process groups.
        compute: number format of the model's parameters.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optim: OptimConfig,
        groups: ProcessGroupCollection,
        compute: torch.dtype,
    ) -> None:
        self._chunks, self._groups = chunks, groups
        config = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            clip_grad=0.0,
            use_distributed_optimizer=True,
            bf16=compute == torch.bfloat16,
            params_dtype=compute,
        )
        self._parts = [made for experts in (False, True) if (made := self._make(config, optim, experts=experts)) is not None]
        self.shards: dict[Tensor, Shard] = {
            parameter: shard for part in self._parts for parameter, shard in _shards(part) if shard.end > shard.start
        }
        """Model parameter -> what this rank updates of it; a parameter of which it updates nothing is left out."""

    def _make(self, config: OptimizerConfig, optim: OptimConfig, *, experts: bool) -> DistributedOptimizer | None:
        decayed: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for chunk in self._chunks:
            for name, parameter in chunk.module.named_parameters():
                if parameter.requires_grad and experts != getattr(parameter, "allreduce", True):
                    decayed[is_decayed(name, parameter.dim())].append(parameter)
        if not any(decayed.values()):
            return None
        settings = [
            {"params": chosen, "weight_decay": optim.weight_decay if decay else 0.0, "is_expert_parallel": experts}
            for decay, chosen in decayed.items()
            if chosen
        ]
        data = self._groups.expt_dp if experts else self._groups.dp_cp
        made = DistributedOptimizer(
            torch.optim.AdamW(settings, lr=optim.lr, betas=optim.betas, eps=optim.eps),
            config,
            None,
            None,
            model_chunks=list(self._chunks),
            per_model_buffers={
                i: chunk.expert_parallel_buffers if experts else chunk.buffers for i, chunk in enumerate(self._chunks)
            },
            data_parallel_group=data,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=self._groups.mp.rank(),
            distributed_optimizer_instance_id=0,
        )
        made.grad_stats_parallel_group = self._groups.intra_dist_opt
        made.tp_group = self._groups.tp
        return made

    def reduce_and_clip(self, max_norm: float | None, device: torch.device) -> float:
        """The norm of the whole gradient, and the clipped gradients where the next step takes them."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in self._parts:
            part.prepare_grads()
            # Copies of tensor-parallel peers and of tied embeddings are left out.
            total += sum_of_squares(part.get_main_grads_for_grad_norm(), device)
        torch.distributed.all_reduce(total, group=self._groups.intra_dist_opt)
        norm = float(total.sqrt())
        if max_norm is not None and norm > max_norm and norm < float("inf"):
            grads = [p.grad for part in self._parts for p in part.get_parameters() if p.grad is not None]
            # A rank may have nothing to train: a pipeline stage that is frozen.
            if grads:
                # torch.nn.utils.clip_grad_norm_'s formula, so that a plain loop clips alike.
                foreach_mul_(grads, max_norm / (norm + 1e-6))
        return norm

    def step(self, lr: float) -> None:
        """Update the shards, and every rank's parameters from them."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step_with_ready_grads()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for part in self._parts:
            part.zero_grad()

    def sync_params(self) -> None:
        """Give every rank's parameters the numbers that the shards hold now."""
        for part in self._parts:
            copy_main_params(part)
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)


def _shards(part: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, Shard]]:
    for models, mains in (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    ):
        for model_group, main_group in zip(models, mains, strict=True):
            for parameter, main in zip(model_group, main_group, strict=True):
                where = local_range(part, parameter)
                state = part.optimizer.state[main]
                # Made now, not by the first step, so that a checkpoint can be taken over before one; and a count of steps
                # for each parameter, since one that is shared would be counted up by all of them.
                state["step"] = torch.zeros((), dtype=torch.float32, device=main.device)
                for kind in MOMENTS:
                    state[kind] = torch.zeros_like(main, requires_grad=False)
                yield parameter, Shard(main.detach().view(-1), where.start, where.end, state)
