"""Roles above the engines; they know no backend.

Names are resolved when asked for: a class of settings loads no more than it needs.
"""

from typing import TYPE_CHECKING

# Fails when the repository root is on sys.path and this is imported as a package of its own.
from .. import __version__ as __version__
from ..faces import hand_out

if TYPE_CHECKING:
    from .actor import ActorConfig as ActorConfig
    from .actor import ActorWorker as ActorWorker
    from .critic import CriticConfig as CriticConfig
    from .critic import CriticWorker as CriticWorker
    from .dispatch import MiniBatches as MiniBatches
    from .group import LocalWorkerGroup as LocalWorkerGroup
    from .group import WorkerGroup as WorkerGroup
    from .host import Role as Role
    from .losses.policy import PolicyLoss as PolicyLoss
    from .losses.value import ValueLoss as ValueLoss
    from .ray_group import RayWorkerGroup as RayWorkerGroup
    from .reference import ReferenceConfig as ReferenceConfig
    from .reference import ReferenceWorker as ReferenceWorker
    from .reward import FunctionRewardConfig as FunctionRewardConfig
    from .reward import FunctionRewardWorker as FunctionRewardWorker
    from .reward import RewardWorker as RewardWorker
    from .rollout.engine import RolloutConfig as RolloutConfig
    from .rollout.engine import SamplingOptions as SamplingOptions
    from .rollout.worker import RolloutWorker as RolloutWorker
    from .worker import WorkerConfig as WorkerConfig

__getattr__, __dir__ = hand_out(
    __name__,
    {
        "ActorConfig": "actor",
        "ActorWorker": "actor",
        "CriticConfig": "critic",
        "CriticWorker": "critic",
        "FunctionRewardConfig": "reward",
        "FunctionRewardWorker": "reward",
        "LocalWorkerGroup": "group",
        "MiniBatches": "dispatch",
        "PolicyLoss": "losses.policy",
        "RayWorkerGroup": "ray_group",
        "ReferenceConfig": "reference",
        "ReferenceWorker": "reference",
        "RewardWorker": "reward",
        "Role": "host",
        "RolloutConfig": "rollout.engine",
        "RolloutWorker": "rollout.worker",
        "SamplingOptions": "rollout.engine",
        "ValueLoss": "losses.value",
        "WorkerConfig": "worker",
        "WorkerGroup": "group",
    },
)
