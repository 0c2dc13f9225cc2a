"""Settings of the trainers. Names are resolved lazily, on first access."""

from typing import TYPE_CHECKING

from ...lazy_imports import lazy_exports

if TYPE_CHECKING:
    from .data import DataConfig as DataConfig
    from .methods import PreferenceConfig as PreferenceConfig
    from .methods import ReferenceConfig as ReferenceConfig
    from .methods import RewardConfig as RewardConfig
    from .runs import DPOConfig as DPOConfig
    from .runs import RMConfig as RMConfig
    from .runs import RunConfig as RunConfig
    from .runs import SFTConfig as SFTConfig
    from .trainer import TrainerConfig as TrainerConfig

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "DPOConfig": "runs",
        "DataConfig": "data",
        "PreferenceConfig": "methods",
        "RMConfig": "runs",
        "ReferenceConfig": "methods",
        "RewardConfig": "methods",
        "RunConfig": "runs",
        "SFTConfig": "runs",
        "TrainerConfig": "trainer",
    },
)
