"""Megatron's distributed optimizer over this rank's chunks, with its shards as plain tensors and our own norm and clipping."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from ..config import OptimConfig
from ..lr_schedule import IS_DECAYED, is_decayed, set_settings
from ..ops.norm import sum_of_squares
from ..torch_private import foreach_mul_
from .megatron_private import copy_main_params, grads_for_norm, local_range

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, eq=False)
class OptimizerShard:
    """The part of a parameter that this rank's optimizer updates.

    Args:
        main: The updated numbers, `[end - start]`: the parameter's own memory, or a float32 copy of 16-bit numbers.
        start: The index of the first element in the flattened parameter.
        end: The index after the last element in the flattened parameter.
        state: The state of torch's optimizer, by name.
        updated: The parameter that torch's optimizer updates; `main` is a view of it. None if the numbers are not trained.
    """

    main: Tensor
    start: int
    end: int
    state: dict[str, Tensor]
    updated: nn.Parameter | None = None


class ShardedOptimizer:
    """AdamW with its state sharded over the data- and context-parallel ranks.

    Args:
        chunks: The model's wrapped chunks.
        optim: The optimizer's settings; the learning rate is passed with every step.
        groups: The process groups.
        compute: The dtype of the model's parameters.
        sometimes: The parameters that have gradients only in some steps, such as those of encoders in steps with media. As in torch's
            optimizers, a step without gradients leaves them unchanged. All others are updated in every step.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optim: OptimConfig,
        groups: ProcessGroupCollection,
        compute: torch.dtype,
        sometimes: Sequence[nn.Parameter] = (),
    ) -> None:
        self._chunks, self._groups = chunks, groups
        self._sometimes = [parameter for parameter in sometimes if parameter.requires_grad]
        self._reached: set[int] = set()
        for number, parameter in enumerate(self._sometimes):
            # Keep no reference to this object or to the parameter, because the hook would keep it alive.
            parameter.register_hook(partial(_note, self._reached, number))
        config = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.betas[0],
            adam_beta2=optim.betas[1],
            adam_eps=optim.eps,
            # `reduce_and_clip` clips.
            clip_grad=0.0,
            use_distributed_optimizer=True,
            bf16=compute == torch.bfloat16,
            params_dtype=compute,
        )
        # One optimizer for dense parameters and one for experts, because their state is sharded over different ranks.
        self._parts = [
            optimizer for experts in (False, True) if (optimizer := self._make(config, optim, experts=experts)) is not None
        ]
        self.shards: dict[Tensor, OptimizerShard] = {
            parameter: shard for part in self._parts for parameter, shard in _shards(part) if shard.end > shard.start
        }
        """Model parameter -> the shard that this rank updates; parameters without such a shard are left out."""

    def _make(self, config: OptimizerConfig, optim: OptimConfig, *, experts: bool) -> DistributedOptimizer | None:
        decayed: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for chunk in self._chunks:
            for name, parameter in chunk.module.named_parameters():
                # Parameters of experts have the mark `allreduce = False`; see `param_shards_of`.
                if parameter.requires_grad and experts != getattr(parameter, "allreduce", True):
                    decayed[is_decayed(name, parameter.dim())].append(parameter)
        if not any(decayed.values()):
            return None
        # Not Megatron's own groups: without overrides, the weight decay of those is applied only by its scheduler, which is not
        # used here. So both engines decay the same parameters.
        settings = [
            {
                "params": parameters,
                "weight_decay": optim.weight_decay if decay else 0.0,
                "is_expert_parallel": experts,
                IS_DECAYED: decay,
            }
            for decay, parameters in decayed.items()
            if parameters
        ]
        data_group = self._groups.expt_dp if experts else self._groups.dp_cp
        optimizer = DistributedOptimizer(
            # One kernel for all shards; other implementations read each shard's step count on the host.
            torch.optim.AdamW(settings, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True),
            config,
            None,
            None,
            model_chunks=list(self._chunks),
            per_model_buffers={
                i: chunk.expert_parallel_buffers if experts else chunk.buffers for i, chunk in enumerate(self._chunks)
            },
            data_parallel_group=data_group,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=self._groups.mp.rank(),
            distributed_optimizer_instance_id=0,
        )
        optimizer.grad_stats_parallel_group = self._groups.intra_dist_opt
        optimizer.tp_group = self._groups.tp
        return optimizer

    def _leave_out(self, device: torch.device) -> None:
        """Drop the gradients of parameters that no micro-batch of any rank has reached, because their zeros are not real gradients."""
        # Equal on all ranks of the reduction below, which have the same layers.
        if not self._sometimes:
            return
        reached = torch.tensor([float(number in self._reached) for number in range(len(self._sometimes))]).to(
            device, non_blocking=True
        )
        # No reduction over tensor-parallel ranks is needed, because they have run the same documents.
        torch.distributed.all_reduce(reached, group=self._groups.dp_cp)
        for parameter, is_reached in zip(self._sometimes, reached.tolist(), strict=True):
            shard = self.shards.get(parameter)
            if not is_reached and shard is not None and shard.updated is not None:
                shard.updated.grad = None

    def reduce_and_clip(self, max_norm: float | None, device: torch.device) -> float:
        """Return the norm of the full gradient, and clip the gradients of the next step."""
        # In float64: a norm of all gradients in float32 was off by 2e-4 against it.
        total = torch.zeros((), dtype=torch.float64, device=device)
        for part in self._parts:
            part.prepare_grads()
        # After `prepare_grads`, which sets the gradients that this drops, and before the norm, which must not count them.
        self._leave_out(device)
        for part in self._parts:
            total += sum_of_squares(grads_for_norm(part), device)
        torch.distributed.all_reduce(total, group=self._groups.intra_dist_opt)
        norm = float(total.sqrt())
        if max_norm is not None and norm > max_norm and norm < float("inf"):
            grads = [p.grad for part in self._parts for p in part.get_parameters() if p.grad is not None]
            # A rank may have nothing to train, for example in a frozen pipeline stage.
            if grads:
                # This is the formula of torch.nn.utils.clip_grad_norm_, so that a plain loop clips identically.
                foreach_mul_(grads, max_norm / (norm + 1e-6))
        return norm

    def set_settings(self, optim: OptimConfig) -> None:
        """Update with these betas, eps and weight decay from the next step on."""
        for part in self._parts:
            set_settings(part.param_groups, optim)

    def step(self, lr: float) -> None:
        """Update the shards, then every rank's parameters from them."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step_with_ready_grads()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._reached.clear()
        for part in self._parts:
            part.zero_grad()

    def sync_params(self) -> None:
        """Copy the current values of the shards to every rank's parameters."""
        for part in self._parts:
            copy_main_params(part)
        for chunk in self._chunks:
            # Waits until the parameters have arrived, whatever the settings: they may be read right after this.
            chunk.start_param_sync(force_sync=True)


