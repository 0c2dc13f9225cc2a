"""The bottom layer: builds, shards, steps and saves a model. Independent of any training task.

Names are resolved on first access, so that importing a config does not import torch.
"""

from typing import TYPE_CHECKING

# This fails if the repository root is on sys.path and `engine` is imported as a top-level package, which would create a second
# copy of every class.
from .. import __version__ as __version__
from ..lazy_imports import lazy_exports

if TYPE_CHECKING:
    from .base import BaseEngine as BaseEngine
    from .capabilities import Capabilities as Capabilities
    from .config import EngineConfig as EngineConfig
    from .config import ModelConfig as ModelConfig
    from .config import OptimConfig as OptimConfig
    from .export import export_hf as export_hf
    from .loss import Loss as Loss
    from .loss import LossSums as LossSums
    from .loss import OutputRequest as OutputRequest
    from .loss import StepResult as StepResult
    from .loss import TokenOutputs as TokenOutputs
    from .packing.batch import PackedBatch as PackedBatch
    from .parallel.process_groups import init_distributed as init_distributed
    from .registry import BackendSpec as BackendSpec
    from .registry import engine_class as engine_class

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "BackendSpec": "registry",
        "BaseEngine": "base",
        "Capabilities": "capabilities",
        "EngineConfig": "config",
        "Loss": "loss",
        "LossSums": "loss",
        "ModelConfig": "config",
        "OptimConfig": "config",
        "OutputRequest": "loss",
        "PackedBatch": "packing.batch",
        "StepResult": "loss",
        "TokenOutputs": "loss",
        "engine_class": "registry",
        "export_hf": "export",
        "init_distributed": "parallel.process_groups",
    },
)
