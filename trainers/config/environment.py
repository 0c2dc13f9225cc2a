"""Settings of environments."""

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
    max_turns: int = setting(8, "maximum number of policy turns in an episode", most=65535)
    max_tokens: int | None = setting(
        None,
        "maximum number of tokens of an episode after its first prompt, including observations; null: environment.max_turns times rollout.max_tokens",
    )
    timeout_s: float = setting(60.0, "seconds that a call of the environment may take before its episode counts as failed")
    episode_timeout_s: float | None = setting(
        None,
        "seconds that all calls of an episode's environment may take together before the episode counts as failed; null: no limit",
    )
    workers: int = setting(4, "processes that run environments; each runs many environments", most=4096)
    memory_mb: int = setting(4096, "memory limit for the data of such a process, in MiB")
    restarts: int = setting(
        1,
        "how many times an episode is restarted from its beginning after its process died, before it counts as failed",
        most=1000,
    )
    wait_for_all: bool | None = setting(
        None,
        "wait with each call of the generator until no environment is running, so that its batch does not depend on timing; null: enabled unless rl.staleness or rollout.invariant is set",
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
