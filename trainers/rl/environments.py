"""The processes that run the environments of a run."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...environments.pool import EnvironmentPool
from ...environments.registry import ENVIRONMENTS
from ..config.rl import RLConfig
from ..loop.ranks import TrainerRanks


@contextmanager
def environment_pool(config: RLConfig, ranks: TrainerRanks) -> Iterator[EnvironmentPool | None]:
    """Return the processes that run the environments of a run, in the first process of its controller; None elsewhere, or without any."""
    if config.rollout.environment is None or not ranks.is_first:
        yield None
        return
    with start_pool(config, config.environment.workers) as pool:
        yield pool


def start_pool(config: RLConfig, workers: int) -> EnvironmentPool:
    """Start processes for the environments of a run.

    Args:
        config: The run's settings.
        workers: How many.

    Raises:
        ConfigError: There is no such environment.
    """
    assert config.rollout.environment is not None
    settings = config.environment
    location = ENVIRONMENTS.of(config.rollout.environment)
    return EnvironmentPool(
        location, settings.settings, workers=workers, timeout_s=settings.timeout_s, memory_mb=settings.memory_mb
    )
