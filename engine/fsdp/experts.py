"""Expert parallelism for any mixture of experts that transformers dispatches through its experts interface.

Each rank of an expert-parallel group holds some of the experts, and all-to-alls send tokens to the
experts and back. The ranks of a shard group (dp_shard x cp) form a grid `[expert dp, ep]`; experts are sharded again over
expert dp, among the ranks that hold the same ones.

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
from ..hf.experts import expert_modules, grouped_experts_forward
from ..hf.shape import experts_of
from ..ops.router import count_tokens
from ..parallel.topology import Topology

IMPLEMENTATION = "drivetrain_expert_parallel"


def check_experts(config: PreTrainedConfig, parallel: ParallelConfig) -> None:
    """Check that expert parallelism fits the model and the layout.

    Raises:
        TopologyError: The model is not a mixture of experts, or the sizes are not divisible.
    """
    ep = parallel.ep
    if ep == 1:
        return
    count = experts_of(config)
    if count is None:
        raise TopologyError(f"engine.parallel.ep={ep}, but {config.model_type} is not a mixture of experts; set it to 1")
    if count % ep:
        legal = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise TopologyError(
            f"engine.parallel.ep={ep} does not divide the {count} experts of {config.model_type}; use one of {legal}"
        )
    ranks = parallel.cp * (parallel.dp_shard or ep)
    if ranks % ep:
        raise TopologyError(
            f"engine.parallel.ep={ep} does not divide the {ranks} ranks that share a model (dp_shard={parallel.dp_shard} x "
            f"cp={parallel.cp}), over which the experts are distributed; make ep smaller or dp_shard larger"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertShards:
    """The experts that this rank holds.

    Args:
        group: The process group over which the experts are distributed.
        mesh: The mesh of the ranks that hold the same experts.
        first: The index of this rank's first expert.
        names: The names of the experts' parameters in the root module.
    """

    group: ProcessGroup
    mesh: DeviceMesh
    first: int
    names: frozenset[str]

    def shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a parameter over all ranks."""
        return (shape[0] * self.group.size(), *shape[1:]) if name in self.names else tuple(shape)

    def box(self, name: str, box: TensorSlice) -> TensorSlice:
        """Return the position, in the parameter of all ranks, of a slice of this rank's parameter."""
        return TensorSlice((box.offset[0] + self.first, *box.offset[1:]), box.length) if name in self.names else box

    def gather(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter with the experts of all ranks. Collective over the group."""
        if name not in self.names:
            return value
        full = value.new_empty(self.shape(name, value.shape))
        dist.all_gather(list(full.chunk(self.group.size())), value.contiguous(), group=self.group)
        return full


def cut_experts(root: nn.Module, config: PreTrainedConfig, topology: Topology) -> ExpertShards | None:
    """Reduce a model on the meta device to this rank's experts, and make it send tokens to the experts of other ranks.

    Raises:
        TopologyError: The family does not dispatch its experts through transformers' interface.
    """
    p = topology.parallel
    if p.ep == 1:
        return None
    count = experts_of(config)
    assert count is not None
    # The ranks as `[replica, expert dp, ep]`: an expert-parallel group consists of neighbors.
    grid = topology.grid[0].reshape(p.dp_replicate, -1, p.ep)
    replica, edp, index = (grid == topology.ranks[topology.rank]).nonzero()[0].tolist()
    # All ranks create these two groups in this order, so that the members of each group meet.
    group = topology.group(grid[replica, edp])
    kind = topology.device.type
    same_experts = topology.group(grid[replica, :, index])
    if topology.replicate is None:
        mesh = DeviceMesh.from_group(same_experts, kind, mesh_dim_names=("shard",))
    else:
        mesh = DeviceMesh.from_group(
            [topology.replicate, same_experts], kind, mesh=grid[:, :, index], mesh_dim_names=("replicate", "shard")
        )
    names = set()
    local = count // p.ep
    for prefix, module in expert_modules(root):
        # The factors of experts' adapters are cut like the matrices.
        adapters = [(f"{prefix}.adapters.{name}", one) for name, one in getattr(module, "adapters", nn.ModuleDict()).items()]
        for owner_name, owner in [(prefix, module), *adapters]:
            for name, parameter in list(owner.named_parameters(recurse=False)):
                assert len(parameter) == count, f"{owner_name}.{name} has {len(parameter)} rows for {count} experts"
                cut = torch.empty((local, *parameter.shape[1:]), dtype=parameter.dtype, device="meta")
                owner.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
                names.add(f"{owner_name}.{name}")
        module.num_experts = local
        module.expert_group = group
        module.config._experts_implementation = IMPLEMENTATION
    if not names:
        raise TopologyError(
            f"engine.parallel.ep={p.ep}: the experts of {config.model_type} are not dispatched through transformers' experts "
            "interface, so they cannot be distributed over ranks; set ep to 1, or use engine.backend=mcore"
        )
    return ExpertShards(group=group, mesh=mesh, first=index * local, names=frozenset(names))


class _Exchange(torch.autograd.Function):
    """An all-to-all with a given number of rows for each rank; the backward pass sends the gradients back."""

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
    """Apply the experts of all ranks, in transformers' signature.

    Hidden states are `[T, H]`, the chosen experts and their weights `[T, K]`, and the result `[T, H]`.
    """
    group, local = module.expert_group, module.num_experts
    chosen_s = top_k_index.reshape(-1)
    # Pairs of a token and an expert in the order of the experts, and thereby of the ranks that hold them.
    order_s = torch.argsort(chosen_s, stable=True)
    counts_e = count_tokens(chosen_s, local * group.size())
    arriving_e = torch.empty_like(counts_e)
    # First the counts: each rank has to allocate what it receives, and needs the number of rows of each expert.
    dist.all_to_all_single(arriving_e, counts_e, group=group)
    # The only transfer from the device: the host needs the sizes of the exchange.
    sent, received = torch.stack([counts_e, arriving_e]).view(2, group.size(), local).sum(2).tolist()
    rows_rh = _Exchange.apply(hidden_states[order_s // top_k_index.shape[1]], sent, received, group)
    # Rows arrive ordered by sender, then by expert.
    every = torch.arange(local, device=chosen_s.device).repeat(group.size())
    experts_r = every.repeat_interleave(arriving_e, output_size=sum(received))
    empty = not len(rows_rh)
    if empty:
        # No token chose an expert of this rank. The inputs and parameters still take part in the backward pass, because its
        # collectives must match those of the other ranks.
        rows_rh = torch.cat([rows_rh, hidden_states.new_zeros(1, hidden_states.shape[1])])
        experts_r = chosen_s.new_zeros(1)
    # Weights of 1: the sender multiplies by the router's weights once the rows are back, so these need no exchange.
    ones = torch.ones_like(experts_r, dtype=top_k_weights.dtype)[:, None]
    output_rh = grouped_experts_forward(module, rows_rh, experts_r[:, None], ones)
    returned_sh = _Exchange.apply(output_rh[:0] if empty else output_rh, received, sent, group)
    # Rows return in the order in which they were sent.
    unsorted_sh = torch.empty_like(returned_sh).index_copy(0, order_s, returned_sh)
    weighted = unsorted_sh.view(*top_k_index.shape, -1) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, expert_parallel_forward)
