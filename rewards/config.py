"""The settings of rewards."""

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
        (), "reward functions: names, or module:function; in a trainer also the name model, for the reward model"
    )
    weights: dict[str, float] = setting(factory=dict, help="weight of a reward, by its name in rewards.use; 1 if not given")
    settings: dict[str, dict[str, Any]] = setting(
        factory=dict, help="additional arguments of a function, by its name: rewards.settings.answer.extract=boxed"
    )
    columns: dict[str, str] = setting(
        factory=dict, help="data column to pass as a parameter with a different name: rewards.columns.answer=solution"
    )
    route: str = setting(
        "",
        "column that selects the rewards that score a row: a name, several separated by commas, or a list; empty: all rewards score every row",
    )
    on_failure: OnFailure = setting(
        "drop",
        "how to treat a completion that a reward could not score; drop: it has no reward and is left out; zero: this reward counts as 0; raise: the run ends",
    )
    timeout_s: float = setting(
        10.0,
        "time limit of a call, in seconds; a function that scores all completions at once gets this limit times the number of completions per worker",
    )
    memory_mb: int = setting(4096, "memory limit for the data of a process that runs functions, in MiB")
    workers: int = setting(2, "processes that run the functions")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.use)) != len(self.use):
            raise ConfigError(f"rewards.use has a duplicate: {', '.join(self.use)}; use a larger weight instead")
        if bad := [name for name, weight in self.weights.items() if not math.isfinite(weight)]:
            raise ConfigError(f"rewards.weights.{bad[0]}={self.weights[bad[0]]}; it must be finite")
        for name, value in (("workers", self.workers), ("timeout_s", self.timeout_s), ("memory_mb", self.memory_mb)):
            if not 0 < value < 2**31:
                raise ConfigError(f"rewards.{name}={value}; it must be above 0")
