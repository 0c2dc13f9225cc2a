"""Names of environments.

A third party adds its own through the entry-point group `drivetrain.environments`, or names it as `module:class`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.errors import ConfigError
from ..engine.registry import print_list
from ..rewards.registry import Locations
from .environment import Environment

_PACKAGE = __name__.rpartition(".")[0]

ENVIRONMENTS = Locations(
    kind="environment",
    setting="rollout.environment",
    attribute="class",
    group="drivetrain.environments",
    named={
        "single_turn": f"{_PACKAGE}.single_turn:SingleTurnEnvironment",
        "calculator": f"{_PACKAGE}.calculator:CalculatorEnvironment",
        "python": f"{_PACKAGE}.python_tool:PythonEnvironment",
        "search": f"{_PACKAGE}.search:SearchEnvironment",
        # It needs a server, which belongs to a higher layer.
        "gateway": f"{_PACKAGE.rpartition('.')[0]}.serve.gateway.agent_environment:GatewayEnvironment",
    },
)
"""The registered environments."""


def main(argv: Sequence[str]) -> int:
    """Run `drivetrain environments`; return the exit code."""
    return print_list("environments", "the environments that rollout.environment accepts", argv, ENVIRONMENTS.all())


def build_environment(location: str, settings: Mapping[str, Any]) -> Environment:
    """Build the environment of an episode.

    Args:
        location: The class, as `module:class`, or a function that returns an instance.
        settings: The arguments of its constructor.

    Raises:
        ConfigError: It cannot be imported, is not an environment, or does not accept these settings.
    """
    factory = ENVIRONMENTS.load(location)
    if not callable(factory):
        raise ConfigError(f"the environment {location} is a {type(factory).__name__}; it must be a subclass of Environment")
    try:
        environment = factory(**settings)
    except (TypeError, ValueError) as e:
        raise ConfigError(
            f"the environment {location} does not accept environment.settings={dict(settings)!r:.200}: {e}"
        ) from e
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"the environment {location} returns a {type(environment).__name__}; it must be an instance of a subclass of Environment"
        )
    return environment
