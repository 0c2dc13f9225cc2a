"""The processes that run the environments of a run."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

from ...engine.errors import ConfigError
from ...environments.host import EnvironmentDescription
from ...environments.pool import EnvironmentPool
from ...environments.registry import ENVIRONMENTS
from ..config.rl import RLConfig
from ..loop.ranks import TrainerRanks


@contextmanager
def environment_pool(config: RLConfig, ranks: TrainerRanks) -> Iterator[EnvironmentPool | None]:
    """Return the processes that run the environments of a run, in the first process of its controller; None elsewhere, or without an environment.

    Raises:
        ConfigError: The environment cannot be built, or the settings are incompatible with it.
    """
    # Environments run once, and not once per process of the controller; the first one passes on their results.
    if config.rollout.environment is None or not ranks.is_first:
        yield None
        return
    about = described(config)
    if config.environment.wait_for_all and not about.independent:
        raise ConfigError(
            f"environment.wait_for_all=true, but an episode of rollout.environment={config.rollout.environment} may wait for another one to end, because "
            "agents run elsewhere; remove it"
        )
    most = about.processes or config.environment.workers
    with start_pool(config, min(most, config.environment.workers)) as pool:
        yield pool


_DESCRIBED: dict[tuple[str, str], EnvironmentDescription] = {}


def described(config: RLConfig) -> EnvironmentDescription:
    """Return the description of a run's environment.

    Raises:
        ConfigError: The environment cannot be built.
    """
    # Cached, since a run asks several times.
    key = (str(config.rollout.environment), json.dumps(config.environment.settings, sort_keys=True, default=str))
    if key not in _DESCRIBED:
        with start_pool(config, 1) as pool:
            _DESCRIBED[key] = pool.describe()
    return _DESCRIBED[key]


def start_pool(config: RLConfig, workers: int) -> EnvironmentPool:
    """Start processes for the environments of a run.

    Args:
        config: The run's settings.
        workers: The number of processes.

    Raises:
        ConfigError: There is no such environment.
    """
    assert config.rollout.environment is not None
    settings = config.environment
    location = ENVIRONMENTS.of(config.rollout.environment)
    return EnvironmentPool(
        location, settings.settings, workers=workers, timeout_s=settings.timeout_s, memory_mb=settings.memory_mb
    )
