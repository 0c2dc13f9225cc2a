"""Every private name of Megatron-core that Drivetrain uses, checked when this module is imported.

Checked against Megatron-core 0.16.1 and 0.19.2; check the names again before `pyproject.toml` allows a later minor version.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import megatron.core
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks

from ..errors import install_command

State = dict[tuple[ModuleType, str], Any]
"""Values of megatron's globals, by module and name."""

_IS_LATER = hasattr(parallel_state, "_GTP_WEIGHT_REMAT_GROUP")
"""Whether this is megatron-core 0.19, rather than 0.16."""

_LATER_GROUPS = {
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp",
}
"""Groups that 0.19 has in two versions, with and without the ranks that shard and regather weights, which is unused here."""

_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embd",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
    **(_LATER_GROUPS if _IS_LATER else {}),
}
_GROUP_RANKS = {
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "cp",
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tp",
    "_DATA_PARALLEL_GLOBAL_RANKS": "dp",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "dp_cp",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "mp",
}
_OTHERS = (
    "_PIPELINE_GLOBAL_RANKS",
    "_EMBEDDING_GLOBAL_RANKS",
    "_POSITION_EMBEDDING_GLOBAL_RANKS",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
    "_GLOBAL_MEMORY_BUFFER",
)
_RANDOM = ("_CUDA_RNG_STATE_TRACKER", "_CUDA_RNG_STATE_TRACKER_INITIALIZED")
# Renamed in 0.19.
_GRADS_FOR_NORM = "get_grads_for_grad_norm" if _IS_LATER else "get_main_grads_for_grad_norm"
_OPTIMIZER = ("_copy_main_params_to_model_params", "_get_model_param_range_map", _GRADS_FOR_NORM)

_missing = [
    f"{owner.__name__}.{name}"
    for owner, names in (
        (parallel_state, (*_GROUPS, *_GROUP_RANKS, *_OTHERS)),
        (megatron_random, _RANDOM),
        (DistributedOptimizer, _OPTIMIZER),
    )
    for name in names
    if not hasattr(owner, name)
]
if _missing:
    raise ImportError(
        f"megatron-core {megatron.core.__version__} has no {', '.join(_missing)}, which Drivetrain needs; install a "
        f"version that Drivetrain's pyproject.toml allows: {install_command('mcore')}"
    )

# As they are before any engine: a global that an engine does not set must not keep the value of another engine.
_INITIAL: State = {
    **{
        (parallel_state, name): value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and not name.startswith("__") and not callable(value)
    },
    **{(megatron_random, name): getattr(megatron_random, name) for name in _RANDOM},
}


def engine_state(groups: ProcessGroupCollection, stages: list[int], virtual_stages: int) -> State:
    """Return the values of megatron's globals while an engine works.

    Args:
        groups: The engine's process groups.
        stages: The global ranks of this rank's pipeline stages, in order.
        virtual_stages: The number of interleaved chunks on each rank; 1 without interleaving.
    """
    values: Mapping[str, Any] = {
        **{name: getattr(groups, group) for name, group in _GROUPS.items()},
        **{name: get_process_group_ranks(getattr(groups, group)) for name, group in _GROUP_RANKS.items()},
        "_PIPELINE_GLOBAL_RANKS": stages,
        "_EMBEDDING_GLOBAL_RANKS": sorted({stages[0], stages[-1]}),
        "_POSITION_EMBEDDING_GLOBAL_RANKS": [stages[0]],
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": virtual_stages if virtual_stages > 1 else None,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": 0 if virtual_stages > 1 else None,
        "_GLOBAL_MEMORY_BUFFER": parallel_state.GlobalMemoryBuffer(),
    }
    return {**_INITIAL, **{(parallel_state, name): value for name, value in values.items()}}


def read_state(like: State) -> State:
    """Return the current values of the globals that `like` names."""
    return {(module, name): getattr(module, name) for module, name in like}


def write_state(values: State) -> None:
    """Set megatron's globals."""
    for (module, name), value in values.items():
        setattr(module, name, value)


def copy_main_params(optimizer: DistributedOptimizer) -> None:
    """Copy the optimizer's parameters to the shards of the model's parameters."""
    optimizer._copy_main_params_to_model_params()


def grads_for_norm(optimizer: DistributedOptimizer) -> list[Tensor]:
    """Return the gradients that enter the norm, without copies of tensor-parallel peers and of tied embeddings."""
    grads: list[Tensor] = getattr(optimizer, _GRADS_FOR_NORM)()
    return grads


def local_range(optimizer: DistributedOptimizer, parameter: nn.Parameter) -> Any:
    """Return the range of a flattened parameter that this rank's optimizer updates, with `start` and `end`."""
    return optimizer._get_model_param_range_map(parameter)["param"]
