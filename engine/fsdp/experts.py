"""Expert parallelism over any mixture that transformers dispatches through its experts interface. Nothing is patched.

Each rank of an expert-parallel group holds some of the experts; tokens travel to them by all-to-alls and back. The ranks of
a shard group (dp_shard x cp) form a grid `[expert dp, ep]`: what an expert's ranks hold is sharded again over expert dp.

Axes: T tokens, K experts of a token, E experts, R rows that arrive, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..checkpoint.tensor_slices import TensorSlice
from ..config import ParallelConfig
from ..errors import TopologyError
from ..hf.shape import experts_of
from ..parallel.topology import Topology

IMPLEMENTATION = "drivetrain_expert_parallel"


def check_experts(config: PreTrainedConfig, parallel: ParallelConfig) -> None:
    """Refuse expert parallelism that cannot be laid out.

    Raises:
        TopologyError: no mixture, or sizes that do not divide.
    """
    ep = parallel.ep
    if ep == 1:
        return
    count = experts_of(config)
    if count is None:
        raise TopologyError(f"engine.parallel.ep={ep}, but {config.model_type} is no mixture of experts; set it to 1")
    if count % ep:
        legal = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise TopologyError(
            f"engine.parallel.ep={ep} does not divide the {count} experts of {config.model_type}; use one of {legal}"
        )
    ranks = parallel.cp * (parallel.dp_shard or ep)
    if ranks % ep:
        raise TopologyError(
            f"engine.parallel.ep={ep} does not divide the {ranks} ranks that share a model (dp_shard={parallel.dp_shard} x "
            f"cp={parallel.cp}), among which the experts are spread; make ep smaller or dp_shard larger"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertShards:
    """Which experts this rank holds.

    Args:
        group: the ranks that hold the others.
        mesh: the ranks that hold the same.
        first: number of this rank's first expert.
        names: of the parameters, in the root module.
    """

    group: ProcessGroup
    mesh: DeviceMesh
    first: int
    names: frozenset[str]

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a parameter over all ranks."""
        return (shape[0] * self.group.size(), *shape[1:]) if name in self.names else tuple(shape)

    def box(self, name: str, box: TensorSlice) -> TensorSlice:
        """Where a box of this rank's parameter stands in that of all ranks."""
        return TensorSlice((box.offset[0] + self.first, *box.offset[1:]), box.length) if name in self.names else box

    def gather(self, name: str, value: Tensor) -> Tensor:
        """A parameter of all ranks, from what each holds. Collective over the group."""
        if name not in self.names:
            return value
        found = value.new_empty(self.shape(name, value.shape))
        dist.all_gather(list(found.chunk(self.group.size())), value.contiguous(), group=self.group)
        return found


def cut_experts(root: nn.Module, config: PreTrainedConfig, topology: Topology) -> ExpertShards | None:
    """Leave this rank's experts in a model on the meta device, and let tokens travel to the others'.

    Raises:
        TopologyError: the family does not dispatch its experts through transformers' interface.
    """
    p = topology.parallel
    if p.ep == 1:
        return None
    count = experts_of(config)
    assert count is not None
    grid = topology.grid[0].reshape(p.dp_replicate, -1, p.ep)
    replica, edp, index = (grid == topology.ranks[topology.rank]).nonzero()[0].tolist()
    group = topology.group(grid[replica, edp])
    kind = topology.device.type
    held = topology.group(grid[replica, :, index])
    if topology.replicate is None:
        mesh = DeviceMesh.from_group(held, kind, mesh_dim_names=("shard",))
    else:
        mesh = DeviceMesh.from_group(
            [topology.replicate, held], kind, mesh=grid[:, :, index], mesh_dim_names=("replicate", "shard")
        )
    names = set()
    local = count // p.ep
    for prefix, module in expert_modules(root):
        for name, parameter in list(module.named_parameters(recurse=False)):
            assert len(parameter) == count, f"{prefix}.{name} has {len(parameter)} rows for {count} experts"
            cut = torch.empty((local, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
            module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
            names.add(f"{prefix}.{name}")
        module.num_experts = local
        module.expert_group = group
        module.config._experts_implementation = IMPLEMENTATION
    if not names:
        raise TopologyError(
            f"engine.parallel.ep={p.ep}: the experts of {config.model_type} are not dispatched through transformers' experts "
            "interface, so they cannot be spread over ranks; set ep to 1, or use engine.backend=mcore"
        )
    return ExpertShards(group=group, mesh=mesh, first=index * local, names=frozenset(names))


def expert_modules(root: nn.Module) -> list[tuple[str, Any]]:
    """The modules that hold a layer's experts, by name."""
    return [(name, module) for name, module in root.named_modules() if hasattr(module, "_is_expert_parallel")]


class _Exchange(torch.autograd.Function):
    """Send rows to the ranks of a group, so many to each; backward sends their gradients home."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.settings = (sent, received, group)
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.settings
        return _Exchange.apply(grads[0], received, sent, group), None, None, None


def expert_parallel_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' signature: hidden states `[T, H]`, chosen experts and their weights `[T, K]` -> `[T, H]`."""
    group, local = module.expert_group, module.num_experts
    chosen_s = top_k_index.reshape(-1)
    order_s = torch.argsort(chosen_s, stable=True)
    counts = torch.bincount(chosen_s // local, minlength=group.size())
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sent, received = counts.tolist(), arriving.tolist()
    rows_rh = _Exchange.apply(hidden_states[order_s // top_k_index.shape[1]], sent, received, group)
    experts_r = _Exchange.apply((chosen_s % local)[order_s], sent, received, group)
    empty = not len(rows_rh)
    if empty:
        # Nobody chose an expert of this rank. What came in and the parameters still take part in the backward pass, whose
        # collectives meet those of the other ranks.
        rows_rh = torch.cat([rows_rh, hidden_states.new_zeros(1, hidden_states.shape[1])])
        experts_r = chosen_s.new_zeros(1)
    ones = torch.ones_like(experts_r, dtype=top_k_weights.dtype)[:, None]
    done_rh = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, rows_rh, experts_r[:, None], ones)
    back_sh = _Exchange.apply(done_rh[:0] if empty else done_rh, received, sent, group)
    unsorted_sh = torch.empty_like(back_sh).index_copy(0, order_s, back_sh)
    weighted = unsorted_sh.view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, expert_parallel_forward)
