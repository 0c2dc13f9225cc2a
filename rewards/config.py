"""The settings of rewards. Does not import torch."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..engine.config import Settings, setting
from ..engine.errors import ConfigError

OnFailure = Literal["drop", "zero", "raise"]


@dataclass(frozen=True, kw_only=True)
class RewardsConfig(Settings):
    """The rewards of a run."""

    section: ClassVar[str] = "rewards"

    use: tuple[str, ...] = setting(
        (), "reward functions: names, or module:function; and in a trainer the name model for the reward model"
    )
    weights: dict[str, float] = setting(factory=dict, help="weight of a reward, by its name in rewards.use; 1 if not given")
    settings: dict[str, dict[str, Any]] = setting(
        factory=dict, help="further arguments of a function, by its name: rewards.settings.answer.extract=boxed"
    )
    columns: dict[str, str] = setting(
        factory=dict, help="column of the data that stands for a parameter of another name: rewards.columns.answer=solution"
    )
    route: str = setting(
        "",
        "column that says which rewards judge a row: a name, several separated by commas, or a list; empty: all judge every row",
    )
    on_failure: OnFailure = setting(
        "drop",
        "what becomes of an answer that a reward could not judge; drop: it has no reward and is left out; zero: this reward counts as 0; raise: the run ends",
    )
    timeout_s: float = setting(
        10.0, "seconds that a call may take; a function of all answers has as many times this as there are answers per worker"
    )
    memory_mb: int = setting(4096, "memory that a process of a function may have for data, in MiB")
    workers: int = setting(2, "processes that run the functions")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.use)) != len(self.use):
            raise ConfigError(f"rewards.use names one twice: {', '.join(self.use)}; give it a larger weight")
        if bad := [name for name, weight in self.weights.items() if not math.isfinite(weight)]:
            raise ConfigError(f"rewards.weights.{bad[0]}={self.weights[bad[0]]}; it must be finite")
        for name, value in (("workers", self.workers), ("timeout_s", self.timeout_s), ("memory_mb", self.memory_mb)):
            if not 0 < value < 2**31:
                raise ConfigError(f"rewards.{name}={value}; it must be above 0")
