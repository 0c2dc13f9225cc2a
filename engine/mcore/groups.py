"""Process groups as Megatron-core wants them, and its process-wide state as one engine needs it.

Most of megatron takes a collection of groups; some of it knows only the globals of `parallel_state`. Those belong to one
engine at a time, so that engines of different layouts work in one process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random
from torch.distributed import ProcessGroup

from ..parallel.topology import Topology
from .cpu import cuda_means_cpu

_RNG = ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")
_INITIAL: dict[tuple[ModuleType, str], Any] = {
    **{
        (parallel_state, name): value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    },
    **{(megatron_random, name): getattr(megatron_random, name) for name in _RNG},
}


def expert_grid(topology: Topology) -> torch.Tensor:
    """The ranks of each pipeline stage as experts are spread over them: `[pp, expert dp, ep, etp]`."""
    p = topology.parallel
    return topology.grid.reshape(p.pp, -1, p.ep, p.etp)


def make_groups(topology: Topology) -> ProcessGroupCollection:
    """Every group that megatron may ask for. Collective over the engine's ranks."""
    grid = topology.grid[:, 0]
    here = (grid.flatten() == topology.ranks[topology.rank]).view_as(grid).nonzero()[0].tolist()
    stage, dp, cp, tp = here
    experts = expert_grid(topology)
    _, edp, ep, etp = (experts == topology.ranks[topology.rank]).nonzero()[0].tolist()
    world = topology.group(grid)
    ends = grid[:, dp, cp, tp][[0, -1] if len(grid) > 1 else [0]]
    made: dict[str, ProcessGroup | None] = {
        "tp": topology.group(grid[stage, dp, cp, :]),
        "pp": topology.group(grid[:, dp, cp, tp]),
        "mp": topology.group(grid[:, dp, cp, :]),
        "cp": topology.group(grid[stage, dp, :, tp]),
        "dp": topology.group(grid[stage, :, cp, tp]),
        "dp_cp": topology.group(grid[stage, :, :, tp]),
        "tp_cp": topology.group(grid[stage, dp, :, :]),
        "tp_dp_cp": topology.group(grid[stage]),
        "embd": topology.group(ends) if stage in (0, len(grid) - 1) else None,
        "pos_embd": None,
        "ep": topology.group(experts[stage, edp, :, etp]),
        "expt_tp": topology.group(experts[stage, edp, ep, :]),
        "tp_ep": topology.group(experts[stage, edp]),
        "tp_ep_pp": topology.group(experts[:, edp]),
        "expt_dp": topology.group(experts[stage, :, ep, etp]),
        "intra_dist_opt": world,
        "inter_dist_opt": None,
    }
    return ProcessGroupCollection(**made, intra_dp_cp=made["dp_cp"], intra_expt_dp=made["expt_dp"])


def _globals(groups: ProcessGroupCollection, topology: Topology) -> dict[str, Any]:
    p = topology.parallel
    grid = topology.grid[:, 0]
    _, dp, cp, tp = (grid == topology.ranks[topology.rank]).nonzero()[0].tolist()
    stages = grid[:, dp, cp, tp].tolist()
    return {
        "_TENSOR_MODEL_PARALLEL_GROUP": groups.tp,
        "_PIPELINE_MODEL_PARALLEL_GROUP": groups.pp,
        "_MODEL_PARALLEL_GROUP": groups.mp,
        "_EMBEDDING_GROUP": groups.embd,
        "_DATA_PARALLEL_GROUP": groups.dp,
        "_DATA_PARALLEL_GROUP_WITH_CP": groups.dp_cp,
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": groups.dp_cp,
        "_CONTEXT_PARALLEL_GROUP": groups.cp,
        "_CONTEXT_PARALLEL_GLOBAL_RANKS": torch.distributed.get_process_group_ranks(groups.cp),
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": groups.tp_cp,
        "_TENSOR_AND_DATA_PARALLEL_GROUP": groups.tp_dp_cp,
        "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": groups.tp_dp_cp,
        "_EXPERT_MODEL_PARALLEL_GROUP": groups.ep,
        "_EXPERT_TENSOR_PARALLEL_GROUP": groups.expt_tp,
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": groups.tp_ep,
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": groups.tp_ep_pp,
        "_EXPERT_DATA_PARALLEL_GROUP": groups.expt_dp,
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": groups.expt_dp,
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": groups.intra_dist_opt,
        "_PIPELINE_GLOBAL_RANKS": stages,
        "_EMBEDDING_GLOBAL_RANKS": sorted({stages[0], stages[-1]}),
        "_POSITION_EMBEDDING_GLOBAL_RANKS": [stages[0]],
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": torch.distributed.get_process_group_ranks(groups.tp),
        "_DATA_PARALLEL_GLOBAL_RANKS": torch.distributed.get_process_group_ranks(groups.dp),
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": torch.distributed.get_process_group_ranks(groups.dp_cp),
        "_MODEL_PARALLEL_GLOBAL_RANKS": torch.distributed.get_process_group_ranks(groups.mp),
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": p.vpp if p.vpp > 1 else None,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": 0 if p.vpp > 1 else None,
        "_GLOBAL_MEMORY_BUFFER": parallel_state.GlobalMemoryBuffer(),
    }


class MegatronState:
    """The globals of one engine, put in place while it works.

    Args:
        topology: of the engine.
    """

    def __init__(self, topology: Topology) -> None:
        self.groups = make_groups(topology)
        self._values = dict(_INITIAL)
        self._values.update({(parallel_state, k): v for k, v in _globals(self.groups, topology).items()})
        self._inside = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Megatron sees this engine's groups and random states; afterwards whatever it saw before."""
        if self._inside:
            yield
            return
        before = {(module, name): getattr(module, name) for module, name in self._values}
        self._put(self._values)
        self._inside = True
        try:
            with cuda_means_cpu():
                yield
        finally:
            self._inside = False
            self._values = {(module, name): getattr(module, name) for module, name in self._values}
            self._put(before)

    @staticmethod
    def _put(values: dict[tuple[ModuleType, str], Any]) -> None:
        for (module, name), value in values.items():
            setattr(module, name, value)


class HasState(Protocol):
    """An engine of this backend."""

    @property
    def _state(self) -> MegatronState: ...


P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=HasState)


def in_megatron(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Run an engine's method with its own megatron state in place."""

    @wraps(method)
    def wrapped(self: E, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._state.active():
            return method(self, *args, **kwargs)

    return wrapped
