"""Drivetrain: one training program for large language models, on any engine. Names are imported on first access."""

from typing import TYPE_CHECKING

from .lazy_imports import lazy_exports

if TYPE_CHECKING:
    from .engine.base import BaseEngine as BaseEngine
    from .engine.config import EngineConfig as EngineConfig
    from .engine.config import LoraConfig as LoraConfig
    from .engine.config import MicroBatchConfig as MicroBatchConfig
    from .engine.config import ModelConfig as ModelConfig
    from .engine.config import OptimConfig as OptimConfig
    from .engine.config import ParallelConfig as ParallelConfig
    from .engine.config import PrecisionConfig as PrecisionConfig
    from .engine.errors import ConfigError as ConfigError
    from .engine.errors import DrivetrainError as DrivetrainError
    from .engine.loss import Loss as Loss
    from .engine.loss import LossSums as LossSums
    from .engine.loss import OutputRequest as OutputRequest
    from .engine.loss import StepResult as StepResult
    from .engine.loss import TokenOutputs as TokenOutputs
    from .engine.packing.batch import PackedBatch as PackedBatch
    from .trainers.config.data import DataConfig as DataConfig
    from .trainers.config.methods import PreferenceConfig as PreferenceConfig
    from .trainers.config.methods import ReferenceConfig as ReferenceConfig
    from .trainers.config.methods import RewardConfig as RewardConfig
    from .trainers.config.rl import GRPOConfig as GRPOConfig
    from .trainers.config.rl import OnlineDPOConfig as OnlineDPOConfig
    from .trainers.config.rl import PPOConfig as PPOConfig
    from .trainers.config.runs import DPOConfig as DPOConfig
    from .trainers.config.runs import RMConfig as RMConfig
    from .trainers.config.runs import SFTConfig as SFTConfig
    from .trainers.config.trainer import TrainerConfig as TrainerConfig
    from .trainers.dry_run import DryRun as DryRun
    from .trainers.loop.parts import Callback as Callback
    from .trainers.rl.trainer import GRPOTrainer as GRPOTrainer
    from .trainers.rl.trainer import OnlineDPOTrainer as OnlineDPOTrainer
    from .trainers.rl.trainer import PPOTrainer as PPOTrainer
    from .trainers.run import RunOutcome as RunOutcome
    from .trainers.trainer import DPOTrainer as DPOTrainer
    from .trainers.trainer import RewardTrainer as RewardTrainer
    from .trainers.trainer import SFTTrainer as SFTTrainer
    from .workers.losses.preference import PreferenceLoss as PreferenceLoss
    from .workers.losses.reward import RewardLoss as RewardLoss
    from .workers.losses.sft import SFTLoss as SFTLoss

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        **dict.fromkeys(
            (
                "EngineConfig",
                "LoraConfig",
                "MicroBatchConfig",
                "ModelConfig",
                "OptimConfig",
                "ParallelConfig",
                "PrecisionConfig",
            ),
            "engine.config",
        ),
        **dict.fromkeys(("ConfigError", "DrivetrainError"), "engine.errors"),
        **dict.fromkeys(("Loss", "LossSums", "OutputRequest", "StepResult", "TokenOutputs"), "engine.loss"),
        **dict.fromkeys(("PreferenceConfig", "ReferenceConfig", "RewardConfig"), "trainers.config.methods"),
        **dict.fromkeys(("GRPOConfig", "OnlineDPOConfig", "PPOConfig"), "trainers.config.rl"),
        **dict.fromkeys(("DPOConfig", "RMConfig", "SFTConfig"), "trainers.config.runs"),
        **dict.fromkeys(("GRPOTrainer", "OnlineDPOTrainer", "PPOTrainer"), "trainers.rl.trainer"),
        **dict.fromkeys(("DPOTrainer", "RewardTrainer", "SFTTrainer"), "trainers.trainer"),
        "BaseEngine": "engine.base",
        "Callback": "trainers.loop.parts",
        "DataConfig": "trainers.config.data",
        "DryRun": "trainers.dry_run",
        "PackedBatch": "engine.packing.batch",
        "PreferenceLoss": "workers.losses.preference",
        "RewardLoss": "workers.losses.reward",
        "RunOutcome": "trainers.run",
        "SFTLoss": "workers.losses.sft",
        "TrainerConfig": "trainers.config.trainer",
    },
)
