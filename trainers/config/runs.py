"""The whole configuration of each trainer. Imports no torch."""

from dataclasses import dataclass

from ...engine.config import EngineConfig, ModelConfig, OptimConfig, setting
from ...engine.errors import ConfigError
from .data import DataConfig
from .methods import PreferenceConfig, ReferenceConfig, RewardConfig
from .trainer import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every trainer has."""

    model: ModelConfig = setting(factory=ModelConfig, help="the model")
    data: DataConfig = setting(factory=DataConfig, help="the data")
    engine: EngineConfig = setting(factory=EngineConfig, help="the engine")
    optim: OptimConfig = setting(factory=OptimConfig, help="the optimizer")
    trainer: TrainerConfig = setting(factory=TrainerConfig, help="the loop")

    def check(self) -> None:
        """Check every section, then the settings of one section that depend on another.

        Raises:
            ConfigError: Names the setting and its value.
        """
        self.data.check()
        self.engine.check()
        self.optim.check(self.trainer.max_steps or 1)
        self.trainer.check()
        for name in ("best_metric", "generate", "eval_every"):
            value = getattr(self.trainer, name)
            if value and not self.data.eval:
                raise ConfigError(f"trainer.{name}={value} needs data.eval, which is not set")


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RunConfig):
    """`python -m drivetrain.trainers.sft`."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig(RunConfig):
    """`python -m drivetrain.trainers.dpo`."""

    trainer: TrainerConfig = setting(factory=lambda: TrainerConfig(output_dir="runs/dpo"), help="the loop")
    dpo: PreferenceConfig = setting(factory=PreferenceConfig, help="the loss")
    reference: ReferenceConfig = setting(factory=ReferenceConfig, help="the reference")

    def check(self) -> None:
        """Check every section."""
        super().check()
        self.dpo.check()
        self.reference.check()


@dataclass(frozen=True, kw_only=True)
class RMConfig(RunConfig):
    """`python -m drivetrain.trainers.rm`."""

    model: ModelConfig = setting(factory=lambda: ModelConfig(head="value"), help="the model")
    trainer: TrainerConfig = setting(factory=lambda: TrainerConfig(output_dir="runs/rm"), help="the loop")
    rm: RewardConfig = setting(factory=RewardConfig, help="the loss")
