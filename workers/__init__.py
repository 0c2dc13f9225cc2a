"""Worker roles for reinforcement learning. They run on the engines and do not depend on a backend.

Names are imported on first access, so that importing a configuration class loads no more than it needs.
"""

from typing import TYPE_CHECKING

# This import fails if the repository root is on sys.path and this package is imported as a top-level one.
from .. import __version__ as __version__
from ..lazy_imports import lazy_exports

if TYPE_CHECKING:
    from .data_plane.data_ref import DataRef as DataRef
    from .data_plane.dataset import DatasetSpec as DatasetSpec
    from .dispatch import MiniBatches as MiniBatches
    from .embeddings.config import EmbeddingConfig as EmbeddingConfig
    from .embeddings.worker import EmbeddingWorker as EmbeddingWorker
    from .groups.base import WorkerGroup as WorkerGroup
    from .groups.local import LocalWorkerGroup as LocalWorkerGroup
    from .groups.process import ProcessWorkerGroup as ProcessWorkerGroup
    from .groups.ray import RayWorkerGroup as RayWorkerGroup
    from .losses.policy import PolicyLoss as PolicyLoss
    from .losses.value import ValueLoss as ValueLoss
    from .model_worker.role_host import RoleSpec as RoleSpec
    from .roles.actor import ActorConfig as ActorConfig
    from .roles.actor import ActorWorker as ActorWorker
    from .roles.advantage import AdvantageConfig as AdvantageConfig
    from .roles.advantage import AdvantageWorker as AdvantageWorker
    from .roles.base import WorkerConfig as WorkerConfig
    from .roles.critic import CriticConfig as CriticConfig
    from .roles.critic import CriticWorker as CriticWorker
    from .roles.reference import ReferenceConfig as ReferenceConfig
    from .roles.reference import ReferenceWorker as ReferenceWorker
    from .roles.reward import FunctionRewardConfig as FunctionRewardConfig
    from .roles.reward import FunctionRewardWorker as FunctionRewardWorker
    from .roles.reward import RewardWorker as RewardWorker
    from .rollout.options import RolloutConfig as RolloutConfig
    from .rollout.options import SamplingOptions as SamplingOptions
    from .rollout.worker import RolloutWorker as RolloutWorker

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "ActorConfig": "roles.actor",
        "ActorWorker": "roles.actor",
        "AdvantageConfig": "roles.advantage",
        "AdvantageWorker": "roles.advantage",
        "CriticConfig": "roles.critic",
        "CriticWorker": "roles.critic",
        "DataRef": "data_plane.data_ref",
        "DatasetSpec": "data_plane.dataset",
        "EmbeddingConfig": "embeddings.config",
        "EmbeddingWorker": "embeddings.worker",
        "FunctionRewardConfig": "roles.reward",
        "FunctionRewardWorker": "roles.reward",
        "LocalWorkerGroup": "groups.local",
        "MiniBatches": "dispatch",
        "PolicyLoss": "losses.policy",
        "ProcessWorkerGroup": "groups.process",
        "RayWorkerGroup": "groups.ray",
        "ReferenceConfig": "roles.reference",
        "ReferenceWorker": "roles.reference",
        "RewardWorker": "roles.reward",
        "RoleSpec": "model_worker.role_host",
        "RolloutConfig": "rollout.options",
        "RolloutWorker": "rollout.worker",
        "SamplingOptions": "rollout.options",
        "ValueLoss": "losses.value",
        "WorkerConfig": "roles.base",
        "WorkerGroup": "groups.base",
    },
)
