"""Ground level: how a model is built, sharded, stepped and saved. Knows no task.

Names are resolved when asked for, so that importing a config loads no torch.
"""

from typing import TYPE_CHECKING

# Fails when the repository root is on sys.path and `engine` is imported as a package of its own: a second copy of every
# class would be the result.
from .. import __version__ as __version__
from ..faces import hand_out

if TYPE_CHECKING:
    from .base import BaseEngine as BaseEngine
    from .batch import PackedBatch as PackedBatch
    from .capabilities import Capabilities as Capabilities
    from .config import EngineConfig as EngineConfig
    from .config import ModelConfig as ModelConfig
    from .config import OptimConfig as OptimConfig
    from .export import export_hf as export_hf
    from .objective import Loss as Loss
    from .objective import LossSums as LossSums
    from .objective import OutputRequest as OutputRequest
    from .objective import StepResult as StepResult
    from .objective import TokenOutputs as TokenOutputs
    from .registry import BackendSpec as BackendSpec
    from .registry import engine_class as engine_class
    from .topology import init_distributed as init_distributed

__getattr__, __dir__ = hand_out(
    __name__,
    {
        "BaseEngine": "base",
        "PackedBatch": "batch",
        "Capabilities": "capabilities",
        "EngineConfig": "config",
        "ModelConfig": "config",
        "OptimConfig": "config",
        "export_hf": "export",
        "Loss": "objective",
        "LossSums": "objective",
        "OutputRequest": "objective",
        "StepResult": "objective",
        "TokenOutputs": "objective",
        "BackendSpec": "registry",
        "engine_class": "registry",
        "init_distributed": "topology",
    },
)
