"""The settings of environments. This module does not import torch."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from ...engine.config import Settings, check_least, setting
from ...engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(Settings):
    """The environment of `rollout.environment`."""

    section: ClassVar[str] = "environment"

    settings: dict[str, Any] = setting(factory=dict, help="arguments of the environment, by name")
    max_turns: int = setting(8, "turns of the policy in an episode, after which it ends", most=65535)
    max_tokens: int | None = setting(
        None,
        "tokens of an episode behind its first prompt, those of turns and of observations; null: environment.max_turns times rollout.max_tokens",
    )
    timeout_s: float = setting(60.0, "seconds that a call of the environment may take, after which its episode has failed")
    episode_timeout_s: float | None = setting(
        None,
        "seconds that the environment of an episode may take in all its calls together, after which it has failed; null: no limit",
    )
    workers: int = setting(4, "processes that run environments, each many of them", most=4096)
    memory_mb: int = setting(4096, "memory that such a process may have for data, in MiB")
    restarts: int = setting(
        1, "how often an episode is made again from its beginning whose process ended, before it has failed", most=1000
    )
    wait_for_all: bool | None = setting(
        None,
        "whether a call of the generator waits until no environment is at work, so that it does not depend on time which turns it has; null: unless rl.staleness or rollout.invariant is set",
    )

    def check(self) -> None:
        """Check these settings independently of the other sections.

        Raises:
            ConfigError: A setting is invalid; the message names it and its value.
        """
        for name in ("max_turns", "max_tokens", "workers", "memory_mb"):
            check_least(f"environment.{name}", getattr(self, name), 1)
        check_least("environment.restarts", self.restarts, 0)
        for name in ("timeout_s", "episode_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (0 < value < math.inf):
                raise ConfigError(f"environment.{name}={value}; it must be above 0 and finite")
