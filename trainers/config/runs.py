"""The complete configuration of each trainer."""

from dataclasses import dataclass

from ...engine.config import EngineConfig, ModelConfig, OptimConfig, setting
from ...engine.errors import ConfigError
from .command import CommandConfig
from .data import DataConfig
from .methods import PreferenceConfig, ReferenceConfig, RewardConfig
from .trainer import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig(CommandConfig):
    """The settings that all trainers share."""

    model: ModelConfig = setting(factory=ModelConfig, help="the model")
    data: DataConfig = setting(factory=DataConfig, help="the data")
    engine: EngineConfig = setting(factory=EngineConfig, help="the engine")
    optim: OptimConfig = setting(factory=OptimConfig, help="the optimizer")
    trainer: TrainerConfig = setting(factory=TrainerConfig, help="the training loop")

    def check(self) -> None:
        """Check every section, then the settings that depend on another section.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        self.data.check()
        self.engine.check()
        self.optim.check(self.trainer.max_steps or 1)
        self.trainer.check()
        if self.data.streaming and self.trainer.max_steps is None:
            raise ConfigError(
                "data.streaming=true without trainer.max_steps: the number of samples in an epoch is not known before its end; set the "
                "number of steps"
            )
        # Without held-out data they would have no effect, which is more likely a mistake than intended.
        for name in ("best_metric", "eval_completions", "eval_every"):
            value = getattr(self.trainer, name)
            if value and not self.data.eval:
                raise ConfigError(f"trainer.{name}={value} needs data.eval, which is not set")


@dataclass(frozen=True, kw_only=True)
class SFTConfig(RunConfig):
    """The configuration of `python -m drivetrain.trainers.sft`."""


@dataclass(frozen=True, kw_only=True)
class DPOConfig(RunConfig):
    """The configuration of `python -m drivetrain.trainers.dpo`."""

    trainer: TrainerConfig = setting(factory=lambda: TrainerConfig(output_dir="runs/dpo"), help="the training loop")
    dpo: PreferenceConfig = setting(factory=PreferenceConfig, help="the loss")
    reference: ReferenceConfig = setting(factory=ReferenceConfig, help="the reference")

    def check(self) -> None:
        """Check every section.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        super().check()
        self.dpo.check()
        self.reference.check()
        if self.data.streaming and self.reference.mode == "cached":
            raise ConfigError(
                "reference.mode=cached with data.streaming=true, which stores nothing; use reference.mode=model, or base with adapters"
            )


@dataclass(frozen=True, kw_only=True)
class RMConfig(RunConfig):
    """The configuration of `python -m drivetrain.trainers.rm`."""

    model: ModelConfig = setting(factory=lambda: ModelConfig(head="value"), help="the model")
    trainer: TrainerConfig = setting(factory=lambda: TrainerConfig(output_dir="runs/rm"), help="the training loop")
    rm: RewardConfig = setting(factory=RewardConfig, help="the loss")
