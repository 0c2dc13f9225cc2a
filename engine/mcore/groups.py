"""The process groups that Megatron-core needs, and its process-wide state for one engine.

Most of megatron takes a collection of groups, but some of it reads only the globals of `parallel_state`. Those belong to one
engine at a time, so that engines with different layouts can work in one process.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from ..parallel.topology import Topology
from .cpu import cuda_calls_use_cpu
from .megatron_private import engine_state, read_state, write_state


def expert_grid(topology: Topology) -> torch.Tensor:
    """Return the grid of ranks over which experts are distributed: `[pp, expert dp, ep, etp]`."""
    p = topology.parallel
    return topology.grid.reshape(p.pp, -1, p.ep, p.etp)


def make_groups(topology: Topology) -> ProcessGroupCollection:
    """Create every group that megatron may request. Collective over the engine's ranks."""
    grid = topology.grid[:, 0]
    coordinates = (grid.flatten() == topology.ranks[topology.rank]).view_as(grid).nonzero()[0].tolist()
    stage, dp, cp, tp = coordinates
    experts = expert_grid(topology)
    _, edp, ep, etp = (experts == topology.ranks[topology.rank]).nonzero()[0].tolist()
    world = topology.group(grid)
    # The first and the last stage, which both have the matrix of tied embeddings.
    end_ranks = grid[:, dp, cp, tp][[0, -1] if len(grid) > 1 else [0]]
    # All ranks create their groups in this order, so that the members of each group meet.
    groups: dict[str, ProcessGroup | None] = {
        "tp": topology.group(grid[stage, dp, cp, :]),
        "pp": topology.group(grid[:, dp, cp, tp]),
        "mp": topology.group(grid[:, dp, cp, :]),
        "cp": topology.group(grid[stage, dp, :, tp]),
        "dp": topology.group(grid[stage, :, cp, tp]),
        "dp_cp": topology.group(grid[stage, :, :, tp]),
        "tp_cp": topology.group(grid[stage, dp, :, :]),
        "tp_dp_cp": topology.group(grid[stage]),
        "embd": topology.group(end_ranks) if stage in (0, len(grid) - 1) else None,
        # For learned positions, which a decoder with rotary embeddings does not have.
        "pos_embd": None,
        "ep": topology.group(experts[stage, edp, :, etp]),
        "expt_tp": topology.group(experts[stage, edp, ep, :]),
        "tp_ep": topology.group(experts[stage, edp]),
        "tp_ep_pp": topology.group(experts[:, edp]),
        "expt_dp": topology.group(experts[stage, :, ep, etp]),
        # The optimizer's sums over ranks, such as that of the gradient norm, use this group, so it has every rank of the engine.
        "intra_dist_opt": world,
        "inter_dist_opt": None,
    }
    return ProcessGroupCollection(**groups, intra_dp_cp=groups["dp_cp"], intra_expt_dp=groups["expt_dp"])


class MegatronState:
    """Megatron's globals for one engine, installed while the engine works.

    Args:
        topology: The engine's topology.
    """

    def __init__(self, topology: Topology) -> None:
        self.groups = make_groups(topology)
        grid = topology.grid[:, 0]
        _, dp, cp, tp = (grid == topology.ranks[topology.rank]).nonzero()[0].tolist()
        self._values = engine_state(self.groups, grid[:, dp, cp, tp].tolist(), topology.parallel.vpp)
        self._inside = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install this engine's groups and random states inside the block, then restore the previous ones."""
        # Methods of an engine call each other. Only the outermost may restore the previous state: its caller continues with
        # this engine's.
        if self._inside:
            yield
            return
        # All globals, although most modules are passed their groups: what still reads a global of another engine does not fail
        # but hangs, in a collective with the wrong ranks (megatron-core 0.16.1).
        previous = read_state(self._values)
        write_state(self._values)
        self._inside = True
        try:
            with cuda_calls_use_cpu():
                yield
        finally:
            self._inside = False
            # Megatron has changed some of them, such as its random states, and the engine continues with these.
            self._values = read_state(self._values)
            write_state(previous)


class HasState(Protocol):
    """An engine with its own megatron state."""

    @property
    def _state(self) -> MegatronState: ...


P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=HasState)


def in_megatron(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Wrap an engine's method so that it runs with the engine's own megatron state installed."""

    @wraps(method)
    def wrapped(self: E, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._state.active():
            return method(self, *args, **kwargs)

    return wrapped