def _note(reached: set[int], number: int, gradient: Tensor) -> None:
    reached.add(number)


def average_over_tp(parameters: Iterable[nn.Parameter], group: torch.distributed.ProcessGroup) -> None:
    """Average gradients that should be equal on the ranks of a tensor-parallel group, up to the order of sums in GPU kernels.

    Otherwise their copies would drift apart. Megatron's own implementation uses an operation that gloo does not have.
    """
    grads = [parameter.main_grad for parameter in parameters if parameter.requires_grad]  # type: ignore[attr-defined]
    if not grads:
        return
    joined = torch.cat([grad.flatten() for grad in grads])
    torch.distributed.all_reduce(joined, group=group)
    joined /= group.size()
    for grad, mean in zip(grads, joined.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def _shards(part: DistributedOptimizer) -> Iterator[tuple[nn.Parameter, OptimizerShard]]:
    for models, mains in (
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
        (part.model_fp32_groups, part.shard_fp32_groups),
    ):
        for model_group, main_group in zip(models, mains, strict=True):
            for parameter, main in zip(model_group, main_group, strict=True):
                index_range = local_range(part, parameter)
                state = part.optimizer.state[main]
                # The state is created here rather than in the first step, so that a checkpoint can be loaded before one. Each
                # parameter has its own step count, because a shared count would be incremented once per parameter.
                state["step"] = torch.zeros((), dtype=torch.float32, device=main.device)
                for kind in MOMENTS:
                    state[kind] = torch.zeros_like(main, requires_grad=False)
                yield parameter, OptimizerShard(main.detach().view(-1), index_range.start, index_range.end, state, main)
